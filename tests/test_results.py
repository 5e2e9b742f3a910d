"""What is committed under results/ can be had again: a small network's numbers, recomputed from its weights."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from elle.engine.trained import load_run
from elle.evaluation.evaluate import evaluate

ROOT = Path(__file__).parent.parent / "results"
RUNS = sorted(file.parent for file in ROOT.glob("*/evaluation.json"))
SLACK = 3
"""Images of 500 near the boundary that other processors may round to the other side."""


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.name)
def test_a_committed_claim_holds(run):
    record = json.loads((run / "evaluation.json").read_text())
    weights = (run / "model.safetensors").read_bytes()
    assert len(weights) < 200_000
    assert hashlib.sha256(weights).hexdigest() == record["model"]["sha256"]
    trained = load_run(run, torch.device("cpu"))
    x, y = trained.test_images(None, None)
    again = evaluate(trained.model, x, y, "clean,pgd-20", record["eps"], norm=record["norm"], seed=record["seed"])
    for attack in ("clean", "pgd-20"):
        claimed = record["attacks"][attack]
        assert again[attack]["total"] == claimed["total"] == 500
        assert abs(again[attack]["correct"] - claimed["correct"]) <= SLACK, attack
    # The run's own last words say the same.
    test = json.loads((run / "result.json").read_text())["test"]
    assert abs(test["pgd-20"]["correct"] - record["attacks"]["pgd-20"]["correct"]) <= SLACK


def test_there_is_a_claim():
    assert RUNS
