"""What docs/collapse.md says of the monitor was measured, run by run."""

import json
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
(FILE,) = (ROOT / "benchmarks" / "results").glob("detection-cpu-*.json")
MEASURED = json.loads(FILE.read_text())
COLUMNS = ("collapsing", "in_time", "healthy", "false_alarms", "temporary", "never_robust", "unfounded_alarms")


@pytest.mark.parametrize("part", MEASURED["summary"])
def test_the_table_of_detection_is_what_was_measured(part):
    counts = MEASURED["summary"][part]
    row = f"| {part} | {' | '.join(str(counts[name]) for name in COLUMNS)} |"
    assert row in (ROOT / "docs" / "collapse.md").read_text().splitlines()


def test_every_run_that_fails_is_named():
    text = (ROOT / "docs" / "collapse.md").read_text()
    for run in MEASURED["runs"]:
        assert run["passed"] or f"`{run['run']}`" in text, run["run"]


def test_the_summary_adds_up_the_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("detection").summary(MEASURED["runs"]) == MEASURED["summary"]
    set_on = import_module("detection_runs").SET_ON
    assert all(run["held_out"] == (run["run"] not in set_on) for run in MEASURED["runs"])
