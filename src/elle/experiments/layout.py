"""How a report is laid out: which setting makes the rows, which the columns, and which a table of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elle.experiments.collected import Collected, Setting, telling_keys

OWN_TABLE = ("data", "root", "model", "norm", "schedule")
"""Settings between whose values numbers are not compared: each has tables and lines of its own."""
TOLD = (*OWN_TABLE, "method", "eps", "epochs")
"""Settings that are shown wherever they differ, even if another already tells the runs apart: two datasets, each at
a radius of its own, are not one method over eps."""


@dataclass(frozen=True)
class Layout:
    """Keys of settings: `panels` make a table each, `extras` are written beside the method."""

    rows: str
    columns: str
    panels: tuple[str, ...]
    extras: tuple[str, ...]

    @property
    def carrier(self) -> str:
        """The axis whose labels carry the extras, and within which numbers are compared."""
        return "method" if "method" in (self.rows, self.columns) else self.rows

    @property
    def across(self) -> str:
        """The other axis: eps in most tables."""
        return self.columns if self.carrier == self.rows else self.rows

    def label(self, setting: Setting, axis: str) -> str:
        """The name of the setting along an axis, with those of the extras that are not as by default."""
        extras = [key for key in self.extras if axis == self.carrier and setting.says(key)]
        return ", ".join([setting.label(axis), *(f"{key}={setting.label(key)}" for key in extras)])

    def name(self, setting: Setting) -> str:
        """The label along the carrier, with its key where no table's corner shows it: weight=1000."""
        return ("" if self.carrier == "method" else f"{self.carrier}=") + self.label(setting, self.carrier)

    def panel(self, setting: Setting) -> str:
        return ", ".join(setting.label(key) for key in self.panels)

    def full(self, setting: Setting) -> str:
        """All that tells a setting from the others, in words."""
        across = "" if setting.value(self.across) is None else f"{self.across} {self.label(setting, self.across)}"
        return ", ".join(filter(None, [self.name(setting), across, self.panel(setting)]))

    def grouped(self, settings: Iterable[Setting]) -> dict[str, list[Setting]]:
        """The settings of each panel."""
        groups: dict[str, list[Setting]] = {}
        for setting in settings:
            groups.setdefault(self.panel(setting), []).append(setting)
        return groups

    def along(self, settings: Iterable[Setting], axis: str) -> dict[str, list[Setting]]:
        """The settings of each label along an axis: numbers by size, words in the recipe's order."""
        groups: dict[str, list[Setting]] = {}
        for setting in settings:
            groups.setdefault(self.label(setting, axis), []).append(setting)
        values = {label: group[0].value(axis) for label, group in groups.items()}
        if all(isinstance(value, (int, float)) for value in values.values()):
            return {label: groups[label] for label in sorted(groups, key=lambda label: float(values[label]))}
        return groups


def lay_out(collected: Collected) -> Layout:
    """The layout that the recipe asks for; otherwise methods by eps, a table for each dataset and network."""
    rows = [*collected.asked("rows"), *collected.asked("line"), "method"][0]
    columns = [*collected.asked("columns"), *collected.asked("x"), "eps"][0]
    if columns in ("metric", rows):  # each number has a table of its own here
        columns = "eps" if rows != "eps" else "method"
    panel = [key for key in collected.asked("panel") if key not in (rows, columns)]
    beside = [key for key in (*panel, *TOLD) if key not in (rows, columns)]
    first = [*beside, rows, columns]
    others = [key for key in telling_keys(collected.configs, first) if key not in (rows, columns)]
    own = {*panel, *OWN_TABLE} | (set() if "method" in (rows, columns) else {"method"})
    # What the recipe asks for is named also where runs of one dataset alone have finished: its title names them all.
    panels = dict.fromkeys([*panel, *(key for key in others if key in own)])
    # All by which the recipe's settings differ: one without it would be called, and compared with, its baseline.
    recipe = [] if collected.recipe is None else [run.resolved() for run in collected.recipe.runs(1)]
    extras = dict.fromkeys([*others, *(key for key in telling_keys(recipe, first) if key not in (rows, columns))])
    return Layout(rows, columns, tuple(panels), tuple(key for key in extras if key not in own))
