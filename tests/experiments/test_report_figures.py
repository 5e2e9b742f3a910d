"""A report's figures: what is drawn of which runs, and over what."""

import json
import re

import pytest

from elle.charts.bars import Bars
from elle.charts.lines import Chart, draw
from elle.charts.stacked_bars import StackedBars
from elle.errors import InputError
from elle.experiments.collected import gather
from elle.experiments.layout import lay_out
from elle.experiments.report import write_report
from elle.experiments.report_figures import report_figures
from elle.experiments.report_tables import result_tables

from .reports import RECIPE, with_figure, write_result
from .runs import run_directory, write_lines


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
        shown = [figure for figure in report_figures(found, lay_out(found)) if "while training" in figure.title]
        assert [figure.title for figure in shown] == drawn
        assert [figure.note for figure in shown] == ["Under PGD-10 on the test images."] * len(drawn)


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
    assert bars.note == "On cpu. After each name: epochs."
    (folder / "lengths.toml").write_text(text.replace('columns = "epochs"', 'columns = "weight"'))  # no run has one
    found = gather([str(folder / "lengths.toml"), str(folder / "lengths")])
    (bars,) = [one for one in report_figures(found, lay_out(found)) if isinstance(one, Bars)]
    assert bars.note == "On cpu."


def test_bars_say_over_what_their_means_are(collected):
    (bars,) = [one for one in report_figures(collected, lay_out(collected)) if isinstance(one, Bars)]
    assert bars.note.endswith(" Means over seeds and eps; whiskers: one std.")


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


def test_what_elle_bench_has_written_beside_the_runs_is_drawn_by_forward_and_backward(folder):
    rows = [
        {"method": "fgsm", "forward_ms": 1.5, "backward_ms": 2},
        {"method": "elle", "forward_ms": 3, "backward_ms": 4},
    ]
    measured = {"model": "small-cnn", "batch": 128, "device": "NVIDIA H200", "rows": rows}
    (folder / "runs" / "bench-small-cnn-x.json").write_text(json.dumps(measured))
    runs = with_figure(folder, 'kind = "bars"\nmetric = ["seconds per step"]\nline = "method"')
    (drawn,) = [one for one in report_figures(runs, lay_out(runs)) if isinstance(one, StackedBars)]
    assert (drawn.names, drawn.values) == (["fgsm", "elle"], [(1.5, 2), (3, 4)])
    page, *_ = write_report(runs, folder / "report")
    assert "A training step of small-cnn, batch 128, NVIDIA H200" in page.read_text()
    (folder / "runs" / "bench-small-cnn-x.json").write_text("{}")
    with pytest.raises(InputError, match=r"bench-small-cnn-x\.json is not what `elle bench --out` writes"):
        report_figures(runs, lay_out(runs))
