"""The guard: what a run does about a collapse. It keeps the last healthy state and knows the stronger method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from elle.config import Config
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Linearity
from elle.data.registry import find_dataset
from elle.methods import Method

MAX_ROLLBACKS = 3
"""A run that collapses once more after so many rollbacks stops."""
SHARE = 0.25
"""Share of the batch that the penalty which the guard switches on is computed for: it keeps a step below 1.5 FGSM's."""
_PREFIX = "healthy."


@dataclass
class Guard:
    """The last healthy state and how often it has been gone back to."""

    rollbacks: int = 0
    tensors: dict[str, Tensor] | None = None
    """Clones on the device, as `Step.state` returned them; None before the first healthy look."""
    step: int = 0
    """The step after which they were taken."""

    def keep(self, tensors: dict[str, Tensor], step: int) -> None:
        """Remember this state as healthy."""
        self.tensors = {name: value.detach().clone() for name, value in tensors.items()}
        self.step = step

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and header for a checkpoint."""
        tensors = {_PREFIX + name: value for name, value in (self.tensors or {}).items()}
        return tensors, {"rollbacks": self.rollbacks, "healthy_step": self.step}

    def restore(self, tensors: dict[str, Tensor], header: dict[str, Any], like: dict[str, Tensor]) -> None:
        """Put back what `state` returned; the tensors go where those of `like`, the step's own, are."""
        self.rollbacks, self.step = header["rollbacks"], header["healthy_step"]
        kept = {name.removeprefix(_PREFIX): value for name, value in tensors.items() if name.startswith(_PREFIX)}
        # Names that the step does not have are of a rule that the next rollback starts afresh.
        self.tensors = {name: value.to(like[name].device) for name, value in kept.items() if name in like} or None


def strengthened(method: Method, config: Config) -> Method:
    """ELLE-A added to a method without a penalty; otherwise twice its weight, on twice the images (at most all)."""
    if method.regulariser is not None and method.weight is not None and method.weight.value > 0:
        rule: Constant | OnOff = dataclasses.replace(method.weight, value=2 * method.weight.value)
        measured = dataclasses.replace(method.regulariser, share=min(1.0, 2 * method.regulariser.share))
        return dataclasses.replace(method, weight=rule, regulariser=measured)
    weight = find_dataset(config.data).weights["elle-a"]
    value = weight(config.eps or 0.0, config.schedule) if callable(weight) else weight
    error = Linearity(norm=config.norm, clip=bool(config.clip), share=SHARE)
    return dataclasses.replace(method.with_penalty("elle-a"), regulariser=error, weight=OnOff(value))


def strengthened_times(method: Method, config: Config, times: int) -> Method:
    """The method after that many rollbacks."""
    for _ in range(times):
        method = strengthened(method, config)
    return method
