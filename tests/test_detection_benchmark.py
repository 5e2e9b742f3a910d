"""The benchmark that holds the monitor to the truth: what a collapse is, and what it says of a run directory."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.experiments.runs import run_directory, write_lines

TRUTH = {
    "to the end": ([0.3, 0.4, 0.0, 0.0], [0.4, 0.5, 0.9, 0.9], 2, True),
    "and back": ([0.3, 0.4, 0.0, 0.0, 0.4], [0.4, 0.5, 0.9, 0.9, 0.5], None, True),
    "a dip": ([0.3, 0.4, 0.0, 0.4, 0.4], [0.4, 0.5, 0.9, 0.5, 0.5], None, False),
    "one low reading at the end": ([0.3, 0.4, 0.4, 0.0], [0.4, 0.5, 0.5, 0.9], None, False),
    "forgetting both": ([0.3, 0.4, 0.1, 0.1], [0.4, 0.5, 0.1, 0.1], None, False),
    "never robust": ([0.1, 0.15, 0.0, 0.0], [0.4, 0.5, 0.9, 0.9], None, False),
}


@pytest.fixture
def detection(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return import_module("detection")


@pytest.mark.parametrize(("multi", "single", "start", "temporary"), TRUTH.values(), ids=TRUTH)
def test_the_truth_of(detection, multi, single, start, temporary):
    assert detection.collapse_start(multi, single, 0.1, 2) == start
    assert detection.temporary(multi, single, 0.1, 2) is temporary


@pytest.mark.parametrize(("fall", "kind", "detected"), [(3, "collapsing", 35), (None, "healthy", None)])
def test_a_finished_run_is_judged_from_its_files(detection, tmp_path, fall, kind, detected):
    path = run_directory(tmp_path / "run", fall=fall)
    probes = [json.loads(line) for line in (path / "probes.jsonl").read_text().splitlines()]
    write_lines(path / "probes.jsonl", [one | {"loss": 1.0, "accuracy": one["single"], "rate": 0.1} for one in probes])
    config = {"data": "digits", "model": "small-cnn", "method": "fgsm", "eps": 0.2, "seed": 0, "epochs": 6}
    result = {"config": config | {"track": "clean,pgd-10"}, "classes": list("0123456789")}
    (path / "result.json").write_text(json.dumps(result))
    row = detection.judged(path)
    assert (row["kind"], row["detected_step"], row["passed"]) == (kind, detected, True)
    assert detection.summary([row])["false_alarms"] == 0
