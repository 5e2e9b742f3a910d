"""A report's tables: their rows and columns, their numbers, their marks."""

import math

import pytest

from elle.charts.bars import Bars
from elle.experiments.collected import Setting, gather
from elle.experiments.comparison import compare
from elle.experiments.layout import lay_out
from elle.experiments.page import Table
from elle.experiments.report import write_report
from elle.experiments.report_figures import report_figures
from elle.experiments.report_tables import baseline_tables, comparison_table, markdown, result_tables, unit, written
from elle.experiments.rundir import open_run

from .reports import RECIPE, with_figure, with_results, write_result
from .runs import run_directory


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


def test_settings_that_differ_in_the_seventh_digit_have_a_row_each(tmp_path):
    """A search by Optuna makes such weights; written alike they shared a row, which showed one of them alone."""
    for name, weight in (("a", "1234.5671"), ("b", "1234.5672"), ("c", "4000")):
        run = run_directory(tmp_path / name, f"weight={weight}")
        (run / "result.json").write_text('{"steps": 10, "test": {"clean": {"accuracy": 0.5, "total": 10}}}')
    collected = gather([str(tmp_path)])
    (table,) = result_tables(collected, lay_out(collected))
    assert [row[0].partition("weight=")[2] for row in table.rows] == ["1234.5671", "1234.5672", "4000"]


def test_a_step_is_written_in_milliseconds():
    assert written(0.0125, 0.0005, "seconds per step") == "12.50 ± 0.50"
    assert written(12.5, None, "seconds per epoch") == "12.50"
    assert [unit(metric)[0] for metric in ("seconds per step", "seconds per epoch", "pgd-20")] == ["ms", "s", "%"]


def test_a_setting_is_called_by_the_options_it_has(tmp_path):
    """Where each of several shortcuts has an option of its own, every name held all of them, most as "-"."""
    options = {"plain": (), "every": ("method.weight.every=2",), "off": ("fused=off",),
               "next": ("method.weight.negligible=0.01", "method.weight.next_step=true")}  # fmt: skip
    for name, words in options.items():
        write_result(run_directory(tmp_path / name, "method=elle-a", *words), 40)
    collected = gather([str(tmp_path)])
    layout = lay_out(collected)
    names = [layout.label(setting, layout.carrier) for setting in collected.settings]
    every, lazy = "elle-a, method.weight.every=2", "elle-a, method.weight.negligible=0.01"
    assert names == [every, lazy, "elle-a, fused=off", "elle-a"]
    assert Setting([open_run(tmp_path / "next")]).label("method.weight.next_step") == "true"


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


def test_another_number_of_epochs_is_told_where_eps_differs_too(tmp_path):
    for eps, epochs in (("0.1", 3), ("0.2", 6)):
        run = run_directory(tmp_path / eps, "method=fgsm", f"eps={eps}", epochs=epochs)
        write_result(run, 40.0)
    found = gather([str(tmp_path)])
    assert [row[0] for row in result_tables(found, lay_out(found))[0].rows] == ["fgsm, epochs=3", "fgsm, epochs=6"]


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


def test_nobody_is_second_who_withstands_nothing(tmp_path):
    for method, accuracy in (("fgsm", 0), ("n-fgsm", 0.004), ("elle", 5)):
        write_result(run_directory(tmp_path / method, f"method={method}"), accuracy)
    collected = gather([str(tmp_path)])
    table = result_tables(collected, lay_out(collected))[0]
    assert {table.rows[row][0]: mark for (row, _), mark in table.marks.items()} == {"elle": "best"}


def test_the_dataset_is_named_where_a_recipe_of_several_has_runs_of_one_alone(folder):
    runs = with_figure(folder, 'metric = ["autoattack"]\npanel = "data"')
    layout = lay_out(runs)
    assert [table.caption for table in result_tables(runs, layout)] == ["AutoAttack, %: digits"]
    table = comparison_table(compare(runs), layout)
    assert table.rows[0][0] == "fgsm, eps 8/255, digits"
    bold = {row[0] for number, row in enumerate(table.rows) if table.marks.get((number, 1)) == "best"}
    assert bold == {row[0] for row in table.rows if row[1] == "outside"} != set()


def test_no_other_setting_is_taken_for_a_baseline_that_has_no_result(tmp_path):
    """Of two settings with an option each, the first option tells them apart: the other one was called `elle-a`."""
    (tmp_path / "shortcuts.toml").write_text(
        'title = "Shortcuts"\nseeds = 1\n[base]\ndata = "digits"\nmodel = "small-cnn"\nmethod = "elle-a"\nepochs = 6\n'
        'track = "clean,pgd-10"\n[grid]\neps = ["8/255"]\n[[runs]]\n[[runs]]\n"method.weight.every" = 2\n'
        '[[runs]]\n"method.regulariser.share" = 0.5\n[figure]\nkind = "table"\nbaseline = "elle-a"\n'
    )
    for name, option in (("every", "method.weight.every=2"), ("share", "method.regulariser.share=0.5")):
        words = ("method=elle-a", "eps=8/255", "model=small-cnn", option)
        write_result(run_directory(tmp_path / "runs" / name, *words), 40.0)
    runs = gather([str(tmp_path / "shortcuts.toml"), str(tmp_path / "runs")])
    layout = lay_out(runs)
    names = ["elle-a, method.weight.every=2", "elle-a, method.regulariser.share=0.5"]
    assert [layout.label(setting, "method") for setting in runs.settings] == names
    assert baseline_tables(runs, layout) == []
