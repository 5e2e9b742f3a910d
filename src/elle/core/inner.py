"""Training losses that solve an inner problem of their own: (model, x, y, x_adv, eps, when) -> loss, logits.

Their points do not fit an attack that knows nothing of the loss: they lie inside the network (SLAT), carry a gradient
of their own (Fast-BAT), maximise the penalty (LLR) or what it is made of (GAT, NuAT). The caller's `x_adv` is not
used. All are defined for the l-infinity ball. `when` is (steps done, share of the training done), as tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

When = tuple[Tensor, Tensor]
InputGradient = Callable[..., Tensor]
"""(model, x, y, differentiable=False) -> the gradient of each image's cross-entropy, as `linearity.input_gradient`"""

Held = Callable[[nn.Module], contextlib.AbstractContextManager[None]]
"""(network) -> a context in which it is in eval mode, as `attacks.in_eval_mode`"""

# A gradient whose sign alone is used may be scaled: this keeps half-precision gradients off zero.
_SCALE = 512.0


def _check_finite(part: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(part, name) < float("inf"):
            raise ValueError(f"{name} is {getattr(part, name)}; it must be a finite number, 0 or more")


@dataclass(frozen=True)
class Guided:
    """CE + weight * distance(f(x), f(x_adv)), x_adv one step up the same sum from a random corner (GAT, NuAT).

    GAT: the squared l2 distance of the softmax outputs (arXiv 2011.14969); NuAT: the nuclear norm of the
    difference of the batch's logits, divided by B (Sriramanan et al., NeurIPS 2021).
    """

    held: Held
    distance: Literal["softmax", "nuclear"] = "softmax"
    weight: float = 10.0
    start: float = 1.0
    """The corner's distance from x, in units of eps."""
    alpha: float = 1.0
    """The step, in units of eps."""
    clean: bool = False
    """Take the cross-entropy at x, as the authors of GAT and NuAT do, instead of x_adv."""
    alternate: bool = False
    """Leave the distance out of the attack at every other step."""
    late: float = 1.0
    """The weight's factor in the last 14 % of the training (epoch 86 of the authors' 100)."""
    ramp: bool = False
    """Let the weight grow linearly from 0 over the first 90 % of the training."""
    project: bool = True
    """Hold the attacked point to the eps-ball; the ELLE paper's code for GAT lets it go, to 2 eps."""
    eval_mode: bool = True
    """Attack in eval mode; that code attacks in train mode, where each forward moves BatchNorm's statistics."""
    corner: bool = False
    """Train on what the attack maximises at the corner as well; that code does, by not clearing its gradient."""

    def __post_init__(self) -> None:
        if self.distance not in ("softmax", "nuclear"):
            raise ValueError(f"distance is {self.distance!r}; it must be 'softmax' or 'nuclear'")
        _check_finite(self, "weight", "start", "alpha", "late")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        steps, share = when
        weight = self.weight * torch.where(share < 0.86, 1.0, self.late)
        if self.ramp:
            weight = weight * (share / 0.9).clamp(max=1)
        guide = weight * (steps % 2 if self.alternate else 1)
        with self.held(model) if self.eval_mode else contextlib.nullcontext():
            points, objective = self._attacked(model, x, y, eps, guide)
        # Two forwards, as published: BatchNorm normalises clean and adversarial images apart.
        there, here = model(points).float(), model(x).float()
        loss = F.cross_entropy(here if self.clean else there, y)
        loss = loss + weight * self._distance(here, there)
        return (loss + objective if self.corner else loss), there

    def _attacked(
        self, model: nn.Module, x: Tensor, y: Tensor, eps: float | Tensor, guide: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The point, and what was maximised there, at its corner."""
        with torch.set_grad_enabled(self.corner):
            here = model(x).float()
        corner = x + self.start * eps * torch.sign(torch.rand_like(x) - 0.5)
        with torch.enable_grad():
            corner = corner.clamp(0, 1).requires_grad_()
            logits = model(corner).float()
            objective = F.cross_entropy(logits, y) + guide * self._distance(here, logits)
            (gradient,) = torch.autograd.grad(objective * _SCALE * len(x), corner, retain_graph=self.corner)
        points = corner.detach() + self.alpha * eps * gradient.nan_to_num().sign()
        return _inside(points, x, eps) if self.project else points.clamp(0, 1), objective

    def _distance(self, here: Tensor, there: Tensor) -> Tensor:
        if self.distance == "nuclear":
            return nuclear_norm(there - here) / len(here)
        return (F.softmax(here, 1) - F.softmax(there, 1)).square().sum(1).mean()


def nuclear_norm(matrix: Tensor) -> Tensor:
    """The sum of the singular values of [B, K]; its gradient is the polar factor.

    <P, M> with P the polar factor of M, found by Newton-Schulz iteration: no decomposition, so nothing waits for the
    device, and the gradient stays finite where singular values coincide or vanish.
    """
    with torch.no_grad(), torch.autocast(matrix.device.type, enabled=False):
        factor = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
        # By its largest entry first: the squares of small entries vanish.
        factor = factor / factor.abs().amax().clamp(min=torch.finfo(factor.dtype).tiny)
        factor = factor / torch.linalg.vector_norm(factor).clamp(min=1)
        for _ in range(40):  # each brings a small singular value 1.5 times closer to 1
            factor = 1.5 * factor - 0.5 * factor @ (factor.mT @ factor)
        factor = factor if matrix.shape[0] >= matrix.shape[1] else factor.mT
    norm: Tensor = (factor * matrix).sum()
    return norm


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
        _check_finite(self, "alpha", "latent")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        modules = self.modules(model)
        seen: list[Tensor] = []

        def look(module: nn.Module, arguments: Any, output: Tensor) -> None:
            seen.append(output)

        with torch.enable_grad(), _hooked(modules, look):
            x = x.detach().requires_grad_()
            loss = F.cross_entropy(model(x).float(), y, reduction="sum") * _SCALE
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


@dataclass(frozen=True)
class Bilevel:
    """Cross-entropy at points found by plain gradient steps, and the gradient of those points (Fast-BAT).

    The last step minimises a linear model with a quadratic term of weight lambda, so that d x_adv / d theta is known:
    the loss gains (1/lambda) <grad L(x_z), m * grad L(x_adv)> differentiated in the first factor only, with m = 1 for
    coordinates strictly inside the ball and [0, 1] (Zhang et al., arXiv 2112.12376, Eq. 10).
    """

    gradient: InputGradient
    rate: float = 5000 / 255
    steps: int = 2
    weight: float = 10.0
    """lambda"""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}; it must be a finite number above 0")
        _check_finite(self, "rate")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        points = _random_point(x, eps)
        for step in range(self.steps):
            slope = self.gradient(model, points, y, differentiable=step == self.steps - 1)
            aim = points + self.rate * slope.detach()
            points = _inside(aim, x, eps)
        with torch.enable_grad():
            points.requires_grad_()
            logits = model(points).float()
            loss = F.cross_entropy(logits, y)
            (outer,) = torch.autograd.grad(loss * _SCALE * len(x), points, retain_graph=True)
        # Judged before the projection: rounded, (x + eps) - x is often below eps.
        free = ((aim - x).abs() < eps) & (aim > 0) & (aim < 1)
        implicit = (slope * (outer * free / _SCALE).detach()).sum() / (self.weight * len(x))
        # Its gradient counts, its value does not.
        return loss + implicit - implicit.detach(), logits


@dataclass(frozen=True)
class WorstGap:
    """nominal * L(x) + weight * (g + slope * |d^T grad L(x)|), g = max_d |L(x+d) - L(x) - d^T grad L(x)| (LLR).

    The worst d is sought by Adam from a random start, with x + d in [0, 1] (Qin et al., arXiv 1907.02610, Eq. 8; the
    weights are those of its authors' code for CIFAR-10).
    """

    gradient: InputGradient
    steps: int = 10
    rate: float = 0.1
    """Of Adam, in pixels of [0, 1]."""
    nominal: float = 2.0
    """Weight of the cross-entropy at x."""
    weight: float = 4.0
    slope: float = 0.3
    """Weight of the slope beside the gap."""

    def __post_init__(self) -> None:
        _check_finite(self, "nominal", "weight", "slope", "rate")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; it must be at least 1")

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, eps: float | Tensor, when: When
    ) -> tuple[Tensor, Tensor]:
        slope = self.gradient(model, x, y, differentiable=True)
        d = self._worst(model, x, y, eps, slope.detach())
        logits = model(torch.cat([x, x + d])).float()
        here, there = F.cross_entropy(logits, y.repeat(2), reduction="none").chunk(2)
        linear = (d * slope).flatten(1).sum(1)
        loss = self.nominal * here + self.weight * ((there - here - linear).abs() + self.slope * linear.abs())
        return loss.mean(), logits[: len(x)]

    def _worst(self, model: nn.Module, x: Tensor, y: Tensor, eps: float | Tensor, slope: Tensor) -> Tensor:
        d = _random_point(x, eps) - x
        with torch.no_grad():
            here = F.cross_entropy(model(x).float(), y, reduction="none")
        mean, square = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(1, self.steps + 1):
            with torch.enable_grad():
                d = d.detach().requires_grad_()
                there = F.cross_entropy(model(x + d).float(), y, reduction="none")
                gap = (there - here - (d * slope).flatten(1).sum(1)).abs().sum()
                (gradient,) = torch.autograd.grad(gap * _SCALE, d)
            gradient = gradient.nan_to_num() / _SCALE
            mean, square = mean.lerp(gradient, 0.1), square.lerp(gradient.square(), 0.001)
            move = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
            d = _inside(x + d.detach() + self.rate * move, x, eps) - x
        return d


def _random_point(x: Tensor, eps: float | Tensor) -> Tensor:
    return _inside(x + (2 * torch.rand_like(x) - 1) * eps, x, eps)


def _inside(points: Tensor, x: Tensor, eps: float | Tensor) -> Tensor:
    return (x + (points - x).clamp(-eps, eps)).clamp(0, 1).detach()  # type: ignore[arg-type]
