"""Is every collapse reported, in time, and nothing else? Runs of many kinds, with the truth beside the monitor.

    python benchmarks/detection.py --jobs 12                           # the data that come with elle, on the CPU
    python benchmarks/detection.py --jobs 12 --root DATA --save        # and CIFAR-10, on the GPU at the same time
    python benchmarks/detection.py --limit 900 ...                     # whatever is done by then; the next call goes on
    python benchmarks/detection.py --no-runs --from runs/a runs/b      # finished run directories

The truth is PGD-20 on test images, in the precision of training, at every look of the monitor. By the definition of
docs/collapse.md a run has collapsed where it falls below half of its best and stays there to the end, for an epoch at
least, or where it never was robust and ends answering attacked images better than clean ones, its loss bent. Where it
came back after an epoch or more the collapse was temporary; so is one of the last epoch, whose report is not yet due.
Where it was at chance all along the run was never robust. In both an alarm is not asked for, and right only if the
truth was low as well in the epoch before it. All others are healthy. A
run passes if its collapse is reported no later than an epoch after the fall, or if it is healthy and none is. The fall
is dated to the first look that shows it, and where accuracy comes and goes, to the one from which it stays low; an
alarm given before is counted only if it still stands. Runs are in --runs, each continued where it was cut and never
made again; `--only TEXT` picks settings by name.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from detection_runs import CIFAR10, EMBEDDED, SET_ON, make_run, name_of, run_all
from results import result_file

from elle.engine.monitor import Monitor, Reading, Verdict, collapsed_readings
from elle.errors import InputError, WorkError
from elle.files import read_lines, write_json

KINDS = ("collapsing", "temporary", "never robust", "healthy")


def collapse_start(rows: list[Reading], floor: float, least: int) -> int | None:
    """The index of the row from which `multi` is below half of its best to the end, for `least` rows or more.

    A network that has lost half of its single-step accuracy as well has not collapsed but forgotten.
    """
    multi, single = [row["multi"] for row in rows], [row["single"] for row in rows]
    best = max(multi)
    if best <= floor:
        return early_start(rows)
    first = max((k + 1 for k, level in enumerate(multi) if level >= 0.5 * best), default=0)
    lost = len(multi) - first >= least and single[-1] >= 0.5 * max(single)
    return first if lost else None


def early_start(rows: list[Reading]) -> int | None:
    """Of a run that never was robust: where it had first learnt its own attack alone, as at its end."""
    bad = [leaking(row) for row in rows]
    return bad.index(True) if bad[-1] else None


def leaking(row: Reading) -> bool:
    """Attacked images are answered better than clean ones, or three in four of them, but not under PGD-20.

    The loss must be bent, by the monitor's E_lin: a weak attack learnt by a network that stays straight is no collapse.
    """
    learnt = row["single"] >= min(row["clean"] + 0.1, 0.75) and row["multi"] < 0.5 * row["single"]
    return bool(learnt and (row["error"] or 0.0) >= 2e-3)


def temporary(rows: list[Reading], chance: float, epoch: int) -> bool:
    """Whether it was collapsed for `epoch` rows in a row, at any time.

    The shares are written out: what is true does not change with the monitor's thresholds.
    """
    bad = collapsed_readings([row["multi"] for row in rows], [row["single"] for row in rows], chance, 0.5, kept=0.9)
    return any(all(bad[k : k + epoch]) for k in range(len(bad) - epoch + 1))


def kind_of(rows: list[Reading], chance: float, floor: float, epoch: int, fall: int | None) -> str:
    if fall is not None:
        return "collapsing"
    if max(row["multi"] for row in rows) <= floor:
        return "never robust"
    passing = temporary(rows, chance, epoch) or collapse_start(rows, floor, 1) is not None
    return "temporary" if passing else "healthy"


def alarm(verdicts: list[Verdict], due: int | None) -> Verdict | None:
    """The alarm that stands at step `due`, else the first after it; without a collapse any alarm at all."""
    standing = None
    for verdict in verdicts:
        if standing is not None and (due is None or verdict.step > due):
            break
        if verdict.kind == "collapse":
            standing = verdict
        elif verdict.kind == "recovery":
            standing = None
    return standing


def unfounded(verdicts: list[Verdict], rows: list[Reading], floor: float, epoch: int) -> int:
    """Alarms in whose last `epoch` steps the truth was never below half of its best so far, nor labels read off."""
    bests = accumulate((row["multi"] for row in rows), max)
    low = [
        row["step"]
        for row, best in zip(rows, bests, strict=True)
        if row["multi"] < 0.5 * best > 0.5 * floor or leaking(row)
    ]
    alarms = [verdict.step for verdict in verdicts if verdict.kind == "collapse"]
    return sum(not any(step - epoch <= one <= step for one in low) for step in alarms)


def observed(directory: Path, result: dict[str, Any], per_epoch: int) -> tuple[list[dict[str, Any]], int, int, str]:
    """What the run was in truth: rows of accuracies by step, how many an epoch, of how many images, and of which.

    From the truth measured beside the run, or where there is none from what the run itself has tracked.
    """
    track = result["config"]["track"]
    if truth := read_lines(directory / "truth.jsonl"):
        seen, key, rows_per_epoch, images = truth, "pgd-20", per_epoch, truth[0]["images"]
        errors = {one["step"]: one["error"] for one in read_lines(directory / "probes.jsonl")}
        words = f"PGD-20 on {images} test images"
    else:
        key = next(name for name in reversed(track.split(",")) if name.startswith("pgd"))
        seen = [record for record in read_lines(directory / "metrics.jsonl") if key in record]
        rows_per_epoch, images = 1, result["config"]["validation"]
        errors = {one["step"]: one.get("tracked_error") for one in seen}
        words = f"{key} on tracking images, once an epoch"
    rows = [
        {"multi": one[key], "single": one["accuracy"], "clean": one["clean"], "error": errors.get(one["step"])}
        | {"step": one["step"]}
        for one in seen
    ]
    return rows, rows_per_epoch, images, words


def judged(directory: Path) -> dict[str, Any]:
    """One row: when the run collapsed in truth, when the monitor said so."""
    result = json.loads((directory / "result.json").read_text())
    config, probes = result["config"], read_lines(directory / "probes.jsonl")
    steps_per_epoch = read_lines(directory / "metrics.jsonl")[0]["step"]
    every = probes[0]["step"] if probes else steps_per_epoch
    per_epoch = max(1, steps_per_epoch // every)
    rows, rows_per_epoch, images, words = observed(directory, result, per_epoch)
    chance = 1 / len(result["classes"])
    floor = chance + 3 * math.sqrt(chance * (1 - chance) / images)  # no luck of a network that knows nothing
    fall = collapse_start(rows, floor, rows_per_epoch + 1)  # an epoch after the first of them is in the run
    start = None if fall is None else rows[fall]["step"]
    kind = kind_of(rows, chance, floor, max(2, rows_per_epoch), fall)
    monitor = Monitor(per_epoch)
    for reading in probes:
        monitor.observe(reading)
    found = alarm(monitor.verdicts, None if start is None else start + steps_per_epoch)
    detected = found.step if found else None
    delay = None if start is None or detected is None else (detected - start) / steps_per_epoch
    groundless = unfounded(monitor.verdicts, rows, floor, steps_per_epoch)
    passed = {
        "collapsing": delay is not None and delay <= 1,
        "temporary": groundless == 0,
        "never robust": groundless == 0,
        "healthy": detected is None,
    }[kind]
    about = {"run": directory.name, "held_out": directory.name not in SET_ON}
    about |= {key: config[key] for key in ("data", "model", "method", "eps", "seed", "epochs")}
    return about | {
        "steps_per_epoch": steps_per_epoch,
        "truth": words,
        "best": max(row["multi"] for row in rows),
        "final": rows[-1]["multi"],
        "kind": kind,
        "collapse_step": start,
        "detected_step": detected,
        "delay_epochs": delay,
        "verdicts": [verdict.kind for verdict in monitor.verdicts],
        "unfounded_alarms": groundless,
        "evidence": found.evidence if found else None,
        "passed": passed,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    return {"all": counts(rows), "held out": counts([row for row in rows if row["held_out"]])}


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    return {
        "collapsing": len(of["collapsing"]),
        "in_time": sum(row["passed"] for row in of["collapsing"]),
        "missed": sum(row["detected_step"] is None for row in of["collapsing"]),
        "healthy": len(of["healthy"]),
        "false_alarms": sum(not row["passed"] for row in of["healthy"]),
        "temporary": len(of["temporary"]),
        "temporary_reported": sum(row["detected_step"] is not None for row in of["temporary"]),
        "never_robust": len(of["never robust"]),
        "never_robust_reported": sum(row["detected_step"] is not None for row in of["never robust"]),
        "unfounded_alarms": sum(row["unfounded_alarms"] for row in rows),
    }


def print_row(row: dict[str, Any]) -> None:
    truth, found = row["collapse_step"], row["detected_step"]
    print(
        f"{'ok  ' if row['passed'] else 'FAIL'} {row['run']:44} {row['kind']:12} "
        f"best {row['best']:6.1%} final {row['final']:6.1%}  "
        f"collapse {truth if truth is not None else '-':>6}  detected {found if found is not None else '-':>6}  "
        f"{'' if row['delay_epochs'] is None else format(row['delay_epochs'], '+.2f') + ' epochs'}  "
        f"{', '.join(row['verdicts'])}",
        flush=True,
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/detection"))
    parser.add_argument("--root", help="CIFAR-10's folder; without it only the embedded data are used")
    parser.add_argument("--only", default="", help="settings whose name contains this text")
    parser.add_argument("--images", type=int, default=500, help="test images for the truth")
    parser.add_argument("--device", default="cuda", help="for CIFAR-10")
    parser.add_argument("--device-jobs", type=int, default=1, help="runs at a time there")
    parser.add_argument("--embedded-device", default="cpu", help="for the embedded data")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time there")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which runs are cut")
    parser.add_argument("--from", dest="finished", type=Path, nargs="*", default=[], help="finished run directories")
    parser.add_argument("--no-runs", action="store_true", help="judge what is finished in --runs and --from")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.one:
        try:
            make_run(args.one, args.runs, args.root, args.images, args.device)
        except (InputError, WorkError) as problem:
            sys.exit(f"{name_of(args.one)}: {problem}")
        return
    embedded, cifar10 = (
        [words for words in settings if args.only in name_of(words)] for settings in (EMBEDDED, CIFAR10)
    )
    jobs = {args.embedded_device: embedded}
    if args.root:
        jobs[args.device] = cifar10 + jobs.pop(args.device, [])
    slots = {args.device: args.device_jobs} | {args.embedded_device: args.jobs}
    command = [__file__, "--runs", str(args.runs), "--images", str(args.images)]
    command += ["--root", args.root] if args.root else []
    for words in () if args.no_runs else run_all(jobs, slots, command, args.limit):
        if (args.runs / name_of(words) / "result.json").exists():
            print_row(judged(args.runs / name_of(words)))
        else:
            print(f"FAIL {name_of(words)} did not end", file=sys.stderr)
    finished = sorted(path.parent for path in args.runs.glob("*/result.json") if args.only in path.parent.name)
    rows = [judged(directory) for directory in [*finished, *args.finished]]
    if args.no_runs:
        for row in rows:
            print_row(row)
    print(json.dumps(summary(rows)))
    if args.save:
        path = result_file("detection")
        write_json(path, {"summary": summary(rows), "runs": rows})
        print(path)


if __name__ == "__main__":
    main()
