"""Work that must not make the host wait for the device."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Within it whatever waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
