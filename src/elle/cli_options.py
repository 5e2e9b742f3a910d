"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory written by `elle train`.")]
Root = Annotated[str | None, typer.Option(help="The data folder; otherwise the run's own.")]
Eps = Annotated[str | None, typer.Option(help="The radius, as a fraction: 8/255; otherwise the run's own.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Only N test images: the first, or spread over all that lie class by class.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
