"""Where benchmark results are kept: benchmarks/results/NAME-GPU-torchVERSION.json."""

from __future__ import annotations

import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "results"


def result_file(name: str) -> Path:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return FOLDER / f"{name}-{slug}-torch{torch.__version__.split('+')[0]}.json"
