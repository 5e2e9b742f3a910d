"""Accuracy over seconds: how fast a network gets as robust as the paper's ELLE-A.

    python benchmarks/speedrun.py --root DATA --save                                   # recipes/speedrun.toml
    python benchmarks/speedrun.py --root DATA epochs=10 epochs=20 "method=n-fgsm lr=0.2 batch=128" --seeds 3 --save
    python benchmarks/speedrun.py --root DATA --limit 540 ...                          # the next call goes on

Each word, or words in quotes, is a setting: the recipe with these keys changed; without any, the recipe itself. A run
has a process of its own, alone on the GPU. Its `seconds` are those of `loading` (from the files to images and network
on the device) and of `training`, all epochs; not those of evaluation, checkpoints, and the start of Python and CUDA.
`elapsed` is what the clock says from the beginning of loading to the last epoch's record, checkpoints and all.
`warm_up`, a part of the training, are the first four steps: libraries, the choice of kernels, and the capture of the
CUDA graph, the same however long one trains. (A penalty left out at some steps makes a second graph, captured a few
steps later, and so does each phase.) Triton's kernels are compiled once a machine, which takes longer; on a GPU a few
steps before a setting's first run, or an epoch of each phase, see to it.

A training that was cut is made again from the start, as its seconds would be wrong; an evaluation goes on where it
was; what has finished, here or in the saved file, is not made again. --save writes benchmarks/results/speedrun-*.json
after every run, and the curve beside it as .svg. A setting that fails (its training diverges) is left out: the others
go on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from results import result_file

from elle.charts.lines import Chart, Series, draw
from elle.config import Config, load_config
from elle.engine.loop import train
from elle.engine.parts import build_parts
from elle.engine.ranks import ALONE
from elle.engine.runtime import GraphedStep
from elle.engine.watcher import Watcher
from elle.errors import InputError, Interrupted, WorkError
from elle.evaluation.names import parse_attacks
from elle.experiments.recipe import load_recipe, run_id
from elle.experiments.sweep import run_name
from elle.experiments.training import is_running
from elle.files import write_json, write_text

TIMES = "times.json"
SECONDS = ("seconds", "loading", "training", "warm_up", "elapsed")
CHOSEN = ("method", "epochs", "batch", "lr", "average", "options")
"""What is written down of a setting; its words tell the rest."""


def settings(recipe: str, changes: Sequence[str], root: str | None, runs: Path) -> dict[str, Config]:
    """The recipe with each change, by its words; an attack comes after the run, where it can be interrupted."""
    loaded = load_recipe(recipe).runs(1)
    if len(loaded) > 1:
        raise InputError(f"recipe {recipe} has {len(loaded)} settings; give the changes of one as words instead")
    file = runs / "recipe.toml"
    write_text(file, loaded[0].to_toml())
    more = [f"root={root}"] if root else []
    return {words: load_config([*words.split(), *more, "final=clean"], file).resolved() for words in changes or [""]}


def check(words: str, config: Config) -> None:
    """Build a setting's parts as its training will, so that a mistake is told before others have been trained."""
    try:
        build_parts(config, torch.device("cpu"), "fp32", ALONE).step.data.close()
    except InputError as problem:
        raise InputError(f"{words or 'the recipe'}: {problem}") from None


def train_timed(file: Path, directory: Path) -> None:
    """Train as the file says, and write down where the seconds went."""
    moments: dict[str, float] = {}

    def moment(name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        moments[name] = time.perf_counter()

    def stepped(step: int) -> None:
        if step == GraphedStep.WARM_UP + 1:
            moment("warm")

    moment("begin")
    watcher = Watcher(started=lambda *_: moment("loaded"), stepped=stepped, recorded=lambda _: moment("recorded"))
    result = train(load_config([f"out={directory}"], file), watcher=watcher)
    loading = moments["loaded"] - moments["begin"]
    times = {
        "seconds": loading + result["train_seconds"],
        "loading": loading,
        "training": result["train_seconds"],
        "warm_up": moments.get("warm", moments["loaded"]) - moments["loaded"],
        "elapsed": moments["recorded"] - moments["begin"],
    }
    write_json(directory / TIMES, {name: round(value, 3) for name, value in times.items()})


def compile_kernels(config: Config, folder: Path) -> None:
    """Train a little and throw it away: what Triton compiles stays in its cache, for all runs after.

    An epoch of each phase, whose images and batches have kernels of their own, or a few steps; with the penalty's
    backward, which a run leaves out until its weight jumps, perhaps late.
    """
    options = {slot: dict(fields) for slot, fields in config.options.items()}
    options.get("weight", {}).pop("negligible", None)
    short: dict[str, Any] = {"max_steps": 5}
    if config.phases:
        short = {"phases": tuple(phase._replace(epochs=1) for phase in config.phases), "epochs": len(config.phases)}
    directory = folder / "compiling"
    shutil.rmtree(directory, ignore_errors=True)
    train_alone(config.model_copy(update={"options": options, **short}), directory)
    shutil.rmtree(directory)


def train_alone(config: Config, directory: Path) -> None:
    file = directory.with_name(f"{directory.name}.toml")
    write_text(file, config.to_toml())
    _call([str(Path(__file__)), "--one", str(file), "--runs", str(directory)], directory)


def make(config: Config, directory: Path, attack: str) -> None:
    """Train, unless that has been done to its end; then attack, going on where that was cut."""
    if is_running(directory):
        raise InputError(f"{directory} is in use by another process; wait for it")
    if not (directory / TIMES).exists():
        shutil.rmtree(directory, ignore_errors=True)
        train_alone(config, directory)
    if attacked(directory, attack) is None:
        root = ["--root", config.root] if config.root else []
        _call(["-m", "elle", "evaluate", str(directory), "--attack", attack, "--resume", *root], directory)


def _call(command: list[str], directory: Path) -> None:
    if subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL).returncode:
        raise WorkError(f"{directory} failed; the line above says why")


def attacked(directory: Path, attack: str) -> dict[str, Any] | None:
    """The record of a run's evaluation, if it has all of these attacks."""
    file = directory / "evaluation.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"attacks": {}}
    return record if set(attack.split(",")) <= record["attacks"].keys() else None


def entry(words: str, config: Config, directory: Path, attack: str) -> dict[str, Any]:
    """What is kept of a run."""
    result, record = json.loads((directory / "result.json").read_text()), attacked(directory, attack)
    assert record is not None
    accuracy = {name: record["attacks"][name]["accuracy"] for name in attack.split(",")}
    return {
        "id": run_id(config),
        "setting": words,
        **{key: value for key, value in config.model_dump().items() if key in CHOSEN},
        "seed": config.seed,
        **{key: result[key] for key in ("device", "torch", "precision", "steps")},
        **json.loads((directory / TIMES).read_text()),
        "accuracy": accuracy,
        "images": record["data"]["count"],
    }


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and std over the seeds of each setting, the fastest first."""
    rows = []
    for words in dict.fromkeys(run["setting"] for run in runs):
        mine = [run for run in runs if run["setting"] == words]
        row = {"setting": words, "seeds": len(mine)} | {key: mine[0][key] for key in CHOSEN}
        row |= {name: _over_seeds([run[name] for run in mine]) for name in SECONDS}
        names = [name for name in mine[0]["accuracy"] if all(name in run["accuracy"] for run in mine)]
        rows.append(row | {"accuracy": {name: _over_seeds([run["accuracy"][name] for run in mine]) for name in names}})
    return sorted(rows, key=lambda row: row["seconds"]["mean"])


def _over_seeds(values: list[float]) -> dict[str, float | None]:
    std = round(statistics.stdev(values), 5) if len(values) > 1 else None
    return {"mean": round(statistics.fmean(values), 5), "std": std}


def curve(rows: Sequence[dict[str, Any]]) -> Chart:
    """Accuracies over seconds; settings that differ in their epochs alone are joined."""
    lines: dict[str, list[tuple[float, dict[str, float | None]]]] = {}
    for row in rows:
        others = " ".join(word for word in row["setting"].split() if not word.startswith("epochs="))
        for attack, score in row["accuracy"].items():
            name = ", ".join(part for part in (others, attack) if part)
            lines.setdefault(name, []).append((row["seconds"]["mean"], score))
    series = []
    for name, points in lines.items():
        spread = [score["std"] for _, score in points]
        if not any(std is not None for std in spread):
            spread = []
        series.append(Series(name, [x for x, _ in points], [score["mean"] for _, score in points], spread))
    return Chart("Accuracy over seconds of loading and training", "seconds", "accuracy", series, percent=True,
                 note="Bands: one std over seeds.")  # fmt: skip


def keep(new: dict[str, Any]) -> None:
    """Put a run into the saved file, in place of an earlier one of the same settings; draw the curve anew."""
    path = result_file("speedrun", new["device"], new["torch"])
    runs = [one for one in saved(path) if one["id"] != new["id"]] + [new]
    rows = summary(runs)
    write_json(path, {"torch": new["torch"], "device": new["device"], "settings": rows, "runs": runs})
    write_text(path.with_suffix(".svg"), draw(curve(rows)))


def saved(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())["runs"]) if path.exists() else []


def line(row: dict[str, Any]) -> str:
    """A setting as a line of the table."""

    def written(score: dict[str, float | None], factor: float, digits: int) -> str:
        std = "" if score["std"] is None else f" +- {factor * score['std']:.{digits}f}"
        return f"{factor * (score['mean'] or 0.0):.{digits}f}{std}"

    seconds = f"{written(row['seconds'], 1, 1)} s (loading {row['loading']['mean']:.1f}, "
    seconds += f"warm-up {row['warm_up']['mean']:.1f}; elapsed {row['elapsed']['mean']:.1f})"
    accuracies = ", ".join(f"{name} {written(score, 100, 2)} %" for name, score in row["accuracy"].items())
    return f"{row['setting'] or 'the recipe'}: {row['seeds']} seed{'s' * (row['seeds'] != 1)}, {seconds}, {accuracies}"


def in_turn(found: dict[str, Config], seeds: int) -> Iterator[tuple[str, Config]]:
    """Every setting once before any has its second seed: an early end leaves a whole curve."""
    for seed in range(seeds):
        for words, config in found.items():
            yield words, config.model_copy(update={"seed": seed})


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="a setting each; several keys in quotes")
    parser.add_argument("--recipe", default="speedrun")
    parser.add_argument("--root")
    parser.add_argument("--runs", type=Path, default=Path("runs/speedrun"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--attack", default="clean,pgd-20,autoattack")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no run after so many seconds")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    if args.one:
        train_timed(args.one, args.runs)
        return
    until = time.monotonic() + args.limit
    attack = ",".join(one.name for one in parse_attacks(args.attack))
    found = settings(args.recipe, args.changes, args.root, args.runs)
    known = {run["id"]: run for run in (saved(result_file("speedrun")) if args.save else [])}
    for setting, config in {one[0]: one for one in in_turn(found, args.seeds) if run_id(one[1]) not in known}.values():
        check(setting, config)
    runs, failed, uncompiled = [], set(), set(found if torch.cuda.is_available() else [])
    for setting, config in in_turn(found, args.seeds):
        new = known.get(run_id(config))
        if new is None or not set(attack.split(",")) <= new["accuracy"].keys():
            if time.monotonic() > until:
                print("the time is up; the same command goes on")
                break
            if setting in failed:
                continue
            directory = args.runs / run_name(config)
            try:
                if setting in uncompiled and not (directory / TIMES).exists():
                    compile_kernels(config, args.runs)
                    uncompiled.remove(setting)
                make(config, directory, attack)
            except WorkError as problem:
                print(f"speedrun: {problem}; {setting or 'the recipe'} is left out", file=sys.stderr)
                failed.add(setting)
                continue
            new = entry(setting, config, directory, attack)
            if args.save:
                keep(new)
        runs.append(new | {"setting": setting})
    for row in summary(runs):
        print(line(row))
    if failed:
        raise WorkError(f"{len(failed)} of {len(found)} settings failed; the lines above say why")


if __name__ == "__main__":
    try:
        main()
    except (InputError, WorkError) as problem:
        print(f"speedrun: {problem}", file=sys.stderr)
        sys.exit(problem.exit_code)
    except KeyboardInterrupt:
        print("speedrun: interrupted; the same command goes on", file=sys.stderr)
        sys.exit(Interrupted.exit_code)
