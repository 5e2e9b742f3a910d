"""Attacks: (model, x, y, eps) -> x_adv. One loop of normalised gradient steps serves every name.

The model is used in the mode it is in. In train mode each forward moves BatchNorm's running statistics, as in
the paper's training; call `model.eval()` first to attack a fixed model.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

Model = Callable[[Tensor], Tensor]
AnyModel = TypeVar("AnyModel", bound=Model)

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
        """Of the objective; where a network overflows it is no number."""
        with differentiable(), torch.enable_grad():
            x, target = (value.clone() if value.is_inference() else value for value in (x, target))
            x = x.detach().requires_grad_()
            start, slope = self._differentiated(check_classes(check_logits(model(x))), target)
            (gradient,) = torch.autograd.grad(start, x, slope)
        return gradient

    def _differentiated(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """What a backward begins at, and the objective's gradient there.

        That is the cross-entropy to labels [B], or KL(target || prediction) for probabilities [B, K]: the same there.
        """
        if target.dim() == 1:
            loss = F.cross_entropy(logits.float(), target, reduction="sum")
        else:
            _check_probabilities(target, logits)
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
    """What a network answered, if that is a tensor; some return a tuple, or an object that holds the logits."""
    if not isinstance(answer, Tensor):
        raise ValueError(
            f"the network returned a {type(answer).__name__}, not logits [B, K]; wrap it in a module that returns "
            f"these alone, or pass a function that does: lambda x: model(x).logits"
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


def fgsm(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    clip: bool = False,
    norm: Norm = "linf",
) -> Tensor:
    """x + eps * sign(grad L(x)) (Goodfellow et al., arXiv 1412.6572), not clipped unless asked, as in the paper."""
    check_radius(eps, norm, allow_zero=True)
    check_batch(x, y, eps, norm)
    return SignStep(clip=clip, norm=norm)(model, x, y, eps)


def n_fgsm(model: Model, x: Tensor, y: Tensor, eps: float | Tensor, *, noise: float = 2) -> Tensor:
    """x + eta + eps * sign(grad L(x + eta)), eta ~ Unif(+-noise * eps), unprojected (arXiv 2202.01181)."""
    check_radius(eps, allow_zero=True)
    check_batch(x, y, eps)
    return SignStep(noise=noise, project=False)(model, x, y, eps)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 20,
    alpha: float | None = None,
    norm: Norm = "linf",
) -> Tensor:
    """PGD from a uniform start, inside the ball and [0, 1]; alpha in units of eps, 2.5 / steps by default."""
    check_radius(eps, norm, allow_zero=True)
    check_batch(x, y, eps, norm)
    check_count("steps", steps)
    attack = SignStep(alpha=2.5 / steps if alpha is None else alpha, steps=steps, noise=1, clip=True, norm=norm)
    if 0 < attack.alpha * steps < 1 - 1e-6:
        # 2/255, as papers write a step, would be 2/255 of eps: an attack that goes nowhere and says so to nobody.
        raise ValueError(
            f"alpha is {alpha:g} in units of eps: {steps} steps of it do not reach from the image to the ball's edge; "
            f"write a step of 2/255 as (2 / 255) / eps"
        )
    return attack(model, x, y, eps)


def _check_probabilities(target: Tensor, logits: Tensor) -> None:
    """Refuse a column of labels [B, 1] and the like, which would be broadcast, or refused in torch's words."""
    if target.shape != logits.shape or not target.is_floating_point():
        raise ValueError(
            f"y is {target.dtype} of shape {list(target.shape)} for logits {list(logits.shape)}; it must be labels "
            f"[B], for example y.flatten(), or probabilities [B, K] as floats"
        )


def unwrapped(model: AnyModel) -> AnyModel:
    """The network in DistributedDataParallel: what an attack passes through it is no business of the other ranks.

    The wrapper would take an attack's backward for the step's, and wait for ranks that may not be attacking.
    """
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def parallel_parts(model: Model, **settings: bool) -> Iterator[None]:
    """Every DistributedDataParallel inside the network with these attributes, which are put back afterwards.

    It may be inside of torch.compile or of another module, or be called by a plain function.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    seen: set[nn.Module] = set()
    kept: list[tuple[DistributedDataParallel, dict[str, bool]]] = []

    def find(called: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling():  # what is compiled has been looked into when it was called
            return
        for part in () if called in seen else called.modules():
            if isinstance(part, DistributedDataParallel) and part not in seen:
                kept.append((part, {name: getattr(part, name) for name in settings}))
                part.__dict__.update(settings)
            seen.add(part)

    # What a function calls is known when it does.
    calls = None if isinstance(model, nn.Module) else register_module_forward_pre_hook(find)
    try:
        if isinstance(model, nn.Module):
            find(model)
        yield
    finally:
        if calls is not None:
            calls.remove()
        for wrapper, before in kept:
            wrapper.__dict__.update(before)


def apart_from_ranks(model: Model) -> contextlib.AbstractContextManager[None]:
    """Passes that are no business of the other ranks, which may not make them, and whose backward is not the step's.

    With static_graph the first backward at all would be taken for a step's: it would wait for the other ranks, and the
    gradients of the step itself would never be averaged.
    """
    return parallel_parts(
        model,
        require_forward_param_sync=False,
        require_backward_grad_sync=False,
        find_unused_parameters=False,
        static_graph=False,
    )


def differentiable() -> contextlib.AbstractContextManager[object]:
    """Outside of the caller's inference mode, in which there is no gradient to attack with."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _probabilities(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        return F.softmax(model(x).float(), 1)


@contextlib.contextmanager
def in_eval_mode(model: Model) -> Iterator[None]:
    """Every module of the network in eval mode, and each back in its own mode afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


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
