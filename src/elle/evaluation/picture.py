"""A picture of attacked images: the originals, what each attack makes of them, and its perturbation amplified."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from elle.errors import InputError, first_line
from elle.evaluation.mode import device_of, evaluation_mode, exact_float32, is_wrong
from elle.evaluation.names import EvaluationAttack
from elle.files import write_atomically

TILE, GAP, CAPTION, MARGIN = 96, 6, 18, 150
"""Pixels: a tile, the space between tiles, a caption's height, the space for the rows' names."""
RIGHT, WRONG, INK = (20, 110, 50), (185, 30, 30), (30, 30, 30)


@dataclass(frozen=True)
class Row:
    """Images [n, C, H, W] in [0, 1] with the predicted classes; for an attack also the perturbation."""

    name: str
    x: Tensor
    predicted: list[int | None]
    """None where the logits are not a number: that is no class, and counts as wrong."""
    y: list[int]
    delta: Tensor | None


def attacked_rows(
    model: nn.Module,
    x: npt.NDArray[np.uint8],
    y: npt.NDArray[np.int64],
    attacks: Sequence[EvaluationAttack],
    eps: float,
    *,
    count: int,
    seed: int = 0,
) -> list[Row]:
    """`count` images classified correctly, from all over the set, and the last point of each attack on them."""
    device = device_of(model, torch.device("cpu"))
    with evaluation_mode(model, seed, device), exact_float32(device):
        points, labels = _correct_ones(model, x, y, count, device)
        rows = [_row("original", model, points, labels, None)]
        for one in attacks:
            if one.attack is not None:
                try:
                    x_adv = one.attack(model, points, labels, eps)
                except RuntimeError as problem:  # no way back from the logits to the image
                    raise InputError(
                        f"{one.name} finds no gradient of the network to follow: {first_line(problem)}"
                    ) from problem
                rows.append(_row(one.name, model, x_adv, labels, x_adv - points))
    return rows


def _correct_ones(
    model: nn.Module, x: npt.NDArray[np.uint8], y: npt.NDArray[np.int64], count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    kept: list[tuple[Tensor, Tensor]] = []
    # Every so many images, not the first: files lie class by class.
    order = np.argsort(np.arange(len(y)) % max(1, len(y) // count), kind="stable")
    for first in range(0, len(y), 256):
        block = order[first : first + 256]
        points = torch.from_numpy(np.array(x[block])).to(device).float() / 255
        labels = torch.from_numpy(np.array(y[block])).to(device)
        with torch.no_grad():
            right = ~is_wrong(model(points).float(), labels)
        kept.append((points[right], labels[right]))
        if sum(len(labels) for _, labels in kept) >= count:
            break
    points, labels = (torch.cat(parts)[:count] for parts in zip(*kept, strict=True))
    if len(labels) == 0:
        raise InputError("the network classifies no test image correctly: there is nothing to attack")
    return points, labels


def _row(name: str, model: nn.Module, x: Tensor, y: Tensor, delta: Tensor | None) -> Row:
    with torch.no_grad():
        logits = model(x)
    answers = zip(logits.argmax(1).tolist(), logits.isnan().any(1).tolist(), strict=True)
    predicted = [None if undefined else k for k, undefined in answers]
    return Row(name, x.cpu(), predicted, y.tolist(), None if delta is None else delta.cpu())


def draw(rows: Sequence[Row], eps: float, classes: Sequence[str], path: Path) -> None:
    """Write the rows as a PNG; no perturbation is grey, and the largest of a row, eps in linf, is black or white."""
    lines = [(row, False) for row in rows[:1]] + [(row, changed) for row in rows[1:] for changed in (False, True)]
    heights = [TILE + GAP + (0 if changed else CAPTION) for _, changed in lines]
    width = MARGIN + len(rows[0].y) * (TILE + GAP)
    canvas = Image.new("RGB", (width, sum(heights) + GAP), "white")
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(13)
    top = GAP
    for (row, changed), height in zip(lines, heights, strict=True):
        # Not by eps: in an l2 ball a pixel moves by a small part of it, and the tile would be plain grey.
        factor = 0.5 / (eps if row.delta is None else float(row.delta.abs().max()) or eps)
        name = f"{row.name}\nperturbation\nx {factor:.3g}" if changed else row.name
        pen.multiline_text((GAP, top + TILE // 3), name, INK, font)
        for k, (predicted, label) in enumerate(zip(row.predicted, row.y, strict=True)):
            left = MARGIN + k * (TILE + GAP)
            image = row.x[k] if row.delta is None or not changed else row.delta[k] * factor + 0.5
            canvas.paste(_tile(image), (left, top))
            if not changed:
                words = _fitting("not a number" if predicted is None else _name(classes[predicted], predicted), font)
                pen.text((left + TILE / 2, top + TILE + 1), words, RIGHT if predicted == label else WRONG, font, "ma")
        top += height
    content = io.BytesIO()
    canvas.save(content, "PNG")
    write_atomically(path, content.getvalue())


_LATIN = str.maketrans("\u00f8\u00d8\u0142\u0141\u0111\u0110\u00f0\u00d0\u0131", "oOlLdDdDi") | {
    ord(letter): words
    for letter, words in zip("\u00df\u00e6\u00c6\u0153\u0152", ("ss", "ae", "AE", "oe", "OE"), strict=True)
}
"""Letters of Latin scripts that are no letter of ASCII with an accent: o with a stroke, sharp s, ..."""


def _name(name: str, number: int) -> str:
    """A class's name in the letters of Pillow's font, which are ASCII's: others would be boxes, and name no class."""
    decomposed = unicodedata.normalize("NFKD", name.translate(_LATIN))
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    return plain if plain.isascii() else f"class {number}"


def _fitting(words: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The words, cut to a tile's width."""
    while font.getlength(words) > TILE and len(words) > 1:
        words = words.rstrip("…")[:-1] + "…"
    return words


def _tile(image: Tensor) -> Image.Image:
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).expand(3, -1, -1)  # grey becomes three channels
    whole = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    return whole.resize((TILE, TILE), Image.Resampling.NEAREST)
