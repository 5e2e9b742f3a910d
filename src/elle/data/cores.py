"""How many cores there are to use."""

import os


def usable_cores() -> int:
    """The cores that this process may use: on Linux a scheduler or container may have given it some of them only."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
