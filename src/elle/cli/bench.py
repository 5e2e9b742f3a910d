"""The `elle bench` command."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elle.cli.options import PRECISIONS, AsJson, Device, check_choice
from elle.cli.printing import print_json, print_table
from elle.errors import WorkError, check_folder

if TYPE_CHECKING:
    from elle.engine.bench import Setting

_CHOICES = {
    "precision": PRECISIONS,
    "memory": ("auto", "low"),
    "penalty": ("trained", "measured", "left out"),
    "fused": ("auto", "off"),
}


def bench(
    methods: Annotated[str, typer.Option(help="Comma-separated methods, or all.")] = "all",
    model: Annotated[str, typer.Option(help="A row of `elle models`.")] = "preact-resnet18",
    batch: Annotated[
        int | None, typer.Option(min=2, help="Images per step; default: 128 on a GPU, 8 on a CPU.")
    ] = None,
    precision: Annotated[str, typer.Option(help="auto, fp32, tf32, fp16 or bf16.")] = "auto",
    memory: Annotated[str, typer.Option(help="auto or low, as in training.")] = "auto",
    penalty: Annotated[
        str, typer.Option(help="trained, measured (E_lin without a backward) or 'left out'.")
    ] = "trained",
    fused: Annotated[str, typer.Option(help="auto or off, as in training.")] = "auto",
    device: Device = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="List the slowest kernels.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the numbers (JSON) and the figure (SVG).")] = None,
    as_json: AsJson = False,
) -> None:
    """Time a training step of each method.

    Forward, backward, images/s, TFLOP/s, memory, and the ratio to FGSM.

    Example: elle bench --methods fgsm,elle,elle-a --out benchmarks/results
    """
    given = {"precision": precision, "memory": memory, "penalty": penalty, "fused": fused}
    for name, value in given.items():
        check_choice(name, value, _CHOICES[name])
    import torch

    from elle.engine.bench import Setting
    from elle.engine.runtime import hardware_name, pick_device, pick_precision, prepare_device
    from elle.methods import METHODS, find_method
    from elle.models.registry import MODELS

    names = list(METHODS) if methods == "all" else [name.strip() for name in methods.split(",")]
    for name in names:
        find_method(name)
    check_choice("model", model, MODELS)
    where = pick_device(device)
    kind = pick_precision(precision, where)
    prepare_device(where, kind)
    if out is not None:
        check_folder(out)  # before minutes of measuring, not after
    setting = Setting(where, kind, model, batch, memory, penalty, fused)  # type: ignore[arg-type]  # checked above
    head = {"device": hardware_name(where), "torch": torch.__version__, **_told(setting)}
    usual = _told(Setting(where, pick_precision("auto", where)))
    result: dict[str, Any] = {}
    files: list[Path] = []
    try:
        for rows in _measured(names, setting, profile):
            result = head | {"rows": rows}
            if out is not None:
                files = _write(out, result, usual)
    finally:  # an interruption, or a method that does not fit, costs no other row
        if result:
            print_json(result) if as_json else _print(result)
        for file in files:
            print(file, file=sys.stderr)


def _told(setting: Setting) -> dict[str, Any]:
    """What a result says of its setting, beside the device."""
    names = ("precision", "model", "batch", "memory", "penalty", "fused")
    return {name: getattr(setting, name) for name in names} | {"batch": setting.images}


def _measured(names: Sequence[str], setting: Setting, profile: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows so far, after each method that fits into the device's memory; the others are told at the end."""
    import torch

    from elle.engine.bench import measure, with_ratios

    rows, too_large = [], []
    for name in names:
        print(f"measuring {name}", file=sys.stderr)
        try:
            rows.append(measure(name, setting, profile))
        except torch.OutOfMemoryError:
            too_large.append(name)
            continue
        yield with_ratios(rows)
    if too_large:
        raise WorkError(
            f"the device's memory is too small for {', '.join(too_large)} at batch {setting.images}; try a smaller "
            f"--batch, or --memory low"
        )


def _print(result: dict[str, Any]) -> None:
    columns = {
        "passes": "passes",
        "forward_ms": "forward ms",
        "backward_ms": "backward ms",
        "ms": "total ms",
        "images_per_second": "images/s",
        "tflops": "TFLOP/s",
        "peak_mib": "peak MiB",
        "ratio": "x FGSM",
    }
    settings = "memory {memory}, penalty {penalty}, fused {fused}"
    head = "{model}, batch {batch}, {precision}, {device}, torch {torch}, " + settings
    print(head.format(**result))
    shown = [[row["method"], *("" if row[key] is None else str(row[key]) for key in columns)] for row in result["rows"]]
    print_table(["method", *columns.values()], shown)
    for row in result["rows"]:
        if "kernels" in row:
            print(f"\n{row['method']}: the kernels that take longest")
            kernels = [
                [f"{one['share']:.1%}", f"{one['ms']:.3f}", f"{one['calls']:g}", one["kernel"]]
                for one in row["kernels"][:10]
            ]
            print_table(["share", "ms a step", "calls", "kernel"], kernels)


def _write(folder: Path, result: dict[str, Any], usual: dict[str, Any]) -> list[Path]:
    """bench-NETWORK-DEVICE-torchVERSION.json and .svg; what is not as usual is named after the network."""
    from elle.charts.stacked_bars import draw_stacked_bars
    from elle.engine.runtime import measured_with
    from elle.experiments.step_times import step_figure
    from elle.files import write_json, write_text

    spelled = {"batch": "batch{}", "fused": "fused-{}"}
    changed = [
        spelled.get(key, "{}").format(str(result[key]).replace(" ", "-"))
        for key in ("batch", "precision", "memory", "penalty", "fused")
        if result[key] != usual[key]
    ]
    name = "-".join(["bench", result["model"], *changed, measured_with(result["device"], result["torch"])])
    files = [folder / f"{name}.json", folder / f"{name}.svg"]
    write_json(files[0], result)
    write_text(files[1], draw_stacked_bars(step_figure(result)))
    return files
