"""Training in the subspace that early training moved in (Subspace AT, Li et al., arXiv 2111.12229)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
_FIRST = "first."
"""Begins the names of the first sample's buffers in a state."""


@dataclass(frozen=True)
class Subspace:
    """Sample the weights while training freely, then go back to the first sample and move along their main directions.

    The directions are the principal components of the samples; from then on every update of the weights (gradient,
    momentum and decay together) is projected onto them. One row of `samples` x parameters is kept: 45 MB each for
    PreActResNet18.
    """

    until: float = 0.5
    """The share of the training that samples."""
    samples: int = 40
    dimension: int = 30
    rate: float = 5.0
    """The learning rate's factor inside the subspace (1 in place of 0.2, as published)."""

    def __post_init__(self) -> None:
        if not 0 < self.until < 1:
            raise ValueError(f"until is {self.until}; it must be a share between 0 and 1")
        if not 1 <= self.dimension < self.samples:
            raise ValueError(f"dimension is {self.dimension}; it must be at least 1 and below samples={self.samples}")
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate is {self.rate}; it must be a finite number above 0")

    def start(self, model: nn.Module) -> State:
        """An empty basis: zero rows, none of them sampled; and the buffers, to go back to with the first sample."""
        flat = flattened(model.parameters())
        return {
            **{_FIRST + name: buffer.clone() for name, buffer in model.named_buffers()},
            "basis": flat.new_zeros(self.samples, len(flat)),
            "sampled": torch.zeros((), dtype=torch.int64),
            "active": torch.zeros((), dtype=torch.bool, device=flat.device),
        }

    def due(self, done: int, total: int) -> int:
        """How many samples there should be after `done` of `total` steps: the first at once, the last at `until`."""
        last = max(1, round(self.until * total))
        return min(self.samples, 1 + (self.samples - 1) * min(done, last) // last)

    @torch.no_grad()
    def observe(self, state: State, model: nn.Module, done: int, total: int) -> bool:
        """Sample if it is time; with the last sample form the basis and go back to the first. True at that moment."""
        sampled, due = int(state["sampled"]), self.due(done, total)
        if sampled >= due:
            return False
        # A run of few steps has fewer moments than samples: the same weights may be taken twice, to no harm.
        state["basis"][sampled:due] = flattened(model.parameters())
        state["sampled"].fill_(due)
        if due < self.samples:
            return False
        first = state["basis"][0].clone()
        self._form(state["basis"])
        state["active"].fill_(True)
        put(model.parameters(), first)
        for name, buffer in model.named_buffers():  # BatchNorm's statistics are of the network that was left
            buffer.copy_(state[_FIRST + name])
        return True

    def _form(self, samples: Tensor) -> None:
        """Replace the samples by their principal components, unit rows, and zeros below."""
        # First by the first: the mean is then rounded to the spread of the samples, not to their size.
        samples -= samples[0].clone()
        samples -= samples.mean(0)
        # Through the small matrix of inner products: samples x samples instead of parameters x parameters.
        # In float64: the spectrum of a smooth path falls below float32's (on a GPU TF32's) precision within few rows.
        parts = torch.split(samples, 1 << 18, dim=1)
        products = torch.stack([part.double() @ part.double().mT for part in parts]).sum(0)
        values, vectors = torch.linalg.eigh(products)
        values, vectors = values.flip(0)[: self.dimension], vectors.flip(1)[:, : self.dimension]
        kept = values > values[0] * 1e-10
        scale = torch.where(kept, values.clamp(min=1e-300).rsqrt(), 0.0)
        for part in parts:  # views: written in place
            block = (vectors * scale).mT @ part.double()
            part.zero_()
            part[: len(block)] = block

    @torch.no_grad()
    def project(self, state: State, parameters: list[nn.Parameter], before: Tensor) -> None:
        """Replace the update since `before` by its part inside the subspace, once there is one."""
        after = flattened(parameters)
        update = after - before
        basis = state["basis"][: self.dimension]
        inside = self.rate * ((basis @ update) @ basis)
        put(parameters, torch.where(state["active"], before + inside, after))


def flattened(parameters: Iterable[nn.Parameter]) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


@torch.no_grad()
def put(parameters: Iterable[nn.Parameter], flat: Tensor) -> None:
    """Write a vector that `flattened` made back into the parameters."""
    place = 0
    for parameter in parameters:
        parameter.copy_(flat[place : place + parameter.numel()].view(parameter.shape))
        place += parameter.numel()
