"""A sweep's runs as tasks of a Ray cluster; what they train comes back to one folder as they go.

Each task trains in a folder of its own node and sends its run directory back with every few new checkpoints, so a
run whose node is lost continues elsewhere from what came back. Nodes share no disk; each has elle installed.
"""

from __future__ import annotations

import logging
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elle.config import parse_config
from elle.errors import InputError, first_line
from elle.experiments.parcel import newest_checkpoint, pack, unpack
from elle.experiments.sweep import Item
from elle.experiments.training import outcome, start_training

SNAPSHOT_SECONDS = 60.0
"""At most this much training, and the epoch under way, is made again when a node is lost."""
UNLIMITED = 1_000_000


def train_remotely(name: str, values: dict[str, Any], parcel: bytes, every: float) -> Iterator[dict[str, Any]]:
    """On a node: first says where it is, then sends the run directory as it grows, last how the run ended."""
    yield {"node": socket.gethostname()}
    config = parse_config(values)
    with tempfile.TemporaryDirectory(prefix="elle-") as scratch:
        path = Path(scratch) / name
        path.mkdir()
        unpack(parcel, path)
        process = start_training(config, path, {})  # Ray has set CUDA_VISIBLE_DEVICES
        try:
            sent, sent_at = newest_checkpoint(path), time.monotonic()
            while process.poll() is None:
                time.sleep(0.1)
                newest = newest_checkpoint(path)
                if newest != sent and time.monotonic() - sent_at >= every:
                    yield {"parcel": pack(path)}
                    sent, sent_at = newest, time.monotonic()
            yield {"parcel": pack(path), "reason": outcome(path, process.returncode), "ended": True}
        finally:
            if process.poll() is None:  # what the run has written cannot be packed or sent
                process.terminate()
                process.wait()


def _reach(address: str) -> None:
    """Try HOST:PORT for a few seconds: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=5).close()


class RayExecutor:
    """Submits every run, with the resources it asks for; one whose node is lost is submitted again."""

    def __init__(
        self, address: str, *, cpus: float, gpus: float | None, retries: int, slots: int | None = None,
        every: float = SNAPSHOT_SECONDS,
    ) -> None:  # fmt: skip
        try:
            import ray
        except ImportError:
            raise InputError("--on ray needs Ray: pip install 'elle-at[ray]'") from None
        self.ray: Any = ray
        try:
            _reach(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
        except (OSError, ValueError, RuntimeError) as problem:
            first = first_line(problem).rstrip(".")
            raise InputError(f"no Ray cluster at {address} ({first}); start one with `ray start --head`") from None
        if gpus is None:
            gpus = 1.0 if self.ray.cluster_resources().get("GPU") else 0.0
        self._tell_of_want({"CPU": cpus, "GPU": gpus})
        self.slots, self.retries, self.every = slots or UNLIMITED, retries, every
        # We resubmit ourselves, with what has come back: Ray's own retry would begin at the first step.
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0, "num_returns": "streaming"}
        self.task: Any = self.ray.remote(**options)(train_remotely)
        self.running: dict[Any, Item] = {}
        self.lost: dict[str, int] = {}

    def _tell_of_want(self, needed: dict[str, float]) -> None:
        """Say that no node has what a run asks for; a cluster that grows may still get one."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(kind, 0) >= count for kind, count in needed.items()) for node in nodes):
            asked = ", ".join(f"{count:g} {kind}" for kind, count in needed.items())
            print(f"elle: no node of the cluster has what a run asks for ({asked}); the runs wait", file=sys.stderr)

    def start(self, item: Item) -> None:
        item.path.mkdir(parents=True, exist_ok=True)
        values = item.config.model_copy(update={"out": None}).model_dump()
        self.running[self.task.remote(item.name, values, pack(item.path), self.every)] = item

    def ended(self) -> list[tuple[Item, str | None]]:
        if not self.running:
            return []
        ready, _ = self.ray.wait(list(self.running), num_returns=len(self.running), timeout=0.1, fetch_local=False)
        ends: list[tuple[Item, str | None]] = []
        for stream in ready:
            item = self.running[stream]
            end = self._next(stream, item)
            if end is not None:
                del self.running[stream]
                ends += end
        return ends

    def _next(self, stream: Any, item: Item) -> list[tuple[Item, str | None]] | None:
        """Take what a task has sent: None while it goes on; nothing where it was lost and is submitted again."""
        from ray.exceptions import RayError, RayTaskError

        try:
            message = self.ray.get(next(stream))
        except RayTaskError as problem:
            # Where a node has no elle, the traceback of the import follows Ray's own words: what is missing comes last.
            *_, last = [type(problem.cause).__name__, *str(problem.cause).strip().splitlines()]
            return [(item, f"on its node: {last}")]
        except (RayError, StopIteration) as problem:
            return self._again(item, type(problem).__name__)
        item.state = "running"
        if "parcel" in message:
            unpack(message["parcel"], item.path)
        return [(item, message["reason"])] if "ended" in message else None

    def _again(self, item: Item, problem: str) -> list[tuple[Item, str | None]]:
        self.lost[item.name] = self.lost.get(item.name, 0) + 1
        if self.lost[item.name] > self.retries:
            return [(item, f"lost its node {self.lost[item.name]} times ({problem})")]
        item.state = "waiting"
        self.start(item)
        return []

    def stop(self) -> None:
        """Leave the cluster, which ends our tasks and with them their runs; what has come back stays."""
        self.ray.shutdown()
