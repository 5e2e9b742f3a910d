"""The `elle` command: parse and dispatch. Errors are one line; exit codes: 1 failed work, 2 bad input, 130 Ctrl-C."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import textwrap
import traceback
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from elle import cli_bench, cli_evaluation, cli_export, cli_lists, cli_recipes, cli_sweep
from elle.cli_data import app as data_app
from elle.cli_options import AsJson, Device, Root
from elle.config import KEYS, Config, load_config, parse_words
from elle.data.registry import find_dataset
from elle.errors import REASONS, InputError, Interrupted, WorkError, check_file_name, expanded, first_line, leave, tell
from elle.printing import print_accuracies, print_json
from elle.version import __version__

app = typer.Typer(
    name="elle",
    help="Train image classifiers that withstand adversarial attacks, with one attack gradient per step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(data_app)
RunDirectories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Run directories written by `elle train`.")
]


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


# typer brings click along under one name or another: the error class is found through its public child.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the command; a user's mistake and a failed piece of work end in one line each."""
    _prepare_streams()
    try:
        code = app(prog_name="elle", standalone_mode=False) or 0
        sys.stdout.flush()
        if code != Interrupted.exit_code:  # else typer has met Ctrl-C, and says nothing
            sys.exit(code)
        message = "interrupted"
    except (InputError, WorkError) as problem:
        message, code = str(problem), problem.exit_code
    except (KeyboardInterrupt, typer.Abort):
        message, code = "interrupted", Interrupted.exit_code
    except _USAGE_ERROR as problem:
        message, code = _usage(problem), problem.exit_code
        if "\n" in message.strip():  # `elle` alone: not an error but its help
            problem.show()
            sys.exit(code)
    except Exception as problem:
        known = _of_system(problem)
        if known is None and REASONS not in os.environ:
            raise
        if known is None:
            # One of several ranks: who speaks for all would otherwise know only that the others have lost it.
            traceback.print_exc()
            known = WorkError(f"{type(problem).__name__}: {first_line(problem)}; its traceback is above")
        message, code = str(known), known.exit_code
    tell(message, code)
    leave(code)


def _prepare_streams() -> None:
    """Have all three streams, which can show any name."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file opened takes its number, and what libraries print
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show ends no training. Python's own choice in the C locale is for bytes that
        # it could not read as text, and refuses what is text.
        refuses = ("strict",) if stream.encoding == "utf-8" else ("strict", "surrogateescape")
        if isinstance(stream, TextIOWrapper) and stream.errors in refuses:
            stream.reconfigure(errors="backslashreplace")


def _of_system(problem: Exception) -> InputError | WorkError | None:
    """A full device or memory, a file that may not be opened, output that nobody takes: one line. Else None."""
    if type(problem).__name__ == "OutOfMemoryError":  # torch's, which is imported only where it is needed
        asked = first_line(problem).partition(" GPU ")[0]
        return WorkError(f"the device's memory is full ({asked}); see who else uses it, or take another device")
    if isinstance(problem, MemoryError) or (isinstance(problem, OSError) and problem.errno == errno.ENOMEM):
        lacking = first_line(problem).removeprefix(f"[Errno {errno.ENOMEM}] ")
        return WorkError(f"{lacking}; use smaller images (image_size), a smaller batch or fewer workers")
    if not isinstance(problem, OSError):
        return None
    if problem.filename is not None:
        may_not = problem.errno in (errno.EACCES, errno.ENAMETOOLONG, errno.EMFILE)
        return InputError(f"cannot open {problem.filename}: {problem.strerror}") if may_not else None
    try:
        print(flush=True)  # whether it was the output is seen by trying again
    except OSError as refused:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python would try once more, at its end
        if refused.errno == errno.EPIPE:  # whoever read it has had enough
            leave(WorkError.exit_code)
        return WorkError(f"could not print all of the output: {refused.strerror}")
    return None


def _usage(problem: Any) -> str:
    """What is wrong in the command line, and which --help tells how it is written."""
    message: str = problem.format_message()
    context = getattr(problem, "ctx", None)
    if context is None or "\n" in message:
        return message
    return f"{message.rstrip('.')}; see {context.command_path} --help"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"elle {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
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


@app.command(
    help=f"Train a network.\n\nExample: elle train method=elle-a data=digits seed=1\n\n\b\nKeys:\n{_KEYS}\n\n{_OTHERS}"
)
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
    from elle.progress import TrainingProgress

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
            from elle.scalars import with_tensorboard

            watcher = with_tensorboard(watcher, run_directory(settings.resolved()) / "tensorboard")
        result = run_training(settings, resume=resume, start_from=start_from, watcher=watcher)
    if as_json:
        print_json(result)
    else:
        print_accuracies(result["test"])
        print(f"everything is in {run_directory(settings.resolved())}")


def _settings(words: list[str], file: Path | None, resume: bool) -> Config:
    """What the words and the file say; a run that is continued has a file of its own."""
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
    if (root := given.get("root")) and not find_dataset(settings.data).needs_root:
        raise InputError(f"root={root}: {settings.data} comes with the installation; did you mean data=folder as well?")
    return settings


@app.command()
def watch(
    directories: RunDirectories,
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
) -> None:
    """Follow runs in the terminal until they finish or stop.

    Example: elle watch runs/a runs/b
    """
    from elle.watch import watch as follow

    follow(directories, once)


@app.command()
def plot(
    directories: RunDirectories,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("plot.html"),
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for each figure as SVG; also PNG and PDF with elle-at[png]."),
    ] = None,
    before: Annotated[Path | None, typer.Option(help="Draw the loss surface of this checkpoint of the run ...")] = None,
    after: Annotated[Path | None, typer.Option(help="... and of this one; default: around its collapse.")] = None,
    root: Root = None,
    device: Device = "auto",
) -> None:
    """Plot runs on one HTML page that opens offline.

    Accuracy, E_lin (the linearity error), lambda, and the loss surface around a collapse.

    Example: elle plot runs/a runs/b --out page.html
    """
    from elle.experiments.figure import write_figures
    from elle.experiments.pictures import write_pictures
    from elle.experiments.rundir import open_runs, unique_names

    check_file_name(out, ".html")
    if (before is None) != (after is None):
        raise InputError("--before and --after belong together; give a checkpoint of the run for each")
    runs = open_runs(directories)
    if before is not None and len(runs) > 1:
        raise InputError("--before and --after are checkpoints of one run; give that run alone")
    if before is None and not any(run.records or run.probes for run in runs):
        raise InputError(
            f"there is nothing to draw yet: {runs[0].path} has no record of an epoch, nor a look at a probe"
        )
    surfaces = {}
    for run, name in zip(runs, unique_names(runs), strict=True):
        if before is not None or (run.path / "after-collapse.safetensors").exists():
            from elle.engine.runtime import pick_device
            from elle.engine.surface import around_collapse

            surfaces[name] = around_collapse(run.path, pick_device(device), before, after, root)
    drawn = write_pictures(out, runs, {name: one for name, one in surfaces.items() if one is not None})
    print(f"{len(drawn)} figures are in {out}")
    if figures is not None:
        print(f"{len(write_figures(figures, drawn))} files are in {figures}")


app.command()(cli_sweep.sweep)
app.command()(cli_sweep.report)
app.command()(cli_evaluation.evaluate)
app.command()(cli_evaluation.compare)
app.command()(cli_evaluation.show)
app.command()(cli_recipes.recipes)
app.command("show-schedule")(cli_recipes.show_schedule)
app.command()(cli_recipes.tune)
app.command()(cli_bench.bench)
app.command()(cli_export.export)
app.command()(cli_evaluation.metrics)
app.command()(cli_lists.methods)
app.command()(cli_lists.models)
app.command()(cli_lists.datasets)
app.command()(cli_lists.doctor)
