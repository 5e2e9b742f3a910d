"""Axes of a chart: ranges that fit the values, and ticks people would choose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A range, its ticks with their labels, and the power of ten taken out of the labels."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    factor: str = ""
    log: bool = False

    def place(self, value: float) -> float:
        """Where `value` lies along the axis, as a fraction of its length."""
        if self.log:
            return math.log10(value / self.low) / math.log10(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def titled(self, label: str) -> str:
        """The axis's name, with the power of ten that its labels leave out."""
        return f"{label} ({self.factor})" if self.factor else label


def linear_axis(values: Sequence[float], *, tight: bool = False, percent: bool = False, whole: bool = False) -> Axis:
    """Ticks at multiples of 1, 2, 2.5 or 5, of integers if `whole`; the ends are ticks unless `tight`."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if percent:
        low, high = min(low, 0.0), max(high, 0.05)
    elif not tight and 0 < low <= high / 2:
        low = 0.0
    if not tight and low == high == 0:
        high = 1.0  # a weight that was never on is not drawn as one that could be negative
    size = max(abs(low), abs(high))
    if high - low <= 1e-6 * size or high == low:
        pad = max(0.5, 1e-6 * size) if whole else (0.1 * size or 1.0)
        low, high = low - pad, high + pad
    step = _nice((high - low) / 5)
    if whole:
        step = max(math.floor(step), 1.0)  # 2.5 epochs are none
    if not tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = tuple(min(max(i * step, low), high) + 0.0 for i in range(first, last + 1))
    if percent:
        shape = f".{_digits(100 * step)}f" if step < 10 else ".3g"
        return Axis(low, high, ticks, tuple(f"{100 * tick:{shape}}%" for tick in ticks))
    size = max(abs(low), abs(high))
    power = 0 if 1e-3 <= size < 1e5 else math.floor(math.log10(size))
    power -= power % 3 if power > 0 else 0  # thousands and millions, as they are said
    digits = _digits(step / 10.0**power)
    texts = (f"{tick / 10.0**power:.{digits}f}".replace("-", "\u2212") for tick in ticks)
    return Axis(low, high, ticks, tuple(texts), f"\u00d7{_power(power)}" if power else "")


def log_axis(values: Sequence[float], percent: bool = False) -> Axis:
    """Ticks at powers of ten, or at 1, 2 and 5 times those where there are few; values are positive."""
    low, high = (min(values), max(values)) if values else (0.1, 1.0)
    margin = max((high / low) ** 0.04, math.sqrt(10 * low / high))  # at least one power of ten is shown
    low, high = low / margin, high * margin
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = [power for power in powers if low <= 10.0**power <= high]
    if len(decades) >= 3:
        stride = math.ceil(len(decades) / 6)
        fine = [(1, power) for power in decades if power % stride == 0]
    else:
        fine = [(m, power) for power in powers for m in (1, 2, 5) if low <= m * 10.0**power <= high]
    ticks = [m * 10.0**power for m, power in fine]
    if ticks[0] >= 1e-3 and ticks[-1] < 1e5:
        labels = [f"{tick:g}" for tick in ticks]
    else:
        labels = [_power(power) if m == 1 else f"{m}\u00b7{_power(power)}" for m, power in fine]
    if percent:
        labels = [f"{100 * tick:.3g}%" for tick in ticks]
    return Axis(low, high, tuple(ticks), tuple(labels), log=True)


def _nice(raw: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is not below `raw`."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= raw * (1 - 1e-9)), 10 * power)


def _digits(step: float) -> int:
    """How many decimals write `step` exactly."""
    return next((d for d in range(12) if abs(round(step, d) - step) < 1e-6 * step), 12)


def _power(power: int) -> str:
    superscripts = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
    return "10" + str(power).translate(superscripts)
