"""A training run: epochs, evaluation points, records, checkpoints, stop conditions."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from elle.config import Config, format_radius, parse_config
from elle.core.attacks import Norm
from elle.core.schedules import SCHEDULES
from elle.data.image_folder import filled_in, training_source
from elle.data.registry import dataset_statistics, load_dataset
from elle.data.resident import to_tensors
from elle.data.sources import ImageSet
from elle.data.workers import usable_workers
from elle.engine import checkpoint
from elle.engine.batchnorm import synchronise
from elle.engine.guard import Guard
from elle.engine.monitor import Verdict, collapse_epoch
from elle.engine.ranks import ALONE, Ranks, joined, own_device, restarts
from elle.engine.runtime import (
    GraphedStep,
    autocast,
    pick_device,
    pick_precision,
    prepare_device,
    stop_signals,
)
from elle.engine.step import RECORDED, Step
from elle.errors import InputError, WorkError
from elle.evaluation.evaluate import (
    EvaluationAttack,
    evaluate,
    evaluation_mode,
    parse_attacks,
    parse_tracked,
    surviving,
)
from elle.evaluation.metrics import METRICS, linearity_metrics, mean_error
from elle.methods import Method, configured
from elle.models.registry import build_model
from elle.version import __version__

Record = dict[str, Any]
Value = TypeVar("Value")


@dataclass
class Watcher:
    """What a run tells whoever watches it; the default watcher looks away."""

    started: Callable[[Config, int, int], None] = lambda config, steps, done: None
    stepped: Callable[[int], None] = lambda step: None
    recorded: Callable[[Record], None] = lambda record: None
    said: Callable[[str], None] = lambda text: None
    judged: Callable[[Verdict], None] = lambda verdict: None


def parse_track(track: str, norm: Norm) -> tuple[list[EvaluationAttack], str]:
    """`clean,pgd-10,misalignment` -> the attacks, and the names of the linearity metrics, which may be none."""
    names = [name.strip() for name in track.split(",") if name.strip()]
    metrics = [name for name in names if name in METRICS]
    return parse_tracked(",".join(name for name in names if name not in METRICS), norm), ",".join(metrics)


def run_directory(config: Config) -> Path:
    """Where a run writes: `out`, or runs/ and a name made of its settings."""
    if config.out is not None:
        return Path(config.out)
    eps = format_radius(config.eps or 0).replace("/", "-")
    return Path("runs") / f"{config.data}-{config.method}-eps{eps}-seed{config.seed}"


def train(
    config: Config, *, resume: bool = False, start_from: Path | None = None, watcher: Watcher | None = None
) -> dict[str, Any]:
    """Train as configured, into a run directory, and return what its result.json holds.

    `resume` continues from the newest checkpoint (and starts afresh where there is none); `start_from` from that one.
    """
    config = config.resolved()
    with joined(pick_device(own_device(config.device))) as ranks:
        # Built before the directory is touched: what the input gets wrong leaves no empty folder behind.
        run = Run(config, run_directory(config), (watcher if ranks.first else None) or Watcher(), ranks)
        with contextlib.ExitStack() as held, contextlib.closing(run.step.data):
            start = ranks.from_first(lambda: _opened(run, held, resume or restarts() > 0, start_from))
            if start is not None:
                run.resume(start)
            return run.finish()


def _opened(run: Run, held: contextlib.ExitStack, resume: bool, start_from: Path | None) -> Path | None:
    """Take the run directory, until `held` is closed; the checkpoint to continue from, if there is one."""
    directory = run.directory
    held.enter_context(checkpoint.RunLock(directory))
    existing = checkpoint.checkpoints(directory)
    if existing and not resume and start_from is None:
        raise InputError(f"{directory} already holds a run; continue it with --resume or choose another --out")
    if start_from is None and not existing:
        checkpoint.write_atomically(directory / "config.toml", run.config.to_toml().encode())
    return start_from or (existing[-1] if existing else None)


class Run:
    """One run's parts and its position in the schedule."""

    def __init__(self, config: Config, directory: Path, watcher: Watcher, ranks: Ranks = ALONE) -> None:
        self.config, self.directory, self.watcher, self.ranks = config, directory, watcher, ranks
        self.device = pick_device(own_device(config.device) if ranks.count > 1 else config.device)
        self.precision = pick_precision(config.precision, self.device)
        self.attacks, self.metrics = parse_track(config.track, config.norm)
        parse_attacks(config.final, config.norm)
        self.method = configured(
            config.method,
            weight=config.weight,
            norm=config.norm,
            clip=_given(config.clip),
            data=config.data,
            eps=_given(config.eps),
            model=_given(config.model),
            options=config.options,
        )
        self.images = load_dataset(config.data, config.root, image_size=config.image_size, workers=config.workers)
        self.config = config = config.model_copy(update=filled_in(self.images, config.model_dump()))
        prepare_device(self.device, self.precision)
        torch.manual_seed(config.seed)
        self.step, self.tracked = self._parts(self.images)
        if config.compile == "graph" and self.device.type != "cuda":
            raise InputError("compile=graph needs an NVIDIA GPU; leave it out or set compile=off")
        self.run_step = self._runnable()
        self.guard = Guard(self)
        self.schedule = SCHEDULES[_given(config.schedule)]
        self.history: list[Record] = []
        self.done = 0
        self.epoch_seconds = 0.0
        self.order: tuple[int, Tensor] | None = None

    def _parts(self, images: ImageSet) -> tuple[Step, tuple[Tensor, Tensor]]:
        config = self.config
        data, validation = training_source(
            images.train,
            self.device,
            validation=_given(config.validation),
            seed=config.seed,
            batch=_given(config.batch),
            epochs=_given(config.epochs),
            crop=_given(config.crop),
            flip=_given(config.flip),
            loading=config.loading,
            workers=config.workers if self.ranks.count == 1 else self._own_workers(),
            cache=config.cache,
            rank=self.ranks.rank,
            ranks=self.ranks.count,
        )
        self.batch = min(_given(config.batch), len(data))
        self.steps_per_epoch = len(data) // self.batch
        self.total_steps = self.steps_per_epoch * _given(config.epochs)
        shape = images.test.x.shape
        model = build_model(
            _given(config.model),
            (shape[1], shape[2], shape[3]),
            len(images.classes),
            activation=config.activation,
            normalise=dataset_statistics(config.data, images.train) if config.normalise == "dataset" else None,
        )
        self.method.check(model)
        model = model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        # The same by their seed; a network of the user's may draw elsewhere.
        self.ranks.copy_from_first([*model.parameters(), *model.buffers()])
        if config.sync_bn and self.ranks.count > 1:
            model = synchronise(model, self.ranks)
        step = Step(
            model.train(),
            self.method,
            data,
            eps=_given(config.eps),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            precision=self.precision,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
            ranks=self.ranks,
            accumulate=config.accumulate,
        )
        step.prepare(self.share, shape[1:])
        return step, to_tensors(validation if len(validation) else images.test, self.device)

    def _runnable(self) -> Callable[[Tensor], None]:
        """The step, captured in a CUDA graph where there is a GPU."""
        if self.device.type == "cuda" and self.config.compile != "off":
            return GraphedStep(self.step, self.share, self.device)
        return self.step

    def _own_workers(self) -> int:
        """Decoding processes of this rank: all of a machine's ranks together use its cores once."""
        cores = usable_workers(None) // self.ranks.on_this_machine
        return max(1, cores) if self.config.workers is None else self.config.workers

    @property
    def share(self) -> int:
        """This rank's images of a batch."""
        return self.ranks.share(self.batch, self.config.accumulate)

    @property
    def last_step(self) -> int:
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint of this very run."""
        # Read once: the others may be on machines that do not see the file.
        tensors, header = self.ranks.from_first(lambda: checkpoint.load_checkpoint(path))
        missing = [key for key in ("config", "step", "history", "epoch_seconds") if key not in header]
        if missing:
            raise InputError(f"{path} is not a whole checkpoint: its header has no {missing[0]!r}")
        saved = parse_config(header["config"])
        different = self.config.differences(saved)
        if different:
            words = ", ".join(saved.spelled(key) for key in different)
            raise InputError(f"{path} belongs to a run with {words}; give the same values, or choose another --out")
        try:
            self.guard.restore_method(header)
            self.step.restore(tensors)
            self.guard.restore(tensors, header)
        except (KeyError, RuntimeError, TypeError) as problem:
            raise InputError(f"{path} does not fit this run: {problem}") from None
        self.done, self.history, self.epoch_seconds = header["step"], header["history"], header["epoch_seconds"]
        # Records after the checkpoint come again; anything newer on disk is from work that is being redone.
        self.rewrite()
        self.event("resume", step=self.done)
        self.watcher.said(f"continuing from step {self.done} of {self.last_step} ({path.name})")

    def rewrite(self) -> None:
        """Make the run directory that of a run which has come to step `done` and no further."""
        if not self.ranks.first:
            return
        checkpoint.write_lines(self.directory / "metrics.jsonl", self.history)
        if self.guard.monitor is not None:
            checkpoint.write_lines(self.directory / "probes.jsonl", self.guard.monitor.readings)
        steps = checkpoint.read_lines(self.directory / "steps.jsonl")
        whole = [line for line in steps if line["epoch"] <= self.done // self.steps_per_epoch]
        checkpoint.write_lines(self.directory / "steps.jsonl", whole)
        for newer in checkpoint.checkpoints(self.directory):
            if newer.name > checkpoint.checkpoint_path(self.directory, self.done).name:
                newer.unlink()

    def use(self, method: Method) -> None:
        """Train with another method from now on: its step is captured anew."""
        if method != self.step.method:
            self.step.use(method)
            self.run_step = self._runnable()

    def finish(self) -> dict[str, Any]:
        """Train what is left, evaluate on the test set, write the weights and the result."""
        self.watcher.started(self.config, self.last_step, self.done)
        if not self.history and self.done == 0:
            self.rewrite()
        with stop_signals(insistent=self.ranks.count == 1) as heard:

            def stopped(must: bool) -> str | None:
                return self.ranks.stop_signal(heard(), self.done, must)

            while self.done < self.last_step:
                self._epoch(stopped)
        if part := self.done % self.steps_per_epoch:
            # Cut inside an epoch: recorded but not in the checkpoint, from where a longer run continues the epoch.
            self._record(self.done // self.steps_per_epoch, self.step.records[:part].cpu())
        return self._result()

    def _epoch(self, stopped: Callable[[bool], str | None]) -> None:
        epoch, first = divmod(self.done, self.steps_per_epoch)
        started = time.perf_counter()
        for k in range(first, self.steps_per_epoch):
            # The middle of the step, so that neither the first nor the last one has rate 0.
            fraction = (self.done + 0.5) / self.total_steps
            self.step.lr.fill_(_given(self.config.lr) * self.schedule.rate(fraction))
            self.step.eps.fill_(_given(self.config.eps) * self.schedule.eps(fraction))
            self.run_step(self._batch())
            self.done += 1
            self.step.between(self.done)
            self.watcher.stepped(self.done)
            if self.guard.due() and self.guard.look(k + 1, self.epoch_seconds + time.perf_counter() - started):
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

    def _stage(self, epoch: int, step: int) -> None:
        """Have the batch ready; where that fails (a damaged file, a dead worker), what is trained is saved first."""
        try:
            self.step.data.stage(epoch, step)
        except WorkError as problem:
            if self.done == 0 or self.ranks.count > 1:
                raise  # saving is for all ranks together, and the others know nothing of this
            self._keep()
            raise WorkError(
                f"{problem}; the run is saved at step {self.done}; "
                f"continue with: elle train --out {self.directory} --resume"
            ) from None

    def _batch(self) -> Tensor:
        """The images of the next step; a method that replays its batches passes over the set more slowly."""
        turn, place = divmod(self.done // self.method.replays, self.steps_per_epoch)
        if self.order is None or self.order[0] != turn:
            self.order = turn, self.step.data.order(self.config.seed, turn)
        self._stage(turn, place)
        first = place * self.batch + self.ranks.rank * self.share
        return self.order[1][first : first + self.share]

    def _record(self, epoch: int, rows: Tensor) -> None:
        """Write down an epoch, and a checkpoint where the epoch is whole."""
        means = {name: _number(rows[:, k].nanmean()) for k, name in enumerate(RECORDED) if name != "threshold"}
        if means["loss"] is None or not all(
            bool(value.isfinite().all()) for value in self.step.model.state_dict().values()
        ):
            if self.guard.condition != "divergence":
                self.event("divergence", step=self.done)
            raise WorkError(
                f"training diverged in epoch {epoch + 1}: the loss or the network is not finite; "
                f"lower lr (now {self.config.lr}) or weight and start again"
            )
        record: Record = {"epoch": epoch + 1, "step": self.done} | means
        record["seconds"] = round(self.epoch_seconds, 3)
        last = self.done == self.last_step
        if self.config.eval_every and ((epoch + 1) % self.config.eval_every == 0 or last):
            record |= self.ranks.from_first(self._track)
        already = self.collapse()
        self.history.append(record)
        self.write_line("metrics.jsonl", record)
        self.write_line("steps.jsonl", _columns(epoch + 1, self.done, rows))
        if self.done % self.steps_per_epoch == 0:
            self.epoch_seconds = 0.0
            self.step.position.zero_()
            self.save()
        self.watcher.recorded(record)
        since = self.collapse()
        if self.guard.monitor is None and since is not None and already is None:
            self.event("collapse", step=self.done, epoch=since)
            self.watcher.said(f"collapse: accuracy under attack has been below half of its best since epoch {since}")

    def _track(self) -> Record:
        """Accuracies and E_lin on the tracking images, in the training precision and apart from its random state."""
        started = time.perf_counter()
        x, y = self.tracked
        model = self.step.model
        record: Record = {}
        with evaluation_mode(model, self.config.seed, self.device), autocast(self.device, self.precision):
            for one in self.attacks:
                record[one.name] = float(
                    surviving(model, x, y, one, _given(self.config.eps), self._fit(1024)).float().mean()
                )
            error = mean_error(model, x, y, _given(self.config.eps), norm=self.config.norm, batch=self._fit(500))
            record["tracked_error"] = _number(error)
        if self.metrics:
            found = linearity_metrics(
                model,
                x,
                y,
                _given(self.config.eps),
                metric=self.metrics,
                norm=self.config.norm,
                batch=self._fit(500),
                seed=self.config.seed,
            )
            record |= {f"tracked_{name}": one.get("mean") for name, one in found.items()}
        record["eval_seconds"] = round(time.perf_counter() - started, 3)
        return record

    def _fit(self, batch: int) -> int:
        """That many images of 32 x 32, fewer larger ones: the memory for them is known to be there, as in a step."""
        pixels: int = self.images.test.x[0, 0].size
        return min(batch, max(self.share // self.config.accumulate, 1024 * 32 * 32 // pixels))

    def collapse(self) -> int | None:
        """The epoch in which this run collapsed for good, as far as its records tell."""
        multi = next((one.name for one in self.attacks if one.attack is not None and one.attack.steps > 1), None)
        seen = [record for record in self.history if multi in record]
        if multi is None or not self.method.adversarial:
            return None
        index = collapse_epoch([record["accuracy"] for record in seen], [record[multi] for record in seen])
        return None if index is None else int(seen[index]["epoch"])

    def save(self) -> None:
        """Write a checkpoint, once; the other ranks wait, and end with the first where it cannot."""
        healthy, guarded = self.guard.state()
        header = {
            "version": __version__,
            "config": self.config.model_dump(),
            "network": self.model_header(),
            "history": self.history,
            "epoch_seconds": self.epoch_seconds,
        }
        tensors = self.step.state() | healthy

        def write() -> None:
            checkpoint.save_checkpoint(self.directory, self.done, tensors, header | guarded)

        self.ranks.from_first(write)

    def _keep(self) -> None:
        path = checkpoint.checkpoint_path(self.directory, self.done)
        if not self.ranks.from_first(path.exists):
            self.save()

    def _stop(self, signal_name: str | None) -> None:
        self._keep()
        self.event("stop", step=self.done, signal=signal_name)
        raise WorkError(
            f"stopped by {signal_name} at step {self.done} of {self.last_step}; everything is saved; "
            f"continue with: elle train --out {self.directory} --resume"
        )

    def event(self, kind: str, **values: Any) -> None:
        line = {"event": kind, "time": round(time.time(), 3)} | values
        self.write_line("events.jsonl", line)

    def write_line(self, file: str, value: Any) -> None:
        """One more line in a file of the run directory, which only the first rank writes."""
        if self.ranks.first:
            checkpoint.append_line(self.directory / file, value)

    def model_header(self) -> dict[str, Any]:
        config, shape = self.config, self.images.test.x.shape
        header = {"kind": "model", "model": config.model, "shape": shape[1:], "classes": self.images.classes}
        return header | {"activation": config.activation, "normalise": config.normalise}

    def _result(self) -> dict[str, Any]:
        config, model = self.config, self.step.model
        if self.ranks.first:
            checkpoint.write_tensors(self.directory / "model.safetensors", model.state_dict(), self.model_header())
        self.watcher.said(f"evaluating {config.final} on {len(self.images.test)} test images")
        x, y = self.images.test.x, self.images.test.y  # moved to the device a chunk at a time
        final = evaluate(
            model,
            x,
            y,
            config.final,
            _given(config.eps),
            norm=config.norm,
            batch=self._fit(500),
            seed=config.seed,
            part=(self.ranks.rank, self.ranks.count),
            exchange=self.ranks.exchanged,
        )
        epoch_seconds = [record["seconds"] for record in self.history]
        result = {
            "version": __version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            "precision": self.precision,
            "ranks": self.ranks.count,
            "batchnorm": "all ranks" if config.sync_bn and self.ranks.count > 1 else "each rank",
            "config": config.model_dump(),
            "classes": list(self.images.classes),
            "steps": self.done,
            "collapse_epoch": self.collapse(),
            "verdicts": self.guard.verdicts(),
            "rollbacks": self.guard.rollbacks,
            "seconds_per_epoch": sorted(epoch_seconds)[len(epoch_seconds) // 2] if epoch_seconds else None,
            "train_seconds": round(sum(epoch_seconds), 3),
            "test": final,
        }
        if self.ranks.first:
            checkpoint.write_json(self.directory / "result.json", result)
        self.event("finish", step=self.done)
        return result


def _given(value: Value | None) -> Value:
    """A value that `Config.resolved` has filled in."""
    assert value is not None
    return value


def _columns(epoch: int, last: int, rows: Tensor) -> Record:
    """Every step of an epoch in one line: `step` is the first, and a column a quantity, to five digits."""
    columns = {
        name: [_number(float(f"{value:.5g}")) for value in rows[:, k].tolist()] for k, name in enumerate(RECORDED)
    }
    known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return {"epoch": epoch, "step": last - len(rows) + 1} | known


def _number(value: Tensor | float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
