"""One run of a sweep, or of the demo, as a process of its own: started, watched by its files, stopped gently."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from elle.config import Config, load_config
from elle.errors import InputError
from elle.files import is_held, write_text

LOG = "train.log"
RESULT = "result.json"
"""With it, a run counts as finished."""
_PR_SET_PDEATHSIG = 1


def start_training(config: Config, path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """`elle train` into the run directory, from its newest checkpoint if it has one; what it prints goes to its log."""
    file = path / "config.toml"
    settings = None
    with contextlib.suppress(InputError):  # a damaged file: the training itself says so, and fails alone
        settings = _settings(config, path, file)
    if settings is not None:
        write_text(file, settings.to_toml())
    command = [sys.executable, "-m", "elle", "train", "--config", str(file), "--out", str(path), "--resume"]
    with open(path / LOG, "ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C reaches who started it alone, and that stops its runs in order
            preexec_fn=_stop_with_parent,
        )


def _settings(config: Config, path: Path, file: Path) -> Config:
    """The run's settings: those it began with, as image folders fill in more, but for where and how it is made now."""
    here = {"out": str(path)} | {key: getattr(config, key) for key in ("root", "device", "compile", "workers")}
    begun = load_config([], file) if file.exists() else config
    if begun.cache and config.cache:  # a run that was begun without one goes on without
        here["cache"] = config.cache
    return begun.model_copy(update=here)


def _stop_with_parent() -> None:
    """If what started the runs is killed outright, they save themselves and end rather than go on unseen (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def is_finished(path: Path) -> bool:
    return (path / RESULT).exists()


def is_running(path: Path) -> bool:
    """Whether a process, ours or another, is training in the run directory."""
    return is_held(path, ".lock")


def outcome(path: Path, code: int) -> str | None:
    """None for a run that has finished; otherwise why not, in the words its log ends with."""
    if code == 0 and is_finished(path):
        return None
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = (path / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return last.removeprefix("elle: ") or f"ended with exit code {code} and said nothing"
