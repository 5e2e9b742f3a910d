"""The commands around recipes: recipes, show-schedule, tune."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from elle.cli.options import AsJson, check_choice
from elle.cli.printing import print_json, print_rows, print_table
from elle.config import Config, format_radius, format_value
from elle.errors import InputError, check_file_name


def recipes(as_json: AsJson = False) -> None:
    """List the recipes: the paper's tables and figures.

    For each: the number of runs, estimated hours on one NVIDIA H200, and how many numbers the paper prints.

    Example: elle recipes
    """
    from elle.experiments.estimate import gpu_hours
    from elle.experiments.recipe import load_recipe, recipe_files

    found = [load_recipe(name) for name in recipe_files()]
    if not found:
        raise InputError("this installation of elle has no recipes; install it again, or give `elle sweep` a path")
    rows = [
        {
            "name": recipe.name,
            "runs": len(runs := recipe.runs()),
            "gpu_hours": round(gpu_hours(runs), 1),
            "expected": len(recipe.expected),
            "title": recipe.title,
        }
        for recipe in found
    ]
    print_rows(rows, as_json)


def show_schedule(
    name: Annotated[str, typer.Argument(help="short, short-svhn, long, long-svhn, long-cos, cos-1000 or imagenet-15.")],
    out: Annotated[Path | None, typer.Option(help="The SVG file to write; default: NAME.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw a schedule: the learning rate and eps over its epochs.

    Example: elle show-schedule short-svhn --out short-svhn.svg
    """
    from elle.charts.lines import draw
    from elle.experiments.schedule_chart import schedule_chart, schedule_values
    from elle.files import write_text

    if as_json and out is None:
        print_json(schedule_values(name))
        return
    if out is not None:
        check_file_name(out, ".svg")
    chart, path = schedule_chart(name), out or Path(f"{name}.svg")
    write_text(path, draw(chart))
    if as_json:
        print_json(schedule_values(name))
    else:
        print(f"{chart.title}; drawn in {path}")


def tune(
    words: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE|KEY=VALUE...", help="Settings, or a recipe and settings that select its runs."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the runs; finished ones are not trained again.")] = Path(
        "tuning"
    ),
    weights: Annotated[str | None, typer.Option(help="Comma-separated values to try; default: the paper's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per value, averaged.")] = 1,
    search: Annotated[str, typer.Option(help="grid, or optuna (between the smallest and the largest value).")] = "grid",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Values this worker tries with --search optuna; default: 10.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="URL of Optuna's database; default: OUT/tune.db, shared by all workers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose lambda by PGD-20 on held-out training images.

    Runs that collapse stop early. Settings after a recipe select among its runs.

    Example: elle tune method=elle-a data=cifar10 eps=8/255 --seeds 3
    """
    import dataclasses

    from elle.experiments.tune import chosen, grid_search, optuna_search, settings

    check_choice("search", search, ("grid", "optuna"))
    for option in [name for name, value in (("trials", trials), ("storage", storage)) if value is not None]:
        if search == "grid":
            raise InputError(f"--{option} is of a search with Optuna; add --search optuna, or leave it out")
    found = settings(words)
    if weights is not None:
        found = [dataclasses.replace(one, weights=_numbers(weights)) for one in found]
    results: list[dict[str, Any]] = []
    for setting in found:
        if search == "grid":
            tried = grid_search(setting, seeds, out, _trainer(as_json))
        else:
            tried = optuna_search(setting, seeds, out, _trainer(as_json), trials=trials or 10, storage=storage)
        best = chosen(tried)
        results.append({"setting": _named(setting.config), "weight": best.weight, "trials": tried})
        if not as_json:
            _print_trials(results[-1])
    if as_json:
        rows = [one | {"trials": [dataclasses.asdict(trial) for trial in one["trials"]]} for one in results]
        print_json(rows)


def _trainer(quiet: bool) -> Any:
    def train(config: Config) -> None:
        from elle.cli.progress import TrainingProgress
        from elle.engine.loop import train as run_training

        with TrainingProgress(to_stderr=quiet) as progress:
            run_training(config, resume=True, watcher=progress.watcher())

    return train


def _numbers(text: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--weights {text}: write numbers with commas, for example 1000,4000") from None
    if min(numbers) <= 0:
        raise InputError(f"--weights {text}: a weight is greater than 0")
    return tuple(dict.fromkeys(numbers))


def _named(config: Config) -> str:
    whole = config.resolved()
    return f"{whole.method} on {whole.data}, {whole.model}, eps {format_radius(whole.eps or 0)}, {whole.schedule}"


def _print_trials(result: dict[str, Any]) -> None:
    rows = []
    for trial in result["trials"]:
        spread = f" +- {100 * statistics.stdev(trial.scores):.2f}" if len(trial.scores) > 1 else ""
        score = trial.verdict if trial.score is None else f"{trial.score:.2%}{spread}"
        mark = "chosen" if trial.weight == result["weight"] else ""
        rows.append([f"{trial.weight:g}", score, mark])
    print(result["setting"])
    print_table(["weight", "PGD-20 on held-out images", ""], rows)
    print(f"chosen: weight={format_value('weight', result['weight'])}")  # to be trained with: all its digits
