"""`elle sweep`: parse and dispatch."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elle.cli.options import AsJson, check_choice
from elle.cli.printing import count_runs, print_json, print_table
from elle.cli.recipe_checks import check_folders, check_recipe
from elle.errors import InputError, Interrupted, WorkError, check_folder

if TYPE_CHECKING:
    from elle.experiments.object_path import ObjectPath
    from elle.experiments.sweep import Executor, Item


def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A row of `elle recipes`, or a .toml file.")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE...]", help="More settings for --only.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE...", help="Only runs with these settings.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per setting; default: the recipe's.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: one per GPU.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Comma-separated GPUs: 0,1; default: the first.")] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for the runs; default: runs/RECIPE. s3://... also copies them there.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    on: Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Address of the Ray cluster; default: auto.")] = None,
    cpus_per_run: Annotated[
        float | None, typer.Option(min=0, help="With --on ray: CPU cores per run; default: 1.")
    ] = None,
    gpus_per_run: Annotated[
        float | None, typer.Option(min=0, help="With --on ray: GPUs per run; default: 1 if the cluster has any.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help="With --on ray: how often a run may lose its node; default: 3.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a recipe.

    Finished runs are skipped, so the same command continues an interrupted sweep.

    Example: elle sweep table-2 --only eps=8/255 method=elle-a --seeds 1 --gpus 0,1
    """
    from elle.experiments.recipe import load_recipe
    from elle.experiments.sweep import chosen_runs, link_runs, plan, write_manifest
    from elle.files import FolderLock

    cluster = {"address": address, "cpus_per_run": cpus_per_run, "gpus_per_run": gpus_per_run, "retries": retries}
    _check_place(on, gpus, [name for name, value in cluster.items() if value is not None])
    places = _gpus(gpus)
    loaded = load_recipe(recipe)
    configs = chosen_runs(loaded, seeds, [*(only or []), *(words or [])])
    store = _object_path(out)
    own = out is None or store is not None
    folder = Path("runs") / loaded.name if own else Path(str(out))
    if not folder.is_dir():  # one that may not be written can be looked at
        check_folder(folder)
    check_recipe(loaded, configs)
    if dry_run:
        items = plan(configs, folder, beside=own)
        for item in items:
            if store and item.state == "waiting" and store.holds(item):
                item.state = "finished"
        _print_plan(items, folder, as_json)
        return
    if on == "local" and store is None:  # elsewhere runs may be finished, or have other folders
        check_folders([item.config for item in plan(configs, folder, beside=own) if item.state != "finished"])
    with FolderLock(folder, ".sweep.lock"):
        items = plan(configs, folder, beside=own)
        # Those that --only leaves out, too: a report compares with them.
        others = [item for item in plan(loaded.runs(seeds), folder, beside=own) if item.state == "finished"]
        if (linked := link_runs({item.name: item for item in [*others, *items]}.values(), folder)) and not as_json:
            print(f"{count_runs(linked)} that another recipe's sweep has finished: linked into {folder}")
        write_manifest(folder, str(Path(recipe).absolute()) if recipe.endswith(".toml") else recipe, items)
        if on == "ray":
            executor = _ray(address, cpus_per_run, gpus_per_run, retries, jobs)
        else:
            executor = _local(jobs, places)
        _carry_out(items, executor, folder, store, to_stderr=as_json)
    if as_json:
        print_json(_rows(items))
    _conclude(items, store)
    if not as_json:
        are = "is" if len(items) == 1 else "are"
        where = f" and in {store.url}" if store else ""
        named = f" {shlex.quote(str(folder))}" if out and not store else ""
        print(f"{count_runs(len(items))} in {folder}{where} {are} finished: elle report {shlex.quote(recipe)}{named}")


def _carry_out(items: list[Item], executor: Executor, folder: Path, store: ObjectPath | None, to_stderr: bool) -> None:
    from elle.experiments.sweep import run_sweep
    from elle.experiments.sweep_view import SweepView

    def changed(item: Item | None) -> None:
        view(item)
        if store:
            store.follow(item)

    try:
        if store:
            store.even_out(folder, items)
        # Ray tells of a lost node on stdout, from a thread of its own.
        shown = sys.stderr if to_stderr else sys.stdout
        with contextlib.redirect_stdout(shown), SweepView(items, to_stderr=to_stderr) as view:
            run_sweep(items, executor, changed)
    except KeyboardInterrupt:
        _interrupted(items, folder)


def _object_path(out: str | None) -> ObjectPath | None:
    if out is None or "://" not in out:
        return None
    from elle.experiments.object_path import ObjectPath

    return ObjectPath(out)


def _local(jobs: int | None, gpus: list[int]) -> Executor:
    from elle.experiments.local import LocalExecutor

    return LocalExecutor(jobs or len(gpus) or 1, gpus)


def _ray(
    address: str | None, cpus: float | None, gpus: float | None, retries: int | None, jobs: int | None
) -> Executor:
    from elle.experiments.ray_cluster import RayExecutor

    cpus, retries = 1 if cpus is None else cpus, 3 if retries is None else retries
    return RayExecutor(address or "auto", cpus=cpus, gpus=gpus, retries=retries, slots=jobs)


def _check_place(on: str, gpus: str | None, of_cluster: list[str]) -> None:
    """Refuse options that have no effect where the runs are made: a user counts on them."""
    check_choice("on", on, ("local", "ray"))
    if on == "local" and of_cluster:
        raise InputError(f"--{of_cluster[0].replace('_', '-')} is of a cluster; add --on ray, or leave it out")
    if on == "ray" and gpus is not None:
        raise InputError(f"--gpus {gpus} is of this machine; with --on ray, --gpus-per-run says how many a run takes")


def _gpus(text: str | None) -> list[int]:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    if not all(name.isdigit() for name in names):
        raise InputError(f"--gpus {text}: write the numbers of GPUs, for example 0,1")
    if names:
        import torch

        there = torch.cuda.device_count()
        if max(map(int, names)) >= there:  # the runs would train on the CPU
            raise InputError(f"--gpus {text}: this machine has {there} CUDA devices that torch can use")
    return [int(name) for name in names]


def _rows(items: list[Item]) -> list[dict[str, str]]:
    return [{"run": item.name, "state": item.state, "said": item.said, "directory": str(item.path)} for item in items]


def _print_plan(items: list[Item], folder: Path, as_json: bool) -> None:
    from elle.experiments.sweep import counts
    from elle.experiments.sweep_view import cells, columns, shown_keys
    from elle.experiments.training import is_running

    for item in items:
        if is_running(item.path):  # by a sweep that is under way
            item.state = "running"
    if as_json:
        print_json(_rows(items))
        return
    keys = shown_keys(items)
    print_table(columns(keys), [cells(item, keys) for item in items])
    states = ", ".join(f"{count} {state}" for state, count in counts(items).items())
    print(f"{count_runs(len(items))} in {folder}: {states}; nothing was started")


def _interrupted(items: list[Item], folder: Path) -> None:
    finished = sum(item.state == "finished" for item in items)
    raise Interrupted(
        f"interrupted: {finished} of {count_runs(len(items))} finished; the same command goes on from what is saved in "
        f"{folder}"
    )


def _conclude(items: list[Item], store: ObjectPath | None) -> None:
    from elle.experiments.training import LOG

    failed = [item for item in items if item.state == "failed"]
    if failed:
        log = failed[0].path / LOG
        where = f"the log is in {log}; " if log.is_file() else ""  # what could not be started has none
        raise WorkError(
            f"{len(failed)} of {count_runs(len(items))} failed, first {failed[0].name}: {failed[0].said}; {where}"
            f"the same command tries again what has not finished"
        )
    if store and store.problem:
        raise store.problem
