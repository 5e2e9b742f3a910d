"""The runs of a report: found in folders, gathered by setting over their seeds, with the numbers they measured."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elle.config import OWN_IMAGES, Config, format_value, on_own_images
from elle.errors import InputError
from elle.experiments.recipe import Recipe, load_recipe, run_id
from elle.experiments.rundir import RunDirectory, open_runs
from elle.experiments.sweep import FAILURE, MANIFEST
from elle.files import file_digest, read_object

_TELLING = ("method", "eps", "data", "model", "schedule", "epochs", "weight")
"""Settings by which runs are told apart, those first that explain the others."""


VALIDATION = "validation "
"""Before the name of an attack: accuracy at the last epoch on the training images that were held out."""
TIMES = ("seconds", "seconds per epoch", "seconds per step")
"""Numbers of which less is better; all others are accuracies in percent."""


@dataclass(frozen=True)
class Score:
    """Mean and standard deviation of a metric over the seeds of a setting."""

    mean: float
    std: float | None
    """Divided by n - 1; None for one seed."""
    count: int
    collapsed: bool


@dataclass(frozen=True)
class Setting:
    """Finished runs that differ in their seed alone."""

    runs: list[RunDirectory]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def collapsed(self) -> bool:
        return any(run.collapse_step() is not None for run in self.runs)

    @cached_property
    def measured(self) -> list[dict[str, float]]:
        return [measured(run) for run in self.runs]

    def score(self, metric: str) -> Score | None:
        """Mean and std over the seeds that have the number; None where none has."""
        values = [one[metric] for one in self.measured if metric in one]
        if not values:
            return None
        std = statistics.stdev(values) if len(values) > 1 else None
        return Score(statistics.fmean(values), std, len(values), self.collapsed)

    def value(self, key: str) -> Any:
        return flat(self.config).get(key)

    def label(self, key: str) -> str:
        return format_value(key, self.value(key))

    def says(self, key: str) -> bool:
        """Whether it has a value there that a run does not have unless it is given."""
        field = Config.model_fields.get(key)
        return bool(self.value(key) != (None if field is None else field.default))


@dataclass(frozen=True)
class Collected:
    """All that a report is made of."""

    folder: Path
    recipe: Recipe | None
    runs: list[RunDirectory]
    """Finished or not."""
    failures: dict[str, str]
    copies: int
    """Runs left out because another has the same settings and the same seed."""
    others: int = 0
    """Runs left out because they are none of the recipe's, as it is now."""

    @cached_property
    def settings(self) -> list[Setting]:
        groups: dict[str, list[RunDirectory]] = {}
        for run in self.runs:
            if run.finished():
                groups.setdefault(run_id(run.config.model_copy(update={"seed": 0})), []).append(run)
        return [Setting(sorted(group, key=lambda run: run.config.seed)) for group in groups.values()]

    @property
    def configs(self) -> list[Config]:
        return [setting.config for setting in self.settings]

    @cached_property
    def numbers(self) -> list[str]:
        """The names of all numbers that some run has."""
        return list(dict.fromkeys(name for setting in self.settings for one in setting.measured for name in one))

    @property
    def metrics(self) -> list[str]:
        """The numbers to tabulate: those the recipe asks for, otherwise the attacks, the strongest first."""
        chosen = [name for name in self.asked("metric") if name in self.numbers]
        tested = [name for name in self.numbers if name not in TIMES and not name.startswith(VALIDATION)]
        return chosen or sorted(tested, key=_strength)

    @property
    def not_measured(self) -> list[str]:
        """The numbers that the recipe's tables are to show, or to compare with the paper's, and no run has."""
        asked = [] if self.kind in ("curves", "steps", "pictures") else self.asked("metric")
        asked = [*asked, *(one.metric for one in self.recipe.expected)] if self.recipe else asked
        return [name for name in dict.fromkeys(asked) if name not in self.numbers]

    @property
    def fewer_images(self) -> dict[str, int]:
        """Metric -> fewest images, of accuracies that a run has for part of its test set (`elle evaluate --limit`)."""
        fewest: dict[str, int] = {}
        for entries in [accuracies(run) for setting in self.settings for run in setting.runs]:
            whole = max((one["total"] for one in entries.values()), default=0)
            for name in [name for name in self.metrics if name in entries and entries[name]["total"] < whole]:
                fewest[name] = min(entries[name]["total"], fewest.get(name, whole))
        return fewest

    @property
    def fewer_seeds(self) -> list[str]:
        """The metrics that only some seeds of a setting have, as after `elle evaluate` of one of its runs."""
        whole = [(setting, len(setting.runs)) for setting in self.settings]
        return [name for name in self.metrics
                if any((score := setting.score(name)) and score.count < runs for setting, runs in whole)]  # fmt: skip

    @property
    def kind(self) -> str | None:
        """The kind of the recipe's figure; None without a recipe."""
        return self.recipe.kind if self.recipe else None

    def asked(self, key: str) -> list[str]:
        """The words under a key of the recipe's figure; none without a recipe."""
        return self.recipe.asked(key) if self.recipe else []


_PLACES = {"autoattack": 0, "pgd": 1, "fgsm": 3, "clean": 4}
"""Of attacks by the beginning of their names, the strongest first; all others are third."""


def _strength(name: str) -> tuple[int, list[int], str]:
    kind = next((place for start, place in _PLACES.items() if name.startswith(start)), 2)
    # PGD by its steps, then its restarts: pgd-20 is pgd-20-1.
    return kind, [*(-int(part) for part in name.split("-") if part.isdigit()), -1], name


def accuracies(run: RunDirectory) -> dict[str, dict[str, Any]]:
    """Attack -> accuracy on the test images, by `elle evaluate` where it was run in the run's own ball."""
    entries: dict[str, dict[str, Any]] = (run.result or {}).get("test", {})
    if not isinstance(entries, dict) or not all(_is_accuracy(one) for one in entries.values()):
        raise InputError(f"{run.path / 'result.json'} is damaged: its accuracies cannot be read; leave that run out")
    for attacks in _evaluated(run):
        fit = {name: one for name, one in attacks.items() if one["total"] >= entries.get(name, one)["total"]}
        entries = entries | fit
    return entries


def measured(run: RunDirectory) -> dict[str, float]:
    """Accuracies in percent and times in seconds."""
    result = run.result or {}
    numbers = {name: 100 * float(one["accuracy"]) for name, one in accuracies(run).items()}
    if run.config.validation and run.records:
        tracked = {name: value for name, value in run.records[-1].items()
                   if name in ("clean", "fgsm") or name.startswith("pgd-")}  # fmt: skip
        numbers |= {f"{VALIDATION}{name}": 100 * float(value) for name, value in tracked.items()}
    seconds, steps = result.get("train_seconds"), result.get("steps")
    times = (seconds, result.get("seconds_per_epoch"), seconds / steps if seconds and steps else None)
    return numbers | {name: float(value) for name, value in zip(TIMES, times, strict=True) if value is not None}


def _evaluated(run: RunDirectory) -> list[dict[str, Any]]:
    """The attacks of each `elle evaluate` on the run's own images and ball, the last one last.

    Those before it are kept under numbers. Of other weights than the run's, as before it went on, they do not count;
    where its weights are not at hand, the last one's are taken for them.
    """
    file = run.path / "evaluation.json"
    if not file.exists():
        return []
    last = _evaluation(run, file)
    if last is None:
        raise InputError(f"{file} is damaged; evaluate the run again: elle evaluate {shlex.quote(str(run.path))}")
    kept = sorted((int(path.suffixes[0][1:]), path) for path in run.path.glob("evaluation.*.json")
                  if path.suffixes[0][1:].isdigit())  # fmt: skip
    found = [*(one for _, path in kept if (one := _evaluation(run, path))), last]
    file = run.path / "model.safetensors"
    weights = file_digest(file) if file.exists() else last[0]
    return [attacks for digest, attacks in found if digest == weights]


def _evaluation(run: RunDirectory, file: Path) -> tuple[str | None, dict[str, Any]] | None:
    """Which weights were attacked, and what was measured, nothing in another ball; None where that is unreadable."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        ball = math.isclose(record["eps"], run.config.eps or 0) and record["norm"] == run.config.norm
        attacks = dict(record["attacks"]) if ball and on_own_images(run.config, run.result or {}, record) else {}
        weights = record.get("model", {}).get("sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return (weights, attacks) if all(_is_accuracy(one) for one in attacks.values()) else None


def _is_accuracy(entry: Any) -> bool:
    values = [entry.get(key) for key in ("accuracy", "total")] if isinstance(entry, dict) else [None]
    return all(isinstance(value, (int, float)) and math.isfinite(value) for value in values)


def find_runs(sources: Sequence[str]) -> Collected:
    """The runs that the words of the command line name: a recipe and folders of its runs, or runs and folders."""
    named, folders = None, [Path(source) for source in sources]
    if not folders[0].is_dir():
        if len(folders[0].parts) > 1 and folders[0].suffix != ".toml":
            raise InputError(
                f"there is no folder {folders[0]}; give runs, a folder of runs, or a row of `elle recipes`"
            )
        named = load_recipe(sources[0])
        folders = folders[1:] or [Path("runs") / named.name]
    runs = open_runs([path for folder in folders for path in _run_paths(folder)])
    recipe = named or _recipe_of(folders)
    places = _places(runs, recipe) if recipe else {}
    if named and not places:
        raise InputError(
            f"none of the {len(runs)} runs in {folders[0]} belongs to recipe {named.name} as it is now; make them "
            f"with `elle sweep {shlex.quote(sources[0])}`, or report those without it: "
            f"elle report {shlex.quote(str(folders[0]))}"
        )
    found = len(runs)
    if places:
        runs = sorted((run for run in runs if run.path in places), key=lambda run: (places[run.path], run.config.seed))
    distinct = _distinct(runs)
    # Without a reason that can be read, the run is listed as not finished.
    failures = {run.name: str(reason) for run in distinct if (reason := read_object(run.path / FAILURE).get("reason"))}
    recipe = recipe if places else None  # of a sweep whose recipe has changed
    return Collected(folders[0], recipe, distinct, failures, len(runs) - len(distinct), found - len(runs))


def gather(sources: Sequence[str]) -> Collected:
    """As `find_runs`; InputError where no run has finished, or none has an accuracy."""
    found = find_runs(sources)
    if not found.settings:
        raise InputError(
            f"no run in {found.folder} has finished (of {len(found.runs)}); continue with the same `elle sweep`, or "
            f"each by itself: elle train --out DIR --resume"
        )
    if not found.metrics:
        raise InputError(
            f"the runs in {found.folder} have no accuracy of the test set; measure it with: elle evaluate DIR"
        )
    return found


def _run_paths(folder: Path) -> list[Path]:
    if (folder / "config.toml").is_file():
        return [folder]
    paths = sorted(file.parent for file in folder.glob("*/config.toml"))
    if not paths:
        raise InputError(f"{folder} holds no run: no config.toml is in it or one folder below; `elle sweep` makes them")
    return paths


def _recipe_of(folders: Sequence[Path]) -> Recipe | None:
    """The recipe a folder was swept from, if it can still be found."""
    if len(folders) > 1:
        return None
    try:
        return load_recipe(read_object(folders[0] / MANIFEST)["recipe"])
    except (InputError, KeyError):
        return None


def _places(runs: Sequence[RunDirectory], recipe: Recipe) -> dict[Path, int]:
    """The number of the recipe's setting that each run is of: by its settings, or by the digits of its name."""
    known: dict[str, int] = {}
    configs = recipe.runs(1)
    for seed in {run.config.seed for run in runs}:
        known |= {run_id(one.model_copy(update={"seed": seed}))[:8]: place for place, one in enumerate(configs)}
    keys = {run.path: (run_id(run.config)[:8], run.name.rpartition("-")[2]) for run in runs}
    return {path: known[key] for path, pair in keys.items() for key in pair if key in known}


def _distinct(runs: Sequence[RunDirectory]) -> list[RunDirectory]:
    """One run of each configuration, a finished one where there is: a copy of a seed is no further seed."""
    found: dict[str, RunDirectory] = {}
    for run in runs:
        key = run_id(run.config)
        if key not in found or (run.finished() and not found[key].finished()):
            found[key] = run
    return list(found.values())


def flat(config: Config) -> dict[str, Any]:
    """Every setting by the name a user writes, a method's own fields as method.PART.FIELD."""
    values = config.model_dump()
    options = values.pop("options")
    values["root"] = Path(config.root or "").name if config.data in OWN_IMAGES else None
    return values | {f"method.{part}.{name}": value for part, own in options.items() for name, value in own.items()}


def telling_keys(configs: Sequence[Config], first: Sequence[str] = ()) -> list[str]:
    """The keys by which these are told apart, `first` ones first, each only if it adds a difference; never the seed."""
    runs = [flat(config) for config in configs]
    others = [key for values in runs for key in values if key not in ("seed", "out")]
    needed: list[str] = []
    told = 1
    for key in dict.fromkeys([*first, *_TELLING, *others]):
        different = len({tuple(str(values.get(one)) for one in [*needed, key]) for values in runs})
        if different > told:
            needed.append(key)
            told = different
    return needed
