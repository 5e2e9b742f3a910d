"""Pictures of runs: how robustness is gained and lost (Figure 2), and how lambda answers (Figure 9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elle.charts.heatmap import Heatmap
from elle.charts.lines import Chart, Series
from elle.config import format_radius
from elle.experiments.page import Part, Table, write_page
from elle.experiments.rundir import RunDirectory, goes_on, method_after, multi_step_attack, unique_names

Surfaces = Mapping[str, dict[str, Any]]
"""By the run's name: the loss around images before and after its collapse"""


def write_pictures(out: Path, runs: Sequence[RunDirectory], surfaces: Surfaces) -> list[Chart | Heatmap]:
    """One page with every picture the runs have the numbers for; returns the figures."""
    names = unique_names(runs)
    figures: list[Chart | Heatmap] = [*course(runs, names)]
    for run, name in zip(runs, names, strict=True):
        figures += [*weight_evolution(run, name), *surface_figures(name, surfaces.get(name))]
    parts: list[Part] = [_summary(runs, names), *figures]
    lead = " ".join(_fate(run, name) + _ending(run) for run, name in zip(runs, names, strict=True))
    title = runs[0].setting if len(runs) == 1 else f"{len(runs)} runs side by side"
    write_page(out, title, lead, parts, f"elle plot, from {', '.join(names)}.")
    return figures


def course(runs: Sequence[RunDirectory], names: Sequence[str]) -> list[Chart]:
    """Figure 2: accuracies, misalignment and E_lin over the epochs, each collapse marked."""
    marks = [(at, f"{name}: {word}" if len(runs) > 1 else word)
             for run, name in zip(runs, names, strict=True) for at, word in falls(run)]  # fmt: skip
    specifications = [
        ("Accuracy under a multi-step attack", "accuracy", "multi", _multi_step_note(runs), {"percent": True}),
        ("Accuracy under a single-step attack", "accuracy", "single", "In a collapse far above that under a multi-step "
         "attack: the network fools its own. Where there was no monitor: under the attack of training.",
         {"percent": True}),
        ("How far the loss is from linear", "E_lin", "error", "Orders of magnitude higher after a collapse.",
         {"log": True}),
        ("Gradient misalignment", "1 - cos", "misalignment", "Between an image and a random point near it.", {}),
        ("Accuracy without attack", "accuracy", "clean", "", {"percent": True}),
    ]  # fmt: skip
    charts = []
    for title, label, key, note, kind in specifications:
        series = [one for run, name in zip(runs, names, strict=True) for one in _series(run, name, key)]
        if any(value is not None for one in series for value in one.y):
            shown = [one for one in series if len(one.x)]
            charts.append(Chart(title, "epoch", label, shown, note=note, marks=marks, **kind))
    return charts


def _multi_step_note(runs: Sequence[RunDirectory]) -> str:
    """Whether the values are the monitor's or tracked ones, whose attacks and images differ."""
    tracked = [run for run in runs if not run.probes and run.multi_step()]
    words = multi_step_attack(tracked) if tracked else ""
    if not any(run.probes for run in runs):
        return f"{words[:1].upper()}{words[1:]}."
    return "On the monitor's probe" + (f"; where there was no monitor, {words}." if words else ".")


def _series(run: RunDirectory, name: str, key: str) -> list[Series]:
    """A quantity of a run, and of each stretch that a rollback has undone."""
    undone = [event["probes"] for event in run.events if event["event"] == "rollback" and event.get("probes")]
    stretches = [
        Series(f"{name}, undone", [run.epoch_of(one["step"]) for one in probes], [one.get(key) for one in probes])
        for probes in undone
        if key in probes[0]
    ]
    return [Series(name, *_values(run, key)), *stretches]


def _values(run: RunDirectory, key: str) -> tuple[list[float], list[float | None]]:
    """A quantity over the epochs: of the monitor's looks, or of the records where it does not look at it."""
    if run.probes and key in run.probes[0]:
        return [run.epoch_of(one["step"]) for one in run.probes], [one.get(key) for one in run.probes]
    columns = {"clean": "clean", "single": "accuracy", "multi": run.multi_step() or ""}
    column = columns.get(key, f"tracked_{key}")
    rows = [record for record in run.records if column in record]
    return [run.epoch_of(record["step"]) for record in rows], [record[column] for record in rows]


def falls(run: RunDirectory) -> list[tuple[float, str]]:
    """The epochs at which the monitor, or the records, saw a collapse begin, and what became of it."""
    words = {None: "collapse", "recovery": "fall, recovery", "rollback": "collapse, undone"}
    seen = [(run.epoch_of(told["since"]), words[ended["event"] if ended else None])
            for told, ended in run.collapses() if "since" in told]  # fmt: skip
    step = run.collapse_step()
    return seen or ([] if step is None else [(run.epoch_of(step), "collapse")])


def weight_evolution(run: RunDirectory, name: str) -> list[Chart]:
    """Figure 9: E_lin with its threshold, and lambda, at every step; none for a method without a penalty."""
    x: list[float] = []
    columns: dict[str, list[float | None]] = {key: [] for key in ("error", "threshold", "weight")}
    for line in run.steps():
        if "weight" in line:
            x += [float(line["step"] + k) for k in range(len(line["weight"]))]
            for key, values in columns.items():
                values += line.get(key) or [None] * len(line["weight"])
    if not x:
        return []
    error, threshold = Series("E_lin", x, columns["error"]), Series("threshold", x, columns["threshold"])
    note = "Above the threshold, ELLE-A sets lambda to its maximum; below it, lambda decays."
    return [
        Chart(f"E_lin and its threshold, {name}", "step", "E_lin", [error, threshold], log=True, note=note),
        Chart(f"Weight of the penalty, {name}", "step", "lambda", [Series("lambda", x, columns["weight"])]),
    ]


def surface_figures(name: str, surfaces: dict[str, Any] | None) -> list[Chart | Heatmap]:
    """The loss along the attack, and over the attack and a random direction, before and after a collapse."""
    if surfaces is None:
        return []
    states = {f"{key} (step {one['step']})" if one.get("step") else key: one for key, one in surfaces.items()}
    lines = []
    for label, one in states.items():
        middle = min(range(len(one["across"])), key=lambda k: abs(one["across"][k]))
        lines.append(Series(label, one["along"], one["loss"][middle]))
    values = [value for one in states.values() for row in one["loss"] for value in row if math.isfinite(value)]
    low, high = min([0.0, *values]), max([0.0, *values])
    figures: list[Chart | Heatmap] = [
        Chart(f"Loss on the way to the FGSM point, {name}", "eps along the attack", "loss", lines,
              note="Training looks at 1 alone. A linear loss is a straight line there.")
    ]  # fmt: skip
    for label, one in states.items():
        figures.append(
            Heatmap(
                f"Loss surface {label}, {name}",
                "eps along the FGSM direction",
                "eps along a random direction",
                one["along"],
                one["across"],
                one["loss"],
                low,
                high,
                note="Mean over 32 test images.",
            )
        )
    return figures


_OUTCOMES = {"collapse": "", "fall, recovery": " (recovered)", "collapse, undone": " (undone)"}


def _summary(runs: Sequence[RunDirectory], names: Sequence[str]) -> Table:
    rows, bad = [], set()
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        _, multi = _values(run, "multi")
        levels = [value for value in multi if value is not None]
        if run.collapse_step() is not None:
            bad.add(number)
        rows.append(
            (
                name,
                run.config.method,
                run.config.data,
                format_radius(run.config.eps or 0),
                f"{round(run.epochs(), 2):g}",
                f"{max(levels):.1%}" if levels else "-",
                f"{levels[-1]:.1%}" if levels else "-",
                ", ".join(f"{at:.1f}{_OUTCOMES[word]}" for at, word in falls(run)) or "-",
                str(run.rollbacks()),
            )
        )
    columns = ("Run", "Method", "Data", "eps", "Epochs", "Multi-step, best", "Multi-step, last",
               "Collapse, epoch", "Rollbacks")  # fmt: skip
    return Table("Runs", columns, rows, frozenset(bad))


def _ending(run: RunDirectory) -> str:
    """Why the curves of a run end where they do, unless it has finished: one that diverged is no healthy one."""
    reason = run.stopped()
    if reason is None:
        return "" if run.finished() else " It has not finished."
    return f" It ended early: {reason}." if reason else " It ended early."


def _fate(run: RunDirectory, name: str) -> str:
    collapses = [(told, ended) for told, ended in run.collapses() if "evidence" in told]
    if not collapses:
        return f"{name}: no collapse." if run.collapse_step() is None else f"{name} collapsed."
    first, last = collapses[0][0], collapses[-1][1] or {}
    sentence = f"{name} collapsed at step {first['since']}: {first['evidence']}."
    if last.get("event") == "recovery":
        sentence += f" It had recovered at step {last['step']}."
    elif last.get("event") == "rollback":
        after = f"from there with {method_after(last)}" if goes_on(last) else "where the run stopped"
        sentence += f" It was undone: back to step {last['step']}, {after}."
    return sentence
