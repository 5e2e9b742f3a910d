"""The monitor and the guard around a captured step: looks change nothing, a rollback captures the new method."""

import json

import pytest
import torch

from elle.config import load_config
from elle.engine import checkpoint
from elle.engine.loop import train
from elle.engine.probe import CollapseMonitor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WORDS = ("data=digits", "device=cuda", "compile=graph", "eval_every=0", "final=clean", "batch=64", "eps=0.2")


def run(path, *words):
    return train(load_config([*WORDS, *words, f"out={path}"]))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("method", ["fgsm", "n-fgsm"])
def test_looks_between_replays_leave_the_random_numbers_of_the_graph_alone(tmp_path, method, monkeypatch):
    # Only what is drawn is compared: kernels with atomics may differ in the last bit from run to run.
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    states = []
    for every in (0, 4):
        run(tmp_path / str(every), "epochs=2", f"method={method}", f"probe_every={every}")
        states.append(checkpoint.load_checkpoint(checkpoint.checkpoints(tmp_path / str(every))[-1])[0])
    assert torch.equal(states[0]["random.cuda"], states[1]["random.cuda"])
    torch.testing.assert_close(states[0]["model.classifier.1.weight"], states[1]["model.classifier.1.weight"])


def test_a_rollback_captures_the_step_of_the_new_method(tmp_path, monkeypatch):
    seen = []

    def check(self, model, step, *, loss, accuracy, rate):
        seen.append(step)
        fell = len(seen) in (5, 6)
        levels = {"multi": 0.01, "single": 0.9, "error": 0.1} if fell else {"multi": 0.4, "single": 0.5, "error": 1e-5}
        known = {"clean": 0.7, "chance": 0.1, "step": step, "loss": loss, "accuracy": levels["single"], "rate": rate}
        return self.observe(levels | known)

    monkeypatch.setattr(CollapseMonitor, "check", check)
    result = run(tmp_path / "run", "epochs=5", "method=fgsm", "on_collapse=rollback")
    assert result["rollbacks"] == 1
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert [record["error"] is None for record in records] == [True, True, False, False, False]
    assert all(record["loss"] > 0 for record in records)
