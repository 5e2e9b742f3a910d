"""Which images a step trains on: this rank's part of the batch, in its epoch's order and its phase's size."""

from __future__ import annotations

from torch import Tensor

from elle.data.phases import Timetable
from elle.data.resident import TrainingImages
from elle.engine.ranks import Ranks
from elle.errors import InputError


class Batches:
    """The batches of a run, as one rank takes them; `size` and `steps` are those of the phase it is in."""

    def __init__(
        self,
        data: TrainingImages,
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
        """Take batch and image size from the phase of this epoch."""
        self.shape = self.timetable.batch(epoch), self.timetable.size(epoch)
        """(images of a batch over all ranks, pixels of an image's side): a captured step works for one such shape."""
        self.size, self.steps = self.shape[0], self.timetable.steps(epoch)

    @property
    def share(self) -> int:
        """This rank's images of a batch."""
        return self.ranks.share(self.size, self.accumulate)

    def place(self, done: int) -> tuple[int, int]:
        """The epoch of the next step, and its batch in it; each batch counts once, however often it is replayed."""
        return self.timetable.place(done // self.replays)

    def index(self, done: int) -> Tensor:
        """This rank's images of the next step, after `done` steps."""
        epoch, batch = self.place(done)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self.data.order(self.seed, epoch)
        first = batch * self.size + self.ranks.rank * self.share
        return self._order[1][first : first + self.share]
