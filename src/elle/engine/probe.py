"""A few fixed images on which a network is looked at while it trains, and the monitor that judges what is seen."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.core.attacks import Norm, SignStep
from elle.core.attacks.checks import check_count, one_radius
from elle.core.attacks.network import unwrapped
from elle.core.linearity import Linearity
from elle.engine.monitor import Monitor, Reading, Verdict
from elle.evaluation.autoattack import oracle
from elle.evaluation.capture import Captured
from elle.evaluation.mode import evaluation_mode, is_wrong
from elle.models.batch_norm import fusing

IMAGES = 128
"""Images in a run's probe. A look costs 2 passes for the single step, 2 for each step of the multi-step attack, 3 for
E_lin and 3 to classify: with three steps, two looks an epoch of 382 steps are 1.5 % of FGSM training's passes."""


class CollapseMonitor(Monitor):
    """Looks at a network in training on a fixed probe and says when it collapses (docs/collapse.md).

        monitor = elle.CollapseMonitor(x_probe, y_probe, eps=8/255)      # 128 validation images in [0, 1]
        verdict = monitor.check(model, step)                              # twice an epoch; None: nothing new
        if verdict is not None and verdict.kind == "collapse": ...

    The model is put into eval mode and back, no gradient of a parameter is touched, and the random state is left as
    it was: training with the monitor is training without it. `check` waits for the device.

    `graph=True` captures the look in a CUDA graph, at the second one: several times faster for small images. It
    then belongs to one network, in one precision, whose parameters and buffers stay where they are.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        eps: float,
        *,
        norm: Norm = "linf",
        per_epoch: int = 2,
        seed: int = 0,
        batch: int | None = None,
        graph: bool = False,
    ) -> None:
        _check_images(x, y)
        eps = one_radius(eps, norm)
        if per_epoch < 1:
            raise ValueError(f"per_epoch is {per_epoch}; it is how often an epoch you call check, 1 or more")
        if batch is not None:
            check_count("batch", batch)
        if graph and not x.is_cuda:
            raise ValueError(f"graph=True needs probe images on an NVIDIA GPU; these are on {x.device}")
        super().__init__(per_epoch)
        # Copies: a loader may fill the same memory with other images, which are not those of the labels.
        self.x, self.y, self.eps, self.seed = x.detach().clone(), y.long().clone(), eps, seed
        self.batch = batch or len(x)
        """Images attacked at once; fewer than there are need less memory."""
        self.single = SignStep(clip=True, norm=norm)
        # Three steps break a collapsed network in a small ball; in a large one, such as MNIST's, they do not.
        small = eps <= (24 / 255 if norm == "linf" else 1)
        alpha, steps = (0.5, 3) if small else (0.25, 10)
        self.multi = SignStep(alpha=alpha, steps=steps, noise=1, clip=True, norm=norm)
        self.linearity = Linearity(norm=norm)
        self._draw()
        self.graphed = GraphedLook(self.measure, x.device) if graph else None

    def _draw(self) -> None:
        """Draw all random numbers once, for every look: two looks then differ by the network alone.

        Drawn on the CPU, so that the points are the same on every device.
        """
        x, device = self.x.cpu(), self.x.device
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            self.begin = self.multi.first_point(x, self.eps).to(device)
            x_a, x_b, position = (one.to(device) for one in self.linearity.draw(x, self.eps))
        self.drawn = x_a, x_b, position

    def check(
        self,
        model: nn.Module,
        step: int,
        *,
        loss: float | None = None,
        accuracy: float | None = None,
        rate: float | None = None,
    ) -> Verdict | None:
        """Look at the network after `step`; the verdict if there is a new one.

        `loss` and `accuracy` (at the training attack's points, since the last check) and the learning `rate` are
        optional: with them robust overfitting is told too, and a collapse under a noisy training attack more surely.
        """
        # Plain numbers: a tensor would keep its graph, and the step's activations, as long as the monitor lives, and
        # torch.load(weights_only=True) refuses NumPy's in a saved state.
        loss, accuracy, rate = (
            value.item() if isinstance(value, Tensor | np.generic) else value for value in (loss, accuracy, rate)
        )
        step = step.item() if isinstance(step, Tensor | np.generic) else step
        if not isinstance(step, numbers.Real):
            raise ValueError(f"step is {step!r}; give the number of steps trained so far")
        if accuracy is not None and not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy is {accuracy:g}; give the share of images that are answered right, 0 to 1")
        seen = self.look(model)
        ratio = loss / seen["probe_loss"] if loss is not None and seen["probe_loss"] else None
        given = {"step": step, "loss": loss, "loss_ratio": ratio, "accuracy": accuracy, "rate": rate}
        return self.observe(seen | given)

    def look(self, model: nn.Module) -> Reading:
        """Accuracies and E_lin on the probe, in the precision of the autocast around it."""
        if not isinstance(model, nn.Module):
            raise ValueError(f"the model is a {type(model).__name__}; give a torch.nn.Module, which has an eval mode")
        model = unwrapped(model)
        if self.graphed is not None and self.graphed.captured:
            numbers = self.graphed(model)  # eval mode is in the graph
        else:
            with evaluation_mode(model, self.seed, self.x.device):
                numbers = (self.graphed or self.measure)(model)
        # One transfer for all numbers: it waits for the device.
        clean, single, multi, error, loss, classes = numbers.tolist()
        return {
            "clean": clean,
            "single": single,
            "multi": min(single, multi),
            "error": error if math.isfinite(error) else None,
            "probe_loss": loss if math.isfinite(loss) else None,
            "chance": 1 / classes,
        }

    def measure(self, model: nn.Module) -> Tensor:
        """Accuracy without attack, under one step, under several; E_lin; loss under several; number of classes: [6]."""
        y, device = self.y, self.x.device.type
        # Without autocast's cache: copies of the weights made before a capture would be looked at for ever after.
        precision = torch.autocast(
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=False,
        )
        with precision, fusing(model, oracle.FUSED_SEARCH):
            seen = [self._seen(model, slice(first, first + self.batch)) for first in range(0, len(y), self.batch)]
        error = torch.cat([errors for errors, _ in seen]).mean()
        logits = torch.cat([answers for _, answers in seen], 1)
        accuracies = (~is_wrong(logits.flatten(0, 1), y.repeat(3))).view(3, -1).float().mean(1)
        loss = F.cross_entropy(logits[2].float(), y)
        classes = error.new_full((), logits.shape[2], dtype=torch.float32)
        return torch.cat([accuracies, torch.stack([error.float(), loss, classes])])

    def _seen(self, model: nn.Module, some: slice) -> tuple[Tensor, Tensor]:
        """The errors of some images [B], and their logits without attack, under one step and several [3, B, C]."""
        x, y = self.x[some], self.y[some]
        x_single = self.single(model, x, y, self.eps)
        x_multi = self.multi(model, x, y, self.eps, self.begin[some])
        x_a, x_b, position = (one[some] for one in self.drawn)
        with torch.no_grad():
            errors = self.linearity(model, x, y, self.eps, drawn=(x_a, x_b, position))
            logits: Tensor = model(torch.cat([x, x_single, x_multi]))
        return errors, logits.reshape(3, len(y), -1)


def _check_images(x: Tensor, y: Tensor) -> None:
    """Refuse what is no probe: images in [0, 1], each with the number of its class."""
    for name, one in (("x", x), ("y", y)):
        if not isinstance(one, Tensor):
            raise ValueError(f"{name} is a {type(one).__name__}; give a tensor")
    if len(x) == 0 or len(x) != len(y):
        raise ValueError(f"{len(x)} probe images and {len(y)} labels; there must be one label an image")
    if y.dim() != 1:
        raise ValueError(f"the labels have shape {tuple(y.shape)}; give the number of the class of each image, [N]")
    if not torch.equal(y.long().to(y.dtype), y):
        raise ValueError("the labels are not whole numbers; give the number of the class of each image, from 0")
    if not x.is_floating_point() or not bool(((x >= 0) & (x <= 1)).all()):
        raise ValueError(
            f"the probe images are {x.dtype} in {float(x.min()):.3g} to {float(x.max()):.3g}; give floats in "
            f"[0, 1], and a network that normalises for itself"
        )


class GraphedLook:
    """A look captured in a CUDA graph at its second call; it then belongs to one network, in its mode and precision."""

    def __init__(self, measure: Callable[[nn.Module], Tensor], device: torch.device) -> None:
        self.measure, self.device = measure, device
        self.work: Captured[Tensor] | None = None

    @property
    def captured(self) -> bool:
        return self.work is not None and self.work.graph is not None

    def __call__(self, model: nn.Module) -> Tensor:
        """Call `measure`, or replay it."""
        if self.work is None:
            self.work = Captured(functools.partial(self.measure, model), self.device, eager=1)
        return self.work()
