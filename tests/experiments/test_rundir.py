"""Steps and epochs of a run, also of one whose epochs differ in length."""

import pytest

from elle.experiments.delayed import delayed_collapse
from elle.experiments.rundir import open_run

from .runs import STEPS, run_directory, write_lines


def test_a_step_s_epoch_is_its_share_of_the_epochs(tmp_path):
    run = open_run(run_directory(tmp_path / "run", epochs=4))
    assert [run.epoch_of(step) for step in (0, 5, STEPS, 37, 60)] == [0, 0.5, 1, 3.7, 6]


def test_the_steps_of_a_first_epoch_lie_within_it(tmp_path):
    """They were taken for epochs, and drawn far to the right of the runs beside."""
    path = run_directory(tmp_path / "run", epochs=1, finished=False)
    (path / "metrics.jsonl").unlink()
    run = open_run(path)
    assert [run.epoch_of(probe["step"]) for probe in run.probes] == [0.5, 1]
    assert [run.epoch_of(step) for step in (0, STEPS // 5, 2 * STEPS)] == [0, 0.2, 1]


def test_the_epochs_of_a_run_in_phases_have_their_own_lengths(tmp_path):
    path = run_directory(tmp_path / "run", epochs=3)
    write_lines(path / "metrics.jsonl", [{"epoch": k + 1, "step": step} for k, step in enumerate((4, 8, 28))])
    run = open_run(path)
    assert [run.epoch_of(step) for step in (2, 4, 7, 8, 18, 28)] == pytest.approx([0.5, 1, 1.75, 2, 2.5, 3])
    run.events, run.result = [], {"collapse_epoch": 3}
    assert run.collapse_step() == 28


def test_an_epoch_that_max_steps_cuts_short_counts_as_far_as_it_went(tmp_path):
    path = run_directory(tmp_path / "run", epochs=2)
    cut = {"epoch": 2, "step": STEPS + 2, "epoch_steps": STEPS}
    write_lines(path / "metrics.jsonl", [{"epoch": 1, "step": STEPS}, cut])
    run = open_run(path)
    assert (run.epochs(), run.epoch_of(STEPS + 1)) == pytest.approx((1 + 2 / STEPS, 1 + 1 / STEPS))
    assert delayed_collapse([run])[0]["epochs_held"] == 1.2


def test_a_run_without_an_epoch_has_not_held(tmp_path):
    """One that had only begun counted as held, and one that fell in its first epoch held for as many as its steps."""
    for eps, words in ((0.1, {}), (0.2, {"fall": 2}), (0.3, {})):
        path = run_directory(tmp_path / str(eps), "method=fgsm", f"eps={eps}", finished=eps == 0.1, **words)
        if eps > 0.1:
            (path / "metrics.jsonl").unlink()
    begun = [open_run(tmp_path / eps) for eps in ("0.1", "0.3")]
    assert [(one["runs"], one["holds_to"], one["epochs_held"]) for one in delayed_collapse(begun)] == [(1, 0.1, 6)]
    (row,) = delayed_collapse([open_run(tmp_path / "0.1"), open_run(tmp_path / "0.2")])
    assert (row["first_collapse_eps"], row["first_collapse_epoch"]) == (0.2, 0.0)
