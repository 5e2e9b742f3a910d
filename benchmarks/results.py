"""Where benchmark results are kept: benchmarks/results/NAME-GPU-torchVERSION.json."""

from __future__ import annotations

from pathlib import Path

import torch

from elle.engine.runtime import hardware_name, measured_with, pick_device

FOLDER = Path(__file__).parent / "results"
H200 = measured_with("NVIDIA H200", "2.11.0")
"""Of the files that the tables in docs/ are made from."""


def result_file(name: str, device: str | None = None, version: str = torch.__version__) -> Path:
    """For what was measured on this device with this torch, or on the ones named."""
    return FOLDER / f"{name}-{measured_with(device or hardware_name(pick_device('auto')), version)}.json"
