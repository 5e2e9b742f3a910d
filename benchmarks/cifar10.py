"""Train methods on CIFAR-10 with their default settings and collect accuracy and time in one JSON file.

    python benchmarks/cifar10.py --root DATA --runs runs/cifar10 --methods fgsm,n-fgsm,elle-a --seeds 0

Runs are ordinary run directories and resume, so a killed benchmark continues where it was. The file is written
to benchmarks/results/, named by GPU and torch version; entries of other methods and seeds in it are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from results import result_file

from elle.config import load_config
from elle.engine.checkpoint import write_json
from elle.engine.loop import train
from elle.progress import TrainingProgress


def entry(result: dict[str, Any], directory: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = ("epoch", "loss", "accuracy", "error", "weight", "clean", "pgd-10", "seconds")
    return {
        "method": result["config"]["method"],
        "eps": result["config"]["eps"],
        "seed": result["config"]["seed"],
        "precision": result["precision"],
        "epochs": result["config"]["epochs"],
        "seconds_per_epoch": result["seconds_per_epoch"],
        "train_seconds": result["train_seconds"],
        "collapse_epoch": result["collapse_epoch"],
        "test": result["test"],
        "curve": [{key: record[key] for key in kept if key in record} for record in records],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--methods", default="fgsm,n-fgsm,elle-a")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("words", nargs="*", help="key=value settings for every run")
    args = parser.parse_args()
    for seed in args.seeds.split(","):
        for method in args.methods.split(","):
            directory = args.runs / f"{method}-seed{seed}"
            words = [
                "data=cifar10",
                f"root={args.root}",
                f"method={method}",
                f"seed={seed}",
                f"out={directory}",
                *args.words,
            ]
            with TrainingProgress() as progress:
                result = train(load_config(words), resume=True, watcher=progress.watcher())
            new = entry(result, directory)
            path = result_file("cifar10-short")
            old = json.loads(path.read_text())["runs"] if path.exists() else []
            key = ("method", "eps", "seed", "precision", "epochs")
            others = [one for one in old if any(one[k] != new[k] for k in key)]
            write_json(path, {"torch": result["torch"], "device": result["device"], "runs": [*others, new]})
            print(f"{method}: {result['seconds_per_epoch']} s an epoch, " + json.dumps(result["test"]))


if __name__ == "__main__":
    main()
