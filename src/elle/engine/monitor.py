"""Numbers in, verdict out: has a run collapsed, overfitted, gone constant or diverged?

Collapse (catastrophic overfitting): accuracy under a multi-step attack falls below half of its best and stays there,
while accuracy under the single-step attack of training stays near its own best. A network that never was robust has
collapsed where it answers attacked images better than clean ones, or three in four of them. A run judged while it
trains has collapsed when an epoch's looks show that and none between them shows accuracy back above two thirds of its
best; it has recovered when it is back for an epoch. A run without looks is judged so by its records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any, Literal

Kind = Literal["collapse", "recovery", "robust overfitting", "constant", "divergence"]
Reading = dict[str, Any]
"""One look at the probe images: `step`, the accuracies `clean`, `single` and `multi`, the linearity `error`, `chance`
(1/classes), and of the training steps since the last look the mean `loss` and `accuracy` and the `rate`, or None. A
real one has the `probe_loss` under the multi-step attack too, and the `loss_ratio`: training loss over it."""

# Single-step accuracy this far above multi-step accuracy: a network that merely forgets loses both.
_GAP = 0.3
# A fall begins below half of the best accuracy and ends above this share of it. A network on its way down swings, and
# a few steps of attack on a few images put it now above and now below any single line.
_BACK = 2 / 3
# Single-step accuracy above this share of its best has not fallen; a network whose training stumbles loses it as well.
_KEPT = 0.9
# A best accuracy below this many times chance is no robustness to lose: early training, and a constant classifier.
# On 128 images and 10 classes it is three standard deviations above chance.
ABOVE_CHANCE = 1.8
# With many classes chance is less than what so few images can tell from nothing: 5 % are six of them.
_GRAIN = 0.05
# Below this many times chance accuracy still comes and goes: there a collapse must show in the error as well.
_SETTLED = 3.0
# Collapsed networks have 100 to 10,000 times the error of healthy ones.
_JUMP = 10.0
# Attacked images are answered better than clean ones by this much, three standard deviations on 128 images: the network
# reads the label off the perturbation of its own attack. No robust network does, at whatever radius.
_LEAK = 0.1
# Or it answers as many as this under its own attack and next to none under another: it has learnt that one alone. A
# run on MNIST's digits that became robust later had 0.5 to 0.7 for an epoch.
_LEARNT_ALONE = 0.75
# An early collapse has no usual error to jump from: healthy networks have 1e-6 to 5e-4 while they begin to learn, and
# that one 8e-3 and more, after 2e-3 at first. Only a straight one is a state to go back to before it is robust.
_STRAIGHT, _CURVED = 5e-4, 2e-3
# Healthy networks have errors of 1e-6 and more; a constant one has 0 up to rounding.
_LEAST_ERROR, _NO_ERROR = 1e-6, 1e-9
# Robust overfitting: this share of the best accuracy lost while training accuracy rises by that much.
_LOST, _LEARNT = 0.15, 0.05


@dataclass(frozen=True)
class Verdict:
    """A problem with the training: its kind, the step it was noticed at, the step it began at, and the evidence."""

    kind: Kind
    step: int
    since: int
    evidence: str
    confidence: Literal["high", "medium"]

    def __str__(self) -> str:
        return f"{self.kind} at step {self.step} ({self.confidence} confidence): {self.evidence}"


class Monitor:
    """Judges each new reading in the light of those before; `state_dict` is plain data."""

    def __init__(self, per_epoch: int = 2) -> None:
        self.per_epoch = per_epoch
        self.attacked = True
        """Whether training is on attacked images; where it is not there is no attack to learn, and no collapse."""
        self.readings: list[Reading] = []
        self.verdicts: list[Verdict] = []
        """Every verdict so far, oldest first."""
        self.condition: Kind | None = None
        """The kind of the last verdict that still holds; None for a healthy run."""

    def observe(self, reading: Reading) -> Verdict | None:
        """The verdict that this reading brings about, None where nothing has changed."""
        self.readings.append(reading)
        verdict = self._judge()
        if verdict is not None:
            self.verdicts.append(verdict)
            self.condition = None if verdict.kind == "recovery" else verdict.kind
        return verdict

    @property
    def collapsed_since(self) -> int | None:
        """The step at which the present collapse began to show; None where the run is not collapsed."""
        return self.verdicts[-1].since if self.condition == "collapse" else None

    @property
    def healthy(self) -> bool:
        """Whether the last reading shows a state worth going back to: near the best accuracy, its error as usual."""
        if not self.readings or self.condition in ("collapse", "divergence") or _is_diverged(self.readings[-1]):
            return False
        last = self.readings[-1]
        # A network whose error has begun to grow is already on its way.
        usual = median([reading["error"] for reading in self.readings[-11:-1] if reading["error"]] or [last["error"]])
        robust = last["multi"] >= _SETTLED * _floor(last["chance"]) or last["error"] < _STRAIGHT
        return bool(robust and last["multi"] >= 0.75 * self._best and last["error"] <= 3 * usual)

    @property
    def _best(self) -> float:
        return max(float(reading["multi"]) for reading in self.readings)

    def forget(self, step: int) -> list[Reading]:
        """Drop the readings after `step`, which a rollback has undone, and return them; verdicts stay on record."""
        dropped = [reading for reading in self.readings if reading["step"] > step]
        self.readings = [reading for reading in self.readings if reading["step"] <= step]
        self.condition = None
        return dropped

    def state_dict(self) -> dict[str, Any]:
        return {
            "readings": list(self.readings),
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "condition": self.condition,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = [name for name in self.state_dict() if name not in state]
        if missing:
            raise ValueError(f"the state has no {missing[0]!r}; give what a monitor's state_dict() returned")
        self.readings = list(state["readings"])
        self.verdicts = [Verdict(**verdict) for verdict in state["verdicts"]]
        self.condition = state["condition"]

    def _judge(self) -> Verdict | None:
        if self.condition == "collapse":  # it stands at a look that is not finite too
            return None if any(self._not_back()[-self._epoch :]) else self._recovered(self._epoch)
        if _is_diverged(self.readings[-1]):
            return self._diverged()
        low = self._low()
        if self.condition == "constant":
            # Not at the first error above the line: rounding takes a network that stays constant to either side of it.
            return None if _is_constant(self.readings[-1], _LEAST_ERROR) else self._recovered(1)
        fall = self._fall(low) if self.attacked else []
        if fall and fall[-1] is self.readings[-1] and len(fall) >= self._epoch:
            verdict = self._learnt_the_attack(fall) if self._fooled()[-1] else self._collapsed(fall, low)
            if verdict is not None:
                return verdict
        if self.condition == "divergence" and not any(map(_is_diverged, self.readings[-self._epoch :])):
            return self._recovered(self._epoch)
        if self.condition is None and not low[-1]:
            return self._constant() or self._overfitted()
        return None

    @property
    def _epoch(self) -> int:
        """How many looks make an epoch, at least two: one alone is noise."""
        return max(2, self.per_epoch)

    def _fall(self, low: list[bool]) -> list[Reading]:
        """The collapsed readings since accuracy was last above two thirds of its best; others may lie between them."""
        high = [k for k, is_low in enumerate(low) if not is_low]
        since = high[-1] + 1 if high else 0
        fallen = [a or b for a, b in zip(self._fooled(), self._fallen(), strict=True)]
        return [one for one, is_fallen in zip(self.readings[since:], fallen[since:], strict=True) if is_fallen]

    def _not_back(self) -> list[bool]:
        """For each reading, whether accuracy or error are not yet back at what they were before the present collapse.

        The longer a collapsed network trains the less a few steps of attack find against it; its error stays. One that
        never was robust bent slowly: what was usual then tells nothing.
        """
        floor, since = _floor(self.readings[-1]["chance"]), self.verdicts[-1].since
        least = max(_BACK * self._best, ABOVE_CHANCE * floor)
        earlier = [one for one in self.readings if one["step"] < since]
        was_robust = max((one["multi"] for one in earlier), default=0.0) >= _SETTLED * floor
        before = [one["error"] for one in earlier if was_robust and one["error"]]
        most = max(_JUMP * median(before[-10:]) if before else 0.0, _CURVED)
        return [_is_diverged(one) or one["multi"] < least or one["error"] >= most for one in self.readings]

    def _low(self) -> list[bool]:
        """For each reading, whether accuracy is below two thirds of its best so far: a fall lasts as long as that."""
        multi, chance = [one["multi"] for one in self.readings], self.readings[-1]["chance"]
        below = collapsed_readings(multi, multi, chance, _BACK, kept=0)
        return [a or b for a, b in zip(self._fooled(), below, strict=True)]

    def _usual_error(self, low: list[bool]) -> float:
        """The median of the last ten looks that were not low; the last look's own where there is none."""
        before = [one["error"] for one, is_low in zip(self.readings, low, strict=True) if not is_low and one["error"]]
        return float(median(before[-10:]) if before else max(self.readings[-1]["error"], _NO_ERROR))

    def _fallen(self) -> list[bool]:
        """For each reading, whether multi-step accuracy is below half of its best and single-step accuracy keeps up."""
        multi, single = [one["multi"] for one in self.readings], [_single(one) for one in self.readings]
        chance = self.readings[-1]["chance"]
        if self.readings[-1]["accuracy"] is not None:
            fallen = collapsed_readings(multi, single, chance)
            # Nothing kept of nothing is no single-step accuracy: a network that has not begun to learn.
            return [bad and high > level for bad, high, level in zip(fallen, single, multi, strict=True)]
        # On a few images, in eval mode, single-step accuracy swings: it must only be far above the other.
        fallen = collapsed_readings(multi, single, chance, kept=0.5)
        return [bad and high >= 2 * level for bad, high, level in zip(fallen, single, multi, strict=True)]

    def _fooled(self) -> list[bool]:
        """For each reading, whether the network, never robust until then, has only learnt its own attack."""
        settled = _SETTLED * _floor(self.readings[-1]["chance"])
        bests = accumulate((one["multi"] for one in self.readings), max)
        return [best < settled and _is_fooled(one) for best, one in zip(bests, self.readings, strict=True)]

    def _diverged(self) -> Verdict | None:
        reading = self.readings[-1]
        if self.condition == "divergence":
            return None
        words = "E_lin is not finite"
        if reading["loss"] is not None:
            words += f"; the training loss is {reading['loss']:.3g}"
        return Verdict("divergence", reading["step"], reading["step"], words, "high")

    def _collapsed(self, fall: list[Reading], low: list[bool]) -> Verdict | None:
        reading, best, usual = self.readings[-1], self._best, self._usual_error(low)
        jumped = reading["error"] >= _JUMP * usual
        if best < _SETTLED * _floor(reading["chance"]) and not jumped:
            return None
        single, times = _single(reading), reading["error"] / usual
        words = (
            f"accuracy under the multi-step attack fell from {best:.1%} to {reading['multi']:.1%} "
            f"while it is {single:.1%} under the single-step attack; "
            f"E_lin is {reading['error']:.1e}, {times:.3g} times its usual {usual:.1e}"
        )
        sure = jumped and single - reading["multi"] >= _GAP
        return Verdict("collapse", reading["step"], fall[0]["step"], words, "high" if sure else "medium")

    def _learnt_the_attack(self, fall: list[Reading]) -> Verdict:
        """A collapse before there was any robustness to lose."""
        reading = self.readings[-1]
        single = _single(reading)
        read_off = single >= reading["clean"] + _LEAK
        why = "the network reads the labels off its attack" if read_off else "it has learnt its own attack alone"
        words = (
            f"accuracy is {single:.1%} under the single-step attack but {reading['clean']:.1%} without any and "
            f"{reading['multi']:.1%} under the multi-step attack: {why}; E_lin is {reading['error']:.1e}"
        )
        sure = single - reading["multi"] >= _GAP
        return Verdict("collapse", reading["step"], fall[0]["step"], words, "high" if sure else "medium")

    def _recovered(self, count: int) -> Verdict:
        reading = self.readings[-1]
        words = f"accuracy under the multi-step attack is back at {reading['multi']:.1%}"
        if self.condition == "divergence":
            words = f"E_lin is finite again, at {reading['error']:.1e}"
        if self.condition == "constant":
            words = (
                f"E_lin is {reading['error']:.1e} and accuracy {reading['clean']:.1%}: the answers vary with the image"
            )
        return Verdict("recovery", reading["step"], self.readings[-count]["step"], words, "medium")

    def _constant(self) -> Verdict | None:
        """Chance accuracy and no error for three epochs: at the start of training both are normal."""
        last = self.readings[-3 * self.per_epoch :]
        if len(last) < 3 * self.per_epoch or not all(map(_is_constant, last)):
            return None
        reading = last[-1]
        words = (
            f"E_lin is {reading['error']:.1e} and accuracy {reading['clean']:.1%} (chance is {reading['chance']:.1%}): "
            f"the network answers the same whatever the image"
        )
        return Verdict("constant", reading["step"], last[0]["step"], words, "high")

    def _overfitted(self) -> Verdict | None:
        """A slow decline on the probe after the rate has dropped, while the training images are learnt ever better."""
        span = max(10, 5 * self.per_epoch)
        known = [one for one in self.readings if one["accuracy"] is not None and one["rate"] is not None]
        if len(known) < 2 * span:
            return None
        means = [fmean(one["multi"] for one in known[k : k + span]) for k in range(len(known) - span + 1)]
        top = max(range(len(means) - span), key=means.__getitem__, default=None)
        if top is None or not means[-1] < (1 - _LOST) * means[top] or means[top] < 2 * _floor(known[-1]["chance"]):
            return None
        then, now = known[top : top + span], known[-span:]
        before, after = (fmean(one["accuracy"] for one in part) for part in (then, now))
        dropped = known[-1]["rate"] < 0.5 * max(one["rate"] for one in known)
        if not dropped or after < before + _LEARNT:
            return None
        words = (
            f"accuracy under the multi-step attack sank from {means[top]:.1%} around step {then[-1]['step']} to "
            f"{means[-1]:.1%} while accuracy on the training images rose from {before:.1%} to {after:.1%}"
        )
        return Verdict("robust overfitting", now[-1]["step"], then[-1]["step"], words, "medium")


def collapsed_readings(
    multi: Sequence[float], single: Sequence[float], chance: float, share: float = 0.5, kept: float = _KEPT
) -> list[bool]:
    """For each reading, whether multi-step accuracy is below `share` of its best so far, single-step near its own."""
    least = ABOVE_CHANCE * _floor(chance)
    best_multi = best_single = 0.0
    bad = []
    for level, other in zip(multi, single, strict=True):
        best_multi, best_single = max(best_multi, level), max(best_single, other)
        bad.append(best_multi > least and level < share * best_multi and other >= kept * best_single)
    return bad


def _is_fooled(reading: Reading) -> bool:
    """Whether attacked images are answered better than clean ones, or most of them, but few under more steps."""
    single, nothing = _single(reading), ABOVE_CHANCE * _floor(reading["chance"])
    learnt = single >= min(reading["clean"] + _LEAK, _LEARNT_ALONE)
    leaking = learnt and reading["multi"] < min(nothing, 0.5 * single)
    # In eval mode a network may know nothing for a while, until BatchNorm's statistics fit what it has learnt.
    knows = max(reading["clean"], reading["single"]) >= nothing
    return bool(leaking and knows and (reading["error"] or 0.0) >= _CURVED)


def _floor(chance: float) -> float:
    """The accuracy of a network that knows nothing, as far as a probe can tell."""
    return max(chance, _GRAIN)


def _single(reading: Reading) -> float:
    """Accuracy under the training attack, on many images, where known; otherwise under the probe's single step."""
    return float(reading["single"] if reading["accuracy"] is None else reading["accuracy"])


def _is_diverged(reading: Reading) -> bool:
    return reading["error"] is None


def _is_constant(reading: Reading, below: float = _NO_ERROR) -> bool:
    return bool(reading["clean"] < ABOVE_CHANCE * reading["chance"] and (reading["error"] or 0.0) < below)
