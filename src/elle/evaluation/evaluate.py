"""Accuracy without and under attack: eval mode, float32, one result for each attack."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elle.core.attacks import Norm, SignStep
from elle.errors import InputError, nearest


@dataclass(frozen=True)
class EvaluationAttack:
    name: str
    attack: SignStep | None
    restarts: int = 1


def parse_attacks(names: str, norm: Norm = "linf") -> list[EvaluationAttack]:
    """`clean,fgsm,pgd-20,pgd-50-10` -> attacks. PGD-K steps eps/8 at K=20 (2.5 eps/K); PGD-K-R steps eps/4."""
    attacks = [_parse_attack(name.strip(), norm) for name in names.split(",") if name.strip()]
    if not attacks:
        raise InputError("no attack given; for example --attack clean,pgd-20")
    return attacks


def _parse_attack(name: str, norm: Norm) -> EvaluationAttack:
    if name == "clean":
        return EvaluationAttack(name, None)
    if name == "fgsm":
        return EvaluationAttack(name, SignStep(clip=True, norm=norm))
    match = re.fullmatch(r"pgd-([1-9]\d{0,4})(?:-([1-9]\d{0,3}))?", name)
    if not match:
        known = ["clean", "fgsm", "pgd-20", "pgd-50-10"]
        raise InputError(
            f"attack {name!r} does not exist{nearest(name, known)}; use clean, fgsm, pgd-STEPS or pgd-STEPS-RESTARTS"
        )
    steps, restarts = int(match[1]), int(match[2] or 1)
    alpha = 1 / 4 if match[2] else min(2.5 / steps, 1)
    return EvaluationAttack(name, SignStep(alpha, steps, noise=1, clip=True, norm=norm), restarts)


def evaluate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: str = "clean,pgd-20",
    eps: float = 8 / 255,
    *,
    norm: Norm = "linf",
    batch: int = 500,
    seed: int = 0,
) -> dict[str, dict[str, Any]]:
    """Accuracy of `model` on images x [N, C, H, W] in [0, 1] with labels y [N], for each attack named.

    `result["pgd-20"]` holds accuracy, correct, total, interval (95 %) and seconds. The model is put into eval
    mode and back; the random starts come from `seed` alone and the caller's random state is left as it was.
    """
    attacks = parse_attacks(attack, norm)
    if len(x) == 0 or len(x) != len(y):
        raise InputError(f"{len(x)} images and {len(y)} labels cannot be evaluated; there must be one label an image")
    if not 0 <= eps < math.inf or (norm == "linf" and eps > 1):
        raise InputError(f"eps is {eps}; for images in [0, 1] write it as a fraction, for example 8/255")
    results = {}
    with exact_float32(x.device):
        for one in attacks:
            with evaluation_mode(model, seed, x.device):
                results[one.name] = _result(model, x, y, one, eps, batch)
    return results


def _result(model: nn.Module, x: Tensor, y: Tensor, one: EvaluationAttack, eps: float, batch: int) -> dict[str, Any]:
    started = time.perf_counter()
    correct = int(surviving(model, x, y, one, eps, batch).sum())  # waits for the device
    low, high = wilson_interval(correct, len(x))
    return {
        "accuracy": correct / len(x),
        "correct": correct,
        "total": len(x),
        "interval": [low, high],
        "seconds": round(time.perf_counter() - started, 3),
    }


def surviving(model: nn.Module, x: Tensor, y: Tensor, one: EvaluationAttack, eps: float, batch: int = 500) -> Tensor:
    """Which images [N] are still classified correctly; an image is broken if any restart breaks it."""
    everything = torch.arange(len(x), device=x.device)
    alive = torch.cat([_correct(model, x[part], y[part]) for part in torch.split(everything, batch)])
    for _ in range(one.restarts if one.attack is not None else 0):
        # Only what is left, in full batches again: broken images cost nothing more.
        for part in torch.split(everything[alive], batch):
            points = one.attack(model, x[part], y[part], eps)  # type: ignore[misc]
            alive[part] = _correct(model, points, y[part])
    return alive


def _correct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(x)
    # argmax takes NaN for the largest: a network that diverged would pass for one that always answers class 0.
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a proportion (Wilson, 1927)."""
    z = 1.959963984540054
    share = correct / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total**2)) / (1 + z * z / total)
    return max(0.0, middle - half), min(1.0, middle + half)


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, seed: int, device: torch.device) -> Iterator[None]:
    """Eval mode and a random stream of its own; both are put back, so that evaluating never changes training."""
    modes = {module: module.training for module in model.modules()}
    cuda = [device] if device.type == "cuda" else []
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        torch.backends.cudnn.benchmark = False  # survivors come in ever new batch sizes: trials would not pay
        model.eval()
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark
            for module, training in modes.items():
                module.training = training


@contextlib.contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """float32 with full mantissas: no autocast and no TF32."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept
