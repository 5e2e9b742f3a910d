"""ELLE as a plug-in: regulariser, rule for its weight, and state, for a user's own training loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elle.core.attacks import Model
from elle.core.attacks.checks import check_batch, check_classes, check_logits, check_radius
from elle.core.attacks.network import parallel_parts
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Criterion, Linearity, Norm, cross_entropy
from elle.models.half_weights import has_compiled_parts
from elle.models.recomputing import blocks_to_recompute, note_on_random_layers, recomputed

BFLOAT16 = (
    "the network computes in bfloat16 by itself, whose rounding hides the linearity error; keep its weights in float32 "
    "and use torch.autocast around it, or float16"
)


class ELLE(nn.Module):
    """The weighted local-linearity error of a batch, to be added to the training loss (arXiv 2401.11618).

        reg = elle.ELLE(eps=8/255, weight=4000, adaptive=True)    # ELLE-A; adaptive=False is ELLE
        loss = F.cross_entropy(model(x_adv), y) + reg(model, x, y)

    After each call `error`, `weight` and `threshold` are tensors on the device of x: reading them as numbers
    waits for the device, calling `reg` does not. With `adaptive=True` each call is one observation of the error;
    under gradient accumulation over k batches, `decay=0.99 ** (1 / k)` keeps the decay of an optimizer step.
    In a distributed job the error is averaged over the ranks, so every rank must make the same calls.
    Under a bf16 autocast the error is computed outside of it, since 7 mantissa bits drown it.
    `memory="low"`: the network's blocks are recomputed in the backward instead of keeping what they have computed.
    """

    error: Tensor
    weight: Tensor
    threshold: Tensor
    _looked = False

    def __init__(
        self,
        eps: float | Tensor,
        weight: float = 4000.0,
        adaptive: bool = True,
        *,
        samples: int = 1,
        alpha: Literal["uniform"] | float = "uniform",
        norm: Norm = "linf",
        history: Literal["all"] | int = "all",
        decay: float = 0.99,
        sensitivity: float = 2.0,
        criterion: Criterion = cross_entropy,
        clip: bool = False,
        memory: Literal["auto", "low"] = "auto",
    ) -> None:
        super().__init__()
        check_radius(eps, norm)
        if memory not in ("auto", "low"):
            raise ValueError(f"memory is {memory!r}; it must be 'auto' or 'low'")
        if isinstance(history, str) and history != "all":
            raise ValueError(f"history is {history!r}; it must be 'all' or a whole number, 3 or more")
        if not isinstance(adaptive, bool):
            raise ValueError(f"adaptive is {adaptive!r}; it is True (ELLE-A) or False (ELLE)")
        if not callable(criterion) or isinstance(criterion, type):
            raise ValueError(
                f"criterion is {criterion!r}; give a function of logits and labels that returns one loss for each "
                f"image (for example torch.nn.CrossEntropyLoss(reduction='none'))"
            )
        self.eps, self.memory = eps, memory
        self.criterion = criterion
        self.regulariser = Linearity(samples, alpha, norm, clip)
        self.rule: Constant | OnOff = Constant(weight)
        if adaptive:
            self.rule = OnOff(weight, decay, sensitivity, None if history == "all" else history)
        for name, value in self.rule.start().items():
            self.register_buffer(name, value)
        self.register_buffer("error", torch.tensor(float("nan"), device="cpu"), persistent=False)

    if TYPE_CHECKING:  # torch's takes anything and gives Any

        def __call__(self, model: Model, x: Tensor, y: Tensor) -> Tensor: ...

    def forward(self, model: Model, x: Tensor, y: Tensor) -> Tensor:
        """weight * mean error of x [B, ...] in [0, 1] with labels or probabilities y, [B] or [B, K]: a scalar."""
        # Again: a schedule sets another radius.
        check_radius(self.eps, self.regulariser.norm, allow_zero=True)
        check_batch(x, y, self.eps, self.regulariser.norm)
        if x.dim() == 0 or y.dim() == 0 or len(x) == 0 or len(x) != len(y):
            counts = [len(one) if one.dim() else "no" for one in (x, y)]
            raise ValueError(
                f"x has {counts[0]} images and y {counts[1]} labels; give at least one image, and a label for each"
            )
        if self.error.device != x.device:
            self.to(x.device)
        self._warn_of_random_layers(model)

        def logits(points: Tensor) -> Tensor:
            answer = check_logits(model(points))
            if answer.dtype is torch.bfloat16:  # although no autocast is around it
                warnings.warn(BFLOAT16, stacklevel=2)
            return check_classes(answer) if self.criterion is cross_entropy else answer

        # Without a broadcast of BatchNorm's buffers, which the loss's forward, not yet backward, has read.
        with parallel_parts(model, require_forward_param_sync=False), self._recomputed(model):
            error = self.regulariser(logits, x, y, self.eps, self.criterion).mean()
        seen = _mean_over_ranks(error.detach())
        state = {name: getattr(self, name) for name in self.rule.start("meta")}
        with torch.no_grad():
            self._keep(self.rule.update(state, seen) | {"error": seen})
        # A copy: where the buffer changes in place at the next call, that may be before this call's backward.
        return self.weight.clone() * error

    def _warn_of_random_layers(self, model: Model) -> None:
        """At the first call alone: to look at every layer takes time."""
        if self._looked or torch.compiler.is_compiling():
            return
        self._looked = True
        if isinstance(model, nn.Module) and (note := note_on_random_layers(model, "the linearity error")):
            warnings.warn(note, stacklevel=5)  # where the loop calls the plug-in

    def _recomputed(self, model: Model) -> contextlib.AbstractContextManager[None]:
        if self.memory == "auto":
            return contextlib.nullcontext()
        if not isinstance(model, nn.Module) or has_compiled_parts(model):
            raise ValueError("memory='low' needs the network itself, not compiled and not a function that calls it")
        if any(isinstance(part, nn.DataParallel) and len(part.device_ids) > 1 for part in model.modules()):
            raise ValueError("memory='low' is not for DataParallel's copies of a network; use DistributedDataParallel")
        return recomputed(model, blocks_to_recompute(model))

    def _keep(self, values: dict[str, Tensor]) -> None:
        """In tensors of their own: what a loop has put into a list, to read it later, stays what it was.

        In place where a CUDA graph or a compiler will repeat this call, which reads what it wrote the last time.
        """
        for name, value in values.items():
            buffer: Tensor = getattr(self, name)
            repeated = torch.compiler.is_compiling() or (buffer.is_cuda and torch.cuda.is_current_stream_capturing())
            if repeated:
                buffer.copy_(value)
            else:
                setattr(self, name, value.to(buffer.dtype, copy=True))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As `nn.Module._apply`, but `half()` of a network that holds the plug-in leaves its statistics in float32.

        An error of 1e-8 is 0 in fp16, and a count in bf16 ends at 256. A criterion's buffers, such as the weights of
        classes, meet logits in float32 at least.
        """
        before = [(part, *one) for part in self.modules() for one in part.named_buffers(recurse=False)]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part, name, buffer in before:
            moved = getattr(part, name)
            narrower = moved.dtype.itemsize < buffer.dtype.itemsize
            if narrower or (part is self and moved.dtype != buffer.dtype):
                setattr(part, name, buffer.to(moved.device))
        return self

    def extra_repr(self) -> str:
        eps = self.eps
        radius = f"eps of shape {list(eps.shape)}" if isinstance(eps, Tensor) and eps.dim() else f"eps={eps:g}"
        return f"{radius}, {self.rule}, {self.regulariser}"


def _mean_over_ranks(error: Tensor) -> Tensor:
    """The error averaged over the processes of a distributed job, so that every rank's weight is the same."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        error = error.clone()
        dist.all_reduce(error)
        error /= dist.get_world_size()
    return error
