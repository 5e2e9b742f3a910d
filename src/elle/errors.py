"""The two ways a command ends badly; `cli` prints the message on one line and exits with the code."""


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where, and what to do."""

    exit_code = 2


class WorkError(RuntimeError):
    """The input was fine but the work failed (a full disk, a diverged run)."""

    exit_code = 1
