"""Ways to cut a run short, and what must be the same when it has been continued; shared by the tests."""

import contextlib
import json
import os

import pytest
import torch

from elle.engine import checkpoint
from elle.engine.watcher import Watcher
from elle.evaluation.units import Files


def records(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if "seconds" not in key} for line in lines]


def assert_same_state(run, other):
    mine, theirs = (checkpoint.load_checkpoint(checkpoint.checkpoints(one)[-1]) for one in (run, other))
    assert mine[1]["step"] == theirs[1]["step"]
    torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    weights = [checkpoint.read_tensors(one / "model.safetensors")[0] for one in (run, other)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def assert_same_run(run, other):
    assert_same_state(run, other)
    assert records(run) == records(other)
    accuracies = [json.loads((one / "result.json").read_text())["test"]["clean"]["correct"] for one in (run, other)]
    assert accuracies[0] == accuracies[1]


class PulledPlugError(Exception):
    pass


def crash_after_step(last):
    def stepped(step):
        if step == last:
            raise PulledPlugError

    return Watcher(stepped=stepped)


def crash_after_epoch(last):
    def recorded(record):
        if record["epoch"] == last:
            raise PulledPlugError

    return Watcher(recorded=recorded)


def signal_after_step(last, number):
    def stepped(step):
        if step == last:
            os.kill(os.getpid(), number)

    return Watcher(stepped=stepped)


@contextlib.contextmanager
def kept_units(end_after=None, with_problem=PulledPlugError):
    """The names of the units that are done and kept meanwhile; so many, where that is not all, and the work ends."""
    names, save = [], Files.save

    def recorded(self, unit, outcome):
        save(self, unit, outcome)
        names.append(unit.name)
        if len(names) == end_after:
            raise with_problem("ended")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Files, "save", recorded)
        yield names


def accuracies(run):
    """What a run's final evaluation found, but for the time it took."""
    found = json.loads((run / "result.json").read_text())["test"]
    return {name: one | {"seconds": 0} for name, one in found.items()}
