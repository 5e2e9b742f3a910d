"""The report of runs made by hand: its page, its formats, and what it tells; the same runs give the same files."""

import csv
import json

import pytest

from elle.charts.bars import Bars
from elle.experiments.collected import gather
from elle.experiments.layout import lay_out
from elle.experiments.report import write_report
from elle.experiments.report_figures import report_figures
from elle.experiments.report_tables import result_tables

from .reports import with_figure, write_result
from .runs import run_directory


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
