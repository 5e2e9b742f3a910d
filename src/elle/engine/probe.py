"""A few fixed images on which a network is looked at while it trains, and the monitor that judges what is seen."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from elle.core.attacks import Norm, SignStep
from elle.core.linearity import Linearity
from elle.engine.monitor import Monitor, Reading, Verdict
from elle.evaluation.evaluate import evaluation_mode

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
    ) -> None:
        if len(x) == 0 or len(x) != len(y):
            raise ValueError(f"{len(x)} probe images and {len(y)} labels; there must be one label an image")
        if not 0 < eps < math.inf or (norm == "linf" and eps > 1):
            raise ValueError(f"eps is {eps}; for images in [0, 1] write it as a fraction, for example 8/255")
        if per_epoch < 1:
            raise ValueError(f"per_epoch is {per_epoch}; it is how often an epoch you call check, 1 or more")
        super().__init__(per_epoch)
        self.x, self.y, self.eps, self.seed = x, y, eps, seed
        self.single = SignStep(clip=True, norm=norm)
        # Three steps break a collapsed network in a small ball; in a large one, such as MNIST's, they do not.
        steps = 3 if eps <= (24 / 255 if norm == "linf" else 1) else 5
        self.multi = SignStep(alpha=0.5, steps=steps, noise=1, clip=True, norm=norm)
        self.linearity = Linearity(norm=norm)

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
        reading = self.look(model) | {"step": step, "loss": loss, "accuracy": accuracy, "rate": rate}
        return self.observe(reading)

    def look(self, model: nn.Module) -> Reading:
        """Accuracies and E_lin on the probe, in the precision of the autocast around it."""
        x, y = self.x, self.y
        with evaluation_mode(model, self.seed, x.device):
            x_single, x_multi = self.single(model, x, y, self.eps), self.multi(model, x, y, self.eps)
            with torch.no_grad():
                error = self.linearity(model, x, y, self.eps).mean()
                logits = model(torch.cat([x, x_single, x_multi]))
        # NaN logits would pass for class 0.
        correct = (logits.argmax(1) == y.repeat(3)) & ~logits.isnan().any(1)
        # One transfer for all numbers: it waits for the device.
        clean, single, multi, value = torch.cat([correct.view(3, -1).float().mean(1), error.view(1)]).tolist()
        return {
            "clean": clean,
            "single": single,
            "multi": min(single, multi),
            "error": value if math.isfinite(value) else None,
            "chance": 1 / logits.shape[1],
        }
