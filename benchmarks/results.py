"""Where benchmark results are kept: benchmarks/results/NAME-GPU-torchVERSION.json."""

from __future__ import annotations

import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "results"


def result_file(name: str, device: str | None = None, version: str = torch.__version__) -> Path:
    """For what was measured on this device with this torch, or on the ones named."""
    device = device or (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return FOLDER / f"{name}-{slug}-torch{version.split('+')[0]}.json"
