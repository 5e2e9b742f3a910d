"""A network as an attack passes through it: in which mode, without the other ranks, and with gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

Model = Callable[[Tensor], Tensor]
AnyModel = TypeVar("AnyModel", bound=Model)


def unwrapped(model: AnyModel) -> AnyModel:
    """The network in DistributedDataParallel: what an attack passes through it is no business of the other ranks.

    The wrapper would take an attack's backward for the step's, and wait for ranks that may not be attacking.
    """
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def parallel_parts(model: Model, **settings: bool) -> Iterator[None]:
    """Every DistributedDataParallel inside the network with these attributes, which are put back afterwards.

    It may be inside of torch.compile or of another module, or be called by a plain function.
    """
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    seen: set[nn.Module] = set()
    kept: list[tuple[DistributedDataParallel, dict[str, bool]]] = []

    def find(called: nn.Module, *_: object) -> None:
        if torch.compiler.is_compiling():  # what is compiled has been looked into when it was called
            return
        for part in () if called in seen else called.modules():
            if isinstance(part, DistributedDataParallel) and part not in seen:
                kept.append((part, {name: getattr(part, name) for name in settings}))
                part.__dict__.update(settings)
            seen.add(part)

    # What a function calls is known when it does.
    calls = None if isinstance(model, nn.Module) else register_module_forward_pre_hook(find)
    try:
        if isinstance(model, nn.Module):
            find(model)
        yield
    finally:
        if calls is not None:
            calls.remove()
        for wrapper, before in kept:
            wrapper.__dict__.update(before)


def apart_from_ranks(model: Model) -> contextlib.AbstractContextManager[None]:
    """Passes that are no business of the other ranks, which may not make them, and whose backward is not the step's.

    With static_graph the first backward at all would be taken for a step's: it would wait for the other ranks, and the
    gradients of the step itself would never be averaged.
    """
    return parallel_parts(
        model,
        require_forward_param_sync=False,
        require_backward_grad_sync=False,
        find_unused_parameters=False,
        static_graph=False,
    )


def differentiable() -> contextlib.AbstractContextManager[object]:
    """Outside of the caller's inference mode, in which there is no gradient to attack with."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


@contextlib.contextmanager
def in_eval_mode(model: Model) -> Iterator[None]:
    """Every module of the network in eval mode, and each back in its own mode afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            module.training = training


def begun(value: Tensor, slope: Tensor | None) -> Tensor:
    """A scalar, not to be read, whose backward begins at `value` with `slope`, of the same shape; None: `value` itself.

    As `value.backward(slope)`, but that has torch import sympy to compare the shapes: half a second of the first step,
    and above two seconds where no compiled modules are kept.
    """
    if slope is None:
        return value
    start: Tensor = _Begun.apply(value, slope)  # type: ignore[no-untyped-call]
    return start


class _Begun(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, slope: Tensor) -> Tensor:
        ctx.slope = slope
        return value.new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.slope, None
