"""Work on a GPU captured in a CUDA graph: a replay costs the host microseconds, however many kernels it launches."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
_REFUSED = 2
"""The mode "error", as torch tells it."""


class CannotCapture(RuntimeError):
    """The work waits for the device, which no graph can hold."""


class Captured(Generic[Result]):
    """Work captured after a few real, eager runs, on a stream of its own as capture wants; it returns what it found.

    The work keeps all its state in tensors that stay where they are, so replaying it is doing it; what it returns are
    the same tensors each time. Random numbers advance between replays: torch registers the device's generator.

    The last eager run must not wait for the device: an error then is harmless, while one within a capture leaves
    torch's generator and allocator as if the capture went on.
    """

    def __init__(self, work: Callable[[], Result], device: torch.device, eager: int = 3) -> None:
        self.work = work
        self.eager = eager
        """Runs before the capture: libraries are initialised, and the same allocations have been made."""
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> Result:
        if self.eager:
            self.eager -= 1
            return self._eagerly(last=self.eager == 0)
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may speak to the device meanwhile: the one that watches over the ranks' messages does.
            with _no_collection(), torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.work()
            self.graph = graph
        self.graph.replay()
        return self.result

    def _eagerly(self, last: bool) -> Result:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), _waiting_refused() if last else contextlib.nullcontext():
            result = self.work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result


def waiting_is_refused() -> bool:
    """Whether this is a capture, or the last run before one."""
    return torch.cuda.is_available() and (
        torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode() == _REFUSED
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Python's collector keeps still: a graph that it freed would end the capture in progress."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _waiting_refused() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as problem:
        if "synchronizing CUDA operation" in str(problem):
            raise CannotCapture("it waits for the device") from problem
        raise
    finally:
        torch.cuda.set_sync_debug_mode(before)
