"""The tables of a report: numbers over seeds as the paper prints them, and ours beside the paper's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from elle.experiments.collected import TIMES, VALIDATION, Collected, Score, Setting
from elle.experiments.comparison import Comparison, joint_error
from elle.experiments.layout import Layout
from elle.experiments.page import Mark, Table

NAMES = {
    "autoattack": "AutoAttack",
    "clean": "Clean",
    "fgsm": "FGSM",
    "error": "E_lin",
    "error_two": "E_lin of two triplets",
    "error_half": "E_lin at alpha = 1/2",
    "error_max": "E_lin at the worst alpha",
    "misalignment": "Gradient misalignment",
    "seconds": "Training time",
    "seconds per epoch": "Time of an epoch",
    "seconds per step": "Time of a step",
}
WIDE = 7
"""Columns of mean and std that fit on a page of paper."""
REFERENCE = "pgd-"
"""Multi-step methods are the paper's expensive reference: shown, but not marked as best."""


def metric_name(metric: str) -> str:
    if metric.startswith(VALIDATION):
        return f"Validation {metric_name(metric.removeprefix(VALIDATION))}"
    return NAMES.get(metric, metric.upper() if metric.startswith("pgd") else metric)


def unit(metric: str) -> tuple[str, float]:
    """The unit in which a metric is printed, and by what its values are multiplied for that."""
    return ("ms", 1000.0) if metric == "seconds per step" else ("s", 1.0) if metric in TIMES else ("%", 1.0)


def written(mean: float, std: float | None, metric: str) -> str:
    """`44.32 +- 0.04`, or the mean alone of one seed."""
    factor = unit(metric)[1]
    return f"{factor * mean:.2f}" + ("" if std is None else f" \u00b1 {factor * std:.2f}")


def result_tables(collected: Collected, layout: Layout) -> list[Table]:
    """One table for each panel and metric."""
    return [
        _table(settings, layout, metric, panel)
        for panel, settings in layout.grouped(collected.settings).items()
        for metric in collected.metrics
        if any(setting.score(metric) for setting in settings)
    ]


def _table(settings: Sequence[Setting], layout: Layout, metric: str, panel: str) -> Table:
    heads, columns = (list(layout.along(settings, axis)) for axis in (layout.rows, layout.columns))
    places: dict[tuple[int, int], Setting] = {}
    for setting in settings:
        row, column = layout.label(setting, layout.rows), layout.label(setting, layout.columns)
        places[heads.index(row), columns.index(column) + 1] = setting
    scores = {place: score for place, setting in places.items() if (score := setting.score(metric)) is not None}
    texts = {place: written(score.mean, score.std, metric) for place, score in scores.items()}
    rows = [[head, *(texts.get((r, c), "-") for c in range(1, len(columns) + 1))] for r, head in enumerate(heads)]
    # Methods are compared at the same eps: down a column, or along a row where methods are the columns.
    line = 1 if layout.carrier == layout.rows else 0
    reference = {place for place in scores if str(places[place].value("method")).startswith(REFERENCE)}
    marks: dict[tuple[int, int], Mark] = {}
    for number in {place[line] for place in scores}:
        marks |= _marks({place: scores[place] for place in scores if place[line] == number}, reference, metric)
    caption = f"{metric_name(metric)}, {unit(metric)[0]}" + (f": {panel}" if panel else "")
    note = _legend(set(marks.values()), bool(reference))
    table = Table(caption, (f"{layout.rows} \\ {layout.columns}", *columns), rows, marks=marks, note=note)
    if len(columns) > WIDE and len(columns) > len(heads):
        return _turned(table, f"{layout.columns} \\ {layout.rows}")
    return table


def _turned(table: Table, corner: str) -> Table:
    """The table transposed."""
    columns = [row[0] for row in table.rows]
    rows = [[name, *(row[c] for row in table.rows)] for c, name in enumerate(table.columns) if c > 0]
    marks = {(column - 1, row + 1): mark for (row, column), mark in table.marks.items()}
    return replace(table, columns=(corner, *columns), rows=rows, marks=marks)


def _legend(marks: set[Mark], reference: bool) -> str:
    """A sentence that explains the marks which a table has."""
    said = []
    if "best" in marks:
        said.append("best in bold, runner-up underlined" + (", PGD (the reference) left out" if reference else ""))
    if "collapsed" in marks:
        said.append("\u2020 red: at least one of the runs collapsed")
    return (said[0][0].upper() + "; ".join(said)[1:] + ".") if said else ""


def _marks(
    rivals: dict[tuple[int, int], Score], reference: set[tuple[int, int]], metric: str
) -> dict[tuple[int, int], Mark]:
    marks: dict[tuple[int, int], Mark] = {place: "collapsed" for place, score in rivals.items() if score.collapsed}
    if len(rivals.keys() - reference) < 2:  # one alone has beaten nobody
        return marks
    # As printed: two numbers that read the same share a mark.
    factor = unit(metric)[1]
    others = rivals.keys() - marks.keys() - reference
    able = {place: round(factor * rivals[place].mean, 2) for place in others}
    able = {place: value for place, value in able.items() if value > 0}  # who withstands nothing is not second
    levels = sorted(set(able.values()), reverse=metric not in TIMES)[:2]
    names: list[Mark] = ["best", "second"]
    for level, name in zip(levels, names, strict=False):
        marks |= {place: name for place, value in able.items() if value == level}
    return marks


def comparison_table(comparisons: Sequence[Comparison], layout: Layout) -> Table:
    """Ours, the paper's, the difference, and whether chance explains it."""
    rows = []
    marks: dict[tuple[int, int], Mark] = {}
    metrics = {one.expected.metric for one in comparisons}
    timed = not metrics.isdisjoint(TIMES)
    alone = metric_name(metrics.pop()) if len(metrics) == 1 else ""
    for number, one in enumerate(comparisons):
        metric, error = one.expected.metric, one.joint_error
        factor = unit(metric)[1]
        rows.append(
            [
                layout.full(one.setting) + ("" if alone else f": {metric_name(metric)}"),
                one.verdict,  # second: a phone shows no more columns without scrolling
                written(one.score.mean, one.score.std, metric),
                written(one.expected.value, one.expected.std, metric),
                f"{factor * one.difference:+.2f}",
                "-" if error is None or metric in TIMES else f"{2 * factor * error:.2f}",
                str(one.score.count),
            ]
        )
        if one.inside is False:
            marks[number, 1] = "best"  # in bold, to be found among many
        if one.score.collapsed:
            marks[number, 2] = "collapsed"
        if one.expected.collapsed:
            marks[number, 3] = "collapsed"
    columns = ("Setting", "Verdict", "Ours", "Paper", "Difference", "2 SE", "Seeds")
    return Table(
        f"{alone or 'Numbers'}: ours beside the paper's",
        columns,
        rows,
        marks=marks,
        note="SE: joint standard error of the difference, from the std over seeds on both sides. The paper's std "
        "divides by n runs; for the SE it is multiplied by sqrt(n / (n - 1)), to divide by n - 1 as ours does. "
        "Where one side has no std, the other's stands for it, unless that is 0. \u2020 red: collapsed."
        + (" Times are not judged: the paper's are of another machine." if timed else ""),
    )


def baseline_tables(collected: Collected, layout: Layout) -> list[Table]:
    """How far every setting is from the one that the recipe names, and whether by more than chance explains."""
    tables = []
    for panel, settings in layout.grouped(collected.settings).items():
        names = [(layout.label(one, layout.carrier), layout.label(one, layout.across), one) for one in settings]
        bases = {across: one for name, across, one in names if [name] == collected.asked("baseline")}
        others = [(name, across, one, bases[across]) for name, across, one in names
                  if across in bases and one is not bases[across]]  # fmt: skip
        rows: list[list[str]] = []
        marks: dict[tuple[int, int], Mark] = {}
        for name, across, one, base in others:
            head = f"{name}, {layout.across} {across}" if len(bases) > 1 else name
            cells = [_difference(one.score(metric), base.score(metric), metric) for metric in collected.metrics]
            marks |= {(len(rows), column): mark for column, (_, mark) in enumerate(cells, 1) if mark}
            rows.append([head, *(text for text, _ in cells)])
        if rows:
            columns = [metric_name(name) + (f", {unit(name)[0]}" * (name in TIMES)) for name in collected.metrics]
            caption = f"Difference to {collected.asked('baseline')[0]}" + (f": {panel}" if panel else "")
            tables.append(Table(caption, ("Setting", *columns), rows, marks=marks, note=_BASELINE_NOTE))
    return tables


_BASELINE_NOTE = (
    "Accuracies in percentage points. \u00b1: two joint standard errors of the difference, from the std over seeds on "
    "both sides; bold: beyond them. "
    "\u2020 red: one of the two collapsed."
)


def _difference(score: Score | None, base: Score | None, metric: str) -> tuple[str, Mark | None]:
    """`-0.35 +- 0.20`, and its mark."""
    if score is None or base is None:
        return "-", None
    factor, error = unit(metric)[1], joint_error(score.std, score.count, base.std, base.count)
    difference = score.mean - base.mean
    text = f"{factor * difference:+.2f}" + ("" if error is None else f" \u00b1 {2 * factor * error:.2f}")
    if score.collapsed or base.collapsed:
        return text, "collapsed"
    return text, "best" if error is not None and abs(difference) > 2 * error else None


def failure_table(collected: Collected) -> Table | None:
    """Runs without a result, and why."""
    rows = [
        [run.name, collected.failures.get(run.name) or run.stopped() or "not finished"]
        for run in collected.runs
        if not run.finished()
    ]
    return Table("Runs without a result", ("Run", "Reason"), rows) if rows else None


def rollback_table(collected: Collected) -> Table | None:
    """Runs that did not end with the method of their setting, and with which they did."""
    runs = [run for setting in collected.settings for run in setting.runs]
    rows = [[run.name, run.config.method, after] for run in runs if (after := run.went_on_with()) is not None]
    columns = ("Run", "Method", "Went on with")
    return Table("Runs that collapsed and were rolled back", columns, rows) if rows else None


def plain(text: str) -> str:
    """Text that Markdown shows as it is: a folder may be called *x*, and a reason name <class>."""
    return re.sub(r"([*<>`|\[\]]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text.replace("\n", " "))


def markdown(table: Table) -> str:
    """The table as Markdown, the marks with it."""

    def cell(row: int, column: int, text: str) -> str:
        text = plain(text)
        shapes = {"best": f"**{text}**", "second": f"<u>{text}</u>", "collapsed": f"{text}\u2020"}
        mark = table.marks.get((row, column))
        return shapes[mark] if mark else text

    columns = " | ".join(map(plain, table.columns))
    lines = [f"### {plain(table.caption)}", "", f"| {columns} |", "|" + "---|" * len(table.columns)]
    lines += [
        "| " + " | ".join(cell(r, c, text) for c, text in enumerate(row)) + " |" for r, row in enumerate(table.rows)
    ]
    return "\n".join([*lines, *(["", plain(table.note)] if table.note else [])])
