"""`elle evaluate`, `elle compare`, `elle show`, `elle metrics`: parse and dispatch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from elle.cli.options import PRECISIONS, AsJson, Device, Eps, Limit, Root, check_choice
from elle.cli.printing import print_accuracies, print_json, print_table
from elle.config import format_radius, radius_option
from elle.errors import InputError, check_file_name

Weights = Annotated[
    str | None, typer.Option(help="A .safetensors or state_dict file of a network that elle did not train.")
]
ModelName = Annotated[str | None, typer.Option(help="With --weights: a row of `elle models`, or module:function.")]
Data = Annotated[str | None, typer.Option(help="The test images: a row of `elle datasets`; default: the run's own.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of all random draws.")]
Run = Annotated[str | None, typer.Argument(metavar="[DIR|CHECKPOINT]", help="A run directory, or a checkpoint of one.")]


def evaluate(
    run: Run = None,
    attack: Annotated[
        str,
        typer.Option(
            help="Comma-separated: clean, fgsm, pgd-STEPS[-RESTARTS], apgd-ce, apgd-t, fab-t, square, autoattack."
        ),
    ] = "clean,pgd-20",
    eps: Eps = None,
    norm: Annotated[str | None, typer.Option(help="linf, l2 or l1; default: the run's own.")] = None,
    limit: Limit = None,
    model: ModelName = None,
    weights: Weights = None,
    data: Data = None,
    root: Root = None,
    engine: Annotated[
        str, typer.Option(help="AutoAttack engine: fast (elle's own) or reference (pyautoattack).")
    ] = "fast",
    precision: Annotated[
        str,
        typer.Option(
            help="Search precision: auto (fp16 on a GPU), fp32, tf32, fp16 or bf16; successes are verified in fp32."
        ),
    ] = "auto",
    device: Device = "auto",
    devices: Annotated[
        str | None,
        typer.Option(help="Several devices: 0,1 are GPUs. The result does not depend on their number."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Points attacked at once; default: 1,024, fewer for large images.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Points per unit of work: the most that an interruption loses.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the network first: worth it for thousands of images on a GPU.")
    ] = False,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the result; default: the run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted evaluation.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Save the adversarial images, compressed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a network's accuracy with and without attacks.

    The result is written to DIR/evaluation.json.

    Example: elle evaluate runs/digits-elle-a-eps0.2-seed0 --attack clean,fgsm,pgd-20,pgd-50-10
    """
    check_choice("engine", engine, ("fast", "reference"))
    check_choice("precision", precision, PRECISIONS)
    from elle.engine.assessment import Job, assess_run
    from elle.engine.ranks import check_not_launched
    from elle.engine.runtime import pick_device
    from elle.engine.subject import Source, load_subject
    from elle.evaluation.evaluate import search_precision
    from elle.evaluation.names import NORMS, parse_attacks
    from elle.evaluation.units import BATCH, Settings, default_chunk, fitting_batch

    check_not_launched()
    if norm is not None:
        check_choice("norm", norm, NORMS)
    parse_attacks(attack)
    names = [device] if devices is None else _devices(devices)
    first = pick_device(names[0])
    source = Source(run, model, weights, data, root)
    subject = load_subject(source, first, limit)
    radius = _radius(eps, norm, subject)
    chosen: Any = subject.norm if norm is None else norm
    chosen_engine: Any = engine
    parse_attacks(attack, chosen)
    how: Any = search_precision(first) if precision == "auto" else precision
    pixels = subject.test.x[0, 0].size
    batch, chunk = batch or fitting_batch(BATCH, pixels, subject.trained_batch), chunk or default_chunk(first, pixels)
    settings = Settings(radius, chosen, seed, chosen_engine, how, batch, chunk, compiled)
    place = out or source.place
    with _progress() as watch:
        record = assess_run(
            Job(source, attack, settings, len(subject.test), save), subject, place, names, resume=resume, watch=watch
        )
    if as_json:
        print_json(record)
    else:
        _print_record(record)
        print(f"eps {format_radius(radius)} in {chosen}; everything is in {place / 'evaluation.json'}")


def _print_record(record: dict[str, Any]) -> None:
    print_accuracies(record["attacks"])
    for words in dict.fromkeys(words for one in record["attacks"].values() for words in one.get("adaptations", [])):
        print(f"note: {words}")
    for one in record["checks"]:
        if one["passed"] is False:
            print(f"check {one['check']}: {one['words']}")


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run directory, or an evaluation's JSON file.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations point by point, attack by attack.

    Example: elle compare runs/a runs/b
    """
    from elle.evaluation.results import compared, read_record

    result = compared(read_record(a), read_record(b))
    if as_json:
        print_json(result)
        return
    rows = []
    for name, one in result["attacks"].items():
        first, second = one["accuracy"]
        counts = [str(len(one[key])) for key in ("only_a_breaks", "only_b_breaks")]
        rows.append([name, f"{first:.2%}", f"{second:.2%}", f"{one['difference']:+.2%}", *counts, one["statement"]])
    print_table(["attack", "A", "B", "B - A", "broken in A alone", "in B alone", ""], rows)
    for key, (one, other) in result["differing"].items():
        words = [format_radius(value) if key == "eps" else value for value in (one, other)]
        print(f"note: {key} is {words[0]} in A and {words[1]} in B")


def show(
    run: Run = None,
    count: Annotated[int, typer.Option(min=1, max=50, help="How many images.")] = 9,
    eps: Eps = None,
    attack: Annotated[str, typer.Option(help="Comma-separated attacks, one row for each.")] = "fgsm,pgd-50",
    model: ModelName = None,
    weights: Weights = None,
    data: Data = None,
    root: Root = None,
    device: Device = "auto",
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="The PNG file; default: adversarial.png in the run directory.")
    ] = None,
) -> None:
    """Draw test images and their adversarial versions.

    Each with its perturbation, amplified, and the predicted class.

    Example: elle show runs/digits-elle-a-eps0.2-seed0 --count 6
    """
    from elle.engine.runtime import pick_device
    from elle.engine.subject import Source, load_subject
    from elle.evaluation.names import parse_tracked
    from elle.evaluation.picture import attacked_rows, draw

    source = Source(run, model, weights, data, root)
    if out is not None:
        check_file_name(out, ".png")
    subject = load_subject(source, pick_device(device))
    attacks = parse_tracked(attack, subject.norm)  # type: ignore[arg-type]
    radius = _radius(eps, None, subject)
    rows = attacked_rows(subject.model, subject.test.x, subject.test.y, attacks, radius, count=count, seed=seed)
    path = out or source.place / "adversarial.png"
    draw(rows, radius, subject.classes, path)
    print(f"eps {format_radius(radius)}: {path}")


def metrics(
    run: Run = None,
    metric: Annotated[str, typer.Option(help="Comma-separated metrics, or all.")] = "all",
    eps: Eps = None,
    limit: Limit = None,
    model: ModelName = None,
    weights: Weights = None,
    data: Data = None,
    root: Root = None,
    device: Device = "auto",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Measure how linear a network's loss is around test images.

    Example: elle metrics runs/digits-elle-a-eps0.2-seed0 --metric error,misalignment
    """
    from elle.engine.runtime import pick_device
    from elle.engine.subject import Source, load_subject
    from elle.evaluation.metrics import METRICS, linearity_metrics, parse_metrics
    from elle.evaluation.units import fitting_batch

    parse_metrics(metric)
    subject = load_subject(Source(run, model, weights, data, root), pick_device(device), limit)
    norm: Any = subject.norm
    radius = _radius(eps, None, subject)
    x, y = subject.test.x, subject.test.y
    batch = fitting_batch(500, x[0, 0].size)
    result = linearity_metrics(subject.model, x, y, radius, metric=metric, norm=norm, batch=batch, seed=seed)
    if as_json:
        print_json({"eps": radius, "norm": norm, "seed": seed, "metrics": result})
        return
    columns = ["mean", "std", "q05", "q50", "q95"]
    if any(one["undefined"] for one in result.values()):
        columns.append("undefined")
    rows = [
        [name, *(f"{one.get(key, float('nan')):.3g}" for key in columns), METRICS[name][0]]
        for name, one in result.items()
    ]
    if not print_table(["metric", *columns, "what it is"], rows, explained=True):
        print("what each metric is: in a wider terminal, or in docs/metrics.md")


def _devices(words: str) -> list[str]:
    names = [name.strip() for name in words.split(",") if name.strip()]
    if not names:
        raise InputError("--devices names none; for example --devices 0,1")
    return [f"cuda:{name}" if name.isdecimal() else name for name in names]


def _radius(eps: str | None, norm: str | None, subject: Any) -> float:
    if eps is None:
        if norm not in (None, subject.norm):
            raise InputError(f"--norm {norm} needs --eps: the run's radius is one of {subject.norm}")
        return float(subject.eps)
    return radius_option(eps, norm or subject.norm)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar of units on a terminal, nothing in a log."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("evaluating", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
