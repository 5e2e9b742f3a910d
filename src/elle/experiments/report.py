"""A report: one page, its Markdown, its numbers as CSV, its figures as files; the same runs give the same files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from elle.experiments.collected import Collected, telling_keys
from elle.experiments.comparison import Comparison, compare
from elle.experiments.figure import Figure, write_figures
from elle.experiments.layout import TOLD, Layout, lay_out
from elle.experiments.page import Part, Picture, Table, write_page
from elle.experiments.report_figures import report_figures
from elle.experiments.report_tables import (
    baseline_tables,
    comparison_table,
    failure_table,
    markdown,
    metric_name,
    plain,
    result_tables,
    rollback_table,
)
from elle.files import write_text

PICTURE = "adversarial.png"
"""What `elle show` writes into a run directory."""


def write_report(collected: Collected, out: Path) -> list[Path]:
    """Everything, into the folder `out`; returns the files, the page first."""
    layout, comparisons = lay_out(collected), compare(collected)
    tables = [*result_tables(collected, layout), *baseline_tables(collected, layout)]
    figures = report_figures(collected, layout)
    closing = [comparison_table(comparisons, layout)] if comparisons else []
    closing += [table for table in (rollback_table(collected), failure_table(collected)) if table is not None]
    title = collected.recipe.title if collected.recipe else _counted(len(collected.runs), "run")
    lead = _lead(collected, layout, comparisons)
    pictures = _pictures(collected, layout)
    shown = [Picture(title, file.read_bytes()) for title, file in pictures]
    parts: list[Part] = [*tables, *shown, *figures, *closing]
    footer = (
        f"elle report, from {_counted(len(collected.runs), 'run')}. Numbers: results.csv, runs.csv. Figures: figures/."
    )
    write_page(out / "report.html", title, lead, parts, footer)
    drawn = write_figures(out / "figures", figures)
    write_text(out / "report.md", _markdown(title, lead, tables, _images(pictures, out), figures, drawn, closing))
    write_text(out / "results.csv", _results_csv(collected, comparisons))
    write_text(out / "runs.csv", _runs_csv(collected))
    return [out / name for name in ("report.html", "report.md", "results.csv", "runs.csv")] + drawn


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _lead(collected: Collected, layout: Layout, comparisons: Sequence[Comparison]) -> str:
    finished = sum(len(setting.runs) for setting in collected.settings)
    seeds = sorted({len(setting.runs) for setting in collected.settings})
    counts = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    count = len(collected.settings)
    whole = f"{count} of " if collected.recipe else ""
    settings = _counted(len(collected.recipe.runs(1)) if collected.recipe else count, "setting")
    text = f"{whole}{settings} with {counts} seed{'s' * (seeds[-1] > 1)} each"
    text += f", {_counted(finished, 'run')}; mean \u00b1 std over seeds."
    if collected.kind == "pictures" and not _pictures(collected, layout):
        text += " The pictures are still to be drawn: `elle show DIR` for each run, then this report again."
    if changed := sum(run.went_on_with() is not None for setting in collected.settings for run in setting.runs):
        text += f" {changed} of them collapsed and went on with a stronger method than their row says: see the end."
    if missing := collected.not_measured:
        text += f" No run has measured {', '.join(map(metric_name, missing))}, which the recipe asks for."
    if (baseline := collected.asked("baseline")) and not baseline_tables(collected, layout):
        names = "; ".join(dict.fromkeys(layout.label(setting, layout.carrier) for setting in collected.settings))
        text += f" Nothing is compared with the baseline {baseline[0]}: the settings with results are {names}."
    if few := collected.fewer_images:
        names = ", ".join(f"{metric_name(name)} ({count})" for name, count in few.items())
        text += f" Some numbers are of fewer images than their runs' test sets have: {names}."
    if few_seeds := collected.fewer_seeds:
        names = ", ".join(metric_name(name) for name in few_seeds)
        text += f" Some numbers are of fewer seeds than their settings have: {names}."
    if unfinished := len(collected.runs) - finished:
        text += f" {unfinished} more {'has' if unfinished == 1 else 'have'} no result: see the end."
    if collected.copies:
        text += f" {collected.copies} more {_are(collected.copies)} left out: another has the same settings and seed."
    if others := collected.others:
        text += f" {others} more in the same place {_are(others)} left out: not of this recipe as it is now."
    judged = [one for one in comparisons if one.inside is not None]
    if judged:
        inside, numbers = sum(bool(one.inside) for one in judged), _counted(len(judged), "number")
        text += f"\n\n{inside} of {numbers} {_are(len(judged))} inside two joint standard errors of the paper's."
    return text


def _pictures(collected: Collected, layout: Layout) -> list[tuple[str, Path]]:
    """The attacked images that `elle show` has drawn, where the recipe's figure is made of them."""
    if collected.kind != "pictures":
        return []
    runs = [(f"Attacked images, {layout.full(setting)}", run) for setting in collected.settings for run in setting.runs]
    return [(title, file) for title, run in runs if (file := run.path / PICTURE).exists()]


def _images(pictures: Sequence[tuple[str, Path]], out: Path) -> list[str]:
    return [f"![{plain(title)}]({quote(os.path.relpath(file, out))})" for title, file in pictures]


def _markdown(
    title: str, lead: str, tables: Sequence[Table], images: Sequence[str], figures: Sequence[Figure],
    drawn: Sequence[Path], closing: Sequence[Table],
) -> str:  # fmt: skip
    files = [path for path in drawn if path.suffix == ".svg"]
    pictures = [
        f"![{plain(figure.title)}](figures/{quote(path.name)})\n\n{plain(figure.title)}. {plain(figure.note)}".rstrip()
        for figure, path in zip(figures, files, strict=True)
    ]
    return (
        "\n\n".join([f"# {plain(title)}", lead, *map(markdown, tables), *images, *pictures, *map(markdown, closing)])
        + "\n"
    )


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerows([columns, *rows])
    return stream.getvalue()


def _keys(collected: Collected) -> list[str]:
    """The settings that a line of numbers begins with."""
    return list(dict.fromkeys(["method", "data", "model", "eps", *telling_keys(collected.configs, TOLD)]))


def _results_csv(collected: Collected, comparisons: Sequence[Comparison]) -> str:
    """A line for each setting and number: ours over seeds, and the paper's where it has one."""
    keys = _keys(collected)
    paper = {(id(one.setting), one.expected.metric): one for one in comparisons}
    rows = []
    for setting in collected.settings:
        for metric in dict.fromkeys(name for one in setting.measured for name in one):
            score = setting.score(metric)
            assert score is not None
            one = paper.get((id(setting), metric))
            theirs = ["", "", "", "", ""]
            if one is not None:
                values = (one.expected.value, one.expected.std, one.difference, one.joint_error, one.verdict)
                theirs = [_plain(value) for value in values]
            ours = [_plain(score.mean), _plain(score.std), str(score.count), str(score.collapsed).lower()]
            rows.append([*(setting.label(key) for key in keys), metric, *ours, *theirs])
    columns = [*keys, "metric", "mean", "std", "seeds", "collapsed"]
    return _csv([*columns, "paper", "paper_std", "difference", "joint_standard_error", "verdict"], rows)


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _runs_csv(collected: Collected) -> str:
    """A line a run, with every number it measured."""
    names, keys = collected.numbers, _keys(collected)
    rows = [
        [run.name, *(setting.label(key) for key in keys), run.config.seed, str(run.collapse_step() is not None).lower()]
        + [_plain(numbers.get(name)) for name in names]
        for setting in collected.settings
        for run, numbers in zip(setting.runs, setting.measured, strict=True)
    ]
    return _csv(["run", *keys, "seed", "collapsed", *names], rows)
