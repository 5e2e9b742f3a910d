"""Time an epoch of the whole training loop: batches, steps, looks for a collapse, records.

    python benchmarks/epochs.py --root DATA [--methods fgsm,elle-a] [--epochs 5] [--save] [KEY=VALUE ...]

Each method trains on CIFAR-10 with its default settings (or the ones given), and nothing is evaluated in between. Told
is the median of all epochs but the first, in which kernels are chosen and the step is captured. `--save` keeps it under
benchmarks/results/; rows of other methods or settings there are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import result_file

from elle.config import load_config
from elle.engine.loop import train
from elle.files import write_json

METHODS = "fgsm,n-fgsm,elle,elle-a,gradalign,pgd-10"


def measured(method: str, common: Sequence[str], words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train with a method, and say how long its epochs took."""
    config = load_config([f"method={method}", *common, *words, "eval_every=0", "final=clean", f"out={folder / method}"])
    result = train(config)
    records = (folder / method / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(record)["seconds"] for record in records]
    return {
        "method": method,
        "settings": list(words),
        "images": result["steps"] // len(seconds) * config.resolved().batch,
        "seconds_per_epoch": round(statistics.median(seconds[1:]), 4),
        "epochs": seconds,
        "device": result["device"],
        "torch": result["torch"],
        "precision": result["precision"],
    }


def keep(row: dict[str, Any]) -> None:
    """Put a row into the saved file, in place of the one of the same method and settings."""
    path = result_file("epochs", row["device"], row["torch"])
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [one for one in rows if (one["method"], one["settings"]) != (row["method"], row["settings"])]
    head = {name: row.pop(name) for name in ("device", "torch", "precision")}
    write_json(path, head | {"rows": [*rows, row]})


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as in elle train")
    parser.add_argument("--root")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args(words)
    if args.epochs < 2:
        parser.error("--epochs must be 2 or more: the first epoch does not count")
    root = [f"root={args.root}"] if args.root else []
    common = ["data=cifar10", *root, f"epochs={args.epochs}"]
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods.split(","):
            row = measured(method, common, args.settings, Path(folder))
            print(f"{method:16} {row['seconds_per_epoch']:.3f} s, {row['images']} images", flush=True)
            if args.save:
                keep(row)


if __name__ == "__main__":
    main()
