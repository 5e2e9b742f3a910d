"""A finished run as a file for other programs: written, read back, compared on test images, then put in place."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elle.data.resident import to_tensors
from elle.data.sources import spread_images
from elle.engine.trained import load_run
from elle.errors import InputError, WorkError, check_folder, first_line, nearest
from elle.export.card import model_card
from elle.export.formats import FORMATS, Format, Header, quiet
from elle.files import write_text

IMAGES = 32
"""Test images on which the file's logits are compared with the network's."""
TOLERANCE = 1e-4
"""The difference allowed, relative to the largest logit: other kernels add in another order."""


def export_run(
    directory: Path, to: str, out: Path | None = None, *, root: str | None = None, licence: str | None = None
) -> dict[str, Any]:
    """Write the run's network to `out` in the format called `to`, with its model card beside it; what was compared."""
    if to not in FORMATS:
        raise InputError(f"--to {to!r} does not exist{nearest(to, FORMATS)}; use {', '.join(FORMATS)}")
    form = FORMATS[to]
    trained = load_run(directory)
    path = out or directory / "exported" / f"model{form.suffix}"
    _check_name(path, form)
    card = _checked_card(path)
    x, _ = to_tensors(spread_images(trained.images(root).test, IMAGES), "cpu")
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.part{form.suffix}")  # some formats insist on their ending
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        compared = _written(form, trained.model, x, trained.header, temporary)
        text = model_card(directory, form, path.name, trained, compared, licence)
        write_text(card, text)
        os.replace(temporary, path)
    except OSError as problem:
        raise WorkError(f"could not write {path}: {problem.strerror}; what was there before is untouched") from None
    finally:
        with contextlib.suppress(OSError):  # a folder that cannot be written has none
            temporary.unlink()
    return {"file": str(path), "card": str(card), "format": to, "bytes": path.stat().st_size} | compared


def _check_name(path: Path, form: Format) -> None:
    """Refuse a name that says another format: with `--to` forgotten, a program would be given what it cannot read."""
    ending = path.suffix.lower()
    others = [one.name for one in FORMATS.values() if ending and one.suffix.endswith(ending)]
    if others and form.name not in others:
        raise InputError(
            f"--out {path} has the ending of {others[0]}, and --to is {form.name}; add --to {others[0]}, or name a "
            f"{form.suffix} file"
        )


def _checked_card(path: Path) -> Path:
    """The card's place. Only what was exported before is replaced: a run's own network, or a user's file, is not."""
    if path.is_dir():  # asked first: `.` has no name for a card to be named after
        raise InputError(f"--out {path} is a folder; name a file in it")
    card = path.with_name(f"{path.name}.md")
    check_folder(path.parent)
    if path.exists() and not card.exists():
        raise InputError(f"{path} exists and was not written by `elle export`; choose another --out, or remove it")
    return card


def _written(form: Format, model: nn.Module, x: Tensor, header: Header, path: Path) -> dict[str, Any]:
    """Write, read back, compare; WorkError where the file does not compute what the network does."""
    try:
        with quiet(), torch.no_grad():
            # Two: an exporter takes the size of a batch of one for a constant.
            form.write(model, torch.cat([x, x])[:2], header, path)
            network = form.read(path)
            found = torch.cat([network(x[:1]), network(x[1:])]) if len(x) > 1 else network(x)
            expected = model(x)
    except (InputError, WorkError, OSError):
        raise
    except Exception as problem:  # an exporter may fail in any way at all on a network it cannot express
        raise WorkError(
            f"this network cannot be written as {form.name}: {first_line(problem)[:200]}; try another format"
        ) from None
    difference, largest = float((found - expected).abs().max()), float(expected.abs().max())
    if not difference <= TOLERANCE * max(1.0, largest):
        raise WorkError(
            f"the {form.name} file gives other logits than the network: they differ by {difference:.2g} "
            f"where the largest is {largest:.2g}; nothing was written; try another format"
        )
    same = int((found.argmax(1) == expected.argmax(1)).sum())
    return {"images": len(x), "max_difference": difference, "largest_logit": largest, "same_class": same}
