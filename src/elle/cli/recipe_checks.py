"""What no run of a recipe can do or measure, refused before the first run and not in each."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elle.config import Config
from elle.errors import InputError, nearest

if TYPE_CHECKING:
    from elle.experiments.recipe import Recipe


def check_recipe(recipe: Recipe, configs: list[Config]) -> None:
    """Refuse, before the first run, what no run of the recipe can do or measure."""
    try:
        _check_trainable(configs)
        _check_metrics("expected", {one.metric for one in recipe.expected}, configs)
        if recipe.kind in ("table", "lines", "bars"):  # others draw columns of a run's records
            _check_metrics("[figure]: metric", set(recipe.asked("metric")), configs)
        if recipe.kind != "steps":
            key = "metric" if recipe.kind == "curves" else "curves"
            _check_columns(f"[figure]: {key}", recipe.asked(key), recipe.runs(1))
    except InputError as problem:
        raise InputError(f"recipe {recipe.name}: {problem}") from None


def _check_trainable(configs: list[Config]) -> None:
    """Refuse a mistyped method, field or attack once, not in each run."""
    from elle.engine.parts import method_of
    from elle.engine.tracking import parse_track
    from elle.evaluation.names import parse_attacks
    from elle.models.registry import check_name

    for config in configs:
        if config.seed == configs[0].seed:
            whole = config.resolved()
            method_of(whole)
            if whole.model:  # a folder's is chosen when its images have been seen
                check_name(whole.model)
            parse_attacks(whole.final, whole.norm)
            parse_track(whole.track, whole.norm)


def check_folders(configs: list[Config]) -> None:
    """Refuse a data folder that is not there once, not in each run."""
    from elle.data.registry import data_folder, find_dataset, load_dataset

    for config in configs:
        if find_dataset(config.data).needs_root and not data_folder(config.root).exists():
            load_dataset(config.data, config.root)  # says what was looked for, and where


def _check_metrics(where: str, names: set[str], configs: list[Config]) -> None:
    """Refuse a metric that no run can have: it would be missing from the report without a word."""
    from elle.evaluation.names import parse_attacks
    from elle.experiments.collected import TIMES, VALIDATION

    for name in sorted(names - {*TIMES}):
        try:
            parse_attacks(name.removeprefix(VALIDATION))
        except InputError as problem:
            raise InputError(f"{where} {name}: {problem}; or {', '.join(TIMES)}") from None
        if name.startswith(VALIDATION) and not any(config.resolved().validation for config in configs):
            raise InputError(f"{where} {name}: no run holds out images of its training set; set validation in [base]")


def _check_columns(where: str, names: list[str], configs: list[Config]) -> None:
    """Refuse a column that no run records, for the same reason."""
    from elle.engine.tracking import parse_track
    from elle.experiments.report_figures import OF_TRAINING

    tracked = [parse_track(track, norm) for track, norm in {(one.track, one.norm) for one in configs}]
    known = {*OF_TRAINING, "accuracy", "tracked_error"}
    known |= {attack.name for attacks, _ in tracked for attack in attacks}
    known |= {f"tracked_{name}" for _, metrics in tracked for name in metrics}
    for name in names:
        if re.sub(r"_(std|undefined|q\d\d)$", "", name) not in known:
            raise InputError(f"{where} {name}: no run records it{nearest(name, known)}; name it in `track`")
