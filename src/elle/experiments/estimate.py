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
    """The same for a pass of the penalty, whose batches are three times as large and use the chip better."""
    evaluation: float
    """The time of an image in eval mode, relative to PreActResNet18's."""


# A fifth of FGSM's step, and a ninth of what ELLE's takes beyond it; ResNet50 at 224 pixels.
_SPEEDS = {
    "preact-resnet18": _Speed(0.653, 0.379, 1.0),
    "wide-resnet-28-10": _Speed(3.63, 3.19, 4.5),
    "resnet50": _Speed(7.40, 5.64, 9.2),
}
_FILES_SIZE = 224
"""Pixels of a side for which the speeds of image files hold."""
_IMAGES = {
    "cifar10": (50_000, 10_000),
    "cifar100": (50_000, 10_000),
    "svhn": (73_257, 26_032),
    "imagenet": (1_281_167, 50_000),
}
"""Training and test images; other sets are too small to count."""
_DOUBLE_BACKPROPAGATION = 1.9
"""A step of GradAlign, 9 passes, takes as long as 17 of FGSM's."""
_EVALUATION = {"pgd-20": 0.0002, "pgd-50-10": 0.0025, "autoattack": 0.015}
"""Seconds a test image with PreActResNet18, half of which survive: 7.8 us a forward and backward of an image, measured
in PGD-50-10, and 3.3 us a forward, which most of AutoAttack's questions are (5,000 of Square to each survivor)."""


def gpu_hours(runs: Sequence[Config]) -> float:
    """Training and final evaluation of these runs, on one GPU after the other."""
    return sum(_seconds(config.resolved()) for config in runs) / 3600


def _seconds(config: Config) -> float:
    from elle.core.linearity import triplet_error
    from elle.methods import configured

    method = configured(config.method, options=config.options)
    speed = _SPEEDS.get(config.model or "", _SPEEDS["preact-resnet18"])
    train, test = _IMAGES.get(config.data, (0, 0))
    slower = _DOUBLE_BACKPROPAGATION if method.double_backpropagation else 1.0
    passes, penalty = float(method.cost.total), 0.0
    if method.regulariser is not None and method.weight is not None:
        passes -= triplet_error.passes  # which a row's cost has in it, at every step
        penalty = method.regulariser.passes / method.weight.every
    step = passes * speed.step * slower + penalty * speed.penalty
    seen = max(0, train - (config.validation or 0)) * (config.epochs or 0)
    if config.max_steps is not None:
        seen = min(seen, config.max_steps * (config.batch or 0))
    if config.phases:
        # The speeds of sets without files are for their images' own size, the last phase's.
        whole = 1.0 if config.image_size else _area(config.phases[-1].image_size)
        step *= sum(phase.epochs * _area(phase.image_size) for phase in config.phases) / (config.epochs or 1) / whole
    evaluated = sum(_EVALUATION.get(name.strip(), 0) for name in config.final.split(",")) * _area(config.image_size)
    return step / 1000 * seen / 128 + evaluated * test * speed.evaluation


def _area(image_size: int | None) -> float:
    """The cost of an image of that size, relative to one of the size that the speeds are for."""
    return 1.0 if image_size is None else (image_size / _FILES_SIZE) ** 2
