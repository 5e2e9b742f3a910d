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
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from elle.errors import InputError
from elle.models.batch_norm import called_plainly, replacing_layers
from elle.models.residual import PostActBlock, PreActBlock, PreActResNet, ResNet

Context = Callable[[], contextlib.AbstractContextManager[None]]
_RANDOM = ("DropPath", "StochasticDepth")
"""Layers of others that draw numbers, by the name of their class."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
SPARED = 0.75
"""With all that the largest block takes, and not three quarters, PreActResNet18 would need 1.29 times FGSM's memory."""


_steady: WeakSet[nn.Module] = WeakSet()
"""Networks whose blocks have been seen, in train mode, to draw no numbers and to keep no state."""


def random_layer(model: nn.Module) -> str | None:
    """The name of a layer that draws numbers in train mode, which it is in, if the network has any."""
    for name, module in model.named_modules():
        drops = (isinstance(module, _DropoutNd) and module.p > 0) or type(module).__name__ in _RANDOM
        if drops and module.training:
            return str(name)
    return None


def note_on_random_layers(model: nn.Module, error: str) -> str | None:
    """What to tell of a network in which `error`, a difference between points, is one of draws; None for others."""
    if name := random_layer(model):
        return (
            f"layer {name} of this network draws anew for each point, and {error} measures that more than the loss; "
            f"train a network without such a layer"
        )
    return None


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The network's blocks, but for some of the last ones.

    A block is a member of a Sequential or the like, with several layers of which no more than half are in blocks within
    it, such as squeeze and excitation. A Sequential of bare layers is one too, unless it is part of another.
    """
    if name := random_layer(model):
        raise InputError(f"memory=low computes layers twice, and {name} of this network draws anew each time")
    if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise InputError("memory=low cannot compute parts of TorchScript anew, which this network has; leave it out")
    members = {child for module in model.modules() if isinstance(module, _CONTAINERS) for child in module.children()}
    blocks = _blocks(model, members - {model}, most=_layers(model) // 2)
    if not blocks:
        raise InputError(
            "memory=low computes a network anew block by block, and this one has no blocks (members of an "
            "nn.Sequential or nn.ModuleList, with several layers each); leave it out"
        )
    spared = {block for network in _residual_networks(model) for block in _last_blocks(network)}
    return [block for block in blocks if block not in spared]


def _blocks(module: nn.Module, members: set[nn.Module], most: int) -> list[nn.Module]:
    """Those of the module, or itself; with more layers than `most` of a network, it is not taken in place of others."""
    within = list(dict.fromkeys(block for child in module.children() for block in _blocks(child, members, most)))
    if module not in members or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return within
    layers = _layers(module)
    if isinstance(module, nn.Sequential):  # of blocks it is a stage, of bare layers a block
        whole = not within and layers > 1
    else:
        inner = [block for block in within if not isinstance(block, nn.Sequential)]
        whole = layers <= most and 2 * sum(map(_layers, inner)) <= layers if inner else layers > 1
    return [module] if whole else within


def _residual_networks(model: nn.Module) -> list[PreActResNet | ResNet]:
    """Those within it, or itself: what comes before their blocks is known, and what each block computes."""
    return [module for module in model.modules() if isinstance(module, PreActResNet | ResNet)]


def _last_blocks(network: PreActResNet | ResNet) -> list[nn.Module]:
    """The last blocks, as many as take `SPARED` of the memory that the largest takes alone: they are gone by then.

    Resolution falls from stage to stage, so they take little memory, but as much time as others to compute anew.
    """
    blocks, kept, area = list(network.blocks), [], 1.0
    for block in blocks:
        values = 0.0  # of an image: what the convolutions read, and as much again for BatchNorm
        for k in range(1, block.depth + 1) if isinstance(block, PreActBlock | PostActBlock) else ():
            conv = getattr(block, f"conv{k}")
            if isinstance(conv, nn.Conv2d):
                values += conv.in_channels * area
                area /= conv.stride[0] * conv.stride[1]
        if not values:  # others have been put in its place, and what they keep is not known
            return []
        kept.append(values)
    together = list(accumulate(reversed(kept)))
    return blocks[len(blocks) - bisect_right(together, SPARED * max(kept, default=0)) :]


def _layers(module: nn.Module) -> int:
    return sum(1 for part in module.modules() if any(True for _ in part.parameters(recurse=False)))


@contextlib.contextmanager
def recomputed(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[None]:
    """Within it, a forward of these blocks of the model keeps their inputs only."""
    if not blocks:
        yield
        return
    # Of a half-precision copy made before the forward, the gradient would be held until the backward's very end.
    torch.clear_autocast_cache()
    known = model in _steady or not torch.is_grad_enabled()
    before = {} if known else _state(model, blocks)
    inputs: list[_Input] = []
    first = {network.blocks[0]: network for network in _residual_networks(model) if _begins_with_stem(network)}
    with contextlib.ExitStack() as stack:
        for block in blocks:
            whole = block.forward
            if isinstance(block, PreActBlock | PostActBlock):
                whole = partial(_by_layers, block, whole)
            norms = _norms(block)
            if block in first:
                # The stem's values are as many as a block's: kept are the images, and the block begins with the stem.
                network, stem = first[block], first[block].stem
                inside = {norm for one in network.blocks for norm in _norms(one)}
                own = [norm for norm in _norms(network) if norm not in inside]
                if isinstance(network, ResNet):
                    stem = _keeping_inputs(own, stem)
                whole, norms = partial(_one_after_the_other, stem, whole), norms + own
                stack.enter_context(_instead(network, "stem", _as_it_is))
            forward = _keeping_inputs(norms, whole, contextlib.nullcontext if known else _NoDraws)
            if not known:
                forward = partial(_noting_inputs, inputs, block, forward)
            stack.enter_context(_instead(block, "forward", forward))
        yield
    if not known:
        _check_inputs(model, inputs)
        _check_state(model, blocks, before)


_Input = tuple[nn.Module, Tensor, int]
"""A block, a tensor that it was given, and the tensor's version then"""


def _noting_inputs(
    inputs: list[_Input], block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    inputs += [(block, one, one._version) for one in tree_leaves((args, named)) if isinstance(one, Tensor)]
    return forward(*args, **named)


def _check_inputs(model: nn.Module, inputs: list[_Input]) -> None:
    """Refuse an input of a block that was changed since: the second forward would begin with another."""
    for block, tensor, version in inputs:
        if tensor._version != version:
            name = next(name for name, module in model.named_modules() if module is block)
            raise InputError(
                f"memory=low computes blocks anew from their inputs, and that of {name} is changed in place, by its "
                f"first layer (inplace=True) or behind it (x += ...); change it there, or leave memory=low out"
            )


def _check_state(model: nn.Module, blocks: Collection[nn.Module], before: dict[str, tuple[int, int]]) -> None:
    """Refuse blocks that have changed in a forward: the second one would be another."""
    for name, version in _state(model, blocks).items():
        if before.get(name) != version:
            raise InputError(f"memory=low computes layers twice, and {name} of this network changes each time")
    if all(block.training for block in blocks):
        _steady.add(model)


def _state(model: nn.Module, blocks: Collection[nn.Module]) -> dict[str, tuple[int, int]]:
    """The versions of these blocks' buffers, but for statistics, which move at the first computation only."""
    inside = {part for block in blocks for part in block.modules()}
    return {
        f"{name}.{key}": (id(buffer), buffer._version)
        for name, module in model.named_modules()
        if module in inside
        for key, buffer in module._buffers.items()
        if buffer is not None and not (isinstance(module, _NormBase) and key in _STATISTICS)
    }


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, an operation that draws numbers is an error: functions such as F.dropout are no layers to be found."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            names = [argument.name for argument in function._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            # Attention is said to draw also where its dropout is 0.
            if "dropout_p" not in names or given.get("dropout_p"):
                name = str(function).removeprefix("aten.")
                raise InputError(f"memory=low computes layers twice, and {name} of this network draws anew each time")
        return function(*args, **(kwargs or {}))


def _begins_with_stem(network: PreActResNet | ResNet) -> bool:
    """Whether the first block may compute the stem, too: nobody else reads it, or looks at what the block is given."""
    first = next(iter(network.blocks), network)
    around = [part for part in network.modules() if part is not network and first in part.modules()]
    plain = type(network).forward in (PreActResNet.forward, ResNet.forward) and "forward" not in vars(network)
    return plain and bool(around) and all(map(called_plainly, around))


def _by_layers(block: PreActBlock | PostActBlock, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A block of which each layer keeps its input only: of one being computed anew, not all is there together."""
    with _instead(block, "layer", _keeping_inputs(_norms(block), block.layer)):
        return forward(x)


def _one_after_the_other(stem: Callable[[Tensor], Tensor], block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return block(stem(x))


def _as_it_is(x: Any) -> Any:
    return x


def _norms(module: nn.Module) -> list[_NormBase]:
    """The layers with running statistics: BatchNorm, and InstanceNorm that is asked for them."""
    return [part for part in module.modules() if isinstance(part, _NormBase)]


def _keeping_inputs(
    norms: list[_NormBase], function: Callable[..., Any], forward: Context = contextlib.nullcontext
) -> Callable[..., Any]:
    """This function, by way of these layers, computed anew from its inputs in the backward; `forward` is not."""
    # Nothing draws random numbers here, and a CUDA graph cannot capture a change of their state.
    keep = partial(
        checkpoint,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (forward(), _Again(norms)),
    )

    def kept(*args: Any, **named: Any) -> Any:
        if any(isinstance(one, list | tuple | dict) for one in (*args, *named.values())):
            return keep(_from_inputs_as_they_were(function, args, named))
        return keep(function, *args, **named)

    return kept


def _from_inputs_as_they_were(function: Callable[..., Any], args: Any, named: Any) -> Callable[[], Any]:
    """The function of these inputs: of the caller's own at first, then of lists as long as they were; his may grow."""
    own, kept = [(args, named)], tree_map(_as_it_is, (args, named))

    def compute() -> Any:
        given, by_name = own.pop() if own else tree_map(_as_it_is, kept)
        return function(*given, **by_name)

    return compute


@contextlib.contextmanager
def _instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Within it, the module's method `name` is this function."""
    own = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)  # its class's again
        if own is not None:
            setattr(module, name, own)


class _Again:
    """Layers as they were in the forward, without moving the running statistics: momentum 0.

    A backward may be outside of what replaced layers then, as `twice_differentiable` does, and enters it anew. A graph
    that is kept is computed anew by each of its backwards, within the same one of these.
    """

    def __init__(self, layers: list[_NormBase]) -> None:
        self.layers, self.modes = layers, [layer.training for layer in layers]
        self.replacing = [one for one in replacing_layers() if not isinstance(one, DeviceContext)]  # checkpoint's own

    def __enter__(self) -> None:
        self.entered, active = contextlib.ExitStack(), replacing_layers()
        for one in self.replacing:
            if one not in active:
                self.entered.enter_context(one)
        self.kept = [(layer.momentum, layer.num_batches_tracked, layer.training) for layer in self.layers]
        for layer, mode in zip(self.layers, self.modes, strict=True):
            layer.momentum, layer.num_batches_tracked, layer.training = 0.0, None, mode

    def __exit__(self, *raised: Any) -> None:
        for layer, before in zip(self.layers, self.kept, strict=True):
            layer.momentum, layer.num_batches_tracked, layer.training = before
        self.entered.close()
