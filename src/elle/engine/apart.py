"""The penalty's passes beside those of the loss, on a stream of their own.

Neither needs what the other computes before the backward pass, and two chains of small kernels keep a GPU busier side
by side than one after the other; autograd runs each chain's backward on the stream of its forward.

What both would write, the running statistics of BatchNorm, the penalty's passes write aside; the buffers are moved by
that when all passes have been launched, as if the penalty's had come last.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elle.engine.half_weights import LAYERS
from elle.models.batch_norm import BatchNorm
from elle.models.normalise import Normalise

_BATCH_NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MOVED = ("running_mean", "running_var")
_COUNTED = "num_batches_tracked"


class Apart:
    """Where a network's second chain of passes runs, and what it writes; on a CPU it comes when it is called."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = _batch_norms(model)
        self.aside = [
            {name: torch.zeros_like(buffer) for name, buffer in layer._buffers.items() if buffer is not None}
            for layer in self.layers
        ]
        device = next(model.parameters()).device
        self.stream = _stream(device) if device.type == "cuda" else None
        self.begun: torch.cuda.Event | None = None

    def begin(self) -> None:
        """What the passes read is there from now on."""
        if self.stream is not None:
            self.begun = torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Within it, passes that run beside whatever has been launched since `begin`; what follows waits for both."""
        moving = [(layer, aside) for layer, aside in zip(self.layers, self.aside, strict=True) if layer.training]
        own = [(layer._buffers, layer.momentum) for layer, _ in moving]
        with self._stream_of_passes():
            if moving:  # zeros, and not what was left there: it may not be finite
                torch._foreach_zero_([aside[name] for _, aside in moving for name in _MOVED])
            for layer, aside in moving:
                layer._buffers, layer.momentum = {**layer._buffers, **aside}, 1.0  # the statistics of the pass alone
            try:
                yield
            finally:
                for (layer, _), (buffers, momentum) in zip(moving, own, strict=True):
                    layer._buffers, layer.momentum = buffers, momentum
        if moving:
            self._move(moving)

    @contextlib.contextmanager
    def _stream_of_passes(self) -> Iterator[None]:
        if self.stream is None or self.begun is None:
            yield
            return
        current = torch.cuda.current_stream()
        self.stream.wait_event(self.begun)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def _move(self, moving: list[tuple[_BatchNorm, dict[str, Tensor]]]) -> None:
        buffers = [layer.get_buffer(name) for layer, _ in moving for name in _MOVED]
        found = [aside[name] for _, aside in moving for name in _MOVED]
        torch._foreach_lerp_(buffers, found, moving[0][0].momentum or 0.0)
        torch._foreach_add_([layer.get_buffer(_COUNTED) for layer, _ in moving], 1)


def _batch_norms(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and type(layer) in _BATCH_NORMS]


def suits(model: nn.Module) -> bool:
    """Whether two chains of passes through a network may run at once: nothing but its BatchNorms writes in a forward.

    Nor may anything be made by the first pass for the next, as autocast's copies are of weights that `half_weights`
    does not know.
    """
    layers = list(model.modules())
    norms = _batch_norms(model)
    others = [layer for layer in layers if type(layer) not in (*_BATCH_NORMS, Normalise)]
    return (
        all(layer._buffers.get(name) is not None for layer in norms for name in (*_MOVED, _COUNTED))
        and len({layer.momentum for layer in norms}) <= 1
        and all(layer.momentum is not None for layer in norms)
        and not any(layer._buffers for layer in others)
        and not any(layer._parameters for layer in others if type(layer) not in LAYERS)
    )


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
