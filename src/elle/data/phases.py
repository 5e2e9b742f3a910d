"""A run in phases, each with its own image size and batch: which epoch and place in it a step belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple


class Phase(NamedTuple):
    """So many epochs on images of that many pixels a side, in batches of that many."""

    epochs: int
    image_size: int
    batch: int


_FORM = "write EPOCHS:IMAGE_SIZE:BATCH for each, for example 6:128:512,6:224:224,3:288:128"


def parse_phases(value: Any) -> tuple[Phase, ...]:
    """`6:128:512,6:224:224`, or a list of such triples of numbers."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        rows = [part.split(":") if isinstance(part, str) else part for part in parts]
        phases = tuple(Phase(*(int(str(number)) for number in row)) for row in rows)  # as text: int(6.5) is 6
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a list of phases; {_FORM}") from None
    if not phases or min(min(phase) for phase in phases) < 1 or min(phase.image_size for phase in phases) < 8:
        raise ValueError(f"{value!r} has a phase of no epoch, no image, or images below 8 pixels; {_FORM}")
    return phases


def format_phases(phases: Sequence[Phase]) -> str:
    """The text that `parse_phases` reads back."""
    return ",".join(":".join(map(str, phase)) for phase in phases)


@dataclass(frozen=True)
class Timetable:
    """Phases over a training set of `images`; epochs and steps are counted from 0 through all of them."""

    phases: tuple[Phase, ...]
    images: int

    @cached_property
    def _of_epoch(self) -> list[Phase]:
        return [phase for phase in self.phases for _ in range(phase.epochs)]

    @cached_property
    def _first_epochs(self) -> list[int]:
        """The number of the first epoch of each phase, and last the number of all epochs."""
        return list(accumulate((phase.epochs for phase in self.phases), initial=0))

    @cached_property
    def _first_steps(self) -> list[int]:
        """The number of the first step of each epoch, and last the number of all steps."""
        return list(accumulate((self.steps(epoch) for epoch in range(self.epochs)), initial=0))

    @property
    def epochs(self) -> int:
        return len(self._of_epoch)

    @property
    def total_steps(self) -> int:
        return self._first_steps[-1]

    @property
    def longest_epoch(self) -> int:
        return max(self.steps(epoch) for epoch in range(self.epochs))

    def batch(self, epoch: int) -> int:
        """Images a step: those of its phase, or all where there are fewer."""
        return min(self._of_epoch[epoch].batch, self.images)

    def note_on_batches(self) -> str | None:
        """A line about batches that are larger than the training set; None where there are none."""
        larger = [f"batch={phase.batch}" for phase in self.phases if phase.batch > self.images]
        if not larger:
            return None
        return f"{', '.join(larger)}: there are {self.images} training images, and a step takes all of them"

    def size(self, epoch: int) -> int:
        """Pixels of a side of its images."""
        return self._of_epoch[epoch].image_size

    def steps(self, epoch: int) -> int:
        """Whole batches in it."""
        return self.images // self.batch(epoch)

    def place(self, step: int) -> tuple[int, int]:
        """The epoch that `step` belongs to, and how many of its steps come before."""
        epoch = bisect_right(self._first_steps, step) - 1
        return epoch, step - self._first_steps[epoch]

    def into_phase(self, step: int) -> int:
        """How many steps of its phase come before."""
        epoch, place = self.place(step)
        first = max(start for start in self._first_epochs if start <= epoch)
        return (epoch - first) * self.steps(epoch) + place

    def starts_phase(self, epoch: int) -> bool:
        """Whether it is the first epoch of a phase."""
        return epoch in self._first_epochs

    def progress(self, step: int) -> float:
        """The share of all epochs that has passed in the middle of a step: schedules are functions of it."""
        # The middle, so that neither the first nor the last step of a schedule has rate 0.
        epoch, place = self.place(step)
        length = self.steps(epoch)
        return (epoch * length + place + 0.5) / (self.epochs * length)
