"""What a rollback saves, and what the monitor costs: FGSM on CIFAR-10, alone on the GPU, one run after another.

    python benchmarks/recovery.py --root DATA [--runs runs/recovery] [--eps 8/255,16/255] [--no-runs]

For each radius plain FGSM and FGSM with on_collapse=rollback; then, for the cost of the monitor, five epochs with it
and five without, twice by turns: the medians of an epoch are compared, the first with its captures left out. Runs that
are finished are not made again; the numbers go to benchmarks/results/, named by GPU and torch version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from results import result_file

from elle.files import read_lines, write_json

SHORT = ["epochs=5", "eval_every=0", "final=clean"]
BY_TURNS = {"monitor-0": [], "no-monitor-0": ["probe_every=0"], "monitor-1": [], "no-monitor-1": ["probe_every=0"]}


def settings(radii: list[str]) -> dict[str, list[str]]:
    named = {}
    for eps in radii:
        for action, label in (("warn", "plain"), ("rollback", "rollback")):
            named[f"{label}-{eps.replace('/', '-')}"] = [f"eps={eps}", f"on_collapse={action}"]
    return named | {name: [*SHORT, *words] for name, words in BY_TURNS.items()}


def train(words: list[str], directory: Path, root: str) -> None:
    command = [sys.executable, "-m", "elle", "train", "data=cifar10", f"root={root}", "method=fgsm", *words]
    subprocess.run([*command, f"out={directory}"], check=True)


def summary(directory: Path) -> dict[str, Any]:
    result = json.loads((directory / "result.json").read_text())
    epochs = [record["seconds"] for record in read_lines(directory / "metrics.jsonl")]
    told = [
        {key: event[key] for key in ("event", "step", "since", "undone_from", "evidence", "method") if key in event}
        for event in read_lines(directory / "events.jsonl")
        if event["event"] != "finish"
    ]
    return {
        "run": directory.name,
        "eps": result["config"]["eps"],
        "on_collapse": result["config"]["on_collapse"],
        "train_seconds": result["train_seconds"],
        "median_epoch_seconds": statistics.median(epochs[1:]),
        "accuracy": {name: one["accuracy"] for name, one in result["test"].items()},
        "events": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--runs", type=Path, default=Path("runs/recovery"))
    parser.add_argument("--eps", default="8/255,16/255")
    parser.add_argument("--no-runs", action="store_true", help="collect what is finished in --runs")
    args = parser.parse_args()
    directories = []
    for name, words in settings(args.eps.split(",")).items():
        directory = args.runs / name
        if not (directory / "result.json").exists() and not args.no_runs:
            train(words, directory, args.root)
        if (directory / "result.json").exists():
            directories.append(directory)
            row = summary(directory)
            accuracies = ", ".join(f"{attack} {value:.1%}" for attack, value in row["accuracy"].items())
            print(f"{name:16} {row['train_seconds']:7.1f} s, epoch {row['median_epoch_seconds']:.3f} s, {accuracies}")
    if not directories:
        sys.exit(f"no finished run in {args.runs}")
    known = json.loads((directories[0] / "result.json").read_text())
    path = result_file("recovery", known["device"], known["torch"])
    rows = [summary(directory) for directory in directories]
    write_json(path, {"torch": known["torch"], "device": known["device"], "runs": rows})
    print(path)


if __name__ == "__main__":
    main()
