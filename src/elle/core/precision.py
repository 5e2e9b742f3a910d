"""The number format in which a network's passes run."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
_HALF: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


def autocast(device: torch.device, precision: Precision, cache: bool | None = None) -> torch.autocast:
    """The mixed-precision context; `cache`: whether copies of the weights are kept until it ends, else as around it."""
    dtype = _HALF.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=cache)
