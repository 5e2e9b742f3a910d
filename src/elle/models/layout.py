"""How images and weights lie in memory: channels last, as convolutions on a GPU are fastest, if a network takes that.

One that says x.view(len(x), -1) of what a convolution gives it does not: it wants the channels first.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from elle.core.attacks.network import in_eval_mode


def takes_channels_last(model: nn.Module, x: Tensor) -> bool:
    """Whether the network answers the images x [N, C, H, W] as well where they and its weights are laid out so."""
    devices = [x.device] if x.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), in_eval_mode(model):
        try:
            tried: Any = copy.deepcopy(model)
            tried(x)
            tried = tried.to(memory_format=torch.channels_last)
        except Exception:  # another fault than the layout's, to be told where it shows
            return True
        try:
            tried(x.contiguous(memory_format=torch.channels_last))
        except RuntimeError:
            return False
    return True


def give_channels_first(model: nn.Module) -> RemovableHandle:
    """Lay out whatever images the network is given with the channels first, until the handle is removed."""
    return model.register_forward_pre_hook(_channels_first)


def layout_of(model: nn.Module) -> torch.memory_format:
    """How the network's weights are to lie."""
    first = any(hook is _channels_first for hook in model._forward_pre_hooks.values())
    return torch.contiguous_format if first else torch.channels_last


def _channels_first(model: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = given
    # With one channel both layouts are alike but for a stride, by which torch chooses that of the output: it is set.
    return x.contiguous().flatten().view(x.shape), *others
