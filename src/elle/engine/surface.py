"""The loss around images along the attack's direction and a random one: flat before a collapse, folded after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elle.config import given
from elle.core.attacks import Norm, fgsm
from elle.core.linearity import cross_entropy
from elle.engine.checkpoint import read_tensors
from elle.engine.trained import load_run
from elle.errors import InputError
from elle.evaluation.mode import evaluation_mode, exact_float32

POINTS = 15
"""Points along each direction."""
IMAGES = 32


def loss_surface(
    model: nn.Module, x: Tensor, y: Tensor, eps: float, norm: Norm = "linf", seed: int = 0
) -> dict[str, Any]:
    """The mean loss at x + t (FGSM's step) + s (a random step of the same length), t and s in units of eps."""
    along = torch.linspace(0, 1.25, POINTS).tolist()
    across = torch.linspace(-1.25, 1.25, POINTS).tolist()
    with exact_float32(x.device), evaluation_mode(model, seed, x.device):
        attack = fgsm(model, x, y, eps, norm=norm) - x
        random = torch.randn(x.shape, device=x.device)
        sizes = random.flatten(1).norm(dim=1).view(-1, *[1] * (x.dim() - 1))
        random = eps * (random.sign() if norm == "linf" else random / sizes)
        with torch.no_grad():
            rows = [
                torch.stack([cross_entropy(model(x + t * attack + s * random), y).mean() for t in along])
                for s in across
            ]
    return {"along": along, "across": across, "loss": torch.stack(rows).tolist()}


def around_collapse(
    directory: Path,
    device: torch.device,
    before: Path | None = None,
    after: Path | None = None,
    root: str | None = None,
) -> dict[str, Any] | None:
    """The surfaces before and after a run's collapse, or of two given checkpoints; None where there was no collapse."""
    files = {
        "before": before or directory / "before-collapse.safetensors",
        "after": after or directory / "after-collapse.safetensors",
    }
    if not all(file.exists() for file in files.values()):
        missing = [file for file in (before, after) if file is not None and not file.exists()]
        if missing:
            raise InputError(f"{missing[0]} does not exist; give a checkpoint of {directory}")
        return None
    result: dict[str, Any] = {}
    for name, file in files.items():
        trained, header = load_run(directory, device, file), read_tensors(file)[1]
        x, y = trained.test_images(root, IMAGES)
        config = trained.config.resolved()
        surface = loss_surface(trained.model, x, y, given(config.eps), config.norm, config.seed)
        result[name] = surface | {"step": header.get("step")}
    return result
