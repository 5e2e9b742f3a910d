"""Layers whose gradient is cheap to differentiate once more, for methods that penalise a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from elle.core.second_order.convolution import convolution
from elle.core.second_order.normalisation import batch_norm

_REPLACED = {torch.conv2d: convolution, F.batch_norm: batch_norm}


class _Replacing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(function, function)(*args, **(kwargs or {}))


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Within it, convolutions and BatchNorm are built so that differentiating their gradient is cheap.

    The values are the same, and so are BatchNorm's running statistics. What is out of the ordinary is left to torch.
    """
    with _Replacing():
        yield
