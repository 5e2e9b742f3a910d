"""What a run needs of the machine: device, precision, seed, CUDA graph, and a way to be stopped gently."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Literal

import torch
from torch import Tensor

from elle.errors import InputError

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
AUTOCAST: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` as a device that is really there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device={name} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device={name}: this machine has {torch.cuda.device_count()} CUDA devices that torch can use")
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device={name} is not supported; use auto, cpu, cuda or cuda:N")
    return device


def pick_precision(name: str, device: torch.device) -> Precision:
    """`auto` is fp16 on a GPU and fp32 on a CPU; a TF32 that the device lacks is refused."""
    if name == "auto":
        return "fp16" if device.type == "cuda" else "fp32"
    if name == "tf32" and device.type != "cuda":
        raise InputError("precision=tf32 needs an NVIDIA GPU; use fp32 on a CPU")
    return name  # type: ignore[return-value]  # Config admits these words only


def prepare_device(device: torch.device, precision: Precision) -> None:
    """Process-wide settings: TF32 unless exact float32 is asked for, and cuDNN's choice of kernels by trial."""
    if device.type != "cuda":
        return
    torch.cuda.set_device(device.index or 0)
    torch.backends.cuda.matmul.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.allow_tf32 = precision != "fp32"
    torch.backends.cudnn.benchmark = True


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """The mixed-precision context of a training step."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


class GraphedStep:
    """A step captured in one CUDA graph after a few real, eager steps; a replay costs the host microseconds.

    The step reads its batch from a fixed index tensor and keeps all its state in tensors, so replaying it is
    training. Random numbers advance between replays: torch registers the device's generator with the graph.
    """

    WARM_UP = 3

    def __init__(self, step: Callable[[Tensor], None], batch: int, device: torch.device) -> None:
        self.step = step
        self.index = torch.zeros(batch, dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.eager_steps = 0

    def __call__(self, index: Tensor) -> None:
        self.index.copy_(index)
        if self.graph is not None:
            self.graph.replay()
            return
        # Capture wants a stream that is not the default one, and the same allocations to have been made on it.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.step(self.index)
        torch.cuda.current_stream().wait_stream(self.stream)
        self.eager_steps += 1
        if self.eager_steps == self.WARM_UP:
            graph = torch.cuda.CUDAGraph()
            # Other threads may speak to the device meanwhile: the one that watches over the ranks' messages does.
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self.step(self.index)
            self.graph = graph


@contextlib.contextmanager
def stop_signals(insistent: bool = True) -> Iterator[Callable[[], str | None]]:
    """SIGINT and SIGTERM are remembered instead of acted on; the function returns the name of the first one.

    A second SIGINT interrupts at once, for a user who cannot wait for the step to end; not so where the signal may
    come twice by itself, from the terminal and from the launcher.
    """
    received: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if insistent and received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread may install handlers
        return
    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
