"""Linearity metrics of a trained network over a set of images: eval mode, float32, reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from elle.core import linearity
from elle.core.attacks import Norm as AttackNorm
from elle.core.attacks import fgsm, pgd
from elle.core.linearity import Linearity, Norm
from elle.errors import InputError, WorkError, first_line, nearest
from elle.evaluation.mode import device_of, evaluation_mode, exact_float32
from elle.evaluation.units import Images, as_tensor

Summary = dict[str, float | int]
Metric = Callable[[nn.Module, Tensor, Tensor, float, Norm], Tensor]
"""(model, x, y, eps, norm) -> one value an image"""


def _error(form: Linearity) -> Metric:
    def measure(model: nn.Module, x: Tensor, y: Tensor, eps: float, norm: Norm) -> Tensor:
        chosen = form if form.norm != "linf" else replace(form, norm=norm)
        with torch.no_grad():
            adversarial = None
            if form.form == "2p":
                x_adv = fgsm(model, x, y, eps, norm=cast(AttackNorm, norm))
                adversarial = (x_adv, model(x_adv))
            return chosen(model, x, y, eps, adversarial=adversarial)

    return measure


def _loss_ratio(model: nn.Module, x: Tensor, y: Tensor, eps: float, norm: Norm) -> Tensor:
    kind = cast(AttackNorm, norm)
    single, multi = fgsm(model, x, y, eps, clip=True, norm=kind), pgd(model, x, y, eps, steps=20, norm=kind)
    with torch.no_grad():
        return linearity.cross_entropy(model(single), y) / linearity.cross_entropy(model(multi), y)


_FORMS: dict[str, tuple[str, Linearity]] = {
    "error": ("E_lin as it is penalised: squared, three points (Algorithm 1)", Linearity()),
    "error_abs": ("E_lin of Definition 1: not squared", Linearity(power=1)),
    "error_smooth": ("smooth-l1 in place of the square, as in the ImageNet scripts", Linearity(power="smooth-l1")),
    "error_two": ("two triplets an image, averaged", Linearity(samples=2)),
    "error_half": ("alpha fixed at 1/2", Linearity(alpha=0.5)),
    "error_max": ("the worst alpha", Linearity(alpha="max")),
    "error_5point": ("the 5-point form (Definition 3), squared", Linearity(form="5-point")),
    "error_2p": ("ELLE-2p: x_b is the FGSM point (Eq. 6), not squared", Linearity(form="2p", power=1)),
    "error_l2": ("E_lin in the l2 ball of the same radius", Linearity(norm="l2")),
    "error_l1": ("E_lin in the l1 ball of the same radius", Linearity(norm="l1")),
}
_OTHER_POWERS = ("error_abs", "error_smooth")
"""The same gap as `error`: for logits there is one, the l2 norm of Definition 1."""

METRICS: dict[str, tuple[str, Metric]] = {
    **{name: (words, _error(form)) for name, (words, form) in _FORMS.items()},
    **{
        f"{name}_logits": (
            f"{name} on the logits: the l2 norm of their gap",
            _error(replace(form, power=1, on="logits")),
        )
        for name, (_, form) in _FORMS.items()
        if name not in _OTHER_POWERS
    },
    "misalignment": ("1 - cos of input gradients (Eq. 5)", linearity.gradient_misalignment),
    "misalignment_fd": ("the same from finite differences (Eq. 8)", linearity.finite_difference_misalignment),
    "curvature": ("second directional derivative along x_a - x_b", linearity.directional_curvature),
    "llr": ("LLR's squared Taylor gap", linearity.taylor_gap),
    "cure": ("CURE's squared difference of input gradients", linearity.gradient_difference),
    "gradient_norm": ("l2 norm of the input gradient", linearity.gradient_norm),
    "loss_ratio": ("loss at the FGSM point over loss at the PGD-20 point", _loss_ratio),
}
_WITH_ATTACK = ("error_2p", "error_2p_logits", "cure", "loss_ratio")
"""Those that step to an adversarial point, for which there is no l1 form."""


def parse_metrics(names: str, norm: Norm = "linf") -> list[str]:
    """`error,curvature` -> names of METRICS; `all` is every one that the norm has."""
    without = _WITH_ATTACK if norm == "l1" else ()
    if names == "all":
        return [name for name in METRICS if name not in without]
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen:
        if name not in METRICS:
            raise InputError(f"metric {name!r} does not exist{nearest(name, METRICS)}; there are {', '.join(METRICS)}")
        if name in without:
            raise InputError(f"metric {name} steps to an adversarial point, which has no l1 form; leave it out")
    if not chosen:
        raise InputError("no metric given; for example --metric error,misalignment, or all")
    return chosen


def linearity_metrics(
    model: nn.Module,
    x: Images,
    y: Images,
    eps: float,
    *,
    metric: str = "all",
    norm: Norm = "linf",
    batch: int = 500,
    seed: int = 0,
) -> dict[str, Summary]:
    """Each metric's mean, std and quantiles over the images x [N, ...] in [0, 1] with labels y [N].

    Arrays of bytes, 0 to 255, go to the network's device batch by batch: they may be larger than its memory.
    Every metric starts from `seed`, so its value does not depend on which others are asked for. A value that is not
    defined (the angle to a gradient of 0) is counted as such, never replaced.
    """
    names = parse_metrics(metric, norm)
    if len(x) == 0 or len(x) != len(y):
        raise InputError(f"{len(x)} images and {len(y)} labels cannot be measured; there must be one label an image")
    device = x.device if isinstance(x, Tensor) else device_of(model, torch.device("cpu"))
    result = {}
    with exact_float32(device):
        for name in names:
            with evaluation_mode(model, seed, device):
                pairs = _batches(x, y, batch, device)
                try:
                    parts = [METRICS[name][1](model, *pair, eps, norm).detach() for pair in pairs]
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as problem:  # a network without a way back from the logits to the image
                    raise WorkError(
                        f"metric {name} cannot be measured of this network: {first_line(problem)}"
                    ) from problem
                result[name] = summary(torch.cat(parts).double().cpu())
    return result


def _batches(x: Images, y: Images, batch: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for first in range(0, len(x), batch):
        points, labels = (as_tensor(values[first : first + batch]).to(device) for values in (x, y))
        yield points / 255 if points.dtype == torch.uint8 else points, labels


def mean_error(model: nn.Module, x: Tensor, y: Tensor, eps: float, *, norm: Norm = "linf", batch: int = 500) -> float:
    """The mean error over the images, in the mode and precision the caller has set."""
    pairs = zip(torch.split(x, batch), torch.split(y, batch), strict=True)
    return float(torch.cat([METRICS["error"][1](model, *pair, eps, norm) for pair in pairs]).mean())


def summary(values: Tensor) -> Summary:
    """Mean, std and quantiles of the defined values, and how many were undefined (NaN, or infinite)."""
    defined = values[values.isfinite()]
    result: Summary = {"count": len(defined), "undefined": len(values) - len(defined)}
    if len(defined):
        result["mean"] = float(defined.mean())
        result["std"] = float(defined.std(correction=0))
        for level in (5, 25, 50, 75, 95):
            result[f"q{level:02d}"] = float(defined.quantile(level / 100))
    return result
