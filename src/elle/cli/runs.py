"""`elle watch` and `elle plot`: run directories looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elle.cli.options import Device, Root
from elle.errors import InputError, check_file_name, check_folder

RunDirectories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run directories written by `elle train`.")
]


def watch(
    directories: RunDirectories,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Follow runs in the terminal until they finish or stop.

    Example: elle watch runs/a runs/b
    """
    from elle.cli.watch import watch as follow

    follow(directories, once)


def plot(
    directories: RunDirectories,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("plot.html"),
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for each figure as SVG; also PNG and PDF with elle-at[png]."),
    ] = None,
    before: Annotated[Path | None, typer.Option(help="Draw the loss surface of this checkpoint of the run ...")] = None,
    after: Annotated[Path | None, typer.Option(help="... and of this one; default: around its collapse.")] = None,
    root: Root = None,
    device: Device = "auto",
) -> None:
    """Plot runs on one HTML page that opens offline.

    Accuracy, E_lin (the linearity error), lambda, and the loss surface around a collapse.

    Example: elle plot runs/a runs/b --out page.html
    """
    from elle.experiments.figure import write_figures
    from elle.experiments.pictures import write_pictures
    from elle.experiments.rundir import open_runs, unique_names

    check_file_name(out, ".html")
    if figures is not None:
        check_folder(figures, "--figures")
    if (before is None) != (after is None):
        raise InputError("--before and --after belong together; give a checkpoint of the run for each")
    runs = open_runs(directories)
    if before is not None and len(runs) > 1:
        raise InputError("--before and --after are checkpoints of one run; give that run alone")
    if before is None and not any(run.records or run.probes for run in runs):
        raise InputError(
            f"there is nothing to draw yet: {runs[0].path} has no record of an epoch, nor a look at a probe"
        )
    surfaces = {}
    for run, name in zip(runs, unique_names(runs), strict=True):
        if before is not None or (run.path / "after-collapse.safetensors").exists():
            from elle.engine.runtime import pick_device
            from elle.engine.surface import around_collapse

            surfaces[name] = around_collapse(run.path, pick_device(device), before, after, root)
    drawn = write_pictures(out, runs, {name: one for name, one in surfaces.items() if one is not None})
    print(f"{len(drawn)} figures are in {out}")
    if figures is not None:
        print(f"{len(write_figures(figures, drawn))} files are in {figures}")
