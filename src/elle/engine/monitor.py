"""Numbers in, verdict out: has a run collapsed?"""

from __future__ import annotations

from collections.abc import Sequence

# Healthy networks stay within about 0.15 in the runs measured; a collapsed one nears 1.
_GAP = 0.3


def collapse_epoch(single_step: Sequence[float], multi_step: Sequence[float]) -> int | None:
    """The first index from which the run stays collapsed to the end, or None.

    Collapsed is: accuracy under the multi-step attack below half of its best so far, while accuracy under the
    single-step training attack is far above it. (A network that merely forgets loses both.)
    """
    collapsed = [
        multi < 0.5 * max(multi_step[: k + 1]) and single > multi + _GAP
        for k, (single, multi) in enumerate(zip(single_step, multi_step, strict=True))
    ]
    if not collapsed or not collapsed[-1]:
        return None
    return len(collapsed) - next((k for k, bad in enumerate(reversed(collapsed)) if not bad), len(collapsed))
