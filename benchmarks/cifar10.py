"""Train methods on CIFAR-10 with their default settings and collect accuracy and time in one JSON file.

    python benchmarks/cifar10.py --root DATA --runs runs/cifar10 --methods fgsm,elle-a --eps 8/255 --seeds 0 [--jobs 3]

Runs are ordinary run directories and resume, so a killed benchmark continues where it was. The file is written
to benchmarks/results/, named by GPU and torch version; entries of other methods, radii and seeds in it are kept.
With --jobs above 1 the runs share the GPU and their seconds mean nothing, so they are left out: take those of
`elle bench`, or run alone. Sharing pays where NVIDIA's MPS daemon runs (nvidia-cuda-mps-control -d).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from results import result_file

from elle.files import write_text

KEY = ("method", "eps", "seed", "precision", "epochs", "settings")
CURVE = ("epoch", "loss", "accuracy", "error", "weight", "clean", "pgd-10", "tracked_error", "seconds")


def entry(directory: Path, words: list[str], alone: bool) -> dict[str, Any]:
    result = json.loads((directory / "result.json").read_text())
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    curve = [{key: short(record[key]) for key in CURVE if key in record} for record in records]
    seconds: dict[str, Any] = {key: result[key] for key in ("seconds_per_epoch", "train_seconds")}
    if not alone:
        seconds = {}
        for point in curve:
            point.pop("seconds", None)
    own = {key: result["config"][key] for key in ("method", "eps", "seed", "epochs")}
    return {
        **own,
        "precision": result["precision"],
        "settings": words,
        **seconds,
        "collapse_epoch": result["collapse_epoch"],
        "test": result["test"],
        "curve": curve,
    }


def short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run(directory: Path, words: list[str]) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "log.txt").open("a") as log:
        command = [sys.executable, "-m", "elle", "train", *words, "--out", str(directory), "--resume"]
        return subprocess.run(command, stdout=log, stderr=log).returncode


def keep(new: dict[str, Any], directory: Path) -> None:
    path = result_file("cifar10-short")
    result = json.loads((directory / "result.json").read_text())
    old = json.loads(path.read_text())["runs"] if path.exists() else []
    others = [one for one in old if any(one.get(k, []) != new[k] for k in KEY)]
    runs = sorted([*others, new], key=lambda one: (one["eps"], one["method"], one["seed"]))
    lines = ",\n".join(json.dumps(one) for one in runs)
    write_text(path, f'{{"torch": "{result["torch"]}", "device": "{result["device"]}", "runs": [\n{lines}\n]}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--methods", default="fgsm,n-fgsm,elle-a")
    parser.add_argument("--eps", default="8/255")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("words", nargs="*", help="key=value settings for every run")
    args = parser.parse_args()
    jobs = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for seed in args.seeds.split(","):
            for eps in args.eps.split(","):
                for method in args.methods.split(","):
                    name = "-".join([method, "eps" + eps.replace("/", "-"), f"seed{seed}", *args.words])
                    directory = args.runs / name
                    words = ["data=cifar10", f"root={args.root}", f"method={method}", f"eps={eps}", f"seed={seed}"]
                    jobs[pool.submit(run, directory, [*words, *args.words])] = directory
        for job in as_completed(jobs):
            directory = jobs[job]
            if job.result() != 0:
                print(f"{directory.name}: failed, see {directory / 'log.txt'}", flush=True)
                continue
            new = entry(directory, args.words, args.jobs == 1)
            keep(new, directory)
            accuracies = ", ".join(f"{name} {one['accuracy']:.2%}" for name, one in new["test"].items())
            print(f"{directory.name}: {accuracies}, collapse {new['collapse_epoch']}", flush=True)


if __name__ == "__main__":
    main()
