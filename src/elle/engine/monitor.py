"""Numbers in, verdict out: has a run collapsed?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

# Single-step accuracy this far above multi-step accuracy: a network that merely forgets loses both.
_GAP = 0.3


def collapse_epoch(single_step: Sequence[float], multi_step: Sequence[float]) -> int | None:
    """The index at which accuracy under the multi-step attack fell for good, or None.

    Collapsed is: the median of the last three multi-step accuracies (one bad epoch is noise) below half of the best
    such median so far, while accuracy under the single-step training attack is far above it.
    """
    smooth = [median(multi_step[max(0, k - 2) : k + 1]) for k in range(len(multi_step))]
    collapsed = [
        level < 0.5 * max(smooth[: k + 1]) and single > level + _GAP
        for k, (single, level) in enumerate(zip(single_step, smooth, strict=True))
    ]
    if not any(collapsed[-1:]):
        return None
    first = max((k + 1 for k, bad in enumerate(collapsed) if not bad), default=0)
    # The median needs two low epochs; the fall itself was the first of them.
    return first - 1 if multi_step[first - 1] < 0.5 * max(smooth[:first]) else first
