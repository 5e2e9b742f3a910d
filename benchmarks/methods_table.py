"""Write what was measured of each method on CIFAR-10 into docs/methods.md, beside what the paper prints.

    python benchmarks/methods_table.py            # between <!-- measured --> and <!-- /measured -->
    python benchmarks/methods_table.py --check    # exit code 1 where the page is not up to date

Accuracies are those of benchmarks/results/cifar10-short-*.json (seed 0), times and memory those of `elle bench` for the
same network and batch; the paper's are in the recipes.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import FOLDER, H200
from results_table import placed

from elle.config import format_radius
from elle.experiments.recipe import Expected, load_recipe
from elle.files import write_text

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
STEPS = 382
"""Of an epoch: 48,976 images in batches of 128."""
RECIPES = ("table-2", "figure-1", "figure-5", "table-3")
COLUMNS = ("method", "clean", "PGD-20", "collapse", "s an epoch", "peak MiB", "clean, paper", "AutoAttack, paper")

Row = dict[str, Any]


def read(name: str) -> list[Row]:
    content = json.loads((FOLDER / f"{name}-{H200}.json").read_text())
    rows: list[Row] = content.get("runs") or content["rows"]
    return rows


def printed(method: str, eps: str, metric: str) -> str:
    """The paper's number for CIFAR-10 with PreActResNet18 and the Short schedule, where one of its tables has it."""
    wanted = {"method": method, "eps": eps, "data": "cifar10", "model": "preact-resnet18"}
    for one in expected():
        if one.metric == metric and "method" in one.where and one.where.items() <= wanted.items():
            return f"{one.value:.1f}"
    return ""


@functools.cache
def expected() -> list[Expected]:
    return [one for recipe in RECIPES for one in load_recipe(recipe).expected]


def table() -> str:
    runs = [run for run in read("cifar10-short") if run["seed"] == 0]
    steps = {row["method"]: row for row in read("bench-preact-resnet18")}
    lines = []
    for radius in sorted({run["eps"] for run in runs}):
        eps = format_radius(radius)
        lines += [f"eps {eps}:", "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        notes: list[str] = []
        for run in (run for run in runs if run["eps"] == radius):
            method, other = run["method"], " ".join(run.get("settings", []))
            step = steps.get(method)
            if other and other not in notes:
                notes.append(other)
            cells = [
                f"`{method}`" + (f" ({notes.index(other) + 1})" if other else ""),
                *(f"{100 * run['test'][name]['accuracy']:.1f}" for name in ("clean", "pgd-20")),
                f"epoch {run['collapse_epoch']}" if run["collapse_epoch"] else "no",
                *([f"{step['ms'] * STEPS / 1000:.2f}", f"{step['peak_mib']:.0f}"] if step else ["", ""]),
                *(printed(method, eps, metric) for metric in ("clean", "autoattack")),
            ]
            lines.append(f"| {' | '.join(cells)} |")
        lines += [
            "",
            *(f"({number}) with `{note}`  " for number, note in enumerate(notes, 1)),
            *([""] if notes else []),
        ]
    return "\n".join(lines[:-1])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where the page is old")
    args = parser.parse_args(words)
    before = PAGE.read_text(encoding="utf-8")
    after = placed(before, table(), PAGE.name, "measured")
    if not args.check:
        write_text(PAGE, after)
    return int(args.check and after != before)


if __name__ == "__main__":
    sys.exit(main())
