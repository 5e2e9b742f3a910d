"""How many cores there are to use."""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

OWN_GROUPS, LIMITS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Where Linux tells a process the groups it is in, such as a container's, and their limits."""
_FILES = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
"""Where a group's limit is: microseconds of work (or none) in so many of time. By folder, that of version 1 last."""


def usable_cores() -> int:
    """The cores that this process may use: a scheduler or container may have given it some of them only.

    Some give it the time of so many instead: it sees all cores, and is stopped when that time is used up.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min([cores, *_granted()]))


def _granted() -> Iterator[int]:
    """The limits on this process's time, in whole cores: its own group's, and those of the groups around it."""
    groups = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for controllers, name in (group.split(":", 2)[1:] for group in groups):
        for folder in _FILES.keys() & set(controllers.split(",")):
            for place in (PurePosixPath(name), *PurePosixPath(name).parents):
                files = [LIMITS / folder / str(place).strip("/") / file for file in _FILES[folder]]
                if all(file.is_file() for file in files):
                    work, time = " ".join(file.read_text() for file in files).split()
                    if work not in ("max", "-1"):
                        yield int(work) // int(time)
