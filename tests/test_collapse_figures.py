"""What docs/collapse.md says of the monitor was measured, run by run."""

import json
import re
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


def test_the_collapse_of_the_second_kind_is_what_was_measured():
    (run,) = (run for run in MEASURED["runs"] if run["run"] == "fgsm-eps16-255-seed0")
    attack, clean, multi, error = re.search(
        r"is ([\d.]+)% under .* but ([\d.]+)% without .* and ([\d.]+)% under .* E_lin is (\S+)$", run["evidence"]
    ).groups()
    text = " ".join((ROOT / "docs" / "collapse.md").read_text().split())
    assert f"trained to {attack} % under its own attack, it answered {clean} % of the clean images" in text
    assert f"and {multi} % under three steps of PGD, with E_lin at {error} where" in text


def test_the_summary_adds_up_the_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    assert import_module("detection").summary(MEASURED["runs"]) == MEASURED["summary"]
    set_on = import_module("detection_runs").SET_ON
    assert all(run["held_out"] == (run["run"] not in set_on) for run in MEASURED["runs"])


def test_the_figures_of_recovery_are_what_was_measured():
    (file,) = (ROOT / "benchmarks" / "results").glob("recovery-*.json")
    runs = {run["run"]: run for run in json.loads(file.read_text())["runs"]}
    page, readme = ((ROOT / name).read_text() for name in ("docs/collapse.md", "README.md"))
    for eps in ("8-255", "16-255"):
        plain, undone = runs[f"plain-{eps}"], runs[f"rollback-{eps}"]
        told = [[f"{100 * run['accuracy'][attack]:.1f} %" for attack in ("pgd-20", "clean")] for run in (plain, undone)]
        times = f"{undone['train_seconds'] / plain['train_seconds']:.2f} times"
        assert f"| {told[0][0]} | {told[0][1]} | {plain['train_seconds']:.1f} |" in page
        assert f"| **{told[1][0]}** | {told[1][1]} | {undone['train_seconds']:.1f} ({times}) |" in page
        assert told[1][0] in readme
        if eps == "8-255":
            assert f"{times} the time of plain `fgsm`" in " ".join(readme.split())


def test_the_accuracy_that_came_back_after_a_collapse_is_what_was_measured():
    (file,) = (ROOT / "benchmarks" / "results").glob("recovery-*.json")
    (run,) = (run for run in json.loads(file.read_text())["runs"] if run["run"] == "plain-8-255")
    fall, back = (next(one for one in run["events"] if one["event"] == kind) for kind in ("collapse", "recovery"))
    assert back["since"] - fall["since"] == 7 * 382
    text = " ".join((ROOT / "docs" / "collapse.md").read_text().split())
    share = re.search(r"back at ([\d.]+)%", back["evidence"])[1]
    assert f"seven epochs after its collapse, had {float(share):.0f} % under three steps of PGD again" in text
    assert f"ended at {100 * run['accuracy']['pgd-20']:.1f} % under PGD-20 (`{run['run']}`" in text


def test_the_epochs_that_the_page_on_methods_corrects_are_those_of_the_looks():
    epochs = {run["run"]: -(-(run["detected_step"] or 0) // run["steps_per_epoch"]) for run in MEASURED["runs"]}
    text = " ".join((ROOT / "docs" / "methods.md").read_text().split())
    first, second = (epochs[f"{name}-eps16-255-seed0"] for name in ("fgsm", "advmixup-single"))
    assert f"that of `fgsm` is reported in epoch {first} and that of `advmixup-single` in epoch {second} (" in text


def test_the_monitor_s_cost_is_what_was_measured():
    (file,) = (ROOT / "benchmarks" / "results").glob("recovery-*.json")
    seconds = {run["run"]: f"{run['median_epoch_seconds']:.3f}" for run in json.loads(file.read_text())["runs"]}
    text = " ".join((ROOT / "docs" / "collapse.md").read_text().split())
    with_it, without = (
        " and ".join(seconds[f"{name}-{turn}"] for turn in (0, 1)) for name in ("monitor", "no-monitor")
    )
    assert f"{with_it} s with the monitor and {without} without" in text
