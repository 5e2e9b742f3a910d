"""Shared fixtures: one core, short runs on the digits that come with scikit-learn, and the command in-process."""

import os

# Before torch is imported, and for every subprocess: results and timings must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Some virtual machines announce AMX and do not let it run: bf16 would end in an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from elle.config import Config, load_config
from elle.engine.loop import train

torch.set_num_threads(1)

QUICK = (
    *("data=digits", "method=fgsm", "epochs=1", "track=clean", "eval_every=0", "final=clean", "device=cpu"),
    # Written out, so that a change of the dataset's defaults changes no test: 18 steps an epoch.
    *("model=small-cnn", "eps=0.3", "lr=0.2", "batch=64", "validation=97"),
)
"""A run of about 0.2 s; later words override these."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def assert_one_line(outcome: Outcome, code: int) -> None:
    assert outcome.code == code, outcome
    assert outcome.err.startswith("elle: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert "Traceback" not in outcome.out + outcome.err


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Config]:
    """settings("lr=0.1", out="b") -> the configuration of a short run into the test's own folder."""

    def make(*words: str, out: str = "run") -> Config:
        return load_config([*QUICK, f"out={tmp_path / out}", *words])

    return make


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run directory, to read only."""
    run = tmp_path_factory.mktemp("finished") / "run"
    train(load_config([*QUICK, "epochs=2", f"out={run}"]))
    return run


@pytest.fixture
def run_copy(finished_run: Path, tmp_path: Path) -> Path:
    """A finished run directory, to spoil."""
    return Path(shutil.copytree(finished_run, tmp_path / "copy"))


@pytest.fixture
def elle(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """elle("train", "lr=0.1") -> the outcome of the command, without the seconds a process takes to start."""
    from elle.cli import main

    def run(*words: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["elle", *map(str, words)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Outcome(code, *capsys.readouterr())

    return run
