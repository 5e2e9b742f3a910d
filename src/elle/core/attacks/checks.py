"""What an attack is given, refused with a plain sentence where it cannot be meant."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor


def check_radius(eps: float | Tensor, norm: str = "linf", allow_zero: bool = False) -> None:
    """Refuse a radius that cannot be meant; one that is a tensor is not read, as that would wait for its device."""
    if isinstance(eps, Tensor):
        return
    if not isinstance(eps, numbers.Real):
        raise ValueError(f"eps is {eps!r}, a {type(eps).__name__}; give a number, for example 8 / 255")
    if not 0 <= eps < math.inf or (eps == 0 and not allow_zero) or (norm == "linf" and eps > 1):
        raise ValueError(f"eps is {eps}; for images in [0, 1] write it as a fraction, for example 8/255")


def one_radius(eps: float | Tensor, norm: str = "linf", allow_zero: bool = False) -> float:
    """The radius of all images as a plain number, if it can be meant; one that is a tensor is read."""
    if isinstance(eps, Tensor):
        if eps.numel() != 1:
            raise ValueError(f"eps has shape {list(eps.shape)}; give one number, for all images and pixels")
        eps = eps.item()
    check_radius(eps, norm, allow_zero)
    return float(eps)


def check_count(name: str, value: int) -> None:
    if not (isinstance(value, numbers.Integral) and value >= 1):
        raise ValueError(f"{name} is {value!r}; it must be a whole number, 1 or more")


def check_batch(x: Tensor, y: Tensor, eps: float | Tensor, norm: str = "linf") -> None:
    """Refuse images of whole numbers, which have no gradient, and radii [B], which would be those of columns."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x is a {type(x).__name__}; give a tensor of floats in [0, 1]")
    if not x.is_floating_point():
        raise ValueError(f"x is {x.dtype}; it must be floats in [0, 1], for example x.float() / 255")
    if not isinstance(y, Tensor):
        raise ValueError(f"y is a {type(y).__name__}; give a tensor with a label for each image")
    if not isinstance(eps, Tensor) or eps.dim() == 0:
        return
    if eps.dim() != x.dim() or (norm != "linf" and eps[:1].numel() != 1):
        shape = ", ".join(["-1", *["1"] * (x.dim() - 1)])
        raise ValueError(f"eps has shape {list(eps.shape)}; give one number, or one an image as eps.view({shape})")
    if torch.promote_types(eps.dtype, x.dtype) != x.dtype:
        raise ValueError(f"eps is {eps.dtype} and x {x.dtype}, which would change; give eps.to(x.dtype)")


def check_logits(answer: object) -> Tensor:
    """Refuse an answer that is no tensor: some networks return a tuple, or an object that holds the logits."""
    if not isinstance(answer, Tensor):
        raise ValueError(
            f"the network returned a {type(answer).__name__}, not logits [B, K]; wrap it in a module that returns "
            f"these alone (to an attack and to elle.ELLE, a function will do: lambda x: model(x).logits)"
        )
    return answer


def check_classes(logits: Tensor) -> Tensor:
    """Refuse one logit an image, of which the cross-entropy is 0 whatever it is: an attack would return its images."""
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise ValueError(
            f"the network returned logits of shape {list(logits.shape)}; the cross-entropy needs one for each class, "
            f"[B, K]: for a single logit z of shape [B, 1] return torch.cat([torch.zeros_like(z), z], 1), and give "
            f"labels 0 and 1"
        )
    return logits


def check_probabilities(target: Tensor, logits: Tensor) -> None:
    """Refuse a column of labels [B, 1] and the like, which would be broadcast, or refused in torch's words."""
    if target.shape != logits.shape or not target.is_floating_point():
        raise ValueError(
            f"y is {target.dtype} of shape {list(target.shape)} for logits {list(logits.shape)}; it must be labels "
            f"[B], for example y.flatten(), or probabilities [B, K] as floats"
        )
