"""A sweep: the runs of a recipe, each in a run directory of its own; what is finished is never made again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

from elle.config import OWN_IMAGES, Config, load_config, parse_words
from elle.errors import InputError, WorkError
from elle.experiments.recipe import Recipe, matches, run_id, worded
from elle.experiments.rundir import RunDirectory
from elle.experiments.training import RESULT, is_finished
from elle.files import write_json
from elle.signals import handling

MANIFEST = "sweep.json"
FAILURE = "failure.json"
State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass
class Item:
    """One run of a sweep and what is known of it."""

    config: Config
    path: Path
    state: State = "waiting"
    said: str = ""
    """What it reached, or why it failed."""
    epochs_done: float = 0.0
    epochs: int | None = None
    """How many it trains; of an image folder that is known when its images have been counted."""

    def __post_init__(self) -> None:
        self.epochs = self.config.epochs

    @property
    def name(self) -> str:
        return self.path.name

    def look(self) -> None:
        """See how far the run has come."""
        run = RunDirectory(self.path, self.config)
        try:
            if self.epochs is None and (file := self.path / "config.toml").is_file():
                self.epochs = load_config([], file).epochs
            run.read()
        except InputError as problem:  # one damaged file stops no other run
            self.said = str(problem)
            return
        self.epochs_done = float(run.records[-1]["epoch"]) if run.records else 0.0
        test = (run.result or {}).get("test", {})
        self.said = ", ".join(f"{name} {one['accuracy']:.1%}" for name, one in test.items())


class Executor(Protocol):
    """Who makes the runs: processes of this machine, or a cluster."""

    slots: int
    """How many runs it takes at a time."""

    def start(self, item: Item) -> None: ...

    def ended(self) -> list[tuple[Item, str | None]]:
        """Runs that have ended since the last look, with the reason where they failed."""

    def stop(self) -> None:
        """End what still runs gently, so that what is trained is kept, and let go of the place where it ran."""


def run_name(config: Config) -> str:
    """A name a person can read, and eight digits of the run's identity."""
    return f"{config.resolved().name()}-{run_id(config)[:8]}"


def chosen_runs(recipe: Recipe, seeds: int | None, only: Sequence[str]) -> list[Config]:
    """The recipe's runs with the settings of the `key=value` words; a key given twice allows either value."""
    allowed: dict[str, list[Any]] = {}
    for word in only:
        parse_words([word])  # tells what is wrong with the word as it was written
        key, _, text = word.partition("=")
        allowed.setdefault(key, []).append(worded(key, text))
    for key, values in allowed.items():
        for value in values:
            recipe.runs(seeds, {key: value})  # a value that no run has is a mistake
    runs = [run for run in recipe.runs(seeds) if all(_any_matches(run, key, values) for key, values in allowed.items())]
    # Where no run has all of them, this refuses, and names what the runs differ in.
    return runs or recipe.runs(seeds, {key: values[0] for key, values in allowed.items()})


def _any_matches(config: Config, key: str, values: Sequence[Any]) -> bool:
    return any(matches(config, {key: value}) for value in values)


def plan(configs: Sequence[Config], folder: Path, beside: bool = False) -> list[Item]:
    """One item a run, in the recipe's order; those already finished in `folder`, or in another `beside` it, say so."""
    items: dict[str, Item] = {}
    for config in configs:
        path = folder / run_name(config)
        if path.name not in items:
            # Images of one's own are told apart by the name of their folder alone.
            if beside and not path.exists() and config.data not in OWN_IMAGES:
                there = (other.parent for other in sorted(folder.parent.glob(f"*/{escape(path.name)}/{RESULT}")))
                path = next(there, path)
            item = Item(config.resolved(), path, "finished" if is_finished(path) else "waiting")
            item.look()
            items[path.name] = item
    return list(items.values())


def link_runs(items: Iterable[Item], folder: Path) -> int:
    """Link the runs that another sweep has finished into `folder`, so that a report finds them; how many they are."""
    linked = 0
    for item in items:
        path, found = folder / item.name, item.path
        item.path = path
        if path.is_symlink() and not path.exists():  # what it led to is gone
            path.unlink()
        if found != path:
            try:
                path.symlink_to(os.path.relpath(found, folder))
                linked += 1
            except OSError:  # a filesystem without links: it is made again
                item.state, item.said, item.epochs_done = "waiting", "", 0.0
    return linked


def write_manifest(folder: Path, recipe: str, items: Sequence[Item]) -> None:
    """What the folder holds, for `elle report`; runs of earlier sweeps into it stay on the list by being there."""
    write_json(folder / MANIFEST, {"recipe": recipe, "runs": [item.name for item in items]})


def run_sweep(
    items: Sequence[Item], executor: Executor, show: Callable[[Item | None], None], pause: float = 0.2
) -> None:
    """Make every waiting run; one that fails does not stop the others; `show` is told of each change, and of time."""
    waiting = [item for item in items if item.state == "waiting"]
    active = 0
    try:
        # SIGTERM does what Ctrl-C does: a scheduler that takes the machine away loses nothing. SIGINT is named because
        # a shell has a process in the background ignore it.
        with handling(_interrupt, signal.SIGINT, signal.SIGTERM):
            while waiting or active:
                while waiting and active < executor.slots:
                    item = waiting.pop(0)
                    try:
                        executor.start(item)
                        active += 1
                    except (OSError, WorkError) as problem:  # its folder cannot be written
                        item.state, item.said = "failed", str(problem)
                        show(item)
                for item, reason in executor.ended():
                    active -= 1
                    _settle(item, reason)
                    show(item)
                for item in items:
                    if item.state == "running":
                        item.look()
                show(None)
                time.sleep(pause)
    finally:
        executor.stop()
        for item in items:
            if item.state == "running":
                item.state = "finished" if is_finished(item.path) else "stopped"


def _settle(item: Item, reason: str | None) -> None:
    """Write down how a run ended."""
    item.look()
    if reason is None:
        item.state = "finished"
        (item.path / FAILURE).unlink(missing_ok=True)
    else:
        item.state, item.said = "failed", reason
        write_json(item.path / FAILURE, {"reason": reason, "time": round(time.time(), 3)})


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def counts(items: Sequence[Item]) -> Mapping[State, int]:
    """How many runs are in each state, empty ones left out."""
    states: list[State] = ["finished", "running", "waiting", "failed", "stopped"]
    return {state: n for state in states if (n := sum(item.state == state for item in items))}
