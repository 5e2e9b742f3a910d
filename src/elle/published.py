"""What the authors of each method chose, by dataset, eps and network; anything here a user can override."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Published = Callable[[str, float, str], dict[str, dict[str, Any]]]
"""(dataset, eps, network) -> the fields of a method's parts that its authors chose there"""


def table_radius(eps: float, norm: str) -> float:
    """Where to look a radius up: all values are by l-infinity radii; in another norm they are those of 8/255."""
    return eps if norm == "linf" else 8 / 255


def n_fgsm_noise(data: str, eps: float, model: str) -> dict[str, dict[str, Any]]:
    """The authors' k = 2, and their two exceptions."""
    levels = round(255 * eps, 3)
    exception = {("svhn", 12.0): 3, ("cifar10", 16.0): 4 if model.startswith("wide") else 2}
    return {"attack": {"noise": exception.get((data, levels), 2)}}


def gradalign_weight(data: str, eps: float, model: str) -> dict[str, dict[str, Any]]:
    """The authors' fits (levels = 255 eps): 0.2 at 8 and 2 from 16 on for CIFAR-10, 2.5 at 8 for SVHN."""
    levels = min(255 * eps, 16)
    if data == "svhn":
        return {"loss": {"weight": 6.25 / 4 * 1.6 ** (levels / 8)}}
    return {"loss": {"weight": 0.02 * 10 ** (levels / 8)}}


def llr_weight(data: str, eps: float, model: str) -> dict[str, dict[str, Any]]:
    table = {8: 200, 12: 500, 14: 1_000, 16: 500, 18: 1_000, 20: 500, 22: 2_000, 24: 5_000}
    levels = round(255 * eps, 3)
    return {"loss": {"weight": next((weight for upto, weight in table.items() if levels <= upto), 2_000)}}


def cure_weight(data: str, eps: float, model: str) -> dict[str, dict[str, Any]]:
    """The paper's 1,000 (eps 8) and 50,000 (16), which multiply gradients of a mean over 128 images, squared."""
    return {"loss": {"weight": (1_000 if eps < 12 / 255 else 50_000) / 128**2}}


def zerograd_share(data: str, eps: float, model: str) -> dict[str, dict[str, Any]]:
    return {"attack": {"zero": {"cifar100": 0.45, "svhn": 0.7}.get(data, 0.35)}}


def fast_bat_rate(data: str, eps: float, model: str) -> dict[str, dict[str, Any]]:
    return {"loss": {"rate": (5000 if eps < 8.5 / 255 else 2000) / 255}}


def normalisation(method: str) -> str:
    """The default of `normalise` for a method: the steps of SLAT inside a network are meant for normalised images."""
    return "dataset" if method.partition("+")[0] == "slat" else "none"


def penalty_weight(method: str, data: str, eps: float, model: str) -> float | None:
    """The paper's lambda_max for ELLE-A on top of another method (Appendix B.2); None where it has none of its own."""
    if method == "n-fgsm+elle-a":  # the same in every schedule
        return {"cifar10": 4_000.0, "svhn": 5_000.0, "imagenet": 20_000.0 if eps < 12 / 255 else 100_000.0}.get(data)
    if data != "cifar10":
        return None
    gat = 50_000.0 if model.startswith("wide") else 10_000.0
    return {"gat+elle-a": gat, "advmixup-single+elle-a": 5_000.0, "trades-single+elle-a": 10_000.0}.get(method)
