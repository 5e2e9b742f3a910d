"""Is every collapse reported, in time, and nothing else? Runs of many kinds, with the truth beside the monitor.

    python benchmarks/detection.py --jobs 12                           # the data that come with elle
    python benchmarks/detection.py --jobs 6 --root DATA --save         # and CIFAR-10
    python benchmarks/detection.py --from runs/a runs/b                # also finished run directories

The truth is PGD-20 on test images at every look of the monitor. By the definition of docs/collapse.md a run has
collapsed where it falls below half of its best and stays there to the end, for an epoch at least; where it came back
after an epoch or more the collapse was temporary (an alarm is right but not asked for); all others are healthy. A run
passes if its collapse is reported no later than an epoch after the fall, or if it is healthy and none is. Runs are in
--runs and not made again; `--only TEXT` picks settings by name.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from elle.engine.monitor import ABOVE_CHANCE, Monitor, collapsed_readings

# Words of each run; the name is made of them. Chosen before the monitor was run on them.
EMBEDDED = [
    *(f"data=mnist5k method=fgsm eps=0.28 seed={seed}" for seed in range(6)),
    *(f"data=mnist5k method=fgsm eps=0.32 seed={seed}" for seed in range(4)),
    *(f"data=mnist5k method=rs-fgsm eps=0.32 seed={seed}" for seed in range(3)),
    *(f"data=mnist5k method=n-fgsm eps=0.36 seed={seed}" for seed in range(3)),
    *(f"data=digits method=fgsm eps=0.2 seed={seed}" for seed in range(4)),
    *(f"data=digits method=fgsm eps=0.15 seed={seed}" for seed in range(3)),
    *(f"data=mnist5k method=fgsm eps=0.3 model=preact-resnet18 epochs=8 seed={seed}" for seed in range(2)),
    *(f"data=mnist5k method=elle-a eps=0.28 seed={seed}" for seed in range(6)),
    *(f"data=mnist5k method=elle eps=0.2 seed={seed}" for seed in range(3)),
    *(f"data=mnist5k method=fgsm eps=0.1 seed={seed}" for seed in range(3)),
    *(f"data=mnist5k method=n-fgsm eps=0.15 seed={seed}" for seed in range(3)),
    *(f"data=mnist5k method=pgd-7 eps=0.2 seed={seed}" for seed in range(2)),
    *(f"data=digits method=n-fgsm eps=0.1 seed={seed}" for seed in range(3)),
    *(f"data=digits method=elle-a eps=0.2 seed={seed}" for seed in range(4)),
    *(f"data=digits method=gradalign eps=0.15 seed={seed}" for seed in range(2)),
    *(f"data=mnist5k method=elle-a eps=0.2 model=preact-resnet18 epochs=8 seed={seed}" for seed in range(2)),
]
CIFAR10 = [
    *(f"data=cifar10 method=fgsm eps=8/255 seed={seed}" for seed in range(3)),
    *(f"data=cifar10 method=fgsm eps=16/255 seed={seed}" for seed in range(3)),
    *(f"data=cifar10 method=rs-fgsm eps=16/255 seed={seed}" for seed in range(2)),
    *(f"data=cifar10 method=fgsm eps=12/255 model=small-cnn seed={seed}" for seed in range(2)),
    *(f"data=cifar10 method=n-fgsm eps=8/255 seed={seed}" for seed in range(3)),
    *(f"data=cifar10 method=n-fgsm eps=16/255 seed={seed}" for seed in range(2)),
    *(f"data=cifar10 method=elle-a eps=8/255 seed={seed}" for seed in range(2)),
    *(f"data=cifar10 method=elle-a eps=16/255 seed={seed}" for seed in range(2)),
    *(f"data=cifar10 method=fgsm eps=2/255 seed={seed}" for seed in range(2)),
    "data=cifar10 method=pgd-2 eps=8/255 seed=0",
]


def name_of(words: str) -> str:
    return "-".join(word.partition("=")[2].replace("/", "-") for word in words.split())


def make_run(words: str, runs: Path, root: str | None, images: int, device: str) -> Path:
    """Train with the monitor on and PGD-20 on test images at each of its looks; the run directory."""
    from elle.config import load_config
    from elle.data.resident import to_tensors
    from elle.engine.checkpoint import append_line
    from elle.engine.loop import Run, Watcher
    from elle.evaluation.evaluate import evaluate

    directory = runs / name_of(words)
    if (directory / "result.json").exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    extra = [f"out={directory}", f"device={device}", "eval_every=0", "final=clean,pgd-20", "on_collapse=warn"]
    # A multi-step method is monitored only when asked: twice an epoch, as the others are.
    if "method=pgd" in words:
        extra.append(f"probe_every={25 if 'mnist5k' in words else 192}")
    config = load_config([*words.split(), *extra, *([f"root={root}"] if root and "cifar10" in words else [])])
    holder: list[Run] = []

    def stepped(step: int) -> None:
        run = holder[0]
        if step % run.guard.every:
            return
        eps = run.config.eps or 0.0
        found = evaluate(run.step.model, *test, "pgd-20", eps, norm=run.config.norm, batch=1000)["pgd-20"]
        within = (step - 1) % run.steps_per_epoch + 1
        rows = run.step.records[max(0, within - run.guard.every) : within, 1]
        append_line(
            directory / "truth.jsonl",
            {"step": step, "pgd-20": found["accuracy"], "accuracy": float(rows.nanmean())},
        )

    run = Run(config.resolved(), directory, Watcher(stepped=stepped))
    holder.append(run)
    x, y = to_tensors(run.images.test, run.device)
    test = x[:images], y[:images]
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(run.config.to_toml())
    run.finish()
    return directory


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def collapse_start(multi: list[float], single: list[float], chance: float, epoch: int) -> int | None:
    """The index from which multi-step accuracy is below half of its best to the end, for `epoch` readings at least.

    A network that has lost half of its single-step accuracy as well has not collapsed but forgotten.
    """
    best = max(multi)
    first = max((k + 1 for k, level in enumerate(multi) if level >= 0.5 * best), default=0)
    lost = best > ABOVE_CHANCE * chance and len(multi) - first >= epoch and single[-1] >= 0.5 * max(single)
    return first if lost else None


def temporary(multi: list[float], single: list[float], chance: float, epoch: int) -> bool:
    """Whether it was collapsed for `epoch` readings in a row, at any time."""
    bad = collapsed_readings(multi, single, chance)
    return any(all(bad[k : k + epoch]) for k in range(len(bad) - epoch + 1))


def judged(directory: Path) -> dict[str, Any]:
    """One row: when the run collapsed in truth, when the monitor said so."""
    result = json.loads((directory / "result.json").read_text())
    config, probes = result["config"], read_lines(directory / "probes.jsonl")
    truth = read_lines(directory / "truth.jsonl")
    records = read_lines(directory / "metrics.jsonl")
    steps_per_epoch = records[0]["step"]
    every = probes[0]["step"] if probes else steps_per_epoch
    per_epoch = max(1, steps_per_epoch // every)
    if truth:
        rows, key, window = truth, "pgd-20", max(2, per_epoch)
    else:
        key = next(name for name in reversed(config["track"].split(",")) if name.startswith("pgd"))
        rows, window = [record for record in records if key in record], 2
    multi, single, chance = [row[key] for row in rows], [row["accuracy"] for row in rows], 1 / len(result["classes"])
    fall = collapse_start(multi, single, chance, window)
    start = None if fall is None else rows[fall]["step"]
    kind = "healthy" if not temporary(multi, single, chance, window) else "temporary"
    monitor = Monitor(per_epoch)
    for reading in probes:
        monitor.observe(reading)
    # The first alarm: a reported collapse, of this run directory or of the same readings judged again.
    found = next((verdict for verdict in monitor.verdicts if verdict.kind == "collapse"), None)
    detected = found.step if found else None
    delay = None if start is None or detected is None else (detected - start) / steps_per_epoch
    passed = kind == "temporary" or detected is None if start is None else delay is not None and delay <= 1
    return {
        "run": directory.name,
        "data": config["data"],
        "model": config["model"],
        "method": config["method"],
        "eps": config["eps"],
        "seed": config["seed"],
        "epochs": config["epochs"],
        "steps_per_epoch": steps_per_epoch,
        "truth": "PGD-20 on test images" if truth else f"{key} on tracking images, once an epoch",
        "best": max(row[key] for row in rows),
        "final": rows[-1][key],
        "kind": kind if start is None else "collapsing",
        "collapse_step": start,
        "detected_step": detected,
        "delay_epochs": delay,
        "verdicts": [verdict.kind for verdict in monitor.verdicts],
        "evidence": found.evidence if found else None,
        "passed": passed,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in ("collapsing", "temporary", "healthy")}
    return {
        "collapsing": len(of["collapsing"]),
        "in_time": sum(row["passed"] for row in of["collapsing"]),
        "missed": sum(row["detected_step"] is None for row in of["collapsing"]),
        "healthy": len(of["healthy"]),
        "false_alarms": sum(not row["passed"] for row in of["healthy"]),
        "temporary": len(of["temporary"]),
        "temporary_reported": sum(row["detected_step"] is not None for row in of["temporary"]),
    }


def print_row(row: dict[str, Any]) -> None:
    truth, found = row["collapse_step"], row["detected_step"]
    print(
        f"{'ok  ' if row['passed'] else 'FAIL'} {row['run']:44} {row['kind']:10} "
        f"best {row['best']:6.1%} final {row['final']:6.1%}  "
        f"collapse {truth if truth is not None else '-':>6}  detected {found if found is not None else '-':>6}  "
        f"{'' if row['delay_epochs'] is None else format(row['delay_epochs'], '+.2f') + ' epochs'}  "
        f"{', '.join(row['verdicts'])}",
        flush=True,
    )


def run_all(chosen: list[str], args: argparse.Namespace) -> list[Path]:
    directories = []
    # A fresh interpreter each: CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        jobs = {pool.submit(make_run, words, args.runs, args.root, args.images, args.device): words for words in chosen}
        for job in as_completed(jobs):
            try:
                directories.append(job.result())
                print_row(judged(directories[-1]))
            except Exception as problem:
                print(f"FAIL {name_of(jobs[job])}: {type(problem).__name__}: {problem}", file=sys.stderr)
    return directories


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/detection"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--root", help="CIFAR-10's folder; without it only the embedded data are used")
    parser.add_argument("--only", default="", help="settings whose name contains this text")
    parser.add_argument("--images", type=int, default=1000, help="test images for the truth")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--from", dest="finished", type=Path, nargs="*", default=[], help="finished run directories")
    parser.add_argument("--no-runs", action="store_true", help="judge --from alone")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.jobs)))
    chosen = [] if args.no_runs else [*EMBEDDED, *(CIFAR10 if args.root else [])]
    chosen = [words for words in chosen if args.only in name_of(words)]
    directories = run_all(chosen, args)
    finished = [judged(directory) for directory in args.finished]
    for row in finished:
        print_row(row)
    rows = sorted([*(judged(directory) for directory in directories), *finished], key=lambda row: row["run"])
    print(json.dumps(summary(rows)))
    if args.save:
        from results import result_file

        path = result_file("detection")
        path.write_text(json.dumps({"summary": summary(rows), "runs": rows}, indent=2) + "\n")
        print(path)


if __name__ == "__main__":
    main()
