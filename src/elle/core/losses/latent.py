"""The loss of SLAT: steps inside the network."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.core.losses.common import SCALE, When, check_finite


@dataclass(frozen=True)
class LatentStep:
    """Cross-entropy with the input and inner activations each moved along the sign of its own gradient (SLAT).

    One backward at the clean image gives all the gradients; nothing is changed in the network, hooks add the steps
    (Park & Lee, arXiv 2104.01575).
    """

    alpha: float = 0.9
    """The input's step, in units of eps."""
    latent: float = 1.8
    """The activations' step, in units of eps; the ELLE paper's code holds it to eps."""
    bounded: bool = False
    """Hold images and activations to each channel's own range in each image, as that code does, instead of [0, 1]."""
    layers: str = ""
    """Names of modules, with commas; none: the first convolution and the first stage, as published."""

    def __post_init__(self) -> None:
        check_finite(self, "alpha", "latent")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        modules = self.modules(model)
        seen: list[Tensor] = []

        def look(module: nn.Module, arguments: Any, output: Tensor) -> None:
            seen.append(output)

        with torch.enable_grad(), _hooked(modules, look):
            x = x.detach().requires_grad_()
            loss = F.cross_entropy(model(x).float(), y, reduction="sum") * SCALE
            gradients = torch.autograd.grad(loss, [x, *seen])
        # In the order of the calls, which is that of the network and not that of the names.
        latent = iter(gradients[1:])

        def move(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return _moved(output, self.latent * eps, next(latent), self.bounded)

        points = _moved(x.detach(), self.alpha * eps, gradients[0], self.bounded)
        with _hooked(modules, move):
            logits = model(points if self.bounded else points.clamp(0, 1)).float()
        return F.cross_entropy(logits, y), logits

    def check(self, model: nn.Module, x: Tensor) -> None:
        """ValueError names a layer without an output to move on the way from images to logits: nothing would be moved.

        A list of layers is one, or a layer whose weights alone are used.
        """
        modules = self.modules(model)
        seen: dict[nn.Module, Any] = {}

        def look(module: nn.Module, arguments: Any, output: Any) -> None:
            seen[module] = output

        with torch.enable_grad(), _hooked(modules, look):
            total = model(x.detach().requires_grad_()).sum()
        for name, module in model.named_modules():
            if module not in modules:
                continue
            output = seen.get(module)
            slope = None
            if isinstance(output, Tensor) and output.requires_grad:
                (slope,) = torch.autograd.grad(total, output, retain_graph=True, allow_unused=True)
            if slope is None:
                why = "is not called in its forward" if module not in seen else "gives nothing that leads to its logits"
                raise ValueError(f"the layer {name.removeprefix('network.')!r} of the network {why}; name another")

    def modules(self, model: nn.Module) -> list[nn.Module]:
        """The modules whose outputs are moved; ValueError names one that the network does not have."""
        # A network behind a normalising layer has its own names as well, whether a run normalises or not.
        own = {name.removeprefix("network."): module for name, module in model.named_modules()}
        named = own | dict(model.named_modules())
        if not self.layers:
            return _first_convolution_and_stage(model)
        names = dict.fromkeys(name.strip() for name in self.layers.split(",") if name.strip())
        for name in names:
            if name not in named:
                some = ", ".join(list(own)[1:7])
                raise ValueError(f"the network has no layer {name!r}; it has {some} and so on")
        return [named[name] for name in names]


def _first_convolution_and_stage(model: nn.Module) -> list[nn.Module]:
    """The first convolution, and the last block before one that shrinks the map; without blocks, the second one."""

    def convolutions(module: nn.Module) -> list[nn.Conv2d]:
        return [part for part in module.modules() if isinstance(part, nn.Conv2d)]

    every = convolutions(model)
    if not every:
        raise ValueError("the network has no convolution; name layers whose outputs to move")
    blocks = [
        module
        for module in model.modules()
        if len(convolutions(module)) > 1 and all(len(convolutions(child)) < 2 for child in module.children())
    ]
    if len(blocks) < 2:
        return list(every[:2])
    shrinking = [any(max(part.stride) > 1 for part in convolutions(block)) for block in blocks]
    return [every[0], blocks[max(0, shrinking.index(True) - 1) if any(shrinking) else 0]]


def _moved(x: Tensor, step: float | Tensor, gradient: Tensor, bounded: bool) -> Tensor:
    """x + step * sign(gradient); bounded: inside each channel's own range in each image, where it has one."""
    moved = x + step * gradient.nan_to_num().sign().to(x.dtype)
    axes = tuple(range(2, x.dim()))
    if not bounded or not axes:
        return moved
    low, high = x.amin(axes, keepdim=True), x.amax(axes, keepdim=True)
    # The step is a constant for differentiation.
    return x + (torch.maximum(torch.minimum(moved, high), low) - x).detach()


@contextlib.contextmanager
def _hooked(modules: list[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
