"""The model card of an exported network: Markdown, made of what the run directory holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elle.config import Config, format_radius, on_own_images
from elle.data.decoding import MARGIN
from elle.data.registry import find_dataset
from elle.engine.trained import Trained
from elle.errors import InputError
from elle.export.formats import Format
from elle.files import file_digest, read_lines, read_object
from elle.version import __version__

_LISTED = 20
"""Classes that are named."""
_NO_LICENCE = "not stated: say which with `--licence`, and mind that the licence of the images may bind the weights too"


_Numbers = tuple[float, float, float, int]


def model_card(
    directory: Path,
    form: Format,
    file: str,
    trained: Trained,
    compared: Mapping[str, Any],
    licence: str | None,
) -> str:
    """A page in Markdown about the network: how it was trained, its measured robustness, and how to load it."""
    config, header = trained.config.resolved(), trained.header
    result = read_object(directory / "result.json")  # a card without accuracies says so
    parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    facts = {
        "Task": f"classify images into {len(trained.classes)} classes: {_listed(trained.classes)}",
        "Input": f"float32 [N, {', '.join(map(str, header['shape']))}], pixels in [0, 1]{_cut_out(config)}",
        "Output": f"logits [N, {len(trained.classes)}]",
        "Network": f"`{config.model}`, {parameters:,} parameters, normalisation {_normalisation(header)}",
        "Data": f"`{config.data}`{_folder(config)}, images of {' x '.join(map(str, header['shape']))}",
        "Method": _method(config) + _rollbacks(directory, result),
        "Trained": _training(config, result),
        "Licence": licence or _NO_LICENCE,
    }
    lines = [f"# {config.model} on {config.data}, {config.method}, eps {format_radius(config.eps or 0)}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items()), ""]
    lines += ["## Accuracy", "", *_accuracies(directory, config, result), ""]
    lines += ["## Load", "", *_loading(form, file, trained.classes, header), "", *_reading(config)]
    same = f"the same class for {compared['same_class']} of {compared['images']}"
    lines += [
        f"The file was read back and compared with the trained network on {compared['images']} test images: "
        f"logits differ by at most {compared['max_difference']:.1e} (the largest is {compared['largest_logit']:.2g}), "
        f"{same}.",
        "",
    ]
    return "\n".join(lines)


def _folder(config: Config) -> str:
    """The name of the folder the files were in, which tells one set of own images from another."""
    return f" ({Path(config.root).name})" if config.root and find_dataset(config.data).files else ""


def _method(config: Config) -> str:
    words = f"`{config.method}`, eps {format_radius(config.eps or 0)} in {config.norm}"
    return words + (f", lambda {config.weight:g}" if config.weight is not None else "")


def _rollbacks(directory: Path, result: Mapping[str, Any]) -> str:
    """The last rollback after a collapse, and the method from there on; not those that `--from` has undone."""
    events = [event for event in read_lines(directory / "events.jsonl") if event["event"] == "rollback"]
    if not events or not result.get("rollbacks"):
        return ""
    last = events[-1]
    weight = "" if last["weight"] is None else f", lambda {last['weight']:g}"
    return f"; it collapsed and was rolled back to step {last['step']}, from where on it is `{last['method']}`{weight}"


def _training(config: Config, result: Mapping[str, Any]) -> str:
    cut = "" if config.max_steps is None else f", ended after {result.get('steps', config.max_steps)} steps"
    begun = "" if config.init is None else f", from the weights in {Path(config.init).name}"
    words = f"{config.length()}{cut}{begun}, seed {config.seed}, elle {result.get('version', __version__)}"
    collapse = result.get("collapse_epoch")
    return words + (f"; **collapsed in epoch {collapse}**" if collapse is not None else "")


def _cut_out(config: Config) -> str:
    """How a photograph becomes an image of that shape."""
    if not find_dataset(config.data).files:
        return ", no other preprocessing"
    size = config.image_size or 0
    return (
        f": the short side of a photograph resized to {round(MARGIN * size)} pixels (left as it is where it has fewer, "
        f"enlarged to {size} below that), its middle {size} x {size} cut out, as `read_image` does below; "
        f"a transparency is dropped, and an orientation tag not applied"
    )


def _normalisation(header: Mapping[str, Any]) -> str:
    return "as its first layer" if header.get("normalise") == "dataset" else "not used"


def _accuracies(directory: Path, config: Config, result: Mapping[str, Any]) -> list[str]:
    """The accuracies at the end of training, and those of `elle evaluate` on these very weights and images."""
    rows = _rows(directory / "result.json", result.get("test", {}), config.eps or 0, config.norm)
    weights = file_digest(directory / "model.safetensors")
    for file in sorted(directory.glob("evaluation*.json")):  # the last one, and those before it under numbers
        evaluation = read_object(file)
        if evaluation.get("model", {}).get("sha256") == weights and on_own_images(config, result, evaluation):
            rows += _rows(file, evaluation.get("attacks"), evaluation.get("eps"), evaluation.get("norm"))
    if not rows:
        return ["Not measured."]
    lines = ["| attack | eps | accuracy | 95 % interval | test images |", "|---|---|---|---|---|"]
    for name, radius, (accuracy, low, high, total) in dict.fromkeys(rows):
        lines.append(f"| {name} | {radius} | {accuracy:.2%} | {low:.2%} to {high:.2%} | {total:,} |")
    return [*lines, "", "An accuracy under attack is an upper bound: a stronger attack may find more."]


def _radius(eps: float, norm: str) -> str:
    return format_radius(eps) if norm == "linf" else f"{format_radius(eps)} in {norm}"


def _rows(file: Path, attacks: Any, eps: Any, norm: Any) -> list[tuple[str, str, _Numbers]]:
    """What a file says of each attack: its radius, and accuracy, interval and number of images."""
    try:
        radius = _radius(float(eps), norm)
        return [(name, "" if name == "clean" else radius, _numbers(one)) for name, one in attacks.items()]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f"{file} is damaged: its accuracies cannot be read; repair it, or move it away") from None


def _numbers(one: Mapping[str, Any]) -> _Numbers:
    low, high = one["interval"]
    return float(one["accuracy"]), float(low), float(high), int(one["total"])


def _loading(form: Format, file: str, classes: tuple[str, ...], header: Mapping[str, Any]) -> list[str]:
    """Code as RobustBench's `load_model` is used: a path in, a network for images in [0, 1] out."""
    channels, height, width = header["shape"]
    code = (
        f"{form.loader}\n\n"
        f"model = load_model({file!r})\n"
        f"classes = {list(classes)!r}\n"
        f"logits = model(x)  # x: float32 [N, {channels}, {height}, {width}] in [0, 1]\n"
        f"names = [classes[k] for k in logits.argmax(1).tolist()]"
    )
    return [f"`{file}` ({form.name}): {form.description}.", "", "```python", *code.splitlines(), "```"]


# What elle.data.decoding makes of a photograph that is evaluated, for programs without elle. A test compares their
# pixels, which differ by two levels at most: Pillow's resizing rounds otherwise than torch's.
_READER = """\
import numpy
import torch
from PIL import Image


def read_image(path, size={size}, short={short}):
    photo = Image.open(path)
    width, height = photo.size
    shrink = min(photo.size) / min(max(min(photo.size), size), short)
    if photo.mode == "RGB" and shrink >= 2:  # a large JPEG is decoded at 1/2, 1/4 or 1/8 of its size
        photo.draft("RGB", (int(width / shrink), int(height / shrink)))
    across, down, side = photo.width / width, photo.height / height, size * shrink
    left, top = round((width - side) / 2 * across), round((height - side) / 2 * down)
    right, bottom = round((width + side) / 2 * across), round((height + side) / 2 * down)
    if photo.mode.startswith("I"):  # 16-bit grey, which convert would make white
        photo = Image.fromarray((numpy.asarray(photo) >> 8).astype(numpy.uint8))
    photo = photo.convert("RGB").crop((left, top, max(left + 1, right), max(top + 1, bottom)))
    pixels = numpy.array(photo.resize((size, size), Image.Resampling.BILINEAR))
    return torch.tensor(pixels).permute(2, 0, 1)[None] / 255
"""


def _reading(config: Config) -> list[str]:
    """Code that makes a photograph the x that the network was evaluated on; nothing for other images."""
    size = config.image_size
    if size is None or not find_dataset(config.data).files:
        return []
    code = _READER.format(size=size, short=round(MARGIN * size)).splitlines()
    return [
        "`x = read_image(path)` reads a photograph as the test images were read:",
        "",
        "```python",
        *code,
        "```",
        "",
    ]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
