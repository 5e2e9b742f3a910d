"""How long a run takes on one NVIDIA H200, from the step times measured there (benchmarks/results, fp16)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elle.config import Config


@dataclass(frozen=True)
class _Speed:
    """Milliseconds of one pass (a forward, or one of the two gradients) of 128 images."""

    step: float
    penalty: float
    """The same in the penalty's batches, three times as large, which use the chip better."""


# FGSM's 5 passes take 4.43 ms and ELLE-A's 9 more 5.02 on the first; the second is as many times slower as its
# forward and backward are, at 128 and at 512 images; the third was not measured: 150 TFLOP/s are assumed.
_SPEEDS = {
    "preact-resnet18": _Speed(0.886, 0.558),
    "wide-resnet-28-10": _Speed(4.26, 3.69),
    "resnet50": _Speed(6.98, 6.98),
}
_IMAGES = {
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "svhn": (73_257, 26_032),
    "imagenet": (1_281_167, 50_000),
}
"""Training and test images; other sets are too small to count."""
_DOUBLE_BACKPROPAGATION = 13 / 9
"""A step of GradAlign took three times one of FGSM, or 15 passes, when it made 11; it makes 9: two plain ones less."""
_EVALUATION = {"pgd-20": 0.002, "pgd-50-10": 0.05, "autoattack": 0.07}
"""Seconds a test image with PreActResNet18 in float32; AutoAttack's from its APGD part and the others' queries."""


def gpu_hours(runs: Sequence[Config]) -> float:
    """Training and final evaluation of these runs, on one GPU after the other."""
    return sum(_seconds(config.resolved()) for config in runs) / 3600


def _seconds(config: Config) -> float:
    from elle.methods import find_method

    method = find_method(config.method)
    speed = _SPEEDS.get(config.model or "", _SPEEDS["preact-resnet18"])
    train, test = _IMAGES.get(config.data, (0, 0))
    triplets = 9 if method.penalty else 0
    slower = _DOUBLE_BACKPROPAGATION if method.double_backpropagation else 1.0
    step = (method.cost.total - triplets) * speed.step * slower + triplets * speed.penalty
    seen = max(0, train - (config.validation or 0)) * (config.epochs or 0)
    if config.max_steps is not None:
        seen = min(seen, config.max_steps * (config.batch or 0))
    evaluated = sum(_EVALUATION.get(name.strip(), 0) for name in config.final.split(","))
    return step / 1000 * seen / 128 + evaluated * test * speed.step / _SPEEDS["preact-resnet18"].step
