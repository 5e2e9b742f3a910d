"""How a network is held while it is evaluated: eval mode, a random stream of its own, exact float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from elle.core.attacks.network import apart_from_ranks, differentiable, in_eval_mode
from elle.models.batch_norm import fusing


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, seed: int, device: torch.device) -> Iterator[None]:
    """Eval mode and a random stream of its own; both are put back, so that evaluating never changes training."""
    cuda = [device] if device.type == "cuda" else []
    with differentiable(), torch.random.fork_rng(devices=cuda), repeatable(model):
        torch.manual_seed(seed)
        # What counts is torch's own BatchNorm; a search may ask for the fused one.
        with fusing(model, False), apart_from_ranks(model):
            yield


@contextlib.contextmanager
def repeatable(model: nn.Module) -> Iterator[None]:
    """Eval mode and the same kernels every time; both are put back."""
    cudnn = torch.backends.cudnn
    kept = cudnn.benchmark, cudnn.deterministic
    # Kernels chosen by trial differ from one process to the next: what is resumed would not be what was begun.
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        with in_eval_mode(model):
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic = kept


@contextlib.contextmanager
def exact_float32(device: torch.device) -> Iterator[None]:
    """float32 with full mantissas: no autocast and no TF32."""
    with tf32(False), torch.autocast(device.type, enabled=False):
        yield


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether float32 products may be rounded to TF32; put back afterwards."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device whose streams a CUDA graph is captured on."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def is_wrong(logits: Tensor, y: Tensor) -> Tensor:
    """Which predictions [B] are not the label."""
    # argmax takes NaN for the largest: a network that diverged would pass for one that always answers class 0.
    return (logits.argmax(1) != y) | logits.isnan().any(1)


def in_batches(rows: Tensor, batch: int) -> Sequence[Tensor]:
    """The rows, so many at a time; never an empty batch, which many networks cannot answer: not x.view(0, -1)."""
    return torch.split(rows, batch) if len(rows) else ()


def are_probabilities(logits: Tensor) -> Tensor:
    """Which rows [B] are a softmax's already."""
    return (logits >= 0).all(1) & ((logits.sum(1) - 1).abs() < 1e-4)


def device_of(model: nn.Module, otherwise: torch.device) -> torch.device:
    """Where the network's parameters or buffers are."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return otherwise
