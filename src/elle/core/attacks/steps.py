"""Normalised gradient steps inside a ball: an attack as a row of settings, and the one that lives through replays."""

from __future__ import annotations

import contextlib
import math
import numbers
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from elle.core.attacks.checks import check_classes, check_count, check_logits, check_probabilities
from elle.core.attacks.network import Model, apart_from_ranks, begun, differentiable, in_eval_mode, unwrapped

Norm = Literal["linf", "l2"]

# Only the gradient's direction is used, so its scale is free: this one keeps half-precision gradients off zero.
SCALE = 512.0


@dataclass(frozen=True)
class SignStep:
    """`steps` normalised gradient steps up an objective from a random start; lengths in units of eps."""

    alpha: float = 1.0
    steps: int = 1
    noise: float = 0.0
    """Start at a random point of the ball of radius noise * eps."""
    start: Literal["uniform", "sign", "normal"] = "uniform"
    """How that point is drawn: in the ball, at a corner of it, or noise * N(0, 1) whatever eps is (TRADES).

    In an l2 ball its distance is uniform (Rice et al., arXiv 2002.11569), and a corner is one of the signs' directions.
    """
    project: bool = True
    """Return to the eps-ball after each step."""
    clip: bool = False
    """Return to [0, 1] after each step."""
    norm: Norm = "linf"
    objective: Literal["cross-entropy", "kl"] = "cross-entropy"
    """kl: the divergence from the prediction at x, which needs no label (TRADES)."""
    zero: float = 0.0
    """Share of each image's gradient, the smallest entries, that is set to 0 (ZeroGrad)."""
    agree: int = 1
    """Step from x only where the gradients at this many random points agree in sign (MultiGrad)."""
    frank_wolfe: bool = False
    """Step t goes 2 / (t + 2) of the way to the ball's furthest point along the gradient; alpha plays no part."""
    eval_mode: bool = False
    """Attack in eval mode, so that BatchNorm's statistics stay as they are; the modes are put back."""

    def __post_init__(self) -> None:
        for name in ("steps", "agree"):
            check_count(name, getattr(self, name))
        for name in ("alpha", "noise"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 <= float(value) < math.inf):
                raise ValueError(f"{name} is {value!r}; it must be a finite number, 0 or more")
        if not isinstance(self.clip, bool):  # a pair of bounds would be taken for True
            raise ValueError(f"clip is {self.clip!r}; it must be True or False")
        if not 0 <= self.zero < 1:
            raise ValueError(f"zero is {self.zero}; it must be a share from 0 to below 1")
        if self.agree > 1 and (self.steps > 1 or self.zero or self.frank_wolfe):
            raise ValueError(f"agree is {self.agree}: that is one step; leave steps, zero and frank_wolfe out")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                words = " or ".join(map(repr, allowed))
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {words}")
        if self.objective == "kl" and not self.noise:
            raise ValueError("objective is 'kl', which is 0 at x itself: its gradient there is rounding; give noise")

    def __call__(self, model: Model, x: Tensor, y: Tensor, eps: float | Tensor, begin: Tensor | None = None) -> Tensor:
        """Adversarial points for x [B, ...], detached; parameters' `.grad` is not touched.

        The steps start at `begin` where it is given, otherwise at a `first_point` drawn now.
        """
        x, model = x.detach(), unwrapped(model)
        with apart_from_ranks(model), in_eval_mode(model) if self.eval_mode else contextlib.nullcontext():
            target = _probabilities(model, x) if self.objective == "kl" else y
            if self.agree > 1:
                return self._inside(x + self.alpha * eps * self._agreement(model, x, target, eps), x, eps)
            x_adv = self.first_point(x, eps) if begin is None else begin
            for t in range(self.steps):
                x_adv = self.next_point(x_adv, self._gradient(model, x_adv, target), x, eps, t)
        return x_adv

    @property
    def at_image(self) -> bool:
        """Whether all that it asks of the model is the gradient of the cross-entropy at x, in the mode it is in."""
        own_mode = self.objective == "cross-entropy" and not self.eval_mode
        return own_mode and self.steps == self.agree == 1 and not self.noise

    def first_point(self, x: Tensor, eps: float | Tensor) -> Tensor:
        """Where the steps begin: at random in the ball, or x itself where there is no noise."""
        return self._inside(self._started(x, eps), x, eps) if self.noise else x

    def next_point(self, x_adv: Tensor, gradient: Tensor, x: Tensor, eps: float | Tensor, t: int = 0) -> Tensor:
        """Step t, from x_adv up the gradient there."""
        direction = self._direction(gradient.nan_to_num())
        if self.frank_wolfe:
            return self._inside(x_adv + 2 / (t + 2) * (x + eps * direction - x_adv), x, eps)
        return self._inside(x_adv + self.alpha * eps * direction, x, eps)

    def _started(self, x: Tensor, eps: float | Tensor) -> Tensor:
        if self.start == "normal":
            return x + self.noise * torch.randn(x.shape, dtype=x.dtype, device=x.device)
        direction = _random_direction(x, self.norm)
        # As long as the ball's radius in its own norm: the signs themselves are sqrt(d) times an l2 ball's.
        return x + self.noise * eps * (_normalised(direction.sign(), self.norm) if self.start == "sign" else direction)

    def _direction(self, gradient: Tensor) -> Tensor:
        if self.zero:
            size = gradient.abs().flatten(1)
            least = size.kthvalue(max(1, round(self.zero * size.shape[1])), dim=1).values
            gradient = gradient * (gradient.abs() > least.view(-1, *[1] * (gradient.dim() - 1)))
        return _normalised(gradient, self.norm)

    def _agreement(self, model: Model, x: Tensor, target: Tensor, eps: float | Tensor) -> Tensor:
        votes = torch.zeros_like(x)
        for _ in range(self.agree):
            votes += self._gradient(model, self.first_point(x, eps), target).nan_to_num().sign()
        return _normalised(votes * (votes.abs() == self.agree), self.norm)

    def _gradient(self, model: Model, x: Tensor, target: Tensor) -> Tensor:
        """The gradient of the objective at x; not finite where a network overflows."""
        with differentiable(), torch.enable_grad():
            x, target = (value.clone() if value.is_inference() else value for value in (x, target))
            x = x.detach().requires_grad_()
            start, slope = self._differentiated(check_classes(check_logits(model(x))), target)
            (gradient,) = torch.autograd.grad(begun(start, slope), x)
        return gradient

    def _differentiated(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The objective summed over the images, from which a backward starts, and the slope it starts with.

        The objective is the cross-entropy to labels [B], or KL(target || prediction) for probabilities [B, K].
        """
        if target.dim() == 1:
            loss = F.cross_entropy(logits.float(), target, reduction="sum")
        else:
            check_probabilities(target, logits)
            loss = F.kl_div(F.log_softmax(logits.float(), 1), target, reduction="sum")
        return loss, torch.full_like(loss, SCALE)

    def _inside(self, x_adv: Tensor, x: Tensor, eps: float | Tensor) -> Tensor:
        if self.project:
            x_adv = x + _projected(x_adv - x, eps, self.norm)
        return x_adv.clamp(0, 1) if self.clip else x_adv


@dataclass(frozen=True)
class Replay:
    """A perturbation that lives on: each batch is trained on `replays` times, and each time's gradient moves it.

    The training step's own backward gives the gradient, so an attack costs no pass of its own (Free AT,
    Shafahi et al., arXiv 1904.12843).
    """

    replays: int = 8
    alpha: float = 1.0
    """The step of each replay, in units of eps."""
    clip: bool = True
    norm: Norm = "linf"

    def __post_init__(self) -> None:
        if self.replays < 1:
            raise ValueError(f"replays is {self.replays}; it must be at least 1")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha is {self.alpha}; it must be a finite number, 0 or more")
        if self.norm not in _CHOICES["norm"]:
            raise ValueError(f"norm is {self.norm!r}; it must be 'linf' or 'l2'")

    def points(self, x: Tensor, delta: Tensor) -> Tensor:
        """Where the network is trained: a leaf that collects the gradient of the backward pass."""
        x_adv = x + delta
        return (x_adv.clamp(0, 1) if self.clip else x_adv).detach().requires_grad_()

    def moved(self, delta: Tensor, gradient: Tensor, eps: float | Tensor) -> Tensor:
        """The perturbation for the next replay, or the next batch."""
        step = self.alpha * eps * _normalised(gradient.nan_to_num(), self.norm)
        return _projected(delta + step, eps, self.norm)


_CHOICES: dict[str, tuple[str, ...]] = {
    "norm": ("linf", "l2"),
    "start": ("uniform", "sign", "normal"),
    "objective": ("cross-entropy", "kl"),
}


def _probabilities(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.softmax(model(x).float(), 1)


def _random_direction(x: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return 2 * torch.rand_like(x) - 1
    radius = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device, dtype=x.dtype)
    return _normalised(torch.randn(x.shape, dtype=x.dtype, device=x.device), norm) * radius


def _normalised(gradient: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return gradient.sign()
    wide = _wide(gradient)
    # Scaled by its largest entry first: the square of a confident network's gradient is 0 in float32.
    wide = wide / wide.abs().amax(tuple(range(1, wide.dim())), keepdim=True).clamp(min=1e-38)
    return (wide / _length(wide)).to(gradient.dtype)


def _projected(delta: Tensor, eps: float | Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return delta.clamp(-eps, eps)  # type: ignore[arg-type]  # a number or a tensor, both ends alike
    return (_wide(delta) * (eps / _length(delta)).clamp(max=1)).to(delta.dtype)


def _length(delta: Tensor) -> Tensor:
    """The l2 norm of each image, shaped to divide them by; never 0."""
    return _wide(delta).square().sum(tuple(range(1, delta.dim())), keepdim=True).sqrt().clamp(min=1e-30)


def _wide(values: Tensor) -> Tensor:
    """At least in float32: the squares of a large image add up to infinity in fp16, where the least lengths are 0."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
