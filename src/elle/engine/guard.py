"""The guard: looks for a collapse during training, keeps the last healthy state, and does what `on_collapse` says."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elle.config import Config, given
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Linearity
from elle.core.precision import autocast
from elle.engine.monitor import Kind, Reading, Verdict
from elle.engine.probe import IMAGES, CollapseMonitor
from elle.engine.records import number
from elle.engine.step import RECORDED
from elle.errors import InputError, WorkError
from elle.methods import Method

if TYPE_CHECKING:
    from elle.engine.loop import Run

MAX_ROLLBACKS = 3
"""A run that collapses once more after so many rollbacks stops."""
EVERY = 4
"""Steps from one with the penalty that the guard switches on to the next: cheap to pay. A share of each batch would
cost more, as a GPU takes hardly less time for few images, and the mean over few is noise that throws training back."""
_PREFIX = "healthy."


class Guard:
    """A run's monitor, its last healthy state, and how often it has gone back to one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rollbacks = 0
        self.healthy_state: dict[str, Tensor] | None = None
        """Copies on the device of what `Step.state` returned at the last healthy look, or at the start."""
        self.healthy_step = 0
        """The step after which that was."""
        self.strengthened_at: int | None = None
        """The step from which the last rollback went on with a stronger method."""
        # On by default for every method that its network can learn to fool.
        self.wanted = run.config.on_collapse != "warn" or run.method.few_steps
        if not self.every and run.config.on_collapse != "warn":
            raise InputError(f"on_collapse={run.config.on_collapse} needs the monitor; leave probe_every=0 out")
        self.monitor = _monitor(run) if self.every else None

    @property
    def every(self) -> int:
        """Steps between two looks in the current phase; 0 for no looks."""
        every = self.run.config.probe_every
        # Rounded down: what lasts for two looks is known within an epoch of its first.
        twice_an_epoch = max(1, self.run.steps_per_epoch // 2) if self.wanted else 0
        return twice_an_epoch if every is None else every

    @property
    def condition(self) -> Kind | None:
        return None if self.monitor is None else self.monitor.condition

    def verdicts(self) -> list[dict[str, Any]]:
        return [] if self.monitor is None else [dataclasses.asdict(verdict) for verdict in self.monitor.verdicts]

    def start(self) -> None:
        """Keep the state of a run that begins: one that collapses at once has no other to go back to."""
        if self.monitor is not None:
            self._keep_state()

    def _keep_state(self) -> None:
        """Make the state of now the healthy one, in the memory of the one before: none is allocated twice an epoch."""
        self.healthy_step = self.run.done
        now = {name: value.detach() for name, value in self.run.step.state().items()}
        if self.healthy_state is None or self.healthy_state.keys() != now.keys():
            self.healthy_state = {name: value.clone() for name, value in now.items()}
        else:
            torch._foreach_copy_([self.healthy_state[name] for name in now], list(now.values()))

    def due(self) -> bool:
        """Whether it is time for a look."""
        run, every = self.run, self.every
        # Two looks an epoch are counted from where the phase begins: another has epochs of another length.
        passed = run.done if run.config.probe_every else run.timetable.into_phase(run.done - 1) + 1
        return bool(every) and passed % every == 0 and self.can_judge(run.done)

    def can_judge(self, step: int) -> bool:
        """Whether the network after `step` has been trained at the whole eps: while eps grows, it has not met it."""
        run = self.run
        return run.schedule.eps(run.timetable.progress(min(step, run.total_steps - 1))) == 1

    def latest(self) -> dict[str, float | None]:
        """The means over the phase's steps since the last look, at most an epoch's, of what each step records."""
        run = self.run
        # Behind the rows of this epoch are still those of the one before, in which the last look may have been.
        position = run.timetable.place(run.done - 1)[1] + 1
        # Not those of another phase: its epochs, of another length, end elsewhere.
        count = min(self.every, run.timetable.into_phase(run.done - 1) + 1)
        rows = run.step.records[: run.steps_per_epoch].roll(-position, 0)[-count:]
        return {name: number(mean) for name, mean in zip(RECORDED, rows.nanmean(0).tolist(), strict=True)}

    def look(self, seconds: float) -> bool:
        """Look at the network after `seconds` of the epoch; whether the run was rolled back.

        In the training precision and apart from its random state: a look changes nothing.
        """
        run, monitor = self.run, self.monitor
        assert monitor is not None
        monitor.per_epoch = max(1, run.steps_per_epoch // self.every)
        # A device may have room for few images more than it trains on.
        monitor.batch = run.evaluation_batch(len(monitor.y))
        latest = self.latest()
        known = {"loss": latest["loss"], "accuracy": latest["accuracy"], "rate": float(run.step.lr)}

        def check() -> tuple[Verdict | None, Reading]:
            with autocast(run.device, run.precision):
                return monitor.check(run.step.model, run.done, **known), monitor.readings[-1]

        # One rank's eyes for all: what is decided must be the same on each.
        verdict, reading = run.ranks.from_first(check)
        if not run.ranks.first:
            monitor.observe(reading)
        run.files.append("probes.jsonl", reading)
        run.watcher.looked(reading, monitor.condition)
        if monitor.healthy:
            self._keep_state()
        return verdict is not None and self._act(verdict, seconds)

    def announce(self, verdict: Verdict) -> None:
        """Write it to events.jsonl and tell whoever watches."""
        values = dataclasses.asdict(verdict)
        self.run.files.event(values.pop("kind").replace(" ", "_"), **values)
        self.run.watcher.judged(verdict)
        self.run.watcher.said(str(verdict))

    def _act(self, verdict: Verdict, seconds: float) -> bool:
        """Announce it, and do what `on_collapse` says of a collapse; whether the run was rolled back."""
        run = self.run
        self.announce(verdict)
        if verdict.kind != "collapse":
            return False
        self._keep_both_networks()
        if run.config.on_collapse == "warn":
            return False
        if self.healthy_state is None:
            raise WorkError(f"stopped: {verdict}; no healthy state was kept; start again with on_collapse=rollback")
        spent = self.rollbacks == MAX_ROLLBACKS
        if run.config.on_collapse == "rollback" and not spent:
            self.rollbacks += 1
            method = strengthened(run.step.method, run.config)
            self._roll_back(seconds, method)
            words = "" if method.weight is None else f" at weight {method.weight.value:g}"
            run.watcher.said(f"rolled back to step {run.done}, going on with {method.name}{words}")
            return True
        self._roll_back(seconds, run.step.method)
        after = f" after {self.rollbacks} rollbacks" if spent else ""
        go_on = run.how_to_continue("--resume on_collapse=rollback")
        raise WorkError(
            f"stopped{after}: {verdict}; the run is back at its last healthy state, step {run.done}, and saved; "
            f"{'start again with method=elle-a' if spent else go_on}"
        )

    def _roll_back(self, seconds: float, method: Method) -> None:
        """Go back to the last healthy state, and on from there with `method`; the time lost stays counted."""
        run = self.run
        assert self.monitor is not None
        assert self.healthy_state is not None
        at, run.done = run.done, self.healthy_step
        dropped = [record for record in run.history if record["step"] > run.done]
        run.history = [record for record in run.history if record["step"] <= run.done]
        run.epoch_seconds = seconds + sum(record["seconds"] for record in dropped)
        stronger = method != run.step.method
        run.use(method)
        rule = {name: value for name, value in run.step.state().items() if name.startswith("rule.")}
        # A stronger method's rule is a new one; the same method's goes back with all else.
        run.step.restore(self.healthy_state | rule if stronger else rule | self.healthy_state)
        if stronger and method.weight is not None:
            # At its maximum at once: what comes next from this state is known.
            run.step.rule["weight"].fill_(method.weight.value)
            if isinstance(method.weight, OnOff) and method.weight.ramp:
                run.step.rule["since"].fill_(method.weight.ramp)  # else the next jump would be one down
            self.strengthened_at = run.done
        if run.timetable.place(run.done)[1] == 0:
            run.step.position.zero_()
        self._keep_state()  # with the rule of now: a stop that comes next goes back to the start of this one
        readings = self.monitor.forget(run.done)
        weight = None if method.weight is None else method.weight.value
        known = {"undone_from": at, "method": method.name, "weight": weight, "records": dropped, "probes": readings}
        known["goes_on"] = stronger  # else it stops here, and is not one of the rollbacks that are counted
        # Told before it is saved: a run killed in between rolls back once more, and one that goes on from what is saved
        # would never tell it.
        run.files.event("rollback", step=run.done, **known)
        run.save()  # before the checkpoints of the undone steps go: they may be all there are
        run.cut_files()

    def _keep_both_networks(self) -> None:
        """Write the network before the collapse and the collapsed one, to be looked at (`elle plot`)."""
        kept = self.healthy_state or {}
        before = {name.removeprefix("model."): kept[name] for name in kept if name.startswith("model.")}
        states = {"before": (self.healthy_step, before), "after": (self.run.done, self.run.step.model.state_dict())}
        for name, (step, tensors) in states.items():
            if tensors:
                header = self.run.model_header() | {"step": step}
                self.run.files.write_tensors(f"{name}-collapse.safetensors", tensors, header)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and header entries for a checkpoint."""
        known = {
            "rollbacks": self.rollbacks,
            "healthy_step": self.healthy_step,
            "strengthened_at": self.strengthened_at,
        }
        header: dict[str, Any] = {"guard": known}
        if self.monitor is not None:
            header["monitor"] = self.monitor.state_dict()
        if self.run.config.on_collapse == "warn":
            return {}, header  # the state is kept to be looked at, never to be gone back to
        return {_PREFIX + name: value for name, value in (self.healthy_state or {}).items()}, header

    def restore_method(self, header: dict[str, Any]) -> None:
        """Have the run train with the method that its rollbacks had led to."""
        self.rollbacks = header.get("guard", {"rollbacks": 0})["rollbacks"]
        method = self.run.method
        for _ in range(self.rollbacks):
            method = strengthened(method, self.run.config)
        self.run.use(method)

    def restore(self, tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
        """Put back what `state` returned."""
        if "guard" not in header:
            return  # a checkpoint of a version without a guard
        self.healthy_step = header["guard"]["healthy_step"]
        self.strengthened_at = header["guard"].get("strengthened_at")
        like = self.run.step.state()
        kept = {name.removeprefix(_PREFIX): value for name, value in tensors.items() if name.startswith(_PREFIX)}
        self.healthy_state = {name: value.to(like[name].device) for name, value in kept.items() if name in like} or None
        if "monitor" in header:
            # Also where probe_every=0 ends the looks: those made before stay on record.
            self.monitor = self.monitor or _monitor(self.run)
            self.monitor.load_state_dict(header["monitor"])


def _monitor(run: Run) -> CollapseMonitor:
    x, y = run.tracking_images
    # Spread over the set, which may be sorted by class.
    chosen = torch.linspace(0, len(x) - 1, min(IMAGES, len(x)), device=run.device).long()
    x = x[chosen].contiguous(memory_format=torch.channels_last)
    monitor = CollapseMonitor(
        x,
        y[chosen],
        given(run.config.eps),
        norm=run.config.norm,
        seed=run.config.seed,
        # Larger images keep the device busy without a graph, and a graph would hold the memory for them for good.
        graph=run.graphed and x[0, 0].numel() <= 64 * 64,
    )
    monitor.attacked = run.method.adversarial
    return monitor


def strengthened(method: Method, config: Config) -> Method:
    """ELLE-A added to a method without a penalty; otherwise twice its weight, at twice as many steps (at most all)."""
    before = method.weight
    if before is None:
        stronger = method.with_penalty("elle-a")
        rule: Constant | OnOff = OnOff(config.usual_weight(stronger.name), every=EVERY)
        error = Linearity(norm=config.norm, clip=bool(config.clip))
        return dataclasses.replace(stronger, regulariser=error, weight=rule)
    # Twice nothing is nothing: a penalty at weight 0 gets what it has by default.
    value = 2 * before.value or config.usual_weight(method.name)
    rule = dataclasses.replace(before, value=value, every=-(-before.every // 2))
    return dataclasses.replace(method, weight=rule)
