"""Delayed collapse (Observation 1 of arXiv 2401.11618): up to which eps, and for how many epochs, a method holds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from elle.config import format_radius
from elle.experiments.rundir import RunDirectory

Row = dict[str, Any]


def delayed_collapse(runs: Sequence[RunDirectory]) -> list[Row]:
    """One row a method, dataset, network and norm, over all its runs that have an epoch behind them or collapsed.

    `holds_to`: the largest eps such that no run at it or at a smaller one collapsed; `epochs_held`: of the longest run
    at that eps; `by_eps`: at each eps how many runs there are, how many of them collapsed, for how many epochs the
    first of those held, and how many epochs the longest run had.
    """
    groups: dict[tuple[str, str, str, str], list[RunDirectory]] = defaultdict(list)
    # One that has only begun, or diverged at once, has not held yet, at an eps that others may never have reached.
    for run in [run for run in runs if run.records or run.first_fall() is not None]:
        groups[run.config.method, run.config.data, run.config.model or "", run.config.norm].append(run)
    return [_row(key, group) for key, group in sorted(groups.items())]


def _row(key: tuple[str, str, str, str], runs: list[RunDirectory]) -> Row:
    by_eps = [_at_eps(eps, [run for run in runs if (run.config.eps or 0.0) == eps])
              for eps in sorted({run.config.eps or 0.0 for run in runs})]  # fmt: skip
    held = list(itertools.takewhile(lambda one: not one["collapsed"], by_eps))
    first = next((one for one in by_eps if one["collapsed"]), None)
    return {
        "method": key[0],
        "data": key[1],
        "model": key[2],
        "norm": key[3],
        "runs": len(runs),
        "holds_to": held[-1]["eps"] if held else None,
        "epochs_held": held[-1]["epochs"] if held else None,
        "first_collapse_eps": first["eps"] if first else None,
        "first_collapse_epoch": first["held"] if first else None,
        "by_eps": by_eps,
    }


def _at_eps(eps: float, runs: list[RunDirectory]) -> Row:
    falls = [fall for run in runs if (fall := collapse_epochs(run)) is not None]
    return {
        "eps": eps,
        "radius": format_radius(eps),
        "runs": len(runs),
        "collapsed": len(falls),
        "held": min(falls) if falls else None,
        "epochs": max((round(run.epochs(), 2) for run in runs), default=0.0),
    }


def collapse_epochs(run: RunDirectory) -> float | None:
    """For how many epochs its method held before it collapsed for good or was rolled back; None: to the end."""
    step = run.first_fall()
    if step is None:
        return None
    return round(run.epoch_of(step), 2) if run.records else 0.0  # in its first epoch, of a length nobody knows yet


def describe(row: Row) -> list[str]:
    """The cells of a row of the table."""
    falls = [f"{one['radius']} after {one['held']:g}" for one in row["by_eps"] if one["collapsed"]]
    return [
        row["method"],
        row["data"],
        row["model"],
        row["norm"],
        str(row["runs"]),
        "-" if row["holds_to"] is None else format_radius(row["holds_to"]),
        "-" if row["epochs_held"] is None else f"{row['epochs_held']:g}",
        "; ".join(falls) or "-",
    ]


COLUMNS = [
    "method",
    "data",
    "network",
    "norm",
    "runs",
    "holds up to eps",
    "for epochs",
    "collapses at eps, after epochs",
]
