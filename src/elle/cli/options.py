"""Options that several commands share, and the refusal of a value that is none of an option's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer

from elle.errors import InputError, nearest

PRECISIONS = ("auto", "fp32", "tf32", "fp16", "bf16")

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory written by `elle train`.")]
Root = Annotated[str | None, typer.Option(help="The data folder; default: the run's own.")]
Eps = Annotated[str | None, typer.Option(help="The radius, as a fraction: 8/255; default: the run's own.")]
Limit = Annotated[
    int | None, typer.Option(min=1, help="Use N test images: the first N, or N spread over a set sorted by class.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def check_choice(option: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        words = ", ".join(allowed)
        raise InputError(f"--{option} {value} does not exist{nearest(value, allowed)}; choose from {words}")
