"""The `elle data` commands: get, check, list, separation."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from elle.cli.options import AsJson
from elle.cli.printing import print_json, print_rows, print_table
from elle.config import format_radius
from elle.data.registry import DATASETS, check_root, data_folder, find_dataset, load_dataset
from elle.errors import InputError, check_folder

app = typer.Typer(
    name="data",
    help="Download datasets, check them, measure their separation.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_SIZES = 5
"""Image sizes that are printed, the most frequent ones: photographs have hundreds."""
Name = Annotated[str, typer.Argument(help="A row of `elle data list`.")]
Root = Annotated[str | None, typer.Option(help="The data folder; default: $ELLE_DATA, then ./data.")]


@app.command("list")
def list_datasets(as_json: AsJson = False) -> None:
    """List the datasets and their default settings.

    Example: elle data list
    """
    rows = []
    for row in DATASETS.values():
        brought = dict(row.defaults) | {"eps": format_radius(row.defaults["eps"])}
        rows.append({"name": row.name, **brought, "description": row.description})
    if as_json:
        print_json(rows)
        return
    shown = ("name", "model", "eps", "epochs", "batch", "lr", "description")
    print_rows([{key: row[key] for key in shown} for row in rows], as_json=False)
    print("all settings that a dataset brings: elle datasets --json")


@app.command()
def get(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Download a dataset from its official address.

    Run the command again to continue an interrupted download.

    Example: elle data get cifar10 --root data
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from elle.data import download

    row = find_dataset(name)
    if not row.needs_root:
        raise InputError(f"{name} comes with the installation: there is nothing to download")
    if name not in download.REMOTES:
        raise InputError(
            f"{name} has no public address ({row.description}): put the files there yourself; "
            f"what can be downloaded is {', '.join(download.REMOTES)}"
        )
    folder = data_folder(root)
    if not folder.is_dir():  # one that may not be written can hold all files already
        check_folder(folder, "the data folder" if root is None else "--root")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(file=sys.stderr if as_json else sys.stdout)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def report(file: str, have: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bar.add_task(file, total=total)
            bar.update(tasks[file], completed=have, total=total)

        files = download.get(name, folder, report)
    if as_json:
        print_json({"name": name, "root": str(folder), "files": [str(file) for file in files]})
    else:
        print(f"{name} is in {folder}: {len(files)} files, checked")


@app.command()
def check(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Show what a dataset contains, and its unreadable files.

    Counts, sizes, mean and standard deviation, duplicates. Exit code 1 if files are unreadable.

    Example: elle data check cifar10 --root data
    """
    from elle.data.check import check as look

    check_root(name, root)
    report = look(name, root)
    splits = report["splits"]
    if as_json:
        print_json(report)
    else:
        rows = [[label, *(str(one["per_class"][label]) for one in splits.values())] for label in report["classes"]] + [
            ["all", *(str(one["images"]) for one in splits.values())]
        ]
        print_table(["class", *splits], rows)
        if report["held_out"]:
            print("test: no folder of its own; as in training, it is a tenth of each class")
        for split, one in splits.items():
            sizes = ", ".join(f"{size} ({count})" for size, count in list(one["sizes"].items())[:_SIZES])
            if one["different_sizes"] > _SIZES:
                sizes += f" and {one['different_sizes'] - _SIZES} other sizes"
            if one["images"]:
                print(f"{split}: pixels {sizes}; mean {one['mean']}, std {one['std']}")
            for line in one["unreadable"]:
                print(f"{split}: unreadable: {line}")
        if report["skipped"]:
            print(report["skipped"])
        duplicates = report["duplicates"]
        print(f"test images that are also training images: {duplicates['count']}")
        for pair in duplicates["first"]:
            print(f"  test {pair['test']} = train {pair['train']}{'' if pair['same_class'] else ', of another class'}")
    if any(one["unreadable"] for one in splits.values()):
        raise typer.Exit(1)


@app.command()
def separation(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Measure how far apart the classes are.

    The smallest l-infinity distance between images of different classes, and the eps it allows.

    Example: elle data separation cifar10 --root data
    """
    from elle.data.separation import separation as measure

    check_root(name, root)
    images = load_dataset(name, root)
    splits = {"train": images.train, "test": images.test}
    record: dict[str, Any] = {}
    for pair, found in measure(images).items():
        if found is None:
            record[pair] = None
            continue
        labels = [
            images.classes[splits[split].y[number]] for split, number in zip(pair.split("-"), found.images, strict=True)
        ]
        record[pair] = {
            "distance": f"{found.distance}/255",
            "eps": f"{found.distance / 2:g}/255",
            "images": list(found.images),
            "classes": labels,
        }
    if as_json:
        print_json({"name": name, **record})
        return
    rows = []
    for pair, one in record.items():
        if one is not None:
            ends = [f"{number} ({label})" for number, label in zip(one["images"], one["classes"], strict=True)]
            rows.append([pair, one["distance"], one["eps"], " and ".join(ends)])
    print_table(["between", "smallest distance", "eps below", "images"], rows)
