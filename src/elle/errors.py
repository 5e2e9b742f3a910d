"""The two ways a command ends badly; `cli` prints the message on one line and exits with the code."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where, and what to do."""

    exit_code = 2


class WorkError(RuntimeError):
    """The input was fine but the work failed (a full disk, a diverged run)."""

    exit_code = 1


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean ...?' for the closest known word, or nothing when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else ""
