"""The penalty's passes beside those of the loss, on a stream of their own.

Neither needs what the other computes before the backward pass, and two chains of small kernels keep a GPU busier side
by side than one after the other; autograd runs each chain's backward on the stream of its forward.

What both would write, the running statistics of BatchNorm, the penalty's passes write aside; the buffers are moved by
that when all passes have been launched, as if the penalty's had come last. A layer that k of them go through, with the
statistics s_1, ..., s_k and the momentum m, leaves aside what it makes of zeros,

    a = m s_k + (1 - m) m s_{k-1} + ... + (1 - m)^{k-1} m s_1     r <- (1 - m)^k r + a
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from elle.models.batch_norm import BatchNorm
from elle.models.half_weights import takes_copies
from elle.models.normalise import Normalise

_BATCH_NORMS = (BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MOVED = ("running_mean", "running_var")
_COUNTED = "num_batches_tracked"


class Apart:
    """Runs the penalty's passes on a stream of their own, BatchNorm's statistics aside; on a CPU in the usual order."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = _batch_norms(model)
        self.aside = [
            {name: torch.zeros_like(buffer) for name, buffer in layer._buffers.items() if buffer is not None}
            for layer in self.layers
        ]
        device = next(model.parameters()).device
        self.kept = torch.tensor([1 - (layer.momentum or 0.0) for layer in self.layers], device=device)
        """The share (1 - momentum) of its running statistics that each layer keeps at a pass."""
        self.sizes = [layer.num_features for layer in self.layers for _ in _MOVED]
        owners = [number for number, layer in enumerate(self.layers) for _ in range(len(_MOVED) * layer.num_features)]
        self.owners = torch.tensor(owners, dtype=torch.int64, device=device)
        self.stream = _stream(device) if device.type == "cuda" else None
        self.begun: torch.cuda.Event | None = None
        self.factors: list[Tensor] = []
        """(1 - m)^k for each running statistic; an attribute, so that it lives until both streams have used it."""

    def begin(self) -> None:
        """Mark the moment from which the passes may start: all that they read has been launched."""
        if self.stream is not None:
            self.begun = torch.cuda.current_stream().record_event()

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Run the block beside whatever was launched since `begin`; what is launched after it waits for both."""
        own = [layer._buffers for layer in self.layers]
        with self._stream_of_passes():
            if self.layers:
                torch._foreach_zero_([aside[name] for aside in self.aside for name in _MOVED])
                torch._foreach_zero_([aside[_COUNTED] for aside in self.aside])
            for layer, aside in zip(self.layers, self.aside, strict=True):
                # In eval mode a layer reads its statistics; what its kernels count by is no one else's all the same.
                written = {name: aside[name] for name in aside if layer.training or name not in (*_MOVED, _COUNTED)}
                layer._buffers = {**layer._buffers, **written}
            try:
                yield
            finally:
                for layer, buffers in zip(self.layers, own, strict=True):
                    layer._buffers = buffers
            if self.layers:
                # A factor for each number, not for each layer: tensors of one shape are multiplied by one launch.
                passes = torch.stack([aside[_COUNTED] for aside in self.aside])
                self.factors = list(torch.split_with_sizes((self.kept**passes)[self.owners], self.sizes))
        if self.layers:
            self._move()

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

    def _move(self) -> None:
        # `data`, whose changes autograd does not count, as it does not count a forward's: the backward of torch's layer
        # has the buffers at hand, though in train mode it does not read them.
        buffers = [layer.get_buffer(name).data for layer in self.layers for name in _MOVED]
        torch._foreach_mul_(buffers, self.factors)
        torch._foreach_add_(buffers, [aside[name] for aside in self.aside for name in _MOVED])
        counts = [layer.get_buffer(_COUNTED) for layer in self.layers]
        torch._foreach_add_(counts, [aside[_COUNTED] for aside in self.aside])


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
        and all(layer.get_buffer(name).dtype is torch.float32 for layer in norms for name in _MOVED)
        and all(layer.momentum is not None for layer in norms)
        and not any(layer._buffers for layer in others)
        and not any(layer._parameters for layer in others if not takes_copies(layer))
    )


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
