"""Which images a step trains on: this rank's part of the batch, in its epoch's order and its phase's size."""

from __future__ import annotations

from torch import Tensor

from elle.data.phases import Timetable
from elle.data.resident import Resident
from elle.data.streaming import Streaming
from elle.engine.ranks import Ranks
from elle.errors import InputError


class Batches:
    """The batches of a run, as one rank takes them; `size` and `steps` are those of the phase it is in."""

    def __init__(
        self,
        data: Resident | Streaming,
        timetable: Timetable,
        ranks: Ranks,
        *,
        accumulate: int,
        seed: int,
        replays: int,
    ) -> None:
        self.data, self.timetable, self.ranks = data, timetable, ranks
        self.accumulate, self.seed, self.replays = accumulate, seed, replays
        try:
            for epoch in range(timetable.epochs):
                ranks.share(timetable.batch(epoch), accumulate)  # refused now, not when its phase begins
        except InputError as problem:
            note = timetable.note_on_batches()
            raise InputError(f"{note}; {problem}" if note else str(problem)) from None
        self._order: tuple[int, Tensor] | None = None
        self.enter(0)

    def enter(self, epoch: int) -> None:
        """Go on in that epoch's phase."""
        self.shape = self.timetable.batch(epoch), self.timetable.size(epoch)
        """Images of a batch, of all ranks, and pixels of their side: a captured step holds one such shape."""
        self.size, self.steps = self.shape[0], self.timetable.steps(epoch)

    @property
    def share(self) -> int:
        """This rank's images of a batch."""
        return self.ranks.share(self.size, self.accumulate)

    def place(self, done: int) -> tuple[int, int]:
        """Epoch and batch in it of the next step; a method that replays its batches passes over the set more slowly."""
        return self.timetable.place(done // self.replays)

    def index(self, done: int) -> Tensor:
        """This rank's images of the next step, after `done` steps."""
        epoch, batch = self.place(done)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.data.order(self.seed, epoch)
        first = batch * self.size + self.ranks.rank * self.share
        return self._order[1][first : first + self.share]
