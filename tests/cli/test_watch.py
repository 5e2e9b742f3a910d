"""Runs watched in the terminal, from directories made by hand."""

import os
import time

import pytest
from rich.console import Console

from elle.cli.watch import sparkline, view
from elle.experiments.rundir import open_run
from elle.files import FolderLock
from tests.experiments.runs import run_directory


def test_runs_are_watched_side_by_side(elle, tmp_path):
    events = [{"event": "rollback", "step": 20, "undone_from": 35, "probes": [], "method": "fgsm+elle-a"}]
    runs = [
        run_directory(tmp_path / "a", fall=4),
        run_directory(tmp_path / "b", finished=False, events=events),
        run_directory(tmp_path / "c", weight=3.0),
    ]
    outcome = elle("watch", "--once", *runs)
    assert outcome.code == 0, outcome.err
    for part in (
        "finished, collapsed at step 40",
        "a: collapse since step 40, reported at step 45: it fell",
        "training, rolled back 1 x",
        "finished",
    ):
        assert part in outcome.out, part


def test_a_narrow_terminal_shows_fewer_columns_and_those_whole(tmp_path):
    run = open_run(run_directory(tmp_path / "digits-n-fgsm-eps0.2-seed0", fall=4))
    console = Console(width=80)
    with console.capture() as captured:
        console.print(view([run], console.width))
    head, row = captured.get().splitlines()[:2]
    assert head.split() == ["run", "epoch", "multi-step", "best", "state"]
    assert row.split()[:4] == ["digits-n-fgsm-eps0.2-seed0", "6/6", "1.0%", "40.0%"]


def shown(runs, width, height=None):
    console = Console(width=width)
    with console.capture() as captured:
        console.print(view(runs, width, height))
    return captured.get().splitlines()


def test_names_that_differ_at_their_end_do_so_on_a_narrow_terminal(tmp_path):
    names = [f"digits-n-fgsm+elle-a-eps0.2-seed{seed}-0123abcd" for seed in (0, 1)]
    lines = shown([open_run(run_directory(tmp_path / name)) for name in names], 60)
    assert [lines[k][:24].strip() + lines[k + 1][:24].strip() for k in (1, 3)] == names
    assert all(line.split()[1:] == ["6/6", "40.0%", "40.0%", "finished"] for line in lines[1::2])


def test_a_run_is_watched_under_its_name_whatever_is_in_it(tmp_path):
    assert shown([open_run(run_directory(tmp_path / "lr[a]"))], 200)[1].split()[0] == "lr[a]"


def test_more_runs_than_lines_are_counted_and_those_that_train_come_first(tmp_path):
    runs = [open_run(run_directory(tmp_path / f"run{k}", finished=k == 29)) for k in range(30)]
    lines = shown([runs[29], *runs[:29]], 100, height=10)
    assert len(lines) == 10
    assert [line.split()[0] for line in lines[1:-1]] == [f"run{k}" for k in range(8)]
    assert lines[-1] == "and 22 more"
    assert len(shown(runs, 100)) == 31


def test_a_number_that_was_not_finite_is_left_out_of_what_is_watched(elle, tmp_path):
    metrics = run_directory(tmp_path / "a") / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"pgd-10": 0.4', '"pgd-10": null', 1))
    outcome = elle("watch", "--once", tmp_path / "a")
    assert (outcome.code, "40.0%" in outcome.out) == (0, True)


def test_watching_ends_with_the_last_run(elle, tmp_path):
    assert elle("watch", run_directory(tmp_path / "a")).code == 0


def test_watching_ends_with_a_run_that_has_stopped_and_says_why(elle, tmp_path):
    reason = "training diverged in epoch 2: " + "the loss is not finite, " * 10 + "lower lr"
    stop = {"event": "stop", "step": 20, "reason": reason}
    outcome = elle("watch", run_directory(tmp_path / "a", finished=False, events=[stop]))
    assert outcome.code == 0
    assert outcome.out.count("stopped") == 1
    assert f"a: {reason}\n" in outcome.out  # in one line: there is no terminal to wrap it for


def test_a_run_that_was_killed_is_not_called_training(elle, tmp_path):
    run = run_directory(tmp_path / "a", finished=False)
    assert "training" in elle("watch", run, "--once").out.splitlines()[1]
    with FolderLock(run, ".lock"):
        long_ago = time.time() - 3600
        for file in run.iterdir():
            os.utime(file, (long_ago, long_ago))
        assert "training" in elle("watch", run, "--once").out.splitlines()[1]
    (run / "gone").symlink_to("nowhere")  # like a file that another machine removes while we look
    told = elle("watch", run, "--once").out
    assert "not running here" in told
    assert f"`elle train --out {run} --resume`" in told


@pytest.mark.parametrize(("values", "bars"), [([], ""), ([0, 0], "▁▁"), ([0, 0.5, 1], "▁▅█")])
def test_a_course_is_a_row_of_bars(values, bars):
    assert sparkline(values) == bars
