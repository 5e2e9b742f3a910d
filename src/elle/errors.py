"""The ways a command ends badly; `cli` prints the message on one line and exits with the code."""

import difflib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where, and what to do."""

    exit_code = 2


class WorkError(RuntimeError):
    """The input was fine but the work failed (a full disk, a diverged run)."""

    exit_code = 1


class Interrupted(WorkError):
    """The user ended the work with Ctrl-C; the code is the one shells use for it."""

    exit_code = 130


def stopped_by(signal_name: str, words: str) -> WorkError:
    """The one line for work that a signal ended: what is saved, and how to go on."""
    kind = Interrupted if signal_name == "SIGINT" else WorkError
    return kind(f"stopped by {signal_name}{words}")


def expanded(path: str | Path) -> Path:
    """The path with the home folder that its ~ means."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # nobody of that name, or a user without one
        raise InputError(f"{path}: whose home folder ~ means is not known here; write it out") from None


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse, before any work, a folder that files cannot be written into: it is a file, or lies in one."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not os.path.isdir(there):
        raise InputError(f"{option} {folder} cannot be used: {there} is no folder; choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{option} {folder} cannot be used: {there} may not be written; choose another")


def check_file_name(out: Path, ending: str) -> None:
    """Refuse a name after --out that would say another kind of file than is written, or cannot be written."""
    if out.is_dir() or out.suffix.lower() != ending:
        raise InputError(f"--out {out} is {'a folder' if out.is_dir() else f'no {ending}'}; name a {ending} file")
    check_folder(out.parent)


REASONS = "ELLE_REASONS"
"""In the environment of the processes that `devices=N` starts: a folder where each leaves why it failed."""


def tell(message: str, code: int) -> None:
    """The one line about a failure: on stderr, or to the process that started this one and speaks for all ranks."""
    line, rank = " ".join(message.split()), os.environ.get("RANK", "0")
    if folder := os.environ.get(REASONS):
        Path(folder, f"rank-{rank}").write_text(f"{code} {line}", encoding="utf-8")
        return
    print(f"elle: rank {rank}: {line}" if "RANK" in os.environ else f"elle: {line}", file=sys.stderr)


def leave(code: int) -> NoReturn:
    """End this process; one of several ranks ends at once, without Python's own clean-up.

    The threads of a failed rank are still at its messages; one of them that Python's own end catches would abort the
    process, which would then be taken for the cause.
    """
    if "RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def first_line(problem: Exception) -> str:
    """The first line of an exception's message, or its kind where it has none."""
    # All that a KeyError says is the key.
    lines = f"{'no key ' * isinstance(problem, KeyError)}{problem}".strip().splitlines()
    return lines[0] if lines else type(problem).__name__


def nearest(word: str, known: Iterable[str]) -> str:
    """', did you mean ...?' for the closest known word, or nothing when none is close."""

    def likeness(other: str) -> float:
        # A shared beginning counts extra: `epsilon` means eps, not precision.
        shared = os.path.commonprefix([word, other])  # noqa: RUF071 (characters are meant)
        return difflib.SequenceMatcher(None, word, other).ratio() + 0.1 * len(shared)

    best = max(known, key=likeness, default="")
    return f", did you mean {best!r}?" if best and likeness(best) >= 0.6 else ""
