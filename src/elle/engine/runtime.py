"""What a run needs of the machine: device, precision, seed, CUDA graph, and a way to be stopped gently."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor

from elle.core.precision import Precision
from elle.data.cores import usable_cores
from elle.errors import InputError, stopped_by
from elle.evaluation.capture import CannotCapture, Captured
from elle.signals import handling


def _stops() -> tuple[signal.Signals, ...]:
    """The signals that ask work to end: SIGINT, SIGTERM, and SIGHUP, unless nohup has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pick_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` as a device that is really there; of a CPU, the cores that are ours."""
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
    if device.type == "cpu" and torch.get_num_threads() > usable_cores():
        torch.set_num_threads(usable_cores())  # torch does not know of a limit on its time
    return device


def hardware_name(device: torch.device) -> str:
    """The name of the device, to write beside a time: that of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def measured_with(device: str, torch_version: str) -> str:
    """The end of a result file's name: nvidia-h200-torch2.11.0."""
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-torch{torch_version.split('+')[0]}"


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


class GraphedStep:
    """A training step captured in one CUDA graph; it reads its batch from a fixed index tensor."""

    WARM_UP = 3

    def __init__(self, step: Callable[[Tensor], None], batch: int, device: torch.device) -> None:
        self.index = index = torch.zeros(batch, dtype=torch.int64, device=device)
        # Not by way of self: in a circle the graph, and all its memory, would outlive the step.
        self.captured = Captured(lambda: step(index), device, self.WARM_UP)

    def __call__(self, index: Tensor) -> None:
        self.index.copy_(index)
        try:
            self.captured()
        except CannotCapture:
            raise InputError(
                "the network waits for the GPU within a step (its forward reads a value off a tensor, as float(x) or "
                "an if does), which a CUDA graph cannot hold; train with compile=off"
            ) from None


@contextlib.contextmanager
def stop_signals(insistent: bool = True) -> Iterator[Callable[[], str | None]]:
    """Within it, signals to stop are only remembered; the function it yields returns the name of the first.

    A second SIGINT interrupts at once, for a user who cannot wait for the step to end; not so where the signal may
    come twice by itself, from the terminal and from the launcher.
    """
    received: list[str] = []

    def remember(number: int, frame: FrameType | None) -> None:
        if insistent and received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    with handling(remember, *_stops()):
        yield lambda: received[0] if received else None


class _Stopped(BaseException):
    """Raised by a signal; a BaseException, so that no `except Exception` in a user's network swallows it."""


@contextlib.contextmanager
def stopped_at_once(saved: Callable[[], str]) -> Iterator[None]:
    """Within it, a signal to stop ends the work at once, in one line; `saved` says what is kept and how to go on."""

    stops = _stops()

    def stop(number: int, frame: FrameType | None) -> None:
        for one in stops:
            signal.signal(one, signal.SIG_IGN)  # it may come twice, from the terminal and from the launcher
        raise _Stopped(signal.Signals(number).name)

    with handling(stop, *stops):
        try:
            yield
        except _Stopped as stopped:
            raise stopped_by(str(stopped), saved()) from None
