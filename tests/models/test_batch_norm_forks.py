"""Where a network forks behind a BatchNorm, the kernels of its backward add up the gradients of both ways."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elle.models import batch_norm
from elle.models.batch_norm import forked_norm_act, fusing, norm_act
from elle.models.recomputing import recomputed
from elle.models.residual import PostActBlock, PreActResNet, ResNet, _stages
from tests.models.test_batch_norm_kernels import (
    TOLERANCE,
    apart_from_the_kink,
    exact,
    interpreted,  # noqa: F401 -- takes effect where it is known
    launches,
    layer,
    pre_activation,
    rows,  # noqa: F401 -- likewise
    values,
)
from tests.networks import relative_distance
from tests.triton_kernels import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS

MODES = {"train": (True, True), "eval": (False, True), "eval, frozen": (False, False)}
"""Whether the batch's statistics are used, and whether weight and bias want a gradient."""


def layer_in(mode, channels):
    training, trainable = MODES[mode]
    norm = layer(channels).train(training).requires_grad_(trainable)
    nn.init.uniform_(norm.running_mean, -1, 1)
    nn.init.uniform_(norm.running_var, 0.1, 2)
    return norm


def gradients(work, norm, inputs, given):
    """Of these inputs and of the layer's weights where they want any, by the gradients given of all outputs."""
    norm, inputs = copy.deepcopy(norm), [one.detach().requires_grad_() for one in inputs]
    outputs = work(norm, *inputs)
    return torch.autograd.grad(outputs, [*inputs, *(one for one in norm.parameters() if one.requires_grad)], given)


def arguments(place, x, addend):
    return (x,) if place == "none" else (x, addend)


def twice(place):
    if place == "before":
        return lambda norm, x, addend: forked_norm_act(norm, nn.ReLU(), x, before=addend)
    return lambda norm, *inputs: forked_norm_act(norm, nn.ReLU(), *inputs)


def once(place):
    if place == "before":
        return lambda norm, x, addend: norm_act(norm, nn.ReLU(), x, before=addend)
    return lambda norm, *inputs: norm_act(norm, nn.ReLU(), *inputs)


def plainly(norm, x, addend=None):
    return F.relu(norm(x) if addend is None else norm(x) + addend)


@pytest.mark.parametrize("place", ["none", "before", "after"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_gradients_of_both_ways_are_added_up_as_torch_does(dtype, mode, place, rows):  # noqa: F811
    torch.manual_seed(0)
    shape = (5, 40, 4, 3)
    norm = layer_in(mode, shape[1])
    x, addend, g, also = (values(shape, dtype) for _ in range(4))
    reference = exact(norm).train(norm.training).requires_grad_(norm.weight.requires_grad)
    s = x + addend if place == "before" else x
    g, also = (apart_from_the_kink(copy.deepcopy(reference), s, addend, place, one) for one in (g, also))
    inputs = arguments(place, x, addend)
    found = gradients(twice(place), norm, inputs, (g, also))
    # As if torch had added them up: the sum is rounded to their type.
    unforked = gradients(once(place), norm, inputs, g + also)
    assert all(
        relative_distance(mine.double(), theirs.double()) <= (0 if INTERPRETED else TOLERANCE[dtype])
        for mine, theirs in zip(found, unforked, strict=True)
    )
    if place == "before":  # x and the addend have the same gradient
        assert torch.equal(found[0], found[1])
        found, inputs = found[1:], (s,)
    expected = gradients(plainly, reference, [one.double() for one in inputs], (g + also).double())
    assert all(
        relative_distance(mine.double(), theirs) < TOLERANCE[dtype]
        for mine, theirs in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_that_is_kept_as_well_adds_its_gradient(mode):
    torch.manual_seed(0)
    norm = layer_in(mode, 5)
    x, addend, g, also, for_s = (values((3, 5, 4, 7)) for _ in range(5))

    def fused(fork):
        return lambda norm, *inputs: [
            one
            for one in batch_norm._fused(norm, inputs[0], before=inputs[1], keep_sum=True, fork=fork)
            if one is not None
        ]

    found = gradients(fused(True), norm, (x, addend), (g, for_s, also))
    expected = gradients(fused(False), norm, (x, addend), (g + also, for_s))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("used", [0, 1])
def test_of_two_ways_one_may_be_left_unused(used, mode):
    torch.manual_seed(0)
    norm, x, g = layer_in(mode, 5), values((3, 5, 4, 7)), values((3, 5, 4, 7))
    found = gradients(lambda norm, x: forked_norm_act(norm, nn.ReLU(), x)[used], norm, (x,), g)
    expected = gradients(once("none"), norm, (x,), g)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_in_other_layouts_are_added_up_too(mode):
    torch.manual_seed(0)
    shape = (3, 5, 4, 7)
    norm, x, addend, also = layer_in(mode, 5), values(shape), values(shape), values(shape)
    expanded = values((3, 5, 1, 1)).expand(shape)
    found = gradients(twice("after"), norm, (x, addend), (expanded, also.contiguous()))
    laid_out = expanded.contiguous(memory_format=torch.channels_last)
    expected = gradients(twice("after"), norm, (x, addend), (laid_out, also))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_both_outputs_are_the_same_memory_and_have_one_backward(mode):
    norm, x = layer_in(mode, 5), values((3, 5, 4, 7)).requires_grad_()
    y, again = forked_norm_act(norm, nn.ReLU(), x)
    assert y.data_ptr() == again.data_ptr()
    assert y.stride() == again.stride()
    assert y.grad_fn is again.grad_fn
    assert (y.output_nr, again.output_nr) == (0, 2)
    with torch.no_grad():
        y, again = forked_norm_act(norm, nn.ReLU(), x)
    assert y.data_ptr() == again.data_ptr()
    assert not y.requires_grad
    assert not again.requires_grad


def pre_activation_bottleneck():
    return PreActResNet((3, 8, 8), 4, nn.ReLU, blocks=(1, 1), bottleneck=True, stem_width=8, widths=(4, 8))


def resnet(pooled=False, bottleneck=False):
    """With stages so narrow and so few that rounding errors stay small."""
    model = ResNet((3, 8, 8), 4, nn.ReLU, blocks=(0, 0, 0, 0))
    stages = _stages(PostActBlock, 64, (8, 16, 8, 8), (2, 2, 0, 0), bottleneck, nn.ReLU)
    model.layer1, model.layer2, model.layer3, model.layer4 = stages
    model.fc = nn.Linear(64 if bottleneck else 16, 4)
    model.maxpool = nn.MaxPool2d(3, 2, padding=1) if pooled else model.maxpool
    return model


NETWORKS = {
    "pre-activation": pre_activation,
    "pre-activation bottleneck": pre_activation_bottleneck,
    "resnet": resnet,
    "resnet, pooled bottleneck": lambda: resnet(pooled=True, bottleneck=True),
}


def network(name, training):
    torch.manual_seed(0)
    model = NETWORKS[name]().to(DEVICE, memory_format=torch.channels_last)
    model(values((8, 3, 8, 8)))  # statistics of their own
    return model.train(training)


class GradientSums(TorchDispatchMode):
    """How many sums of two arrays of activations' or images' kind were computed."""

    count = 0

    def __torch_dispatch__(self, function, types, given=(), more=None):
        if function.overloadpacket is torch.ops.aten.add and isinstance(given[1], torch.Tensor):
            self.count += given[0].dim() == 4 and given[0].shape == given[1].shape
        elif function.overloadpacket is torch.ops.aten.add_ and isinstance(given[1], torch.Tensor):
            self.count += given[0].dim() == 4
        return function(*given, **(more or {}))


def trained(model, x, forward=None):
    """Logits, all gradients and the state of a copy of the network, and how many sums its backward computed apart."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    logits = (forward or type(model).__call__)(model, x)
    with GradientSums() as sums:
        logits.square().sum().backward()
    return [
        logits.detach(),
        x.grad,
        *(one.grad for one in model.parameters()),
        *model.state_dict().values(),
    ], sums.count


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_as_without_and_leaves_no_sum_of_gradients_to_autograd(name, training, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, x = network(name, training), values((8, 3, 8, 8))
    expected, left_to_autograd = trained(model, x)
    with fusing(model):
        found, left = trained(model, x)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 + 1e-4 * float(theirs.double().abs().max()))
    # Behind a pooling torch adds them up, before its backward.
    assert left == ("pooled" in name)
    assert left_to_autograd > left + 1


@pytest.mark.parametrize("name", ["pre-activation", "resnet"])
def test_low_memory_s_gradients_are_those_of_the_plain_step(name):
    model, x = network(name, True), values((8, 3, 8, 8))

    def recomputing(model, x):
        blocks = model.blocks if name == "pre-activation" else (*model.layer1, *model.layer2)
        with recomputed(model, list(blocks)):
            return model(x)

    with fusing(model):
        found, expected = trained(model, x, recomputing)[0], trained(model, x)[0]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 + 1e-4 * float(theirs.double().abs().max()))


def test_what_the_second_kernel_reads_is_not_taken_for_ready(monkeypatch):
    """With a fork the first kernel of the backward writes what the second reads: it must not read ahead."""
    said, gradient = [], launches().gradient
    monkeypatch.setattr(
        launches(), "gradient", lambda *g, ready, **m: said.append(ready) or gradient(*g, ready=ready, **m)
    )
    norm, x, g = layer_in("train", 5), values((3, 5, 4, 7)), values((3, 5, 4, 7))
    gradients(twice("none"), norm, (x,), (g, g))
    gradients(once("none"), norm, (x,), g)
    assert said == [False, True]
