"""Table 1's ImageNet recipe, scaled down, on a folder of generated images: a rehearsal of the real thing.

    python benchmarks/imagenet.py [--images 4096] [--test 256] [--classes 16] [--save]   # a GPU; the recipe's sizes
    python benchmarks/imagenet.py --images 96 --test 2 --classes 2 --shrink 4 --model resnet18   # a minute of a core

A run of the recipe (--method, --eps) with everything it says but the number of images and epochs: 6, 3 and 2 of them,
a ramp of one epoch, which 2,500 steps are on ImageNet, and an eighth of the rate, since it rises within tens of steps
instead of thousands. --shrink divides the sizes 128/224/288 and the batches 512/224/128, and the rate with them. The
run is cut in its second phase and resumed, and ends with PGD-50-10. Prints a line an epoch, and JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from results import result_file

from elle.config import Config, given, parse_config
from elle.data.phases import Phase, Timetable
from elle.engine.loop import train
from elle.engine.watcher import Watcher
from elle.experiments.recipe import load_recipe
from elle.files import write_json

EPOCHS = (6, 3, 2)


def write_images(root: Path, images: int, test: int, classes: int) -> None:
    """train/CLASS/*.jpg and val/CLASS/*.jpg around 500 x 375."""
    counts = {"train": images // classes, "val": test // classes}
    with ThreadPoolExecutor() as pool:  # Pillow resizes and compresses outside of Python's lock
        list(pool.map(_write_class, repeat(root), range(classes), repeat(counts)))


def _write_class(root: Path, number: int, counts: dict[str, int]) -> None:
    """A pattern of the class under one of the image, and a texture: natural images have details of every size."""
    draw = np.random.default_rng(number)
    pattern = draw.integers(0, 128, (6, 8, 3))
    for split, count in counts.items():
        folder = root / split / f"class-{number:03d}"
        folder.mkdir(parents=True)
        for k in range(count):
            size = 500 + int(draw.integers(-60, 61)), 375 + int(draw.integers(-60, 61))
            fields = (pattern + draw.integers(0, 64, pattern.shape), draw.integers(0, 64, (48, 64, 3)))
            pixels = sum(np.asarray(Image.fromarray(field.astype(np.uint8)).resize(size)) for field in fields)
            Image.fromarray(np.asarray(pixels)).save(folder / f"{k:05d}.jpg", quality=90)


def scaled(args: argparse.Namespace, root: Path, out: Path) -> Config:
    """The recipe's run, with its own method, penalty and precision, for a small set and small images."""
    (run,) = load_recipe("table-1").runs(1, only={"method": args.method, "eps": args.eps})
    whole = run.resolved()
    assert whole.phases is not None
    assert len(whole.phases) == len(EPOCHS)
    phases = [
        Phase(epochs, phase.image_size // args.shrink, max(2, phase.batch // args.shrink))
        for epochs, phase in zip(EPOCHS, whole.phases, strict=True)
    ]
    values = run.model_dump() | {"phases": phases, "root": str(root), "out": str(out), "workers": args.workers}
    values["lr"] = given(run.lr) / args.shrink / 8
    if "ramp" in run.options.get("weight", {}):
        ramp = {"ramp": max(1, args.images // phases[0].batch)}
        values["options"] = run.options | {"weight": run.options["weight"] | ramp}
    return parse_config(values | {"validation": args.images // 16, "model": args.model or run.model})


def rehearse(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_images(folder / "images", args.images, args.test, args.classes)
    config = scaled(args, folder / "images", folder / "run")
    phases = config.phases or ()
    trained = args.images // args.classes * args.classes - (config.validation or 0)
    timetable = Timetable(phases, trained)
    cut = timetable.steps(0) * EPOCHS[0] + max(1, timetable.steps(EPOCHS[0]) // 2)
    watcher = Watcher(recorded=lambda record: print(json.dumps(record), flush=True))
    train(config.model_copy(update={"max_steps": cut, "final": "clean"}), watcher=watcher)
    result = train(config, resume=True, watcher=watcher)
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rows, first = [], 0
    for phase in phases:
        seconds = [record["seconds"] for record in records[first : first + phase.epochs]]
        seen = timetable.steps(first) * timetable.batch(first)
        rows.append(phase._asdict() | {"images_per_second": round(seen / min(seconds), 1)})
        first += phase.epochs
    return {
        "method": args.method,
        "eps": args.eps,
        "model": result["config"]["model"],
        "device": result["device"],
        "precision": result["precision"],
        "training_images": trained,
        "phases": rows,
        "resumed_at_step": cut,
        "steps": result["steps"],
        "train_seconds": result["train_seconds"],
        "collapse_epoch": result["collapse_epoch"],
        "accuracy": {name: one["accuracy"] for name, one in result["test"].items()},
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="n-fgsm+elle-a")
    parser.add_argument("--eps", default="2/255")
    parser.add_argument("--images", type=int, default=4096, help="training images, of all classes")
    parser.add_argument("--test", type=int, default=256, help="test images, of all classes")
    parser.add_argument("--classes", type=int, default=16)
    parser.add_argument("--shrink", type=int, default=1, help="divides image sizes and batches")
    parser.add_argument("--model", help="otherwise the recipe's, resnet50")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        result = rehearse(args, Path(folder))
    if args.save:
        write_json(result_file("imagenet"), result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
