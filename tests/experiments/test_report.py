"""The report of runs made by hand: its numbers, its marks, its formats; the same runs give the same files."""

import csv
import json
import math
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from elle.errors import InputError
from elle.experiments.bars import Bar, Bars, draw_bars
from elle.experiments.chart import Chart, Series, _edges, draw
from elle.experiments.collected import Score, Setting, gather, measured, telling_keys
from elle.experiments.comparison import compare
from elle.experiments.layout import lay_out
from elle.experiments.page import Table
from elle.experiments.report import write_report
from elle.experiments.report_figures import report_figures
from elle.experiments.report_tables import baseline_tables, comparison_table, markdown, result_tables, unit, written
from elle.experiments.rundir import open_run
from elle.experiments.svg import GLYPH

from .runs import run_directory, write_lines

RECIPE = """
title = "Accuracy at two radii"
seeds = 3
[base]
data = "digits"
model = "small-cnn"
epochs = 6
track = "clean,pgd-10"
[grid]
method = ["fgsm", "n-fgsm", "elle-a", "pgd-10"]
eps = ["8/255", "16/255"]
[[expected]]
metric = "autoattack"
rows = "method"
columns = "eps"
table = '''
       | 8/255         | 16/255
fgsm   | 40.0 +- 0.30  | 0.01 +- 0.01 collapsed
n-fgsm | 44.0 +- 0.30  | 20.0 +- 0.20
elle-a | 45.0          | 18.0
'''
[figure]
metric = ["autoattack", "clean"]
rows = "method"
columns = "eps"
"""
ACCURACIES = {  # of AutoAttack at each radius, seed by seed
    "fgsm": ([40.1, 40.3, 40.5], [0.0, 0.0, 0.0]),
    "n-fgsm": ([44.9, 45.0, 45.1], [20.0, 20.2, 20.4]),
    "elle-a": ([44.8, 44.9, 45.0], [21.0]),
    "pgd-10": ([46.0, 46.5, 47.0], [24.0, 24.5, 25.0]),
}


def write_result(run, autoattack):
    test = {
        "clean": {"accuracy": 0.8, "total": 500},
        "autoattack": {"accuracy": autoattack / 100, "total": 500},
    }
    result = {"collapse_epoch": None, "steps": 60, "test": test, "device": "cpu"}
    (run / "result.json").write_text(json.dumps(result | {"train_seconds": 100.0, "seconds_per_epoch": 1.0}))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "radii.toml").write_text(RECIPE)
    for method, by_eps in ACCURACIES.items():
        for eps, values in zip(("8/255", "16/255"), by_eps, strict=True):
            for seed, value in enumerate(values):
                fall = 4 if method == "fgsm" and eps == "16/255" else None
                words = (f"method={method}", f"eps={eps}", f"seed={seed}", "model=small-cnn")
                run = run_directory(tmp_path / "runs" / f"{method}-{eps[:2].strip('/')}-{seed}", *words, fall=fall)
                write_result(run, value)
    return tmp_path


@pytest.fixture
def collected(folder):
    return gather([str(folder / "radii.toml"), str(folder / "runs")])


def test_tables_hold_mean_and_std_and_mark_the_best(collected):
    table = result_tables(collected, lay_out(collected))[0]
    assert table.caption == "AutoAttack, %"
    assert table.columns == ("method \\ eps", "8/255", "16/255")
    assert table.rows[0] == ["fgsm", "40.30 ± 0.20", "0.00 ± 0.00"]
    assert table.rows[2] == ["elle-a", "44.90 ± 0.10", "21.00"]
    assert table.marks == {
        **{(1, 1): "best", (2, 1): "second", (2, 2): "best", (1, 2): "second"},
        (0, 2): "collapsed",  # and PGD-10, the reference, is not marked
    }


@pytest.mark.parametrize(
    ("methods", "marks"),
    [
        # As N-FGSM and ELLE at 26/255 in the paper's Figure 4c.
        (("n-fgsm", "elle", "pgd-10"), {(0, 1): "collapsed", (1, 1): "best"}),
        (("elle", "pgd-10"), {}),  # one alone has beaten nobody
    ],
)
def test_who_alone_has_held_is_the_best(tmp_path, methods, marks):
    for number, method in enumerate(methods):
        path = tmp_path / f"{number}-{method}"
        write_result(run_directory(path, f"method={method}", "eps=26/255", fall=3 if method == "n-fgsm" else None), 14)
    collected = gather([str(tmp_path)])
    assert result_tables(collected, lay_out(collected))[0].marks == marks


def test_methods_are_compared_at_one_radius_also_where_they_are_the_columns(folder):
    runs = with_figure(folder, 'metric = ["autoattack"]\nrows = "eps"\ncolumns = "method"')
    (table,) = result_tables(runs, lay_out(runs))
    assert table.columns == ("eps \\ method", "fgsm", "n-fgsm", "elle-a", "pgd-10")
    best = {(0, 2): "best", (0, 3): "second", (1, 3): "best", (1, 2): "second"}
    assert table.marks == best | {(1, 1): "collapsed"}


def test_numbers_that_read_the_same_share_a_mark(tmp_path):
    for method, accuracy in (("fgsm", 12), ("n-fgsm", 14.001), ("elle", 14.004)):
        write_result(run_directory(tmp_path / method, f"method={method}"), accuracy)
    collected = gather([str(tmp_path)])
    table = result_tables(collected, lay_out(collected))[0]
    marked = {table.rows[row][0]: mark for (row, _), mark in table.marks.items()}
    assert marked == {"n-fgsm": "best", "elle": "best", "fgsm": "second"}


def test_without_a_recipe_the_strongest_attack_comes_first(tmp_path):
    run = run_directory(tmp_path / "run", "model=small-cnn")
    strongest_first = ["autoattack", "pgd-50-10", "pgd-20-10", "pgd-20-2", "pgd-20", "pgd-9-10", "pgd-9"]
    strongest_first += ["apgd-ce", "square", "fgsm", "clean"]
    test = {name: {"accuracy": 0.5, "total": 500} for name in sorted(strongest_first)}
    (run / "result.json").write_text(json.dumps({"collapse_epoch": None, "steps": 60, "test": test}))
    assert gather([str(run)]).metrics == strongest_first


def test_a_score_is_the_mean_and_the_sample_s_std_and_one_collapsed_seed_marks_it(tmp_path):
    runs = []
    for seed, value in enumerate((10, 20, 60)):
        path = run_directory(tmp_path / str(seed), f"seed={seed}", "model=small-cnn", fall=4 if seed == 1 else None)
        write_result(path, value)
        runs.append(open_run(path))
    assert Setting(runs).score("autoattack") == Score(pytest.approx(30), pytest.approx(math.sqrt(700)), 3, True)
    assert Setting(runs[::2]).score("autoattack") == Score(pytest.approx(35), pytest.approx(math.sqrt(1250)), 2, False)
    assert Setting(runs[:1]).score("autoattack") == Score(pytest.approx(10), None, 1, False)


def test_the_validation_accuracy_is_that_of_the_last_epoch(tmp_path):
    run = run_directory(tmp_path / "run", "validation=100", "model=small-cnn", epochs=6, fall=6)
    assert measured(open_run(run))["validation pgd-10"] == pytest.approx(1.0)


def test_every_tracked_attack_has_a_validation_accuracy(tmp_path):
    run = run_directory(tmp_path / "run", "validation=100", "track=clean,fgsm", epochs=1)
    (run / "metrics.jsonl").write_text('{"epoch": 1, "step": 10, "accuracy": 0.9, "clean": 0.8, "fgsm": 0.25}\n')
    numbers = {name: value for name, value in measured(open_run(run)).items() if name.startswith("validation")}
    assert numbers == {"validation clean": 80, "validation fgsm": 25}


def test_settings_that_differ_in_the_seventh_digit_have_a_row_each(tmp_path):
    """A search by Optuna makes such weights; written alike they shared a row, which showed one of them alone."""
    for name, weight in (("a", "1234.5671"), ("b", "1234.5672"), ("c", "4000")):
        run = run_directory(tmp_path / name, f"weight={weight}")
        (run / "result.json").write_text('{"steps": 10, "test": {"clean": {"accuracy": 0.5, "total": 10}}}')
    collected = gather([str(tmp_path)])
    (table,) = result_tables(collected, lay_out(collected))
    assert [row[0].partition("weight=")[2] for row in table.rows] == ["1234.5671", "1234.5672", "4000"]


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


def test_a_step_is_written_in_milliseconds():
    assert written(0.0125, 0.0005, "seconds per step") == "12.50 ± 0.50"
    assert written(12.5, None, "seconds per epoch") == "12.50"
    assert [unit(metric)[0] for metric in ("seconds per step", "seconds per epoch", "pgd-20")] == ["ms", "s", "%"]


def test_the_report_has_every_format_and_is_the_same_twice(folder, elle):
    out = folder / "report"
    first = elle("report", folder / "radii.toml", folder / "runs", "--out", out)
    assert first.code == 0, first.err
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert elle("report", folder / "radii.toml", folder / "runs", "--out", out).code == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    names = {path.name for path in before}
    assert {"report.html", "report.md", "results.csv", "runs.csv", "01-autoattack-over-eps.svg"} <= names
    page = (out / "report.html").read_text()
    assert "<b>45.00 ± 0.10</b>" in page
    assert "<u>44.90 ± 0.10</u>" in page
    assert '<td class="number collapsed" title="collapsed">0.00 ± 0.00†</td>' in page
    assert 'class="band c0"' in page
    assert "3 of 4 numbers are inside" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    text = (out / "report.md").read_text()
    assert "| n-fgsm | **45.00 ± 0.10** | <u>20.20 ± 0.20</u> |" in text
    with open(out / "results.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "autoattack"]
    assert len(rows) == 8
    assert rows[2]["method"] == "n-fgsm"
    ours = {"mean": "45", "std": "0.1", "seeds": "3", "collapsed": "false"}
    theirs = {"paper": "44", "paper_std": "0.3", "difference": "1", "joint_standard_error": "0.219848"}
    assert rows[2].items() >= (ours | theirs | {"verdict": "outside"}).items()
    assert rows[1].items() >= {"method": "fgsm", "eps": "16/255", "mean": "0", "collapsed": "true"}.items()
    with open(out / "runs.csv", encoding="utf-8") as file:
        runs = {row["run"]: row for row in csv.DictReader(file)}
    settings = {"method": "n-fgsm", "eps": "8/255", "seed": "2", "collapsed": "false"}
    numbers = {"clean": "80", "autoattack": "45.1", "seconds": "100", "seconds per step": "1.66667"}
    assert runs["n-fgsm-8-2"].items() >= (settings | numbers).items()
    assert runs["fgsm-16-0"]["collapsed"] == "true"


def test_png_and_pdf_where_the_extra_is_installed(folder, collected):
    pytest.importorskip("cairosvg")
    written = write_report(collected, folder / "report")
    pngs = [path for path in written if path.suffix == ".png"]
    pdfs = [path for path in written if path.suffix == ".pdf"]
    assert len(pngs) == len(pdfs) == sum(path.suffix == ".svg" for path in written)
    assert pngs[0].read_bytes().startswith(b"\x89PNG")
    assert pdfs[0].read_bytes().startswith(b"%PDF")


def test_an_evaluation_at_the_run_s_own_radius_counts(folder):
    run = folder / "runs" / "elle-a-8-0"
    entry = {"accuracy": 0.5, "total": 500}
    record = {"eps": 8 / 255, "norm": "linf", "attacks": {"autoattack": entry, "pgd-50-10": entry}}
    (run / "evaluation.json").write_text(json.dumps(record))
    assert measured(open_run(run))["autoattack"] == 50
    assert measured(open_run(run))["pgd-50-10"] == 50
    for other in ({"eps": 4 / 255}, {"norm": "l2"}):  # 8/255 in l2 is a far smaller ball
        (run / "evaluation.json").write_text(json.dumps(record | other))
        assert measured(open_run(run))["autoattack"] == 44.8
    few = {"autoattack": {"accuracy": 0.1, "total": 50}}  # fewer images than the run itself used
    (run / "evaluation.json").write_text(json.dumps(record | {"attacks": few}))
    assert measured(open_run(run))["autoattack"] == 44.8
    (run / "evaluation.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        measured(open_run(run))


def test_an_evaluation_on_another_folder_of_own_images_does_not_count(elle, tmp_path):
    stream = np.random.default_rng(0)
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            x, y = stream.integers(0, 256, (40, 8, 8, 1), dtype=np.uint8), np.arange(40) % 2
            np.savez(tmp_path / name / f"{part}.npz", x=x, y=y)
    run = tmp_path / "run"
    words = ("data=arrays", "model=small-cnn", "eps=0.1", "batch=20", "max_steps=2", "final=clean")
    assert elle("train", "method=fgsm", f"root={tmp_path / 'mine'}", *words, "--out", run).code == 0
    before = measured(open_run(run))["clean"]
    (tmp_path / "mine").rename(tmp_path / "moved")
    for name, counts in (("theirs", False), ("moved", True)):
        told = elle("evaluate", run, "--attack", "clean,fgsm", "--root", tmp_path / name)
        assert told.code == 0, told.err
        numbers = measured(open_run(run))
        assert ("fgsm" in numbers, numbers["clean"]) == (counts, before)
        assert elle("export", run, "--out", tmp_path / f"{name}.safetensors", "--root", tmp_path / "moved").code == 0
        assert ("| fgsm |" in (tmp_path / f"{name}.safetensors.md").read_text()) == counts


def test_an_evaluation_with_other_attacks_does_not_hide_the_one_before(folder):
    run = folder / "runs" / "elle-a-8-0"

    def record(name, accuracy, weights="w", **more):
        return {"eps": 8 / 255, "norm": "linf", "model": {"sha256": weights},
                "attacks": {name: {"accuracy": accuracy, "total": 500}}} | more  # fmt: skip

    data = open_run(run).config.data
    files = {
        "evaluation.1.json": record("autoattack", 0.1, "of before the run went on", data={"name": data}),
        "evaluation.2.json": record("apgd-t", 0.2, data={"name": data}),
        "evaluation.9.json": record("autoattack", 0.4, data={"name": data}),
        "evaluation.10.json": record("autoattack", 0.41, data={"name": data}),
        "evaluation.11.json": record("autoattack", 0.9, data={"name": "another dataset"}),
        "evaluation.json": record("fgsm", 0.7, data={"name": data}),
    }
    for name, content in files.items():
        (run / name).write_text(json.dumps(content))
    (run / "evaluation.12.json").write_text("{")  # a damaged record is set aside by the next evaluation
    numbers = measured(open_run(run))
    assert (numbers["autoattack"], numbers["apgd-t"], numbers["fgsm"]) == (41, 20, 70)
    (run / "model.safetensors").write_bytes(b"those of the run that went on")
    assert measured(open_run(run))["autoattack"] == 44.8


@pytest.mark.parametrize(
    ("radii", "axis", "places"),
    [
        (("8/255", "51/255"), "eps \u00b7 255", [8, 51]),
        (("0.2", "0.4"), "eps", [0.2, 0.4]),  # 51 and 102 grey levels, which nobody has written
    ],
)
def test_an_axis_counts_eps_as_the_tables_write_it(tmp_path, radii, axis, places):
    for eps in radii:
        run = run_directory(tmp_path / eps.replace("/", "-"), "method=fgsm", f"eps={eps}", "model=small-cnn")
        write_result(run, 50)
    found = gather([str(tmp_path)])
    over = next(one for one in report_figures(found, lay_out(found)) if one.title.endswith("over eps"))
    assert (over.x_label, over.series[0].x) == (axis, places)


def test_one_run_is_not_called_runs(folder):
    write_report(gather([str(folder / "runs" / "elle-a-8-0")]), folder / "one")
    text = (folder / "one" / "report.md").read_text()
    assert text.startswith("# 1 run\n\n1 setting with 1 seed each, 1 run; mean")


def test_unfinished_and_failed_runs_are_listed(folder):
    run = run_directory(
        folder / "runs" / "late", "method=fgsm", "eps=8/255", "seed=9", "model=small-cnn", finished=False
    )
    (run / "failure.json").write_text(json.dumps({"reason": "the disk is full"}))
    write_report(gather([str(folder / "radii.toml"), str(folder / "runs")]), folder / "report")
    text = (folder / "report" / "report.md").read_text()
    assert "| late | the disk is full |" in text
    assert "1 more has no result" in text


@pytest.mark.parametrize("end", [{}, {"event": "stop", "step": 65, "reason": "stopped by SIGTERM at step 65"}])
def test_a_run_that_goes_on_beyond_its_result_has_not_finished(folder, end):
    going_on = [{"event": "finish", "step": 60}, {"event": "resume", "step": 60}, *([end] if end else [])]
    words = ("method=fgsm", "eps=8/255", "seed=9", "model=small-cnn")
    write_result(run_directory(folder / "runs" / "longer", *words, events=going_on), 99.0)
    collected = gather([str(folder / "radii.toml"), str(folder / "runs")])
    assert "longer" not in {run.name for setting in collected.settings for run in setting.runs}
    write_report(collected, folder / "report")
    assert f"| longer | {end.get('reason', 'not finished')} |" in (folder / "report" / "report.md").read_text()


def test_runs_that_went_on_with_another_method_than_their_row_says_are_listed(folder):
    back = {"event": "rollback", "step": 30, "undone_from": 45, "method": "fgsm+elle-a", "weight": 300.0}
    run = run_directory(
        folder / "runs" / "back", "method=fgsm", "eps=8/255", "seed=9", "model=small-cnn", events=[back]
    )
    write_result(run, 45.0)
    sources = [str(folder / "radii.toml"), str(folder / "runs")]
    write_report(gather(sources), folder / "report")  # `stop` goes back too, with the method it had
    assert "rolled back" not in (folder / "report" / "report.md").read_text()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"rollbacks": 1}))
    write_report(gather(sources), folder / "report")
    text = (folder / "report" / "report.md").read_text()
    assert "1 of them collapsed and went on with a stronger method than their row says: see the end." in text
    assert "| back | fgsm | fgsm+elle-a at weight 300 |" in text


def test_the_runs_of_a_recipe_that_has_changed_are_reported_without_it(folder, elle):
    runs = folder / "runs"
    (runs / "sweep.json").write_text(json.dumps({"recipe": str(folder / "radii.toml"), "runs": []}))
    assert gather([str(runs)]).recipe is not None
    (folder / "radii.toml").write_text(RECIPE.replace("[grid]", "lr = 0.5\n[grid]"))
    outcome = elle("report", folder / "radii.toml", runs)
    assert outcome.code == 2
    assert "belongs to recipe radii as it is now; make them with `elle sweep" in outcome.err
    assert (gather([str(runs)]).recipe, len(gather([str(runs)]).runs)) == (None, 22)


def test_runs_of_another_recipe_are_left_out(folder):
    run = run_directory(folder / "runs" / "other", "method=fgsm", "eps=8/255", "lr=0.5", "model=small-cnn")
    write_result(run, 99.0)
    both = [str(folder / "radii.toml"), str(folder / "runs")]
    assert "other" not in {one.name for one in gather(both).runs}
    alone = gather([str(folder / "runs")])
    assert "other" in {one.name for one in alone.runs}
    assert telling_keys(alone.configs) == ["method", "eps", "lr"]
    assert "| fgsm, lr=0.5 |" in markdown(result_tables(alone, lay_out(alone))[0])


def with_figure(folder, figure):
    (folder / "radii.toml").write_text(RECIPE.partition("[figure]")[0] + "[figure]\n" + figure)
    return gather([str(folder / "radii.toml"), str(folder / "runs")])


def test_settings_are_compared_with_the_baseline_at_their_own_radius(folder):
    runs = with_figure(folder, 'metric = ["autoattack", "seconds"]\nbaseline = "n-fgsm"')
    (table,) = baseline_tables(runs, lay_out(runs))
    assert (table.caption, table.columns[1:]) == ("Difference to n-fgsm", ("AutoAttack", "Training time, s"))
    rows = {row[0]: (row[1:], table.marks.get((number, 1))) for number, row in enumerate(table.rows)}
    error = 2 * math.sqrt(0.1**2 / 3 + 0.2**2 / 3)
    assert rows["fgsm, eps 8/255"] == ([f"-4.70 ± {error:.2f}", "+0.00 ± 0.00"], "best")
    assert rows["elle-a, eps 8/255"][1] is None  # -0.10 is within 0.16
    assert rows["fgsm, eps 16/255"] == (["-20.20 ± 0.23", "+0.00 ± 0.00"], "collapsed")
    assert rows["elle-a, eps 16/255"][0][0] == f"+0.80 ± {2 * math.sqrt(0.2**2 + 0.2**2 / 3):.2f}"  # one seed
    assert "Difference to n-fgsm" in (write_report(runs, folder / "out")[0]).read_text()


def test_the_page_names_a_metric_of_the_papers_numbers_that_no_run_has(folder):
    file = folder / "radii.toml"
    file.write_text(file.read_text().replace('metric = "autoattack"\nrows', 'metric = "autoatack"\nrows'))
    page = write_report(gather([str(file), str(folder / "runs")]), folder / "out")[0].read_text()
    assert "No run has measured autoatack, which the recipe asks for." in page


def test_the_page_says_what_it_does_not_compare_and_what_nobody_measured(folder):
    runs = with_figure(folder, 'metric = ["autoattack", "pgd-20"]\nbaseline = "n-fgsm, weight=1"')
    page = write_report(runs, folder / "out")[0].read_text()
    assert "No run has measured PGD-20, which the recipe asks for." in page
    assert "the baseline n-fgsm, weight=1: the settings with results are fgsm; n-fgsm; elle-a; pgd-10." in page


def test_a_setting_is_called_by_the_options_it_has(tmp_path):
    """Where each of several shortcuts has an option of its own, every name held all of them, most as "-"."""
    options = {"plain": (), "every": ("method.weight.every=2",),
               "next": ("method.weight.negligible=0.01", "method.weight.next_step=true")}  # fmt: skip
    for name, words in options.items():
        write_result(run_directory(tmp_path / name, "method=elle-a", *words), 40)
    collected = gather([str(tmp_path)])
    layout = lay_out(collected)
    names = [layout.label(setting, layout.carrier) for setting in collected.settings]
    assert names == ["elle-a, method.weight.every=2", "elle-a, method.weight.negligible=0.01", "elle-a"]
    assert Setting([open_run(tmp_path / "next")]).label("method.weight.next_step") == "true"


def test_a_line_that_is_no_method_says_what_it_is(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'title = "x"\n[base]\ndata = "digits"\nepochs = 6\ntrack = "clean,pgd-10"\nmethod = "elle"\n'
        '[grid]\nweight = [1, 100]\neps = ["0.1", "0.2"]\n[figure]\nline = "weight"\n'
    )
    for weight in (1, 100):
        for eps in ("0.1", "0.2"):
            run = run_directory(tmp_path / "runs" / f"{weight}-{eps}", "method=elle", f"weight={weight}", f"eps={eps}")
            write_result(run, 40)
    collected = gather([str(tmp_path / "mine.toml"), str(tmp_path / "runs")])
    layout = lay_out(collected)
    *charts, bars = report_figures(collected, layout)
    assert [one.name for one in charts[0].series] == ["weight=1", "weight=100"] == [bar.name for bar in bars.bars]
    assert [row[0] for row in result_tables(collected, layout)[0].rows] == ["1", "100"]


def test_a_recipe_says_what_is_drawn(folder):
    lines = with_figure(folder, 'kind = "lines"\nmetric = ["autoattack"]\nx = "eps"\nline = "method"')
    titles = [figure.title for figure in report_figures(lines, lay_out(lines))]
    assert titles[0] == "AutoAttack over eps"
    assert titles[-1] == "Training time"
    curves = with_figure(folder, 'kind = "curves"\nmetric = ["clean", "pgd-10"]\nline = "method"')
    drawn = {figure.title: figure for figure in report_figures(curves, lay_out(curves))}
    fallen = drawn["PGD-10 while training, eps 16/255"].series[0]
    assert fallen.name == "fgsm"
    assert [fallen.y[0], fallen.y[-1]] == pytest.approx([0.4, 0.01])
    assert "Clean while training, eps 8/255" in drawn
    for run in curves.runs:
        (run.path / "steps.jsonl").write_text(
            json.dumps({"epoch": 1, "step": 1, "error": [1e-5], "weight": [4.0], "threshold": [2e-5]}) + "\n"
        )
    steps = with_figure(folder, 'kind = "steps"\nmetric = ["weight"]\npanel = ["method", "eps"]')
    assert any(
        figure.title.startswith("Weight of the penalty, elle-a") for figure in report_figures(steps, lay_out(steps))
    )


def test_only_accuracies_are_drawn_in_percent(folder):
    runs = with_figure(folder, 'curves = ["loss", "accuracy", "clean"]')
    curves = [one for one in report_figures(runs, lay_out(runs)) if isinstance(one, Chart) and "while" in one.title]
    found = {one.title.split()[0]: (one.y_label, one.percent, one.note) for one in curves}
    band = "Bands: one std over seeds."
    assert found["loss"] == ("loss", False, f"Of the training steps. {band}")
    assert found["accuracy"] == ("accuracy", True, f"Of the training steps. {band}")
    assert found["Clean"] == ("accuracy", True, f"On the test images. {band}")


def test_what_was_looked_at_once_is_no_curve(tmp_path):
    """Figure 15's runs are looked at after their last epoch alone."""
    for epochs, drawn in ((1, []), (2, ["Multi-step accuracy while training, eps 0.2"])):
        run_directory(tmp_path / str(epochs) / "run", "method=fgsm", epochs=epochs)
        write_result(tmp_path / str(epochs) / "run", 40.0)
        found = gather([str(tmp_path / str(epochs))])
        titles = [figure.title for figure in report_figures(found, lay_out(found))]
        assert [title for title in titles if "while training" in title] == drawn


def test_accuracy_on_held_out_images_is_a_number_of_its_own(tmp_path):
    run = run_directory(tmp_path / "a", "method=fgsm", "validation=97")
    write_result(run, 50.0)
    numbers = measured(open_run(run))
    assert numbers["validation pgd-10"] == 40
    assert numbers["seconds per step"] == pytest.approx(100 / 60)
    assert "validation pgd-10" not in gather([str(run)]).metrics
    tracked_on_test = run_directory(tmp_path / "b", "method=fgsm", "validation=0")
    assert "validation pgd-10" not in measured(open_run(tracked_on_test))


def test_mistakes_are_told_in_a_line(tmp_path, folder):
    with pytest.raises(InputError, match="no recipe 'table-99'"):
        gather(["table-99"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no run"):
        gather([str(tmp_path / "empty")])
    lonely = run_directory(tmp_path / "lonely" / "a", "method=fgsm", finished=False)
    with pytest.raises(InputError, match=r"no run in .* has finished \(of 1\); continue"):
        gather([str(lonely)])
    with pytest.raises(InputError, match="belongs to recipe radii"):
        gather([str(folder / "radii.toml"), str(tmp_path / "lonely")])


def test_the_verdicts_stand_beside_both_numbers(collected):
    table = comparison_table(compare(collected), lay_out(collected))
    assert list(table.rows[1]) == [
        *("fgsm, eps 16/255", "0.00 ± 0.00", "0.01 ± 0.01", "-0.01", "both collapsed", "0.01", "3"),
    ]
    assert table.marks == {(1, 1): "collapsed", (1, 2): "collapsed", (2, 4): "best"}  # outside, in bold


def test_a_band_needs_as_many_spreads_as_points():
    """And it is cut where one is not known: across the gap it would not lie around the line."""
    spread = [0.01, 0.02, None, 0.02, 0.01]
    chart = Chart("t", "x", "y", [Series("a", [1, 2, 3, 4, 5], [0.1, 0.2, 0.9, 0.2, 0.1], spread)])
    assert draw(chart).count("<polygon") == 2
    with pytest.raises(ValueError, match="spreads"):
        Series("a", [1, 2], [1, 2], [1])


def test_bars_are_as_long_as_their_values():
    drawn = draw_bars(Bars("t", "seconds", [Bar("a", 10.0), Bar("b", 20.0, 1.0)]))
    widths = [float(part.split('"')[0]) for part in drawn.split(' width="')[1:]]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)


def with_results(folder, **keys):
    """All results with these keys changed, by a function of the run's place."""
    for place, file in enumerate(sorted((folder / "runs").glob("*/result.json"))):
        result = json.loads(file.read_text())
        file.write_text(json.dumps(result | {key: value(place) for key, value in keys.items()}))


def test_steps_are_printed_and_ranked_in_milliseconds(folder):
    with_results(folder, train_seconds=lambda place: 0.24 + 0.006 * place)  # 4.0, 4.1, .. ms
    runs = with_figure(folder, 'kind = "bars"\nmetric = ["seconds per step"]\nline = "method"')
    table = result_tables(runs, lay_out(runs))[0]
    assert table.caption == "Time of a step, ms"
    assert table.rows[2] == ["elle-a", "4.20 ± 0.10", "4.00"]
    assert sorted(table.marks.values()) == ["best", "best", "collapsed", "second", "second"]
    (bars,) = [one for one in report_figures(runs, lay_out(runs)) if isinstance(one, Bars)]
    assert (bars.title, bars.x_label) == ("Time of a step", "milliseconds")
    assert bars.bars[2].value == pytest.approx(4.15)


def test_small_accuracies_have_two_digits_like_all_others(folder):
    write_result(folder / "runs/elle-a-16-0", 0.54)
    runs = gather([str(folder / "radii.toml"), str(folder / "runs")])
    assert result_tables(runs, lay_out(runs))[0].rows[2][2] == "0.54"


def test_a_table_explains_the_marks_it_has_and_no_others(collected):
    autoattack = result_tables(collected, lay_out(collected))[0]
    both = "Best in bold, runner-up underlined, PGD (the reference) left out; "
    assert autoattack.note == f"{both}† red: at least one of the runs collapsed."
    alone = gather([str(collected.folder / "n-fgsm-8-0")])
    assert [table.note for table in result_tables(alone, lay_out(alone))] == ["", ""]


def test_times_of_another_machine_are_not_judged(folder):
    recipe = folder / "radii.toml"
    recipe.write_text(RECIPE.replace("[figure]", '[[expected]]\nmetric = "seconds"\nvalue = 377.4\n[figure]'))
    with_results(folder, train_seconds=lambda place: 100.0 + place)
    runs = gather([str(recipe), str(folder / "runs")])
    times = [one for one in compare(runs) if one.expected.metric == "seconds"]
    assert {(one.verdict, one.inside) for one in times} == {("time", None)}
    table = comparison_table(compare(runs), lay_out(runs))
    assert table.note.endswith("Times are not judged: the paper's are of another machine.")
    assert next(row for row in table.rows if row[4] == "time")[5] == "-"


def test_a_method_without_the_setting_across_is_a_level(folder):
    text = RECIPE.partition("[grid]")[0] + '[[runs]]\nmethod = "gradalign"\n"method.loss.weight" = [1, 2, 8]\n'
    figure = 'x = "method.loss.weight"\nline = "method"\nmetric = ["autoattack"]\ncurves = ["clean", "pgd-10"]\nat = 8'
    (folder / "weights.toml").write_text(f'{text}[[runs]]\nmethod = "elle"\n[figure]\n{figure}\n')
    words = ["eps=0.2", "model=small-cnn"]
    for weight in (1, 2, 8):
        run = run_directory(folder / f"two/{weight}", "method=gradalign", f"method.loss.weight={weight}", *words)
        write_result(run, 10.0 + weight)
    write_result(run_directory(folder / "two/elle", "method=elle", *words), 17.8)
    runs = gather([str(folder / "weights.toml"), str(folder / "two")])
    layout = lay_out(runs)
    assert result_tables(runs, layout)[0].rows[1] == ["elle", "-", "-", "-", "17.80"]
    assert layout.full(runs.settings[-1]) == "elle"
    over, *curves = [one for one in report_figures(runs, layout) if isinstance(one, Chart)]
    assert [(line.name, line.x) for line in over.series] == [("gradalign", [1, 2, 8]), ("elle", [1, 8])]
    assert list(over.series[1].y) == pytest.approx([0.178, 0.178])
    assert [one.title for one in curves] == [
        f"{name} while training, method.loss.weight 8" for name in ("Clean", "PGD-10")
    ]


def test_a_table_of_many_columns_is_turned(folder):
    levels = range(1, 10)
    axis = ", ".join(f'"{level}/255"' for level in levels)
    grid = f'[grid]\nmethod = ["fgsm", "n-fgsm"]\neps = [{axis}]\n'
    (folder / "many.toml").write_text(RECIPE.partition("[grid]")[0] + grid)
    for method in ("fgsm", "n-fgsm"):
        for level in levels:
            words = [f"method={method}", f"eps={level}/255", "model=small-cnn"]
            write_result(run_directory(folder / f"many/{method}-{level}", *words), 50 - level + len(method))
    runs = gather([str(folder / "many.toml"), str(folder / "many")])
    table = result_tables(runs, lay_out(runs))[0]
    assert table.columns == ("eps \\ method", "fgsm", "n-fgsm")
    assert table.rows[8] == ["9/255", "45.00", "47.00"]
    assert table.marks == {(row, column): name for row in range(9) for column, name in ((2, "best"), (1, "second"))}


def test_figures_of_an_earlier_report_do_not_stay_among_the_new(folder, collected):
    write_report(collected, folder / "report")
    (folder / "report/figures/notes.txt").write_text("mine")
    fewer = with_figure(folder, 'metric = ["clean"]')
    written = write_report(fewer, folder / "report")
    left = {path.name for path in (folder / "report/figures").iterdir()}
    assert left == {path.name for path in written if path.parent.name == "figures"} | {"notes.txt"}


def test_attacked_images_are_part_of_the_page(folder):
    runs = with_figure(folder, 'kind = "pictures"')
    write_report(runs, folder / "report")
    assert "`elle show DIR`" in (folder / "report/report.md").read_text()
    (runs.runs[0].path / "adversarial.png").write_bytes(b"\x89PNG")
    write_report(with_figure(folder, 'kind = "pictures"'), folder / "report")
    page, text = ((folder / "report" / name).read_text() for name in ("report.html", "report.md"))
    assert 'src="data:image/png;base64,iVBORw=="' in page
    assert "img-src data:" in page
    assert "![Attacked images, fgsm, eps 8/255](../runs/fgsm-8-0/adversarial.png)" in text
    assert "`elle show DIR`" not in text


def test_a_copy_of_a_run_is_no_further_seed(folder):
    shutil.copytree(folder / "runs", folder / "copied")
    (folder / "runs" / "n-fgsm-8-0" / "result.json").unlink()  # the copy alone has finished
    (folder / "copied" / "n-fgsm-8-1" / "result.json").unlink()  # the copy alone has not
    found = gather([str(folder / "radii.toml"), str(folder / "runs"), str(folder / "copied")])
    scores = {(one.config.method, one.label("eps")): one.score("autoattack") for one in found.settings}
    assert scores["n-fgsm", "8/255"].count == 3
    assert scores["n-fgsm", "8/255"].std == pytest.approx(0.1)
    write_report(found, folder / "report")
    assert "22 more are left out: another has the same settings and seed" in (folder / "report/report.md").read_text()


def test_a_run_that_a_sweep_has_linked_from_another_is_no_copy(folder):
    """`elle report runs/*` after Table 2 and Figure 3 told of hundreds of runs that were left out."""
    (folder / "linked").mkdir()
    (folder / "linked" / "n-fgsm-8-0").symlink_to(folder / "runs" / "n-fgsm-8-0")
    found = gather([str(folder / "runs"), str(folder / "linked")])
    assert found.copies == 0
    assert len(found.runs) == len(gather([str(folder / "runs")]).runs)


def test_runs_that_are_none_of_the_recipe_s_are_counted(folder):
    """Of another recipe that was swept into the folder, or of this one before it was changed."""
    write_result(run_directory(folder / "runs" / "other", "method=trades", "eps=8/255"), 40.0)
    sources = [str(folder / "radii.toml"), str(folder / "runs")]
    write_report(gather(sources), folder / "report")
    told = "1 more in the same place is left out: not of this recipe as it is now."
    assert told in (folder / "report/report.md").read_text()


@pytest.mark.parametrize(
    ("first", "second", "panels"),
    [
        (("data=digits", "eps=0.1"), ("data=mnist5k", "eps=0.3"), ["digits", "mnist5k"]),
        (("norm=linf", "eps=0.1"), ("norm=l2", "eps=0.5"), ["linf", "l2"]),
        (("schedule=short", "eps=0.1"), ("schedule=long", "eps=0.2"), ["short", "long"]),
        (("model=small-cnn", "eps=0.1"), ("model=preact-resnet18", "eps=0.2"), ["small-cnn", "preact-resnet18"]),
    ],
)
def test_what_cannot_be_compared_is_no_line_over_eps(tmp_path, first, second, panels):
    for name, words, accuracy in (("a", first, 40.0), ("b", second, 60.0)):
        write_result(run_directory(tmp_path / name, "method=fgsm", *words), accuracy)
    found = gather([str(tmp_path)])
    layout = lay_out(found)
    captions = [table.caption for table in result_tables(found, layout)]
    assert captions == [f"{name}, %: {panel}" for panel in panels for name in ("AutoAttack", "Clean")]
    figures = report_figures(found, layout)
    assert not any("over eps" in one.title for one in figures)
    assert sum(isinstance(one, Bars) for one in figures) == 2  # times of the two are not averaged either
    write_report(found, tmp_path / "report")
    with open(tmp_path / "report" / "results.csv", encoding="utf-8") as file:
        assert set(panels) <= {value for row in csv.DictReader(file) for value in row.values()}


def test_another_number_of_epochs_is_told_where_eps_differs_too(tmp_path):
    for eps, epochs in (("0.1", 3), ("0.2", 6)):
        run = run_directory(tmp_path / eps, "method=fgsm", f"eps={eps}", epochs=epochs)
        write_result(run, 40.0)
    found = gather([str(tmp_path)])
    assert [row[0] for row in result_tables(found, lay_out(found))[0].rows] == ["fgsm, epochs=3", "fgsm, epochs=6"]


def test_times_at_several_values_of_what_lies_across_are_not_averaged(folder):
    text = RECIPE.replace("epochs = 6\n", "").replace('["8/255", "16/255"]', '"8/255"\nepochs = [6, 60]')
    text = text.partition("[[expected]]")[0] + '[figure]\nrows = "method"\ncolumns = "epochs"\n'
    (folder / "lengths.toml").write_text(text)
    for epochs, seconds in ((6, 10.0), (60, 100.0)):
        words = ("method=n-fgsm", "eps=8/255", "model=small-cnn")
        run = run_directory(folder / "lengths" / str(epochs), *words, epochs=epochs)
        write_result(run, 40.0)
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | {"train_seconds": seconds}))
    found = gather([str(folder / "lengths.toml"), str(folder / "lengths")])
    (bars,) = [one for one in report_figures(found, lay_out(found)) if isinstance(one, Bars)]
    assert [(bar.name, bar.value) for bar in bars.bars] == [("n-fgsm, 6", 10), ("n-fgsm, 60", 100)]


def test_long_names_of_bars_that_begin_alike_are_told_apart():
    names = [f"n-fgsm+elle-a, method.weight.history={value}" for value in (100, 500)]
    picture = draw_bars(Bars("Time", "seconds", [Bar(name, 1.0) for name in names]))
    assert "history=100<" in picture
    assert "history=500<" in picture


def test_numbers_of_fewer_images_are_told(folder):
    entry = {"accuracy": 0.5, "total": 50}
    record = {"eps": 8 / 255, "norm": "linf", "attacks": {"apgd-t": entry, "clean": entry}}
    (folder / "runs" / "elle-a-8-0" / "evaluation.json").write_text(json.dumps(record))
    write_report(gather([str(folder / "runs")]), folder / "report")
    text = (folder / "report" / "report.md").read_text()
    assert "fewer images than their runs' test sets have: apgd-t (50)." in text


def test_numbers_of_fewer_seeds_are_told(folder):
    entry = {"accuracy": 0.5, "total": 1000}
    record = {"eps": 8 / 255, "norm": "linf", "attacks": {"apgd-t": entry}}
    for seed, others in ((0, True), (1, True), (2, False)):
        (folder / "runs" / f"elle-a-8-{seed}" / "evaluation.json").write_text(json.dumps(record))
        write_report(gather([str(folder / "runs")]), folder / "report")
        text = (folder / "report" / "report.md").read_text()
        assert ("fewer seeds than their settings have: apgd-t." in text) == others


def test_markdown_shows_names_as_they_are():
    table = Table("a|b <i>", ("method \\ eps", "[c]"), [["__x__ *y*", "E_lin `z`"]], note="on <b>")
    assert markdown(table).splitlines() == [
        r"### a\|b \<i\>",
        "",
        r"| method \ eps | \[c\] |",
        "|---|---|",
        r"| \_\_x\_\_ \*y\* | E_lin \`z\` |",
        "",
        r"on \<b\>",
    ]


def test_own_images_of_two_folders_are_two_settings(tmp_path):
    for root, accuracy in (("apples", 40.0), ("pears", 60.0)):
        write_result(run_directory(tmp_path / root, "data=arrays", f"root={tmp_path / root}"), accuracy)
    found = gather([str(tmp_path)])
    tables = [table for table in result_tables(found, lay_out(found)) if table.caption.startswith("Auto")]
    assert [(table.caption, table.rows[0][1]) for table in tables] == [
        ("AutoAttack, %: apples", "40.00"),
        ("AutoAttack, %: pears", "60.00"),
    ]


@pytest.mark.parametrize(
    "damaged", [{"test": None}, {"test": {"clean": 0.5}}, {"test": {"clean": {"accuracy": math.nan, "total": 5}}}]
)
def test_a_result_that_cannot_be_read_is_named(folder, damaged):
    run = folder / "runs" / "fgsm-8-0"
    (run / "result.json").write_text(json.dumps(damaged))
    with pytest.raises(InputError, match="fgsm-8-0/result.json is damaged"):
        gather([str(folder / "runs")])


def test_an_evaluation_that_cannot_be_read_is_named(folder):
    attacks = {"clean": {"accuracy": 0.5}}
    file = folder / "runs" / "fgsm-8-0" / "evaluation.json"
    file.write_text(json.dumps({"eps": 8 / 255, "norm": "linf", "attacks": attacks}))
    with pytest.raises(InputError, match="evaluation.json is damaged; evaluate the run again"):
        gather([str(folder / "runs")])


def test_a_record_without_its_step_is_damaged(folder):
    (folder / "runs" / "fgsm-8-0" / "metrics.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(InputError, match="fgsm-8-0/metrics.jsonl is damaged"):
        gather([str(folder / "runs")])


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_failure_without_a_reason_is_a_run_that_has_not_finished(folder, content):
    run = folder / "runs" / "fgsm-8-0"
    (run / "result.json").unlink()
    (run / "failure.json").write_text(content)
    assert gather([str(folder / "runs")]).failures == {}


def test_nobody_is_second_who_withstands_nothing(tmp_path):
    for method, accuracy in (("fgsm", 0), ("n-fgsm", 0.004), ("elle", 5)):
        write_result(run_directory(tmp_path / method, f"method={method}"), accuracy)
    collected = gather([str(tmp_path)])
    table = result_tables(collected, lay_out(collected))[0]
    assert {table.rows[row][0]: mark for (row, _), mark in table.marks.items()} == {"elle": "best"}


def test_a_band_of_a_weight_does_not_go_below_zero():
    ends = [(1.0, 0.0, 70.0), (2.0, 20.0, 40.0)]
    assert _edges(Series("elle-a", [1, 2], [30, 30], [40, 10]), percent=False) == [ends]
    assert _edges(Series("change", [1], [-1], [2]), percent=False) == [[(1.0, -3.0, 1.0)]]


def test_the_ticks_of_bars_with_long_names_do_not_overlap():
    drawn = draw_bars(Bars("Time", "seconds", [Bar("elle-a, method.weight.next_step=true", 2.35), Bar("elle-a", 1.2)]))
    soft = re.findall(r'<text class="soft" x="([0-9.]+)" y="[0-9.]+" text-anchor="middle"', drawn)
    *places, _ = map(float, soft)  # and the axis's name
    assert min(b - a for a, b in pairwise(places)) > 3 * GLYPH


def test_misalignment_is_drawn_over_powers_of_ten_as_in_figure_2(folder):
    for file in folder.glob("runs/*/metrics.jsonl"):
        records = [json.loads(line) | {"tracked_misalignment": 0.1} for line in file.read_text().splitlines()]
        write_lines(file, records)
    runs = with_figure(folder, 'kind = "curves"\nmetric = ["clean", "tracked_misalignment"]')
    drawn = [figure for figure in report_figures(runs, lay_out(runs)) if isinstance(figure, Chart)]
    assert {figure.y_label: figure.log for figure in drawn} == {"accuracy": False, "Gradient misalignment": True}


def test_the_kinds_of_an_error_of_one_setting_are_lines_of_one_chart_as_in_figure_18a(tmp_path):
    run = run_directory(tmp_path / "runs/one", "method=fgsm", "track=clean,pgd-20,error,error_two")
    write_result(run, 0)
    records = [json.loads(line) | {"tracked_error": 0.1, "tracked_error_two": 0.2}
               for line in (run / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    write_lines(run / "metrics.jsonl", records)
    recipe = (
        'title = "x"\n[base]\ndata = "digits"\nepochs = 6\ntrack = "clean,pgd-20,error,error_two"\n[grid]\n'
        'method = ["fgsm"]\n[figure]\nkind = "curves"\nmetric = ["clean", "tracked_error"{}]\n'
    )
    for more, names in (("", ["fgsm"]), (', "tracked_error_two"', ["E_lin", "E_lin of two triplets"])):
        (tmp_path / "mine.toml").write_text(recipe.format(more))
        runs = gather([str(tmp_path / "mine.toml"), str(tmp_path / "runs")])
        drawn = [figure for figure in report_figures(runs, lay_out(runs)) if isinstance(figure, Chart)]
        assert [figure.y_label for figure in drawn] == ["accuracy", "E_lin"]
        assert [one.name for one in drawn[1].series] == names


def test_a_wide_range_of_a_setting_is_read_off_a_logarithmic_axis(tmp_path):
    """It was drawn over the logarithm: -0.5, 0.0 and 0.5 for weights of 0.25 to 16."""
    for weight in (0.25, 1, 16):
        run = run_directory(tmp_path / "runs" / f"{weight}", "method=gradalign", f"method.loss.weight={weight}")
        write_result(run, 40)
    (tmp_path / "mine.toml").write_text(
        'title = "x"\n[base]\ndata = "digits"\nepochs = 6\ntrack = "clean,pgd-10"\nmethod = "gradalign"\n'
        '[grid]\n"method.loss.weight" = [0.25, 1, 16]\n[figure]\nkind = "lines"\nx = "method.loss.weight"\n'
    )
    runs = gather([str(tmp_path / "mine.toml"), str(tmp_path / "runs")])
    chart, *_, bars = report_figures(runs, lay_out(runs))
    assert (chart.x_label, chart.log_x, list(chart.series[0].x)) == ("method.loss.weight", True, [0.25, 1, 16])
    labels = re.findall(r'text-anchor="middle"[^>]*>([^<]*)<', draw(chart))
    assert labels == ["0.5", "1", "2", "5", "10", "method.loss.weight"]
    assert [bar.name for bar in bars.bars] == ["gradalign, 0.25", "gradalign, 1", "gradalign, 16"]


def test_the_dataset_is_named_where_a_recipe_of_several_has_runs_of_one_alone(folder):
    runs = with_figure(folder, 'metric = ["autoattack"]\npanel = "data"')
    layout = lay_out(runs)
    assert [table.caption for table in result_tables(runs, layout)] == ["AutoAttack, %: digits"]
    table = comparison_table(compare(runs), layout)
    assert table.rows[0][0] == "fgsm, eps 8/255, digits"
    bold = {row[0] for number, row in enumerate(table.rows) if table.marks.get((number, 4)) == "best"}
    assert bold == {row[0] for row in table.rows if row[4] == "outside"} != set()
