"""The `elle` command: parse and dispatch. Errors are one line; exit codes: 1 failed work, 2 bad input, 130 Ctrl-C."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from elle.cli import bench, evaluation, export, lists, recipes, report, runs, sweep, train
from elle.cli.data import app as data_app
from elle.errors import REASONS, InputError, Interrupted, WorkError, first_line, leave, tell
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
# typer brings click along under one name or another: the error class is found through its public child.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main() -> None:
    """Run the command; a user's mistake and a failed piece of work end in one line each."""
    _prepare_streams()
    _prepare_threads()
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


def _prepare_threads() -> None:
    """Have torch's threads, before it is imported, wait for each other by sleeping sooner than they would.

    Until then they keep a core busy, which another training on the same machine needs: two of the digits on two cores
    took 25 s an epoch, and take 0.6 s so. One alone takes 0.1 s either way; at a count of 1,000 it would be slower.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")


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
    """The mistake in the command line, and the --help that shows how the command is written."""
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


app.command()(train.demo)
app.command(help=train.HELP)(train.train)
app.command()(runs.watch)
app.command()(runs.plot)
app.command()(sweep.sweep)
app.command()(report.report)
app.command()(evaluation.evaluate)
app.command()(evaluation.compare)
app.command()(evaluation.show)
app.command()(recipes.recipes)
app.command("show-schedule")(recipes.show_schedule)
app.command()(recipes.tune)
app.command()(bench.bench)
app.command()(export.export)
app.command()(evaluation.metrics)
app.command()(lists.methods)
app.command()(lists.models)
app.command()(lists.datasets)
app.command()(lists.doctor)
