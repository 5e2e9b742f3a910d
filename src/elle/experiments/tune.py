"""Choosing lambda by PGD-20 on images held out of the training set: the paper's grid (Appendix B.2), or Optuna."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elle.config import Config, load_config, parse_words
from elle.errors import InputError, WorkError, first_line
from elle.experiments.recipe import load_recipe, run_id
from elle.experiments.rundir import open_run
from elle.experiments.sweep import chosen_runs

Train = Callable[[Config], object]
"""Trains into the configuration's `out`, from its newest checkpoint if it has one."""
ATTACK = "pgd-20"
PAPER: dict[tuple[str, str], tuple[float, ...]] = {
    ("elle", "svhn"): (200, 2_000, 10_000, 20_000, 200_000),
    ("elle", "cifar10"): (100, 1_000, 5_000, 10_000, 100_000),
    ("elle-a", "svhn"): (5_000, 10_000, 15_000, 20_000),
    ("elle-a", "cifar10"): (1_000, 2_000, 3_000, 4_000, 5_000),
}
"""The values of Appendix B.2 by penalty and dataset."""
_MULTIPLES = {"elle": (0.02, 0.2, 1.0, 2.0, 20.0), "elle-a": (0.25, 0.5, 0.75, 1.0, 1.25)}
"""The same as multiples of the value chosen: the grid of every other dataset, around its default."""
_HELD_OUT = 256
"""Training images kept to judge by, where a dataset's own settings keep none."""
_PAUSES = (0.2, 0.5, 1.0)
"""Seconds after which a database that has refused is asked again."""


@dataclass(frozen=True)
class Setting:
    """A configuration, and the weights to train it with."""

    config: Config
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """One weight and the held-out accuracy of each seed trained with it."""

    weight: float
    scores: tuple[float, ...]
    """Empty where a run collapsed or diverged: the seeds after it are not trained."""
    verdict: str = ""

    @property
    def score(self) -> float | None:
        return statistics.mean(self.scores) if self.scores else None


def settings(words: Sequence[str]) -> list[Setting]:
    """`key=value` words, or a recipe and words that choose among its runs, as what is to be tuned."""
    if words and "=" not in words[0]:
        grouped: dict[str, list[Config]] = {}
        if "weight" in parse_words(words[1:]):
            raise InputError("leave weight out: the recipe's values are tried; give others with --weights")
        for config in chosen_runs(load_recipe(words[0]), 1, words[1:]):
            _penalty(config)
            grouped.setdefault(run_id(config.model_copy(update={"weight": 0.0})), []).append(config)
        return [_setting(configs[0], [one.weight for one in configs]) for configs in grouped.values()]
    config = load_config(words)
    if config.weight is not None:
        raise InputError(f"weight={config.weight:g}: that is what is chosen here; give values with --weights instead")
    if config.out is not None:
        raise InputError(f"out={config.out}: the runs of a tuning share a folder; name it with --out {config.out}")
    return [_setting(config, [])]


def _penalty(config: Config) -> str:
    penalty = config.method.rpartition("+")[2]
    if penalty not in _MULTIPLES:
        raise InputError(
            f"method {config.method} has no ELLE penalty to weigh; use elle, elle-a or {config.method}+elle-a"
        )
    return penalty


def _setting(config: Config, given: Sequence[float | None]) -> Setting:
    penalty = _penalty(config)
    if config.validation == 0:
        raise InputError("validation=0: values are compared by held-out images; name how many, or leave it out")
    whole = config.resolved()
    own = tuple(weight for weight in given if weight is not None)
    around = PAPER.get((penalty, config.data)) or tuple((whole.weight or 0.0) * one for one in _MULTIPLES[penalty])
    return Setting(_judged(config), own if len(own) > 1 else around)


def _judged(config: Config) -> Config:
    """The run as it is tuned: held-out images, one look at them in the end, and no more steps after a collapse."""
    whole = config.resolved()
    changes: dict[str, Any] = {"track": f"clean,{ATTACK}", "final": "clean", "on_collapse": "stop", "weight": None}
    held_out = whole.validation if whole.validation != 0 else _HELD_OUT
    # The last epoch is looked at in any case; how many an image folder has is known when its images are counted.
    return config.model_copy(update=changes | {"eval_every": whole.epochs or 10**6, "validation": held_out})


def try_weight(setting: Setting, weight: float, seeds: int, out: Path, train: Train) -> Trial:
    """Train with this weight, each run in a folder of its own; what a run before has trained is not trained again."""
    scores = []
    for seed in range(setting.config.seed, setting.config.seed + seeds):
        config = setting.config.model_copy(update={"weight": float(weight), "seed": seed})
        path = out / run_id(config)
        verdict = _verdict(path)
        if verdict is None:
            try:
                train(config.model_copy(update={"out": str(path)}))
            except WorkError as problem:
                if _verdict(path) in (None, ""):  # not the weight's fault: a signal, a full disk
                    # The command that it names would end this one run, and choose nothing.
                    raise type(problem)(f"{problem}; the same `elle tune` goes on from there") from None
            verdict = _verdict(path)
        if verdict:
            return Trial(weight, (), verdict)
        scores.append(float(open_run(path).records[-1][ATTACK]))
    return Trial(weight, tuple(scores))


def _verdict(path: Path) -> str | None:
    """ "collapsed" or "diverged", "" if the run has finished well, None if there is no finished run."""
    if not (path / "config.toml").exists():
        return None
    run = open_run(path)
    if run.first_fall() is not None:
        return "collapsed"
    if any(event["event"] == "divergence" for event in run.events):
        return "diverged"
    return None if run.result is None else ""


def grid_search(setting: Setting, seeds: int, out: Path, train: Train) -> list[Trial]:
    """Every weight in turn."""
    return [try_weight(setting, weight, seeds, out, train) for weight in setting.weights]


def _study(setting: Setting, seeds: int, out: Path, storage: str | None) -> Any:
    """The study of this exact setting over as many seeds: workers that tune the same share it, others do not."""
    import optuna

    name = run_id(setting.config) + (f"-{seeds}-seeds" if seeds > 1 else "")
    database = storage or f"sqlite:///{out / 'tune.db'}"
    pauses = iter(_PAUSES)
    while True:
        try:
            out.mkdir(parents=True, exist_ok=True)
            return optuna.create_study(storage=database, study_name=name, direction="maximize", load_if_exists=True)
        except Exception as problem:  # a database may refuse in any way at all
            pause = next(pauses, None)
            if pause is None:
                raise InputError(
                    f"cannot use {storage or out} to keep the trials: {first_line(problem)}; choose another"
                ) from None
            time.sleep(pause)  # workers that start together get into each other's way as they make its tables


def optuna_search(
    setting: Setting, seeds: int, out: Path, train: Train, *, trials: int, storage: str | None = None
) -> list[Trial]:
    """`trials` more weights between the grid's ends, each chosen by what all workers of the storage have found."""
    try:
        import optuna
    except ImportError:
        raise InputError("this search needs Optuna; pip install 'elle-at[tune]', or leave --search out") from None
    low, high = min(setting.weights), max(setting.weights)
    if low == high:
        raise InputError(
            f"--search optuna has {low:g} alone to choose from; give two values with --weights, or leave it out"
        )
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a warning is a traceback of what is told in one line anyway
    study = _study(setting, seeds, out, storage)

    def objective(proposal: optuna.Trial) -> float:
        weight = proposal.suggest_float("weight", low, high, log=True)
        try:
            trial = try_weight(setting, weight, seeds, out, train)
        except (WorkError, KeyboardInterrupt):  # whoever searches next goes on with what is trained of it
            study.enqueue_trial({"weight": weight})
            raise
        if trial.score is None:
            proposal.set_user_attr("verdict", trial.verdict)
            raise optuna.TrialPruned(trial.verdict)
        proposal.set_user_attr("scores", list(trial.scores))
        return trial.score

    study.optimize(objective, n_trials=trials)
    ended = [one for one in study.trials if {"scores", "verdict"} & set(one.user_attrs)]
    found = [
        Trial(one.params["weight"], tuple(one.user_attrs.get("scores", ())), one.user_attrs.get("verdict", ""))
        for one in ended
    ]
    return sorted(found, key=lambda trial: trial.weight)


def chosen(trials: Sequence[Trial]) -> Trial:
    """The best on average, the smaller weight of two alike; WorkError where none has held."""
    held = [trial for trial in trials if trial.score is not None]
    if not held:
        tried = ", ".join(f"{trial.weight:g}" for trial in trials)
        raise WorkError(f"no weight held ({tried}); give larger ones with --weights")
    return max(held, key=lambda trial: (trial.score or 0.0, -trial.weight))
