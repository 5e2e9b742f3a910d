"""The demonstration: what it writes, what it says, and (slow) that the phenomenon it shows is there."""

import json
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from elle.demo import NAMES, DemoRun, _dip, _start, _table, describe, run_demo
from elle.errors import InputError, WorkError
from elle.experiments.training import is_running
from elle.files import write_lines


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(out, seed=3, quiet=True, words=["epochs=2", "max_steps=4", "batch=32"])


def test_it_summarises_each_method_from_its_records(short):
    out, summary = short
    assert list(summary) == ["fgsm", "elle-a"]
    for method, one in summary.items():
        records = [json.loads(line) for line in (out / method / "metrics.jsonl").read_text().splitlines()]
        assert one["pgd20_final"] == records[-1]["pgd-20"]
        assert one["pgd20_best"] == max(record["pgd-20"] for record in records)
        assert one["clean"] == records[-1]["clean"]
        assert one["collapsed"] is (one["collapse_epoch"] is not None)


def test_it_writes_one_page_with_the_curves_and_the_verdict(short):
    out, summary = short
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 6
    assert describe(summary) in re.sub(r"<[^>]+>|&nbsp;", "", page).replace("\u2060", "")


@pytest.mark.parametrize("width", [50, 60, 80, 160])
def test_its_table_cuts_off_nothing_on_a_narrow_terminal(short, width):
    out, _ = short
    runs = [DemoRun(method, out / method, None) for method in NAMES]
    for run in runs:
        run.read()
    console = Console(width=width)
    with console.capture() as captured:
        console.print(_table(runs, 2, width))
    lines = captured.get().splitlines()
    assert "\u2026" not in captured.get()
    assert [line.split()[0] for line in lines] == ["method", "FGSM", "ELLE-A"]
    assert ("E_lin" in lines[0]) is (width >= 80)
    assert f"{runs[0].records[-1]['pgd-20']:.1%}" in lines[1]


@pytest.fixture
def begin(monkeypatch):
    """Run a demo up to its first training."""

    def run(out):
        with monkeypatch.context() as patch:
            patch.setattr("elle.demo._start", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_demo(out, seed=3, quiet=True)

    return run


def test_it_replaces_a_former_demo_but_nothing_else(begin, tmp_path):
    out = tmp_path / "out"
    begin(out)
    (out / "fgsm").mkdir()
    (out / "fgsm" / "old").touch()
    begin(out)
    assert not (out / "fgsm").exists()
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match="is not a former demo"):
        run_demo(tmp_path, seed=0, quiet=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"


def test_one_demo_at_a_time_and_a_killed_one_leaves_no_training_behind(begin, tmp_path):
    out = tmp_path / "out"
    demo = subprocess.Popen([sys.executable, "-m", "elle", "demo", "--out", str(out)], stdout=subprocess.DEVNULL)
    try:
        _wait_until(lambda: all(is_running(out / method) for method in NAMES))
        with pytest.raises(InputError, match=f"{out} is in use by another process"):
            run_demo(out, seed=0, quiet=True)
        assert all(is_running(out / method) for method in NAMES)
    finally:
        demo.kill()
        demo.wait()
    _wait_until(lambda: not any(is_running(out / method) for method in NAMES))
    begin(out)


def _wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_log_of_an_interrupted_demo_ends_with_how_far_it_came(tmp_path, monkeypatch, capsys):
    record = {"epoch": 7, "loss": 1, "accuracy": 0.5, "clean": 0.6, "pgd-20": 0.4, "tracked_error": 1e-3, "weight": 0}
    sleeps = iter([lambda: [write_lines(tmp_path / method / "metrics.jsonl", [record] * 7) for method in NAMES]])

    def sleep(seconds):
        next(sleeps, _interrupt)()

    training = SimpleNamespace(poll=lambda: None, terminate=lambda: None)
    monkeypatch.setattr("elle.demo._start", lambda method, directory, _: DemoRun(method, directory, training))
    monkeypatch.setattr("elle.demo.time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path, seed=0, quiet=False)
    log = capsys.readouterr().out
    assert [line.split()[:2] for line in log.splitlines()[-2:]] == [["FGSM", "7/20"], ["ELLE-A", "7/20"]]
    assert log.endswith("\n")


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_failed_training_is_reported_with_its_reason(tmp_path):
    with pytest.raises(WorkError, match="training (fgsm|elle-a) failed: training diverged"):
        run_demo(tmp_path / "out", seed=0, quiet=True, words=["lr=1e12", "epochs=1", "max_steps=4"])


@pytest.mark.parametrize(
    ("collapsed", "words"), [(True, "collapsed in epoch 7: .* fell from 40.0% to 1.0%"), (False, "did not collapse")]
)
def test_the_verdict_says_what_the_numbers_say(collapsed, words):
    one = {"pgd20_best": 0.4, "pgd20_final": 0.01, "single_step": 0.97, "dip": None}
    one |= {"collapsed": collapsed, "collapse_epoch": 7 if collapsed else None}
    assert re.search(words, describe({"fgsm": one}))


@pytest.mark.parametrize(
    ("accuracies", "dip"),
    [
        ([0.0, 0.1, 0.4, 0.3, 0.5], None),
        ([0.0, 0.1, 0.4, 0.1, 0.5], {"pgd20": 0.1, "epoch": 4}),
        ([0.3, 0.1, 0.5, 0.3], {"pgd20": 0.1, "epoch": 2}),
        ([0.0], None),
    ],
)
def test_a_dip_is_told(accuracies, dip):
    assert _dip(accuracies) == dip
    one = {"pgd20_best": 0.5, "pgd20_final": 0.5, "collapsed": False, "dip": dip}
    assert ("(best 50.0%, with a dip to 10.0% in epoch" in describe({"elle-a": one})) == (dip is not None)


@pytest.mark.slow
def test_over_five_seeds_fgsm_collapses_in_four_and_elle_a_in_none(tmp_path):
    summaries = [run_demo(tmp_path / str(seed), seed, quiet=True) for seed in range(5)]
    fallen = [one for one in summaries if one["fgsm"]["collapsed"]]
    assert len(fallen) >= 4, summaries
    assert not [one for one in summaries if one["elle-a"]["collapsed"]], summaries
    assert all(one["fgsm"]["single_step"] > 0.9 for one in fallen), summaries
    assert all(one["fgsm"]["pgd20_final"] < 0.5 * one["elle-a"]["pgd20_final"] for one in fallen), summaries


def test_its_two_runs_share_the_cores_that_it_may_use(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **rest: given.append(env["OMP_NUM_THREADS"]))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    _start("fgsm", tmp_path / "fgsm", [])
    assert given == ["1"]
