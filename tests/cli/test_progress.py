"""What stands beside the progress bar while a run trains."""

import pytest

from elle.cli.progress import TrainingProgress
from elle.config import load_config
from elle.engine.monitor import Verdict


def test_the_bar_names_what_is_the_matter_as_long_as_it_is():
    progress = TrainingProgress()
    watcher, (task,) = progress.watcher(), progress.bar.tasks
    watcher.looked({"step": 20}, "collapse")
    watcher.judged(Verdict("collapse", 20, 15, "it fell", "high"))
    assert task.description == "collapse, step 15"
    watcher.looked({"step": 25}, "collapse")
    assert task.description == "collapse, step 15"
    watcher.looked({"step": 20}, None)  # the first look after a rollback
    assert task.description == "training"
    watcher.judged(Verdict("collapse", 30, 25, "it fell", "high"))
    watcher.judged(Verdict("recovery", 40, 35, "it is back", "medium"))  # told by the records: there are no looks
    assert task.description == "training"


def test_a_line_stays_whole_where_there_is_no_terminal(capsys):
    TrainingProgress().watcher().said("collapse: " + "word " * 100 + "end")
    assert capsys.readouterr().out.count("\n") == 1


def test_a_terminal_breaks_a_line_between_words(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    words = "epoch   1/2  loss 2.330  training   8.4%  clean  47.8%  pgd-10  12.0%  E_lin 5.31e-05  weight 0"
    TrainingProgress().watcher().said(words)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(lines).split() == words.split()


def test_an_epoch_is_told_in_words_that_fit_every_method(capsys):
    watcher = TrainingProgress().watcher()
    watcher.started(load_config(["data=digits", "method=pgd-10", "epochs=1"]).resolved(), 20, 0)
    watcher.recorded(
        {"epoch": 1, "step": 20, "loss": 1.0, "accuracy": 0.5, "error": None, "weight": None, "seconds": 1}
    )
    said = capsys.readouterr().out
    assert "1 epoch of batch 64" in said
    assert "training  50.0%" in said  # ten steps are no single-step attack


def test_a_narrow_terminal_parts_no_name_of_an_epoch_from_its_number(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    watcher = TrainingProgress().watcher()
    watcher.started(load_config(["data=digits", "epochs=2", "max_steps=30"]).resolved(), 30, 0)
    record = {"epoch": 1, "step": 20, "loss": 2.33, "accuracy": 0.084, "clean": 0.478, "pgd-10": 0.12}
    watcher.recorded(record | {"error": 5.31e-05, "weight": 0.0, "seconds": 4.0})
    *first, second, third = capsys.readouterr().out.splitlines()
    assert "2 epochs of batch 64, at most 30 steps" in " ".join(" ".join(first).split())
    assert second == "epoch   1/2  loss 2.330  training   8.4%  clean  47.8%  pgd-10  12.0%"
    assert third.startswith("  E_lin 5.31e-05  weight 0  4.0 s  left ")


@pytest.mark.parametrize(("begun_at", "step", "left"), [(20, 20, "left 0 s"), (15, 10, None)])
def test_a_continued_run_tells_no_time_that_it_does_not_know(capsys, begun_at, step, left):
    """Nothing was left to train; or a rollback went further back than where the run was continued."""
    watcher = TrainingProgress().watcher()
    watcher.started(load_config(["data=digits", "epochs=1"]).resolved(), 20, begun_at)
    record = {"epoch": 1, "step": step, "loss": 1.0, "accuracy": 0.5, "error": None, "weight": None, "seconds": 1}
    watcher.recorded(record)
    said = capsys.readouterr().out.rstrip()
    assert said.endswith(left or "1.0 s")
