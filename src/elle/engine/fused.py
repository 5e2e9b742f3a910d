"""A step's small arithmetic by kernels of our own: the cross-entropy and its gradient, and the step of an attack.

Torch computes each by a chain of operations that take longer to launch than to run. A method `by_kernels` uses the
kernels wherever they apply, and torch's operations elsewhere; the values are the same up to rounding.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from elle.core.attacks import Model, SignStep
from elle.core.attacks.steps import SCALE
from elle.core.losses import CrossEntropy, When
from elle.methods import Method
from elle.models.tiles import padded

BLOCK = 1024
"""Pixels that one program of the attack's step writes."""
AT_ONCE = 2048
"""Logits that the one program of the cross-entropy reads at once."""
MOST = 2**15
"""Logits that are read one after the other in less time than by torch's launches."""


def by_kernels(method: Method) -> Method:
    """The method with attack and loss by the kernels, where there are any; they have first derivatives only."""
    attack, loss = method.attack, method.loss
    if type(attack) is SignStep:
        attack = _SignStep(**vars(attack))
    if type(loss) is CrossEntropy:
        loss = _CrossEntropyLoss(**vars(loss))
    return dataclasses.replace(method, attack=attack, loss=loss)


@dataclass(frozen=True)
class _SignStep(SignStep):
    def next_point(self, x_adv: Tensor, gradient: Tensor, x: Tensor, eps: float | Tensor, t: int = 0) -> Tensor:
        plain = self.norm == "linf" and not self.frank_wolfe and not self.zero
        if plain and isinstance(eps, Tensor) and takes_step(x_adv, gradient, x, eps):
            return stepped(x_adv, gradient, x, eps, self.alpha, project=self.project, clip=self.clip)
        return super().next_point(x_adv, gradient, x, eps, t)

    def _differentiated(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        if not takes_logits(logits, target):
            return super()._differentiated(logits, target)
        return logits, slope(logits, target, SCALE)


@dataclass(frozen=True)
class _CrossEntropyLoss(CrossEntropy):
    def __call__(
        self, model: Model, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When | None = None
    ) -> tuple[Tensor, Tensor]:
        answer = model(x_adv)
        logits = answer.float()
        if takes_logits(answer, y):
            return cross_entropy(answer, y, self.smoothing), logits
        return F.cross_entropy(logits, y, label_smoothing=self.smoothing), logits


def cross_entropy(logits: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross-entropy to labels y [B], in float32, of those that `takes_logits`."""
    loss: Tensor = _CrossEntropy.apply(logits, y, smoothing)  # type: ignore[no-untyped-call]
    return loss


def takes_logits(logits: Tensor, target: Tensor) -> bool:
    """Whether the kernel can take these logits: a GPU's, not too many, with one label each."""
    return (
        _usable(logits)
        and logits.dim() == 2
        and logits.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and logits.is_contiguous()
        and 0 < len(logits) * padded(logits.shape[1]) <= MOST
        and target.shape == logits.shape[:1]
        and target.dtype is torch.int64
        and target.is_contiguous()
    )


def slope(logits: Tensor, y: Tensor, factor: float) -> Tensor:
    """The gradient of `factor` times the summed cross-entropy, in the logits' type, of those that `takes_logits`."""
    found = torch.empty_like(logits)
    _launch_cross_entropy(logits, y, found, None, factor)
    return found


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
        slopes, loss = torch.empty_like(logits, dtype=torch.float32), logits.new_empty((), dtype=torch.float32)
        _launch_cross_entropy(logits, y, slopes, loss, 1 / len(logits), smoothing)
        ctx.save_for_backward(slopes)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return torch.mul(slopes, g, out=torch.empty_like(slopes, dtype=ctx.dtype)), None, None


def _launch_cross_entropy(
    logits: Tensor, y: Tensor, slopes: Tensor, loss: Tensor | None, factor: float, smoothing: float = 0.0
) -> None:
    rows, classes = logits.shape
    columns = padded(classes)
    kernels: Any = _kernels()
    # Triton launches where the host is, not where its arguments are.
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        kernels.write_cross_entropy[(1,)](
            logits, y, slopes, loss, rows, classes, factor, smoothing=float(smoothing),
            block=min(padded(rows), max(1, AT_ONCE // columns)), columns=columns, num_warps=4,
        )  # fmt: skip


def takes_step(x_adv: Tensor, gradient: Tensor, x: Tensor, eps: Tensor) -> bool:
    """Whether the kernel can take these: three dense arrays of one layout on a GPU, and a radius on the same device."""
    arrays = (x_adv, gradient, x)
    return (
        all(_usable(one) and one.dtype is torch.float32 for one in arrays)
        and all(one.shape == x.shape and one.stride() == x.stride() for one in arrays)
        and torch.ops.aten.is_non_overlapping_and_dense(x)
        and 0 < x.numel() < 2**31
        and eps.dim() == 0
        and eps.device == x.device
    )


def stepped(
    x_adv: Tensor, gradient: Tensor, x: Tensor, eps: Tensor, alpha: float, *, project: bool, clip: bool
) -> Tensor:
    """x_adv + alpha eps sign(gradient), inside the l-infinity ball around x and [0, 1] where asked."""
    result, count = torch.empty_like(x_adv), x.numel()
    kernels: Any = _kernels()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        kernels.write_step[(-(-count // BLOCK),)](
            x_adv, gradient, x, eps, result, count,
            alpha=float(alpha), project=project, clip=clip, block=BLOCK, num_warps=4,
        )  # fmt: skip
    return result


def _usable(x: Tensor) -> bool:
    """Whether a kernel may read it: on a GPU, and neither compiled nor under torch.func, which do not know kernels."""
    return (
        _on_gpu(x)
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
    )


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


@functools.cache
def _kernels() -> ModuleType:
    from elle.engine import fused_kernels

    return fused_kernels
