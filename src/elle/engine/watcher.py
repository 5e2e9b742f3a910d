"""How a run reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elle.config import Config
    from elle.engine.monitor import Kind, Reading, Verdict
    from elle.engine.records import Record


@dataclass
class Watcher:
    """Functions that a run calls to report its progress; those of the default watcher do nothing."""

    started: Callable[[Config, int, int], None] = lambda config, steps, done: None
    stepped: Callable[[int], None] = lambda step: None
    recorded: Callable[[Record], None] = lambda record: None
    said: Callable[[str], None] = lambda text: None
    judged: Callable[[Verdict], None] = lambda verdict: None
    looked: Callable[[Reading, Kind | None], None] = lambda reading, condition: None
