"""Attacks: (model, x, y, eps) -> x_adv. One loop of normalised gradient steps serves every name.

The model is used in the mode it is in. In train mode each forward moves BatchNorm's running statistics, as in
the paper's training; call `model.eval()` first to attack a fixed model.
"""

from __future__ import annotations

from torch import Tensor

from elle.core.attacks.checks import check_batch, check_count, check_radius
from elle.core.attacks.network import Model
from elle.core.attacks.steps import Norm, Replay, SignStep

__all__ = ["Model", "Norm", "Replay", "SignStep", "fgsm", "n_fgsm", "pgd"]


def fgsm(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    clip: bool = False,
    norm: Norm = "linf",
) -> Tensor:
    """x + eps * sign(grad L(x)) (Goodfellow et al., arXiv 1412.6572), not clipped unless asked, as in the paper."""
    check_radius(eps, norm, allow_zero=True)
    check_batch(x, y, eps, norm)
    return SignStep(clip=clip, norm=norm)(model, x, y, eps)


def n_fgsm(model: Model, x: Tensor, y: Tensor, eps: float | Tensor, *, noise: float = 2) -> Tensor:
    """x + eta + eps * sign(grad L(x + eta)), eta ~ Unif(+-noise * eps), unprojected (arXiv 2202.01181)."""
    check_radius(eps, allow_zero=True)
    check_batch(x, y, eps)
    return SignStep(noise=noise, project=False)(model, x, y, eps)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 20,
    alpha: float | None = None,
    norm: Norm = "linf",
) -> Tensor:
    """PGD from a uniform start, inside the ball and [0, 1]; alpha in units of eps, 2.5 / steps by default."""
    check_radius(eps, norm, allow_zero=True)
    check_batch(x, y, eps, norm)
    check_count("steps", steps)
    attack = SignStep(alpha=2.5 / steps if alpha is None else alpha, steps=steps, noise=1, clip=True, norm=norm)
    if 0 < attack.alpha * steps < 1 - 1e-6:
        # 2/255, as papers write a step, would be 2/255 of eps: an attack that goes nowhere and says so to nobody.
        raise ValueError(
            f"alpha is {alpha:g} in units of eps: {steps} steps of it do not reach from the image to the ball's edge; "
            f"write a step of 2/255 as (2 / 255) / eps"
        )
    return attack(model, x, y, eps)
