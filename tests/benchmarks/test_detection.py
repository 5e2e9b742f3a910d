"""The benchmark that holds the monitor to the truth: what a collapse is, and what it says of a run directory."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from elle.errors import WorkError

from ..experiments.runs import run_directory, write_lines

CLEAN = [0.6, 0.7, 0.8, 0.8, 0.8]
TRUTH = {
    "to the end": ([0.3, 0.4, 0.0, 0.0], [0.4, 0.5, 0.9, 0.9], CLEAN, 2, True),
    "and back": ([0.3, 0.4, 0.0, 0.0, 0.4], [0.4, 0.5, 0.9, 0.9, 0.5], CLEAN, None, True),
    "a dip": ([0.3, 0.4, 0.0, 0.4, 0.4], [0.4, 0.5, 0.9, 0.5, 0.5], CLEAN, None, False),
    "one low reading at the end": ([0.3, 0.4, 0.4, 0.0], [0.4, 0.5, 0.5, 0.9], CLEAN, None, False),
    "forgetting both": ([0.3, 0.4, 0.1, 0.1], [0.4, 0.5, 0.1, 0.1], CLEAN, None, False),
    "never robust, nor fooled": ([0.1, 0.15, 0.0, 0.0], [0.4, 0.5, 0.6, 0.7], CLEAN, None, False),
    "never robust, its own attack learnt": ([0.1, 0.15, 0.0, 0.0], [0.4, 0.5, 0.7, 0.8], CLEAN, 3, False),
    "fooled before it was robust": ([0.1, 0.12, 0.0, 0.0], [0.1, 0.3, 0.5, 0.9], [0.2, 0.1, 0.2, 0.7], 1, False),
}


@pytest.fixture
def detection(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return import_module("detection")


@pytest.mark.parametrize(("multi", "single", "clean", "start", "temporary"), TRUTH.values(), ids=TRUTH)
def test_the_truth_of(detection, multi, single, clean, start, temporary):
    rows = [{"multi": a, "single": b, "clean": c, "error": 1e-2} for a, b, c in zip(multi, single, clean, strict=False)]
    assert detection.collapse_start(rows, 0.18, 2) == start
    assert detection.temporary(rows, 0.1, 2) is temporary


def test_a_weak_attack_learnt_by_a_straight_network_is_no_collapse(detection):
    rows = [{"multi": 0.0, "single": 0.9, "clean": 0.9, "error": error} for error in (1e-4, 1e-2, 1e-4)]
    assert detection.collapse_start(rows, 0.18, 2) is None
    assert detection.collapse_start(rows[:2], 0.18, 2) == 1


def test_a_fall_whose_report_is_not_yet_due_is_neither_healthy_nor_a_collapse_that_must_be_reported(detection):
    rows = [{"multi": level, "single": 0.5, "clean": 0.8, "error": 1e-4} for level in (0.3, 0.4, 0.1)]
    assert detection.kind_of(rows, 0.1, 0.18, 2, None) == "temporary"
    assert detection.kind_of(rows[:2], 0.1, 0.18, 2, None) == "healthy"


ALARMS = {
    "a low epoch before it": ([0.3, 0.4, 0.1, 0.4], 30, 0),
    "low only long before it": ([0.3, 0.1, 0.4, 0.4, 0.4], 50, 1),
    "low only after it": ([0.3, 0.4, 0.4, 0.1], 30, 1),
    "half of nothing": ([0.1, 0.1, 0.0, 0.0], 30, 1),
}


@pytest.mark.parametrize(("multi", "step", "expected"), ALARMS.values(), ids=ALARMS)
def test_whether_an_alarm_is_unfounded(detection, multi, step, expected):
    seen = {"single": 0.5, "clean": 0.8, "error": 1e-2}
    rows = [seen | {"step": 10 * k, "multi": level} for k, level in enumerate(multi, 1)]
    verdict = detection.Verdict("collapse", step, step, "", "high")
    assert detection.unfounded([verdict], rows, 0.18, 20) == expected


VERDICTS = {
    "an alarm that stands": ([("collapse", 20)], 30, 20),
    "an alarm after it was due": ([("collapse", 50)], 30, 50),
    "an alarm taken back before": ([("collapse", 10), ("recovery", 20), ("collapse", 50)], 30, 50),
    "an alarm taken back only afterwards": ([("collapse", 20), ("recovery", 40), ("collapse", 50)], 30, 20),
    "no collapse, so any alarm": ([("collapse", 10), ("recovery", 20), ("collapse", 50)], None, 10),
    "none": ([("constant", 10)], 30, None),
}


@pytest.mark.parametrize(("verdicts", "due", "expected"), VERDICTS.values(), ids=VERDICTS)
def test_the_alarm_that_counts_is(detection, verdicts, due, expected):
    found = detection.alarm([detection.Verdict(kind, step, step, "", "high") for kind, step in verdicts], due)
    assert (found and found.step) == expected


def test_a_run_at_chance_all_along_is_neither_healthy_nor_collapsing(detection):
    rows = [{"step": k, "multi": 0.1, "single": 0.5, "clean": 0.8, "error": 1e-2} for k in range(5)]
    assert detection.kind_of(rows, 0.1, 0.18, 2, None) == "never robust"
    assert detection.kind_of([*rows, rows[0] | {"multi": 0.2}], 0.1, 0.18, 2, None) == "healthy"


@pytest.mark.parametrize(("fall", "kind", "detected"), [(3, "collapsing", 35), (None, "healthy", None)])
def test_a_finished_run_is_judged_from_its_files(detection, tmp_path, fall, kind, detected):
    path = run_directory(tmp_path / "run", fall=fall)
    probes = [json.loads(line) for line in (path / "probes.jsonl").read_text().splitlines()]
    write_lines(path / "probes.jsonl", [one | {"loss": 1.0, "accuracy": one["single"], "rate": 0.1} for one in probes])
    config = {"data": "digits", "model": "small-cnn", "method": "fgsm", "eps": 0.2, "seed": 0, "epochs": 6}
    result = {"config": config | {"track": "clean,pgd-10", "validation": 128}, "classes": list("0123456789")}
    (path / "result.json").write_text(json.dumps(result))
    row = detection.judged(path)
    assert (row["kind"], row["detected_step"], row["passed"]) == (kind, detected, True)
    assert detection.summary([row])["all"]["false_alarms"] == 0


def test_a_run_that_was_cut_goes_on_and_has_the_truth_of_one_that_was_not(detection, tmp_path, monkeypatch):
    runs = import_module("detection_runs")
    words = "data=digits method=fgsm eps=0.2 model=small-cnn epochs=2 batch=68 seed=0"
    whole = runs.make_run(words, tmp_path / "whole", None, 20, "cpu")
    look, left = runs.Truth.look, iter(range(3))

    def pulled(self):
        if next(left, None) is None:
            raise WorkError("cut")
        return look(self)

    monkeypatch.setattr(runs.Truth, "look", pulled)
    with pytest.raises(WorkError, match="cut"):
        runs.make_run(words, tmp_path / "cut", None, 20, "cpu")
    monkeypatch.setattr(runs.Truth, "look", look)
    again = runs.make_run(words, tmp_path / "cut", None, 20, "cpu")
    assert detection.read_lines(again / "truth.jsonl") == detection.read_lines(whole / "truth.jsonl")
    truth, looks = (detection.read_lines(again / f"{name}.jsonl") for name in ("truth", "probes"))
    # Every 9 steps of epochs of 19: the third look's steps begin in the epoch before.
    assert [one["step"] for one in truth] == [9, 18, 27, 36]
    assert [one["accuracy"] for one in truth] == [one["accuracy"] for one in looks]
    assert detection.judged(again) | {"run": ""} == detection.judged(whole) | {"run": ""}


def test_what_is_finished_is_summed_up_when_time_runs_out(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "detection.py"
    ended = subprocess.run(
        [sys.executable, script, "--runs", tmp_path, "--only", "digits-fgsm-0.2-0", "--limit", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["all"]["collapsing"] == 0
