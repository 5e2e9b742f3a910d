"""Our numbers judged beside the paper's, by their standard errors."""

import math
from dataclasses import replace

import numpy as np
import pytest

from elle.experiments.collected import Score, gather
from elle.experiments.comparison import compare
from elle.experiments.layout import lay_out
from elle.experiments.report_tables import comparison_table

from .reports import RECIPE, with_results


def test_differences_are_judged_by_two_joint_standard_errors(collected):
    found = {(one.setting.config.method, one.setting.label("eps")): one for one in compare(collected)}
    n_fgsm = found["n-fgsm", "8/255"]
    assert n_fgsm.difference == pytest.approx(1.0)
    assert n_fgsm.joint_error == pytest.approx(math.sqrt(0.1**2 / 3 + 0.3**2 / 2))
    assert n_fgsm.verdict == "outside"
    assert found["fgsm", "8/255"].verdict == "inside"
    assert found["fgsm", "16/255"].verdict == "both collapsed"
    elle_a = found["elle-a", "8/255"]  # the paper has no std there: ours stands for it
    assert elle_a.joint_error == pytest.approx(math.sqrt(2 * 0.1**2 / 3))
    assert found["elle-a", "16/255"].verdict == "no std"


@pytest.mark.parametrize(
    ("difference", "verdict"), [(0.2, "inside"), (-0.2, "inside"), (0.22, "outside"), (-0.22, "outside")]
)
def test_a_difference_is_judged_by_its_size_in_both_directions(collected, difference, verdict):
    """Two joint standard errors are 0.2, and two printed decimals may hide another 0.005."""
    one = compare(collected)[0]
    expected = replace(one.expected, value=44.0, std=0.1)
    judged = replace(one, expected=expected, score=Score(44.0 + difference, 0.1 * math.sqrt(3 / 2), 3, collapsed=False))
    assert judged.joint_error == pytest.approx(0.1)
    assert (judged.verdict, judged.inside) == (verdict, verdict == "inside")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_paper_s_std_is_taken_as_that_of_a_sample(collected, count):
    """Its +- divides by n: the same three accuracies as ours and as the paper's have the same standard error."""
    one, runs = compare(collected)[0], [44.1, 44.3, 44.8]
    expected = replace(one.expected, value=44.4, std=float(np.std(runs)))
    error = float(np.std(runs, ddof=1)) * math.sqrt(1 / count + 1 / 3)
    known = Score(44.4, float(np.std(runs, ddof=1)), count, collapsed=False)
    assert replace(one, expected=expected, score=known).joint_error == pytest.approx(error)
    unknown = replace(known, std=None)  # the paper's stands for it
    assert replace(one, expected=expected, score=unknown).joint_error == pytest.approx(error)


def test_a_std_of_0_in_the_paper_does_not_stand_for_ours(collected):
    """By it every single run of ours was outside: its two standard errors were 0."""
    one = compare(collected)[0]
    expected = replace(one.expected, value=14.42, std=0.0)
    judged = replace(one, expected=expected, score=Score(14.5, None, 1, collapsed=False))
    assert (judged.joint_error, judged.verdict) == (None, "no std")
    judged = replace(judged, score=Score(14.5, 0.3, 3, collapsed=False))
    assert judged.joint_error == pytest.approx(0.3 / math.sqrt(3))


def test_a_single_run_of_the_paper_is_less_certain_than_a_mean_of_three(collected):
    one = compare(collected)[0]
    for seeds in (1, 3):
        expected = replace(one.expected, std=None, seeds=seeds)
        judged = replace(one, expected=expected, score=Score(44.0, 0.3, 3, collapsed=False))
        assert judged.joint_error == pytest.approx(0.3 * math.sqrt(1 / 3 + 1 / seeds))


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [(True, False, "ours collapsed"), (False, True, "paper's collapsed"), (True, True, "both collapsed")],
)
def test_who_collapsed_is_said_and_nothing_else_judged(collected, ours, theirs, verdict):
    one = compare(collected)[0]
    expected = replace(one.expected, collapsed=theirs, std=0.1)
    judged = replace(one, expected=expected, score=Score(44.0, 0.1, 3, collapsed=ours))
    assert (judged.verdict, judged.inside) == (verdict, None)


def test_times_of_another_machine_are_not_judged(folder):
    recipe = folder / "radii.toml"
    recipe.write_text(RECIPE.replace("[figure]", '[[expected]]\nmetric = "seconds"\nvalue = 377.4\n[figure]'))
    with_results(folder, train_seconds=lambda place: 100.0 + place)
    runs = gather([str(recipe), str(folder / "runs")])
    times = [one for one in compare(runs) if one.expected.metric == "seconds"]
    assert {(one.verdict, one.inside) for one in times} == {("time", None)}
    table = comparison_table(compare(runs), lay_out(runs))
    assert table.note.endswith("Times are not judged: the paper's are of another machine.")
    assert next(row for row in table.rows if row[1] == "time")[5] == "-"


def test_the_verdicts_stand_beside_both_numbers(collected):
    table = comparison_table(compare(collected), lay_out(collected))
    assert list(table.rows[1]) == [
        *("fgsm, eps 16/255", "both collapsed", "0.00 ± 0.00", "0.01 ± 0.01", "-0.01", "0.01", "3"),
    ]
    assert table.marks == {(1, 2): "collapsed", (1, 3): "collapsed", (2, 1): "best"}  # outside, in bold
