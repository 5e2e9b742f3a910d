"""A training run: epochs, evaluation points, records, checkpoints, stop conditions."""

from __future__ import annotations

import contextlib
import gc
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elle.config import Config, given, parse_config
from elle.core.schedules import SCHEDULES
from elle.data.image_folder import described
from elle.data.resident import Resident
from elle.engine.checkpoint import checkpoints
from elle.engine.guard import Guard
from elle.engine.leaving_out import LeavingOut, leaves_out
from elle.engine.outcome import conclude
from elle.engine.parts import build_parts
from elle.engine.ranks import ALONE, LOST, Ranks, check_launched, joined, own_device, restarts
from elle.engine.records import Record, columns, means
from elle.engine.run_files import RunFiles, run_directory
from elle.engine.runtime import GraphedStep, pick_device, pick_precision, stop_signals
from elle.engine.same_images import check_same_images, count_images, drawn_files, labels_digest
from elle.engine.tracking import Tracking
from elle.engine.watcher import Watcher
from elle.errors import InputError, WorkError, stopped_by
from elle.evaluation.names import parse_attacks
from elle.evaluation.units import fitting_batch
from elle.methods import Method
from elle.models.recomputing import note_on_random_layers
from elle.version import __version__


def train(
    config: Config, *, resume: bool = False, start_from: Path | None = None, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Train as configured, into a run directory, and return what its result.json holds.

    `resume` continues from the newest checkpoint (and starts afresh where there is none); `start_from` from that one.
    """
    config = config.resolved()
    check_launched(config.devices)
    device = pick_device(own_device(config.device))
    if device.type == "cuda":
        gc.collect()  # a run before this one in the same process may still hold the GPU's memory
    with joined(device) as ranks:
        directory, again = run_directory(config), resume or restarts() > 0
        goes_on = start_from is not None or (again and ranks.from_first(lambda: bool(checkpoints(directory))))
        # Built before the directory is touched: what the input gets wrong leaves no empty folder behind.
        run = Run(config, directory, (watcher if ranks.first else None) or Watcher(), ranks, initial=not goes_on)
        with contextlib.ExitStack() as held, contextlib.closing(run.step.data):
            start = run.files.open(held, resume=again, start_from=start_from)
            if start is None:
                run.files.begin()
            else:
                run.resume(start)
            run.files.configure(run.config)
            try:
                with _told_if_memory_is_full(run):
                    return run.finish()
            except WorkError as problem:
                # Whether a run that has lost a rank stops or starts again is its launcher's decision.
                if not str(problem).startswith(LOST):
                    with contextlib.suppress(WorkError):  # a full disk has no room for this either
                        run.files.event("stop", step=run.done, reason=str(problem))
                raise


@contextlib.contextmanager
def _told_if_memory_is_full(run: Run) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        less = run.how_to_continue(f"--resume accumulate={2 * run.config.accumulate}")
        raise WorkError(
            f"the device's memory is full at step {run.done} of {run.last_step}; what was saved stays; {less} "
            f"(half as many images at a time), or with memory=low, or start anew with a smaller batch, image or network"
        ) from None


class Run:
    """One run's parts and its position in the schedule."""

    def __init__(
        self, config: Config, directory: Path, watcher: Watcher, ranks: Ranks = ALONE, initial: bool = True
    ) -> None:
        self.config, self.directory, self.watcher, self.ranks = config, directory, watcher, ranks
        self.files = RunFiles(directory, ranks)
        self.device = pick_device(own_device(config.device))
        self.precision = pick_precision(config.precision, self.device)
        self.tracking = Tracking(self)
        parse_attacks(config.final, config.norm)
        parts = build_parts(config, self.device, self.precision, ranks, initial)
        self.config, self.method, self.images = parts.config, parts.method, parts.images
        self.timetable, self.batches, self.step = parts.timetable, parts.batches, parts.step
        self.tracking_images, self.begun = parts.tracking_images, parts.begun
        if config.compile == "graph" and self.device.type != "cuda":
            raise InputError("compile=graph needs an NVIDIA GPU; leave it out or set compile=off")
        self.run_step = self._runnable()
        self.guard = Guard(self)
        self.schedule = SCHEDULES[given(config.schedule)]
        self.history: list[Record] = []
        self.done = 0
        self.rank_counts: list[int] = []
        """On how many ranks it was trained; another number for each continuation on more or fewer."""
        self.epoch_seconds = 0.0

    @property
    def steps_per_epoch(self) -> int:
        return self.batches.steps

    @property
    def total_steps(self) -> int:
        return self.timetable.total_steps

    @property
    def last_step(self) -> int:
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    @property
    def graphed(self) -> bool:
        return self.device.type == "cuda" and self.config.compile != "off"

    def _runnable(self) -> Callable[[Tensor], None]:
        """The step, captured in a CUDA graph where there is a GPU."""

        def prepared(step: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
            return GraphedStep(step, self.batches.share, self.device) if self.graphed else step

        return LeavingOut(self.step, prepared) if leaves_out(self.step) else prepared(self.step)

    def evaluation_batch(self, most: int) -> int:
        """How many images to evaluate at once: no more than the device has room for, as a step has for its own."""
        pixels = self.images.test.x[0, 0].size
        trained = self.batches.share // self.config.accumulate
        if self.config.phases:
            trained = max(1, trained * self.batches.shape[1] ** 2 // pixels)
        return fitting_batch(most, pixels, trained)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of this very run."""
        tensors, header = self.files.load(path)
        saved = parse_config(header["config"])
        different = self.config.differences(saved)
        if different:
            words = ", ".join(saved.spelled(key) for key in different)
            raise InputError(f"{path} belongs to a run with {words}; give the same values, or choose another --out")
        if header["step"] > self.last_step:  # what would be measured is not what the settings say
            raise InputError(
                f"max_steps={self.config.max_steps}: {path} is of step {header['step']}; give as many steps or more"
            )
        check_same_images(path, header.get("network", {}), self.images)
        try:
            self.guard.restore_method(header)
            self.step.restore(tensors)
            self.guard.restore(tensors, header)
        except (KeyError, RuntimeError, TypeError) as problem:
            raise InputError(f"{path} does not fit this run: {problem}") from None
        self.done, self.history, self.epoch_seconds = header["step"], header["history"], header["epoch_seconds"]
        self.rank_counts = header.get("ranks", [])
        # Records after the checkpoint come again; anything newer on disk is from work that is being redone.
        self.cut_files()
        self.files.event("resume", step=self.done)
        self.watcher.said(f"continuing from step {self.done} of {self.last_step} ({path.name})")

    def cut_files(self) -> None:
        """Leave nothing in the run directory of what comes after step `done`."""
        readings = None if self.guard.monitor is None else self.guard.monitor.readings
        self.files.cut(self.done, self.timetable.place(self.done)[0], self.history, readings)

    def use(self, method: Method) -> None:
        """Train with another method from now on: its step is captured anew."""
        if method != self.step.method:
            self.step.use(method)
            self.run_step = self._runnable()
            self._warn_of_random_layers()

    def _warn_of_random_layers(self) -> None:
        method = self.step.method
        if method.regulariser and (note := note_on_random_layers(self.step.model, f"the error of {method.name}")):
            self.watcher.said(note)

    def finish(self) -> dict[str, Any]:
        """Train what is left, evaluate on the test set, write the weights and the result."""
        self.watcher.started(self.config, self.last_step, self.done)
        found = described(self.images, given(self.config.validation))
        for line in filter(None, (self.begun, *found, self.timetable.note_on_batches())):
            self.watcher.said(line)
        if self.config.cache is not None and isinstance(self.step.data, Resident):
            self.watcher.said(f"cache={self.config.cache} is not used: these images are few enough to be kept decoded")
        self._warn_of_random_layers()
        if not self.history and self.done == 0:
            self.cut_files()
            self.guard.start()
        with stop_signals(insistent=self.ranks.count == 1) as heard:

            def stopped(must: bool) -> str | None:
                # A checkpoint that could not be written stops all ranks, too, and `_stop` says why.
                signal_name = heard() or ("SIGTERM" if self.files.failed() else None)
                return self.ranks.stop_signal(signal_name, self.done, must)

            while self.done < self.last_step:
                self._epoch(stopped)
        # Also where nothing was left to train: an evaluation takes as many images at once as the last step did.
        self.batches.enter(self.timetable.place(self.done - 1)[0])
        epoch, part = self.timetable.place(self.done)
        if part:
            # Cut inside an epoch: recorded but not in the checkpoint, from where a longer run continues the epoch.
            self._record(epoch, self.step.records[:part].cpu())
        return conclude(self)

    def _epoch(self, stopped: Callable[[bool], str | None]) -> None:
        """Train the rest of an epoch; `stopped(must)` names a signal to stop, and may look only where it `must`."""
        epoch, first = self.timetable.place(self.done)
        self._enter(epoch, first)
        if self.rank_counts[-1:] != [self.ranks.count]:
            self.rank_counts.append(self.ranks.count)
        started = time.perf_counter()
        for k in range(first, self.steps_per_epoch):
            fraction = self.timetable.progress(self.done)
            self.step.lr.fill_(given(self.config.lr) * self.schedule.rate(fraction))
            self.step.eps.fill_(given(self.config.eps) * self.schedule.eps(fraction))
            self._stage(started)
            self.run_step(self.batches.index(self.done))
            self.done += 1
            self.step.between(self.done)
            self.watcher.stepped(self.done)
            if self.guard.due() and self.guard.look(self.epoch_seconds + time.perf_counter() - started):
                return  # rolled back: the loop goes on from another step
            if k + 1 < self.steps_per_epoch and (signal_name := stopped(False)):
                self.epoch_seconds += time.perf_counter() - started
                self._stop(signal_name)
            if self.done == self.last_step:
                break
        rows = self.step.records[: k + 1].cpu()  # waits for the device
        self.epoch_seconds += time.perf_counter() - started
        if k + 1 < self.steps_per_epoch:
            self.save()
            return
        self._record(epoch, rows)
        if signal_name := stopped(True):
            self._stop(signal_name)

    def _enter(self, epoch: int, first: int) -> None:
        """Enter the epoch's phase; where batch or image size change, the step is captured anew."""
        before = self.batches.shape
        self.batches.enter(epoch)
        if self.batches.shape != before:
            self.run_step = self._runnable()
        # Not where a rollback has led back to: it asks for the whole weight at once, and a ramp begins at 0.
        if first == 0 and self.timetable.starts_phase(epoch) and self.done != self.guard.strengthened_at:
            self.step.begin_phase()

    def _stage(self, started: float) -> None:
        """Have the batch ready; where that fails (a damaged file, a dead worker), what is trained is saved first."""
        try:
            self.step.data.stage(*self.batches.place(self.done))
        except WorkError as problem:
            saved = "what was saved stays" if self.done else "nothing is trained yet"
            if self.done and self.ranks.count == 1:  # saving is for all ranks together, the others know nothing of this
                self.epoch_seconds += time.perf_counter() - started
                self._save_unless_saved()
                saved = f"the run is saved at step {self.done}"
            raise WorkError(f"{problem}; {saved}; {self.how_to_continue()}") from None

    def _record(self, epoch: int, rows: Tensor) -> None:
        """Write down an epoch, and a checkpoint where the epoch is whole."""
        record: Record = {"epoch": epoch + 1, "step": self.done} | means(rows)
        if record["loss"] is None or not all(
            bool(value.isfinite().all()) for value in self.step.model.state_dict().values()
        ):
            if self.guard.condition != "divergence":
                self.files.event("divergence", step=self.done)
            raise WorkError(
                f"training diverged in epoch {epoch + 1}: the loss or the network is not finite; "
                f"lower lr (now {self.config.lr}) or weight and start again"
            )
        if len(rows) < self.steps_per_epoch:
            record["epoch_steps"] = self.steps_per_epoch  # of the whole epoch, which max_steps cuts short
        record["seconds"] = round(self.epoch_seconds, 3)
        whole = self.timetable.place(self.done)[1] == 0
        if whole and self.step.scale is not None and (lowered := self.step.scale.rise()) is not None:
            record["loss_scale"] = lowered
        last = self.done == self.last_step
        if self.config.eval_every and ((epoch + 1) % self.config.eval_every == 0 or last):
            record |= self.tracking.record()
        self.history.append(record)
        self.files.append("metrics.jsonl", record)
        self.files.append("steps.jsonl", columns(epoch + 1, self.done, rows))
        if whole:
            self.epoch_seconds = 0.0
            self.step.position.zero_()
            self.save()
        self.watcher.recorded(record)
        if not self.guard.every:
            verdicts = self.tracking.judged().verdicts
            if verdicts and verdicts[-1].step == self.done:
                self.guard.announce(verdicts[-1])

    def save(self) -> None:
        """Write a checkpoint, once for all ranks."""
        healthy, guarded = self.guard.state()
        header = {
            "version": __version__,
            "config": self.config.model_dump(),
            "network": self.model_header(),
            "history": self.history,
            "epoch_seconds": self.epoch_seconds,
            "ranks": self.rank_counts,
        }
        self.files.save(self.done, self.step.state() | healthy, header | guarded)

    def _save_unless_saved(self) -> None:
        if not self.files.saved(self.done):
            self.save()
            self.files.settle()

    def _stop(self, signal_name: str) -> None:
        self._save_unless_saved()
        raise stopped_by(
            signal_name,
            f" at step {self.done} of {self.last_step}; everything is saved; {self.how_to_continue()}",
        )

    def how_to_continue(self, words: str = "--resume") -> str:
        """The command that continues the run; under torchrun only the user knows it, and is told what to add."""
        if self.ranks.count > self.config.devices:
            return f"continue with the same command and {words}"
        return f"continue with: elle train --out {shlex.quote(str(self.directory))} {words}"

    def model_header(self) -> dict[str, Any]:
        """The header of a file of weights: the network, and the images that it was trained on."""
        return {
            "kind": "model",
            "model": self.config.model,
            "shape": self.images.test.x.shape[1:],
            "classes": self.images.classes,
            "activation": self.config.activation,
            "normalise": self.config.normalise,
            "labels": labels_digest(self.images),
            "images": count_images(self.images),
            "drawn": drawn_files(self.images),
        }
