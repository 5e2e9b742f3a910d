"""The figures of a report: accuracy over eps with bands, curves over epochs, runtime bars."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from elle.charts.bars import Bar, Bars
from elle.charts.lines import Chart, Series
from elle.config import format_radius
from elle.experiments.collected import TIMES, Collected, Setting
from elle.experiments.figure import Figure
from elle.experiments.layout import Layout
from elle.experiments.pictures import weight_evolution
from elle.experiments.report_tables import metric_name, unit
from elle.experiments.rundir import multi_step_attack, tracked_images
from elle.experiments.step_times import step_figures

CURVES = 3
"""Values of eps a panel for which curves are drawn: the smallest, the middle and the largest."""

OF_TRAINING = ("loss", "error", "weight", "seconds")
"""Columns of the records that are of the training steps, and no accuracies."""

_LOGARITHMIC = ("tracked_error", "tracked_misalignment")
"""Beginnings of columns that are drawn over powers of ten, as in the paper's Figure 2: they grow by magnitudes."""


def report_figures(collected: Collected, layout: Layout) -> list[Figure]:
    """Every figure that the runs have the numbers for."""
    groups = layout.grouped(collected.settings)
    over = [chart for panel, settings in groups.items() for metric in collected.metrics
            for chart in _over(settings, layout, metric, panel)]  # fmt: skip
    asked = collected.asked("metric") if collected.kind == "curves" else collected.asked("curves")
    columns: list[str | None] = [*asked] or [None]
    curves = [chart for panel, settings in groups.items() for column in columns
              for chart in _curves(settings, layout, panel, column, collected.asked("at"))]  # fmt: skip
    curves = _side_by_side(curves)
    if collected.kind == "steps":
        firsts = [(setting.runs[0], layout.full(setting)) for setting in collected.settings]
        curves += [chart for run, name in firsts for chart in weight_evolution(run, name)]
    times = [metric for metric in collected.metrics if metric in TIMES] or ["seconds"]
    bars = [one for panel, settings in groups.items() for time in times
            for one in _runtime(settings, layout, panel, time)]  # fmt: skip
    return [*over, *curves, *step_figures(collected.folder), *bars]


def _titled(text: str, panel: str) -> str:
    return f"{text}, {panel}" if panel else text


def _over(settings: Sequence[Setting], layout: Layout, metric: str, panel: str) -> list[Chart]:
    """A number over eps (or what else lies across), mean and std over seeds."""
    values = {setting.value(layout.across) for setting in settings if setting.score(metric)} - {None}
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(values) < 2 or len(numbers) != len(values) or metric in TIMES:
        return []
    name, place = _scale(layout.across, numbers)
    log_x = name == layout.across and min(numbers) > 0 and max(numbers) / min(numbers) > 50
    ends = [place(min(numbers)), place(max(numbers))]
    series = []
    for mine in layout.along(settings, layout.carrier).values():
        found = [(one.value(layout.across), score) for one in mine if (score := one.score(metric))]
        points = [(place(float(value)), score) for value, score in found if value is not None]
        points.sort(key=lambda point: point[0])
        # What does not have the setting at all is a level to compare with.
        points = points or [(end, score) for _, score in found for end in ends]
        x, scores = [point[0] for point in points], [point[1] for point in points]
        spread = [None if score.std is None else score.std / 100 for score in scores]
        known = spread if any(one is not None for one in spread) else []
        series.append(Series(layout.name(mine[0]), x, [score.mean / 100 for score in scores], known))
    note = "Bands: one std over seeds." if any(one.spread for one in series) else ""
    return [Chart(_titled(f"{metric_name(metric)} over {layout.across}", panel), name, "accuracy", series,
                  percent=True, note=note, log_x=log_x)]  # fmt: skip


def _scale(key: str, values: Sequence[float]) -> tuple[str, Callable[[float], float]]:
    """The axis of a setting: eps in grey levels where tables write it so."""
    whole = all(abs(255 * value - round(255 * value)) < 1e-9 for value in values)
    if key == "eps" and whole and any(format_radius(value).endswith("/255") for value in values):
        return "eps \u00b7 255", lambda value: float(round(255 * value))
    return key, lambda value: value


def _curves(
    settings: Sequence[Setting], layout: Layout, panel: str, column: str | None, at: Sequence[str]
) -> list[Chart]:
    """A column of the records over the epochs (None: accuracy under the multi-step attack), at some values across."""
    accuracy = column is None or not (column.startswith("tracked_") or column in OF_TRAINING)
    quantity = "Multi-step accuracy" if column is None else metric_name(column.removeprefix("tracked_"))
    label = "accuracy" if accuracy else quantity
    groups = layout.along(settings, layout.across)
    labels = list(groups)
    chosen = labels if len(labels) <= CURVES else [labels[0], labels[len(labels) // 2], labels[-1]]
    chosen = [label for label in labels if label in at] or chosen
    charts = []
    for across in chosen:
        series = [one for setting in groups[across] if (one := _curve(layout.name(setting), setting, column))]
        if series:
            title = _titled(f"{quantity} while training, {layout.across} {across}", panel)
            of_steps = column == "accuracy" or column in OF_TRAINING
            log = column is not None and column.startswith(_LOGARITHMIC)
            runs = [run for setting in groups[across] for run in setting.runs]
            looked = multi_step_attack(runs) if column is None else f"on {tracked_images(runs)}"
            note = "Of the training steps." if of_steps else f"{looked[:1].upper()}{looked[1:]}."
            note += " Bands: one std over seeds." if any(one.spread for one in series) and not log else ""
            charts.append(Chart(title, "epoch", label, series, percent=accuracy, log=log, note=note))
    return charts


def _side_by_side(charts: Sequence[Chart]) -> list[Chart]:
    """The charts, those of several kinds of E_lin of one setting as one: how they differ is what is looked at."""
    errors = [chart for chart in charts if chart.y_label.startswith(metric_name("error"))]
    kinds = {chart.y_label for chart in errors}
    if not 1 < len(kinds) == len(errors) == sum(len(chart.series) for chart in errors):
        return list(charts)
    lines = [replace(chart.series[0], name=chart.y_label) for chart in errors]
    return [*(chart for chart in charts if chart not in errors), replace(errors[0], series=lines)]


def _curve(label: str, setting: Setting, column: str | None) -> Series | None:
    """The mean over seeds, and its std, at every epoch that all of them have tracked."""
    by_epoch: dict[int, list[float]] = {}
    for run in setting.runs:
        name = column or run.multi_step()
        for record in run.records:
            if name is not None and record.get(name) is not None:
                by_epoch.setdefault(int(record["epoch"]), []).append(record[name])
    whole = {epoch: values for epoch, values in sorted(by_epoch.items()) if len(values) == len(setting.runs)}
    if len(whole) < 2:  # looked at after the last epoch alone
        return None
    spread = [statistics.stdev(values) for values in whole.values()] if len(setting.runs) > 1 else []
    return Series(label, list(whole), [statistics.fmean(values) for values in whole.values()], spread)


def _runtime(settings: Sequence[Setting], layout: Layout, panel: str, time: str) -> list[Bars]:
    """A time by method, over its runs at every eps, as eps costs none; where another setting lies across, by both."""
    bars = []
    name, factor = unit(time)
    groups = {layout.name(mine[0]): mine for mine in layout.along(settings, layout.carrier).values()}
    if layout.across != "eps":
        groups = {label if across == "-" else f"{label}, {across}": at for label, mine in groups.items()
                  for across, at in layout.along(mine, layout.across).items()}  # fmt: skip
    for label, mine in groups.items():
        taken = [factor * numbers[time] for one in mine for numbers in one.measured if time in numbers]
        if taken:
            std = statistics.stdev(taken) if len(taken) > 1 else None
            bars.append(Bar(label, statistics.fmean(taken), std))
    if not bars:
        return []
    devices = sorted({str((run.result or {}).get("device")) for one in settings for run in one.runs})
    warning = "; times of different machines do not compare" if len(devices) > 1 else ""
    note = f"On {' and '.join(devices)}{warning}."
    if layout.across != "eps" and any(one.value(layout.across) is not None for one in settings):
        note += f" After each name: {layout.across}."
    if any(bar.std is not None for bar in bars):
        several = layout.across == "eps" and len(layout.along(settings, "eps")) > 1
        note += f" Means over {'seeds and eps' if several else 'seeds'}; whiskers: one std."
    return [Bars(_titled(metric_name(time), panel), {"s": "seconds", "ms": "milliseconds"}[name], bars, note)]
