"""What elle finds on a machine: torch, GPU, precision, data folders, optional packages."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from elle.data.registry import DATASETS, ROOT_VARIABLE, data_folder, load_dataset
from elle.errors import InputError
from elle.version import __version__

EXTRAS = {
    "png": (["cairosvg"], "figures as PNG and PDF"),
    "tensorboard": (["tensorboard"], "elle train --tensorboard"),
    "autoattack": (["pyautoattack"], "elle evaluate --engine reference"),
    "parquet": (["pyarrow"], "parquet files, and elle sweep --out s3://..."),
    "ray": (["ray"], "elle sweep --on ray"),
    "tune": (["optuna"], "elle tune --search optuna"),
    "onnx": (["onnx", "onnxscript", "onnxruntime"], "elle export --to onnx"),
}
"""The optional packages by the name they are installed under, and what they are for."""


def examine() -> list[dict[str, str]]:
    """One row for each thing looked at: what, found, advice (empty where nothing is missing)."""
    rows = [
        _row("elle", __version__),
        _row("python", platform.python_version()),
        _row("torch", torch.__version__),
        _row("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"),
        *_gpu(),
        _packages(),
        *(_extra(name) for name in EXTRAS),
    ]
    return rows + [_dataset(name) for name in DATASETS]


def _row(what: str, found: str, advice: str = "") -> dict[str, str]:
    return {"what": what, "found": found, "advice": advice}


def _gpu() -> list[dict[str, str]]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            f"torch is built for CUDA {built}, but finds no GPU or driver"
            if built
            else "this torch is a CPU-only build"
        )
        advice = "for CIFAR-size training, use an NVIDIA GPU and a CUDA build of torch"
        return [_row("gpu", f"none ({reason})", advice), _row("precision", "precision=auto uses fp32")]
    rows = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        rows.append(_row(f"cuda:{number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    half = torch.cuda.get_device_capability(0) >= (7, 0)
    rows.append(
        _row("precision", "precision=auto uses fp16", "" if half else "this GPU has no fast fp16; use precision=fp32")
    )
    return rows


def _packages() -> dict[str, str]:
    """The packages that elle itself needs beside torch."""
    found, missing = _versions(["numpy", "safetensors", "pydantic", "typer", "rich", "scikit-learn", "pillow"])
    return _row("packages", found, f"pip install {' '.join(missing)}" if missing else "")


def _extra(name: str) -> dict[str, str]:
    packages, purpose = EXTRAS[name]
    found, missing = _versions(packages)
    advice = f"for {purpose}: pip install 'elle-at[{name}]'" if missing else ""
    return _row(f"extra {name}", found or "not installed", advice)


def _versions(packages: list[str]) -> tuple[str, list[str]]:
    """The packages that are installed, with their versions, and those that are not."""
    found, missing = [], []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    return ", ".join(found), missing


def _dataset(name: str) -> dict[str, str]:
    try:
        images = load_dataset(name)
    except InputError as problem:
        folder = data_folder().absolute()
        found = str(problem) if folder.exists() else f"no folder {folder}"
        return _row(f"data {name}", found, f"set root=FOLDER or {ROOT_VARIABLE}")
    return _row(f"data {name}", f"{len(images.train)} training and {len(images.test)} test images")
