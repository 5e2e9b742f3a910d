"""Steps and epochs of a run, also of one whose epochs differ in length."""

import json

import pytest

from elle.errors import InputError
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


def test_a_record_that_is_there_twice_takes_no_time(tmp_path):
    path = run_directory(tmp_path / "run", epochs=1)
    write_lines(path / "metrics.jsonl", [{"epoch": 1, "step": STEPS}] * 2)
    assert (open_run(path).epochs(), open_run(path).epoch_of(STEPS + 1)) == (1, 1)


def test_an_epoch_that_max_steps_cuts_short_counts_as_far_as_it_went(tmp_path):
    path = run_directory(tmp_path / "run", epochs=2)
    cut = {"epoch": 2, "step": STEPS + 2, "epoch_steps": STEPS}
    write_lines(path / "metrics.jsonl", [{"epoch": 1, "step": STEPS}, cut])
    run = open_run(path)
    assert (run.epochs(), run.epoch_of(STEPS + 1)) == pytest.approx((1 + 2 / STEPS, 1 + 1 / STEPS))
    assert delayed_collapse([run])[0]["epochs_held"] == 1.2


def test_the_strongest_tracked_attack_has_the_most_steps(tmp_path):
    path = run_directory(tmp_path / "run", "track=clean,pgd-9,pgd-10,pgd-8")
    write_lines(path / "metrics.jsonl", [{"epoch": 1, "step": STEPS, "pgd-8": 0.4, "pgd-9": 0.3, "pgd-10": 0.2}])
    assert open_run(path).multi_step() == "pgd-10"


COLLAPSE = {"event": "collapse", "step": 25, "since": 20}
BACK = {"event": "rollback", "step": 10, "method": "fgsm+elle-a", "weight": 100.0}


@pytest.mark.parametrize(
    ("events", "told", "collapsed_at"),
    [
        ([COLLAPSE], 1, 20),
        ([COLLAPSE, {"event": "resume", "step": 25}], 1, 20),  # from where it was told, which is not told again
        ([COLLAPSE, {"event": "resume", "step": 22}], 0, None),
        ([COLLAPSE, {"event": "recovery", "step": 40}], 1, None),
        ([COLLAPSE, BACK], 1, None),
        ([COLLAPSE, BACK, {"event": "resume", "step": 15}], 1, None),  # the way back stays part of the run
    ],
)
def test_a_collapse_is_told_until_the_run_goes_on_from_before_it(tmp_path, events, told, collapsed_at):
    run = open_run(run_directory(tmp_path / "run", events=events))
    assert (len(run.collapses()), run.collapse_step()) == (told, collapsed_at)


def test_the_method_of_the_last_rollback_is_the_one_it_went_on_with(tmp_path):
    run = open_run(run_directory(tmp_path / "run", events=[BACK, BACK | {"weight": 200.0}]))
    run.result = {"rollbacks": 2}
    assert run.went_on_with() == "fgsm+elle-a at weight 200"


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


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics.jsonl", {"epoch": 1}),
        ("metrics.jsonl", {"epoch": float("inf"), "step": STEPS}),
        ("metrics.jsonl", {"epoch": 1, "step": STEPS, "pgd-10": [0.5]}),
        ("probes.jsonl", {"clean": 0.5}),
        ("probes.jsonl", {"step": STEPS, "multi": "0.5"}),
        ("events.jsonl", {"step": STEPS}),
        ("events.jsonl", {"event": "resume", "stfp": STEPS}),
        ("events.jsonl", {"event": "collapse", "step": STEPS, "since": float("nan")}),
        ("events.jsonl", {"event": "rollback", "step": STEPS, "weight": "4000"}),
        ("events.jsonl", {"event": "rollback", "step": STEPS, "probes": [{"clean": 0.5}]}),
        ("steps.jsonl", {"epoch": 1, "step": 1, "loss": 2.0}),
    ],
)
def test_a_damaged_line_that_is_still_json_is_named(tmp_path, file, line):
    path = run_directory(tmp_path / "run", epochs=2)
    write_lines(path / file, [line])
    with pytest.raises(InputError, match=f"{file} is damaged in line 1: .*; take that line out"):
        open_run(path).steps()


def test_a_line_of_what_was_not_measured_or_diverged_is_whole(tmp_path):
    path = run_directory(tmp_path / "run", epochs=1)
    record = {"epoch": 1, "step": STEPS, "error": None, "loss": float("nan")}
    write_lines(path / "metrics.jsonl", [record])
    assert open_run(path).records[0].keys() == record.keys()


@pytest.mark.parametrize("key", ["collapse_epoch", "train_seconds"])
def test_a_number_of_a_result_that_is_none_is_named(tmp_path, key):
    path = run_directory(tmp_path / "run", epochs=1)
    result = json.loads((path / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(result | {key: "soon"}))
    with pytest.raises(InputError, match=f"result.json is damaged: its {key} is not a number"):
        open_run(path)
