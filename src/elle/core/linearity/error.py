"""The local linearity error of the paper, with its variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from elle.core.linearity.points import (
    Model,
    Norm,
    cross_entropy,
    in_bf16,
    logits_with_ten_mantissa_bits,
    uniform_in_ball,
)

Criterion = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Linearity:
    """The local, linear approximation error at random points of the ball (Definition 1, Algorithm 1).

    x_a, x_b ~ Unif(ball(x, eps)), x_c = (1-a) x_a + a x_b, a ~ Unif[0, 1] for each image:
    E = |h(x_c) - (1-a) h(x_a) - a h(x_b)|^power, with h the loss
    """

    samples: int = 1
    """Pairs x_a, x_b drawn for each image; their errors are averaged."""
    alpha: Literal["uniform", "max"] | float = "uniform"
    """Position of x_c: drawn for each image, fixed, or the worst met in 10 signed steps of 0.1 from a random start."""
    norm: Norm = "linf"
    clip: bool = False
    """Keep the points in [0, 1]: the paper does on ImageNet, not on CIFAR and SVHN."""
    form: Literal["triplet", "2p", "5-point"] = "triplet"
    """2p (Eq. 6): x_b is the adversarial point; 5-point (Definition 3): the fourth-order second difference."""
    power: Literal[1, 2, "smooth-l1"] = 2
    on: Literal["loss", "logits"] = "loss"
    """h: the loss, or the vector of logits, whose gap is measured in the l2 norm."""
    share: float = 1.0
    """Share of the images, the first ones of the batch, that are measured: less than 1 is cheaper and noisier."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it must be above 0 and at most 1")
        if not (isinstance(self.samples, int) and self.samples >= 1):
            raise ValueError(f"samples is {self.samples!r}; it must be a whole number, 1 or more")
        if not isinstance(self.clip, bool):  # a pair of bounds would be taken for True
            raise ValueError(f"clip is {self.clip!r}; it must be True or False")
        # At 0 and 1 the third point is one of the two: no gap, whatever the network, and no penalty.
        fixed = isinstance(self.alpha, (int, float)) and 0 < self.alpha < 1
        if self.alpha not in ("uniform", "max") and not fixed:
            raise ValueError(f"alpha is {self.alpha!r}; it must be 'uniform', 'max' or a number between 0 and 1")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {words}")
        if self.form == "5-point" and self.alpha != "uniform":
            raise ValueError("the 5-point form has fixed positions; leave alpha out")
        if self.form == "2p" and self.samples != 1:
            raise ValueError("the 2p form has one adversarial point for each image; leave samples at 1")

    def __call__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        eps: float | Tensor,
        criterion: Criterion = cross_entropy,
        adversarial: tuple[Tensor, Tensor] | None = None,
        drawn: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The error of each image, [share * B]; the 2p form is given (x_adv, logits at x_adv), others ignore it.

        `drawn` is what `draw` returned for these very images, where they are to be measured at the same points again.
        """
        images = self.measured(len(x))
        x, y = x[:images], y[:images]
        if adversarial is not None:
            adversarial = adversarial[0][:images], adversarial[1][:images]
        # Not `repeat`: it would lose channels_last.
        x, y = torch.cat([x] * self.samples), torch.cat([y] * self.samples)
        if isinstance(eps, Tensor) and eps.dim() and len(eps) > 1:  # one an image
            eps = torch.cat([eps[:images]] * self.samples)
        x_a, x_b, a = self.draw(x, eps) if drawn is None else drawn

        def h(points: Tensor, labels: Tensor) -> Tensor:
            return self._function(logits_with_ten_mantissa_bits(model, points), labels, criterion)

        if self.form == "2p":
            if adversarial is None:
                raise ValueError("the 2p form needs the adversarial points and their logits")
            x_b = adversarial[0]
        positions, coefficients = self._stencil(h, x_a, x_b, y, a)
        points = [x_a.lerp(x_b, _like(position, x)) for position in positions]
        if self.form == "2p" and adversarial is not None and not in_bf16(x):
            # The adversarial forward has been made already: two points for the price of the third.
            values = [
                *h(torch.cat(points[:-1]), torch.cat([y] * 2)).chunk(2),
                self._function(adversarial[1], y, criterion),
            ]
        else:
            # One forward of all points: BatchNorm sees them as one batch, and the device is used better.
            values = list(h(torch.cat(points), torch.cat([y] * len(points))).chunk(len(points)))
        gap = sum(_like(c, value) * value for c, value in zip(coefficients, values, strict=True))
        assert isinstance(gap, Tensor)
        return self._size(gap).view(self.samples, images).mean(0)

    def measured(self, images: int) -> int:
        """How many of so many images are measured."""
        return max(1, round(self.share * images))

    @property
    def passes(self) -> float:
        """Forwards, input gradients and weight gradients in a training step, for each image of its batch."""
        points = {"triplet": 3, "2p": 2, "5-point": 5}[self.form]  # the loss has been at 2p's third
        # The search: forward at both ends and at eleven positions, and back from ten of these.
        search = 2 + 11 + 10 if self.alpha == "max" else 0
        return self.share * self.samples * (3 * points + search)

    def draw(self, x: Tensor, eps: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The two ends x_a, x_b [B, ...] and the position a [B] of the third point."""
        x_a, x_b = x + uniform_in_ball(x, eps, self.norm), x + uniform_in_ball(x, eps, self.norm)
        if self.clip:
            x_a, x_b = x_a.clamp(0, 1), x_b.clamp(0, 1)
        return x_a, x_b, torch.rand(len(x), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))

    def _stencil(
        self, h: Callable[[Tensor, Tensor], Tensor], x_a: Tensor, x_b: Tensor, y: Tensor, a: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Positions on the segment from x_a to x_b and the coefficients of h there, [B] each; x_b's come last."""
        zero, one = torch.zeros_like(a), torch.ones_like(a)
        if self.form == "5-point":
            # The spacing is a quarter of the segment, so this is 1/16 of the second directional derivative
            # at its middle; the paper's Proposition 2 says 1/25.
            weights = (-1 / 12, 4 / 3, -5 / 2, 4 / 3, -1 / 12)
            return [zero + k / 4 for k in range(5)], [one * weight for weight in weights]
        if self.alpha == "max":
            a = self._worst(h, x_a, x_b, y, a)
        elif self.alpha != "uniform":
            a = torch.full_like(a, self.alpha)
        return [zero, a, one], [a - 1, one, -a]

    def _worst(self, h: Callable[[Tensor, Tensor], Tensor], x_a: Tensor, x_b: Tensor, y: Tensor, a: Tensor) -> Tensor:
        """The position in [0, 1] whose gap is largest on a path of 10 signed-gradient steps of 0.1 (Appendix B.3)."""
        with torch.no_grad():
            h_a, h_b = h(torch.cat([x_a, x_b]), torch.cat([y] * 2)).chunk(2)

        def squared(a: Tensor) -> Tensor:
            at = h(x_a.detach().lerp(x_b.detach(), _like(a, x_a)), y)
            gap = at - (1 - _like(a, h_a)) * h_a - _like(a, h_b) * h_b
            return gap.square().view(len(a), -1).sum(1)

        # Not the last one: from beyond a kink near an end a step goes to that end, where no gap shows a way back.
        worst, largest = a, torch.full_like(a, -1)
        for _ in range(10):
            with torch.enable_grad():
                a = a.detach().requires_grad_()
                size = squared(a)
                (gradient,) = torch.autograd.grad(size.sum(), a)
            worst, largest = _larger(worst, largest, a.detach(), size.detach())
            a = (a.detach() + 0.1 * gradient.sign()).clamp(0, 1)
        with torch.no_grad():
            return _larger(worst, largest, a, squared(a))[0]

    def _function(self, logits: Tensor, y: Tensor, criterion: Criterion) -> Tensor:
        if self.on == "logits":
            return logits
        loss = criterion(logits, y)
        if loss.shape != y.shape[:1]:
            raise ValueError(
                f"criterion returned shape {tuple(loss.shape)}; it must return one loss for each image "
                f"(for example torch.nn.CrossEntropyLoss(reduction='none'))"
            )
        return loss

    def _size(self, gap: Tensor) -> Tensor:
        if self.power == 2:
            return gap.square() if self.on == "loss" else gap.square().sum(1)
        # linalg's norm has gradient 0 at 0, where a square root's would be infinite.
        length = gap.abs() if self.on == "loss" else torch.linalg.vector_norm(gap, dim=1)
        if self.power == 1:
            return length
        return F.smooth_l1_loss(length, torch.zeros_like(length), reduction="none")


_CHOICES: dict[str, tuple[object, ...]] = {
    "norm": ("linf", "l2", "l1"),
    "form": ("triplet", "2p", "5-point"),
    "power": (1, 2, "smooth-l1"),
    "on": ("loss", "logits"),
}
triplet_error = Linearity()


def _like(values: Tensor, x: Tensor) -> Tensor:
    """One number an image, [B], shaped and typed to multiply x [B, ...]."""
    return values.to(x.dtype).view(-1, *[1] * (x.dim() - 1))


def _larger(worst: Tensor, largest: Tensor, a: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """For each image the position with the larger size, and that size; one that is no number passes for larger."""
    size = size.to(largest.dtype)
    less = size <= largest
    return torch.where(less, worst, a), torch.where(less, largest, size)
