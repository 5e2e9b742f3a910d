"""Up to which eps, and for how many epochs, a method holds."""

import json

from elle.experiments.delayed import delayed_collapse
from elle.experiments.rundir import open_run
from tests.experiments.runs import run_directory


def test_a_delayed_collapse_is_told_by_method(tmp_path):
    words = [
        ("fgsm", "0.1", None),
        ("fgsm", "0.2", 5),
        ("fgsm", "0.3", 2),
        ("elle-a", "0.1", None),
        ("elle-a", "0.3", None),
    ]
    runs = [
        open_run(run_directory(tmp_path / f"{method}-{eps}", f"method={method}", f"eps={eps}", fall=fall))
        for method, eps, fall in words
    ]
    elle_a, fgsm = delayed_collapse(runs)
    assert (elle_a["method"], elle_a["holds_to"], elle_a["epochs_held"]) == ("elle-a", 0.3, 6)
    assert (fgsm["holds_to"], fgsm["first_collapse_eps"], fgsm["first_collapse_epoch"]) == (0.1, 0.2, 5)
    assert [(one["eps"], one["collapsed"], one["held"]) for one in fgsm["by_eps"]] == [
        (0.1, 0, None),
        (0.2, 1, 5),
        (0.3, 1, 2),
    ]


def test_the_epochs_that_a_method_held_are_those_at_the_eps_that_is_told(tmp_path):
    runs = [
        open_run(run_directory(tmp_path / eps, "method=n-fgsm", f"eps={eps}", epochs=epochs, finished=eps == "0.1"))
        for eps, epochs in (("0.1", 20), ("0.3", 2))
    ]
    (row,) = delayed_collapse(runs)
    assert (row["holds_to"], row["epochs_held"]) == (0.3, 2)


def test_radii_of_two_norms_are_not_one_row(tmp_path):
    runs = [
        open_run(run_directory(tmp_path / norm, "method=fgsm", f"norm={norm}", f"eps={eps}", fall=fall))
        for norm, eps, fall in (("linf", "0.2", 3), ("l2", "0.5", None))
    ]
    assert [(row["norm"], row["holds_to"]) for row in delayed_collapse(runs)] == [("l2", 0.5), ("linf", None)]


def test_a_run_without_a_monitor_is_judged_by_its_result(tmp_path):
    path = run_directory(tmp_path / "run")
    (path / "result.json").write_text(json.dumps({"collapse_epoch": 4}))
    assert open_run(path).collapse_step() == 40
