"""`elle demo`: plain FGSM training collapses, ELLE-A does not; two ordinary runs, a table, a verdict, a page."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from elle.charts.lines import Chart, Series
from elle.config import Config, format_radius, given, load_config
from elle.data.cores import usable_cores
from elle.errors import InputError, WorkError
from elle.experiments.page import Table as PageTable
from elle.experiments.page import write_page
from elle.experiments.training import outcome, start_training
from elle.files import FolderLock, read_lines

NAMES = {"fgsm": "FGSM", "elle-a": "ELLE-A"}
"""What a reader is told of each method."""
# At the data's own rate the curves jump so much that a processor's rounding decides where they end.
SETTINGS = ("data=mnist5k", "device=cpu", "lr=0.05", "track=clean,pgd-20", "final=clean,pgd-20")
_MARKER = ".elle-demo"
_COLUMNS = ("method", "epoch", "loss", "single-step", "clean", "PGD-20", "best", "E_lin", "weight", "left")
_NARROW = ("method", "epoch", "single-step", "PGD-20", "best", "left")
"""What the demo is about, for a terminal on which not all columns have room."""


@dataclass
class DemoRun:
    """One of the two trainings: an `elle train` process and the records it has written so far."""

    method: str
    directory: Path
    process: subprocess.Popen[bytes]
    started: float = field(default_factory=time.monotonic)
    records: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> None:
        self.records = read_lines(self.directory / "metrics.jsonl")

    def seconds_left(self, epochs: int) -> float:
        done = max(1, len(self.records))
        return (time.monotonic() - self.started) / done * (epochs - done)

    def summary(self) -> dict[str, Any]:
        """What the table, the verdict and --json say of this run, all from its own records."""
        result = json.loads((self.directory / "result.json").read_text())
        accuracies = [record["pgd-20"] for record in self.records]
        return {
            "pgd20_best": max(accuracies),
            "pgd20_final": accuracies[-1],
            "dip": _dip(accuracies),
            "clean": self.records[-1]["clean"],
            "single_step": self.records[-1]["accuracy"],
            "loss": self.records[-1]["loss"],
            "collapsed": result["collapse_epoch"] is not None,
            "collapse_epoch": result["collapse_epoch"],
            "seconds": round(sum(r["seconds"] + r["eval_seconds"] for r in self.records), 1),
        }


def run_demo(out: Path, seed: int, quiet: bool, words: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Train both methods side by side into `out`, write its report.html, and return a summary of each.

    `out` is an empty folder, or a former demo's, whose runs are replaced; anything else is left alone.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / _MARKER).exists())):
        raise InputError(f"{out} exists and is not a former demo; choose another folder with --out")
    with FolderLock(out, _MARKER):
        return _run(out, seed, quiet, words)


def _run(out: Path, seed: int, quiet: bool, words: Sequence[str]) -> dict[str, dict[str, Any]]:
    for method in NAMES:
        with FolderLock(out / method, ".lock"):  # a training of a demo that was killed may still be saving itself
            pass
        shutil.rmtree(out / method, ignore_errors=True)
    settings = [*SETTINGS, f"seed={seed}", *words]
    config = load_config(settings).resolved()
    epochs = given(config.epochs)
    runs = [_start(method, out / method, settings) for method in NAMES]
    # A log file wants whole lines: no wrapping where no terminal sets a width.
    width = None if sys.stdout.isatty() else 160
    console = Console(stderr=quiet, quiet=quiet, highlight=False, width=width)
    console.print(f"Training twice on 4,000 handwritten digits, {epochs} epochs each, side by side:")
    try:
        _follow(runs, epochs, console)
    finally:
        for run in runs:
            run.process.terminate()
        if not console.is_terminal:
            console.print()  # a log's table does not end its last line, which what comes next would continue
    summaries = {run.method: run.summary() for run in runs}
    verdict = describe(summaries)
    _write_report(out / "report.html", runs, summaries, verdict, config)
    console.print(
        f"\n{verdict}\n\nThe curves are in {out / 'report.html'}; the runs beside it are ordinary run directories."
    )
    return summaries


def _start(method: str, directory: Path, settings: Sequence[str]) -> DemoRun:
    # Half of the cores each: two processes with all of them would wait for each other.
    environment = {"OMP_NUM_THREADS": str(max(1, min(4, usable_cores() // 2)))}
    config = load_config([f"method={method}", *settings])
    return DemoRun(method, directory, start_training(config, directory, environment))


def _follow(runs: list[DemoRun], epochs: int, console: Console) -> None:
    printed = {run.method: 0 for run in runs}
    with Live(_table(runs, epochs, console.width), console=console, auto_refresh=False) as live:
        while any(run.process.poll() is None for run in runs):
            time.sleep(0.2)
            for run in runs:
                run.read()
                if code := run.process.poll():
                    raise WorkError(f"training {run.method} failed: {outcome(run.directory, code)}")
                if not console.is_terminal:
                    for record in run.records[printed[run.method] :]:
                        console.print(
                            f"{NAMES[run.method]:7} {_line(record, epochs)}  left {run.seconds_left(epochs):.0f} s"
                        )
                    printed[run.method] = len(run.records)
            live.update(_table(runs, epochs, console.width), refresh=console.is_terminal)
        for run in runs:
            run.read()
        live.update(_table(runs, epochs, console.width), refresh=True)


def _dip(accuracies: Sequence[float]) -> dict[str, float] | None:
    """The lowest accuracy once half of the best was reached, if it is below half of the best until then."""
    best = max(accuracies)
    first = next(k for k, level in enumerate(accuracies) if level >= 0.5 * best)
    lowest, epoch = min((level, first + k + 1) for k, level in enumerate(accuracies[first:]))
    return {"pgd20": lowest, "epoch": epoch} if lowest < 0.5 * max(accuracies[:epoch]) else None


def _line(record: dict[str, Any], epochs: int) -> str:
    return (
        f"epoch {record['epoch']:2d}/{epochs}  loss {record['loss']:.3f}  single-step {record['accuracy']:6.1%}  "
        f"PGD-20 {record['pgd-20']:6.1%}  E_lin {_error(record)}  weight {record['weight'] or 0:.0f}"
    )


def _error(record: dict[str, Any]) -> str:
    return "-" if record["tracked_error"] is None else f"{record['tracked_error']:.1e}"


def _table(runs: list[DemoRun], epochs: int, width: int) -> Table:
    rows = [_cells(run, epochs) for run in runs]
    for columns in (_COLUMNS, _NARROW):
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in columns:
            table.add_column(name, no_wrap=True)
        for cells in rows:
            table.add_row(*(cells.get(name, "") for name in columns))
        if Console(width=1000).measure(table).maximum <= width:
            break
    return table


def _cells(run: DemoRun, epochs: int) -> dict[str, str]:
    if not run.records:
        return {"method": NAMES[run.method], "epoch": f"0/{epochs}"}
    record = run.records[-1]
    return {
        "method": NAMES[run.method],
        "epoch": f"{record['epoch']}/{epochs}",
        "loss": f"{record['loss']:.3f}",
        "single-step": f"{record['accuracy']:.1%}",
        "clean": f"{record['clean']:.1%}",
        "PGD-20": f"{record['pgd-20']:.1%}",
        "best": f"{max(r['pgd-20'] for r in run.records):.1%}",
        "E_lin": _error(record),
        "weight": "-" if record["weight"] is None else f"{record['weight']:.0f}",
        "left": f"{run.seconds_left(epochs):.0f} s",
    }


def describe(summaries: dict[str, dict[str, Any]]) -> str:
    """One sentence a method, from the numbers alone."""
    sentences = []
    for method, one in summaries.items():
        if one["collapsed"]:
            sentences.append(
                f"{NAMES[method]} collapsed in epoch {one['collapse_epoch']}: accuracy under PGD-20 fell from "
                f"{one['pgd20_best']:.1%} to {one['pgd20_final']:.1%} while accuracy under its own single-step attack "
                f"reached {one['single_step']:.1%}."
            )
        else:
            dip = f", with a dip to {one['dip']['pgd20']:.1%} in epoch {one['dip']['epoch']}" if one["dip"] else ""
            sentences.append(
                f"{NAMES[method]} did not collapse: accuracy under PGD-20 ends at {one['pgd20_final']:.1%} "
                f"(best {one['pgd20_best']:.1%}{dip})."
            )
    return " ".join(sentences)


def _write_report(
    path: Path, runs: list[DemoRun], summaries: dict[str, dict[str, Any]], verdict: str, config: Config
) -> None:
    marks = [
        (float(one["collapse_epoch"]), f"{NAMES[method]} collapses")
        for method, one in summaries.items()
        if one["collapsed"]
    ]

    def chart(title: str, label: str, key: str, note: str, **kind: bool) -> Chart:
        series = [
            Series(NAMES[run.method], [r["epoch"] for r in run.records], [r[key] for r in run.records])
            for run in runs
            if any(r[key] is not None for r in run.records)
        ]
        return Chart(title, "epoch", label, series, note=note, marks=marks, **kind)

    charts = [
        chart("Accuracy under a real attack", "PGD-20 accuracy", "pgd-20", "On 1,000 test images.", percent=True),
        chart("Accuracy under the training attack", "single-step accuracy", "accuracy",
              "On the training batches: near 100 % means the network fools its own attack.", percent=True),
        chart("Training loss", "loss", "loss", "At the single-step adversarial points."),
        chart("How far the loss is from linear", "E_lin", "tracked_error",
              "Local linearity error on the test images: the signal ELLE-A watches.", log=True),
        chart("Weight of the penalty", "weight", "weight",
              "ELLE-A raises it when the error leaves its history, and lets it decay otherwise; FGSM has none."),
        chart("Clean accuracy", "accuracy", "clean", "Without any attack, for comparison.", percent=True),
    ]  # fmt: skip
    footer = (
        f"elle demo, seed {config.seed}: {config.model} on 4,000 images of MNIST, "
        f"eps {format_radius(given(config.eps))}, {config.length()}. "
        f"Every number on this page was measured in this run."
    )
    write_page(
        path,
        "Catastrophic overfitting: FGSM and ELLE-A side by side",
        verdict,
        [_end_table(summaries), *charts],
        footer,
    )


def _end_table(summaries: dict[str, dict[str, Any]]) -> PageTable:
    rows = [
        (
            NAMES[method],
            f"{one['pgd20_best']:.1%}",
            f"{one['pgd20_final']:.1%}",
            f"{one['clean']:.1%}",
            f"{one['single_step']:.1%}",
            f"{one['loss']:.3f}",
            f"{one['seconds']:.0f}",
        )
        for method, one in summaries.items()
    ]
    columns = ("Method", "PGD-20, best", "PGD-20, final", "Clean", "Single-step (training)", "Training loss", "Seconds")
    collapsed = frozenset(k for k, one in enumerate(summaries.values()) if one["collapsed"])
    return PageTable("At the end of training", columns, rows, collapsed)
