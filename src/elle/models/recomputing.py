"""memory=low: the penalty's forward keeps the inputs of the network's blocks; its backward computes the rest anew.

The gradient is the plain one, also through BatchNorm: a block is computed anew from the whole batch of all points, so
its batch statistics are the same, and the running ones move at the first computation only.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from elle.errors import InputError
from elle.models.residual import PostActBlock, PreActBlock, PreActResNet, ResNet

Context = Callable[[], contextlib.AbstractContextManager[None]]
_RANDOM = ("DropPath", "StochasticDepth")
"""Layers of others that draw numbers, by the name of their class."""
SPARED = 0.75
"""With all that the largest block takes, and not three quarters, PreActResNet18 would need 1.29 times FGSM's memory."""


def random_layer(model: nn.Module) -> str | None:
    """The name of a layer that draws numbers in train mode, which it is in, if the network has any."""
    for name, module in model.named_modules():
        drops = (isinstance(module, _DropoutNd) and module.p > 0) or type(module).__name__ in _RANDOM
        if drops and module.training:
            return str(name)
    return None


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The network's blocks, but for some of the last ones.

    A block is a member of a Sequential or the like, with several layers and no such members within.
    """
    if name := random_layer(model):
        raise InputError(f"memory=low computes layers twice, and {name} of this network draws anew each time")
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    members = {child for module in model.modules() if isinstance(module, containers) for child in module.children()}
    whole = {module for module in members if _layers(module) > 1 and not isinstance(module, containers)}
    blocks = [module for module in whole if not any(part in whole for part in _inner(module))]
    if not blocks:
        raise InputError("memory=low computes a network anew block by block, and this one has no blocks; leave it out")
    spared = {block for network in _residual_networks(model) for block in _last_blocks(network)}
    return [block for block in blocks if block not in spared]


def _residual_networks(model: nn.Module) -> list[PreActResNet | ResNet]:
    """Those within it, or itself: what comes before their blocks is known, and what each block computes."""
    return [module for module in model.modules() if isinstance(module, PreActResNet | ResNet)]


def _last_blocks(network: PreActResNet | ResNet) -> list[nn.Module]:
    """The last blocks, as many as take `SPARED` of the memory that the largest takes alone: they are gone by then.

    Resolution falls from stage to stage, so they take little memory, but as much time as others to compute anew.
    """
    blocks = [block for block in network.blocks if isinstance(block, PreActBlock | PostActBlock)]
    kept, area = [], 1.0
    for block in blocks:
        values = 0.0  # of an image: what the convolutions read, and as much again for BatchNorm
        for k in range(1, block.depth + 1):
            conv = getattr(block, f"conv{k}")
            values += conv.in_channels * area
            area /= conv.stride[0] * conv.stride[1]
        kept.append(values)
    together = list(accumulate(reversed(kept)))
    return list(blocks[len(blocks) - bisect_right(together, SPARED * max(kept)) :])


def _layers(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False)))


def _inner(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if part is not module)


@contextlib.contextmanager
def recomputed(
    model: nn.Module, blocks: Collection[nn.Module], around: Context = contextlib.nullcontext
) -> Iterator[None]:
    """Within it, a forward of these blocks of the model keeps their inputs only.

    `around` is what the caller has the forward in, other than autocast: a backward is outside of it and enters it anew.
    """
    if blocks:
        # Of a half-precision copy made before the forward, the gradient would be held until the backward's very end.
        torch.clear_autocast_cache()
    first = {network.blocks[0]: network for network in _residual_networks(model)}
    with contextlib.ExitStack() as stack:
        for block in blocks:
            whole = block.forward
            if isinstance(block, PreActBlock | PostActBlock):
                whole = partial(_by_layers, block, whole, around)
            norms = _batch_norms(block)
            if block in first:
                # The stem's values are as many as a block's: kept are the images, and the block begins with the stem.
                network, stem = first[block], first[block].stem
                if isinstance(network, ResNet):
                    own = _batch_norms(network.bn1)
                    norms, stem = norms + own, _keeping_inputs(own, stem, around)
                whole = partial(_one_after_the_other, stem, whole)
                stack.enter_context(_instead(network, "stem", _as_it_is))
            stack.enter_context(_instead(block, "forward", _keeping_inputs(norms, whole, around)))
        yield


def _by_layers(
    block: PreActBlock | PostActBlock, forward: Callable[[Tensor], Tensor], around: Context, x: Tensor
) -> Tensor:
    """A block of which each layer keeps its input only: of one being computed anew, not all is there together."""
    with _instead(block, "layer", _keeping_inputs(_batch_norms(block), block.layer, around)):
        return forward(x)


def _one_after_the_other(stem: Callable[[Tensor], Tensor], block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(stem(x))


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [part for part in module.modules() if isinstance(part, _BatchNorm)]


def _keeping_inputs(norms: list[_BatchNorm], function: Callable[..., Any], around: Context) -> Callable[..., Any]:
    """This function, by way of these BatchNorms, computed anew from its inputs in the backward."""
    # Nothing draws random numbers here, and a CUDA graph cannot capture a change of their state.
    return partial(
        checkpoint,
        function,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (contextlib.nullcontext(), _again(norms, around)),
    )


@contextlib.contextmanager
def _instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within it, the module's method `name` is this function."""
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)  # its class's again


@contextlib.contextmanager
def _again(layers: list[_BatchNorm], around: Context) -> Iterator[None]:
    """BatchNorm in train mode, by the statistics of the batch, without moving the running ones: momentum 0."""
    kept = [(layer.momentum, layer.num_batches_tracked) for layer in layers]
    for layer in layers:
        layer.momentum, layer.num_batches_tracked = 0.0, None
    try:
        with around():
            yield
    finally:
        for layer, (momentum, count) in zip(layers, kept, strict=True):
            layer.momentum, layer.num_batches_tracked = momentum, count
