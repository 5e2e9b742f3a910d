"""`elle demo` and `elle train`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from elle.cli.options import AsJson
from elle.cli.printing import print_accuracies, print_json
from elle.config import KEYS, Config, load_config, parse_words
from elle.data.registry import check_root
from elle.errors import InputError, expanded


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the runs and report.html.")] = Path("elle-demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Watch FGSM collapse and ELLE-A hold, on bundled images.

    Example: elle demo
    """
    from elle.demo import run_demo

    summary = run_demo(out, seed, quiet=as_json)
    if as_json:
        print_json(summary)


def _default(key: str) -> str:
    """A key's default in brackets, as a user would write it; nothing where others decide on it."""
    value = Config.model_fields[key].default
    return "" if value is None else f" [{str(value).lower()}]"


def _explain_keys(width: int) -> str:
    """A paragraph for each key, indented under its name."""
    paragraphs = (f"  {key:13} {description}{_default(key)}" for key, description in KEYS.items())
    return "\n".join(
        textwrap.fill(text, width, subsequent_indent=" " * 16, break_on_hyphens=False) for text in paragraphs
    )


_KEYS = _explain_keys(max(60, shutil.get_terminal_size((160, 24)).columns - 2))
_OTHERS = (
    "Defaults are in brackets. The others, such as eps, epochs, batch and lr, depend on the data (`elle datasets`)."
)
HELP = f"Train a network.\n\nExample: elle train method=elle-a data=digits seed=1\n\n\b\nKeys:\n{_KEYS}\n\n{_OTHERS}"


def train(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Settings; they override --config.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run directory (the key `out`).")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")
    ] = False,
    start_from: Annotated[Path | None, typer.Option("--from", help="Continue from this checkpoint of the run.")] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write scalars for TensorBoard into DIR/tensorboard.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    from elle.cli.progress import TrainingProgress

    words = (words or []) + ([f"out={out}"] if out else [])
    if start_from is not None and not start_from.exists():
        raise InputError(f"--from {start_from} does not exist; give a file of a run's checkpoints/")
    if start_from is not None and "out" not in parse_words(words):
        if start_from.absolute().parent.name != "checkpoints":
            raise InputError(
                f"--from {start_from} is not in a run's checkpoints/; give a file of that folder, or name its run with "
                f"--out as well"
            )
        words = [*words, f"out={start_from.absolute().parent.parent}"]
    resume = resume or start_from is not None
    settings = _settings(words, config, resume)

    from elle.engine.launch import launch_ranks, speaks
    from elle.engine.loop import train as run_training
    from elle.engine.run_files import run_directory

    if launch_ranks(settings, sys.argv[1:]):
        return
    if not speaks():
        run_training(settings, resume=resume, start_from=start_from)
        return
    with TrainingProgress(to_stderr=as_json) as progress:
        watcher = progress.watcher()
        if tensorboard:
            from elle.cli.tensorboard import with_tensorboard

            watcher = with_tensorboard(watcher, run_directory(settings.resolved()) / "tensorboard")
        result = run_training(settings, resume=resume, start_from=start_from, watcher=watcher)
    if as_json:
        print_json(result)
    else:
        print_accuracies(result["test"])
        print(f"everything is in {run_directory(settings.resolved())}")


def _settings(words: list[str], file: Path | None, resume: bool) -> Config:
    """The settings that the words and the file give; for a run that is continued, the file is its own config.toml."""
    given = parse_words(words)
    directory = given.get("out")
    if resume and file is None and directory:
        own = expanded(directory) / "config.toml"
        if own.exists():
            file = own
        elif len(words) == 1:
            raise InputError(f"{directory} holds no run to continue; give its settings to start one there")
    settings = load_config(words, file)
    settings.resolved()  # refuses what the dataset and the method do not allow
    check_root(settings.data, given.get("root"))
    return settings
