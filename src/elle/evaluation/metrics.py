"""Linearity metrics of a trained network over a set of images: eval mode, float32, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from elle.core.linearity import Norm, Triplet, gradient_misalignment
from elle.evaluation.evaluate import evaluation_mode, exact_float32

Summary = dict[str, float | int]


def linearity_metrics(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float,
    *,
    norm: Norm = "linf",
    batch: int = 500,
    seed: int = 0,
) -> dict[str, Summary]:
    """Each metric's mean, std and quantiles over the images x [N, ...] in [0, 1] with labels y [N].

    error: (L(x_c) - (1-a) L(x_a) - a L(x_b))^2, the training penalty; error_abs: its root (Definition 1);
    misalignment: 1 - cos of input gradients (Eq. 5), undefined where a gradient is 0.
    """
    metrics: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "error": lambda images, labels: _no_grad_error(model, images, labels, eps, norm),
        "misalignment": lambda images, labels: gradient_misalignment(model, images, labels, eps, norm),
    }
    values: dict[str, Tensor] = {}
    with exact_float32(x.device):
        for name, metric in metrics.items():
            with evaluation_mode(model, seed, x.device):
                parts = [metric(*pair) for pair in zip(torch.split(x, batch), torch.split(y, batch), strict=True)]
                values[name] = torch.cat(parts).double().cpu()
    values["error_abs"] = values["error"].sqrt()
    return {name: summary(values[name]) for name in ("error", "error_abs", "misalignment")}


def _no_grad_error(model: nn.Module, x: Tensor, y: Tensor, eps: float, norm: Norm) -> Tensor:
    with torch.no_grad():
        return Triplet(norm=norm)(model, x, y, eps)


def mean_error(model: nn.Module, x: Tensor, y: Tensor, eps: float, *, norm: Norm = "linf", batch: int = 500) -> float:
    """The mean error over the images, in the mode and precision the caller has set."""
    pairs = zip(torch.split(x, batch), torch.split(y, batch), strict=True)
    return float(torch.cat([_no_grad_error(model, *pair, eps, norm) for pair in pairs]).mean())


def summary(values: Tensor) -> Summary:
    """Mean, std and quantiles of the defined values, and how many were undefined (NaN)."""
    defined = values[~values.isnan()]
    result: Summary = {"count": len(defined), "undefined": len(values) - len(defined)}
    if len(defined):
        result["mean"] = float(defined.mean())
        result["std"] = float(defined.std(correction=0))
        for level in (5, 25, 50, 75, 95):
            result[f"q{level:02d}"] = float(defined.quantile(level / 100))
    return result
