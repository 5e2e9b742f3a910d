"""Passes beside others: what they write is what they would have written as the last of all."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn

from elle.core.linearity import Linearity
from elle.engine import step as engine_step
from elle.engine.apart import Apart, suits
from elle.engine.batchnorm import RanksBatchNorm
from elle.engine.ranks import ALONE
from elle.engine.step import Step
from elle.models.batch_norm import BatchNorm
from elle.models.registry import build_model
from elle.models.small_cnn import SmallCNN
from tests.engine.steps import make_step, small_cnn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))


def images(number):
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(number)) + number


def test_running_statistics_move_as_if_the_passes_had_come_last():
    plain, parted = network(), network()
    apart = Apart(parted)
    for step in range(3):
        apart.begin()
        for number in (3 * step, 3 * step + 1):
            plain(images(number))
            parted(images(number))
        expected = plain(images(3 * step + 2))
        with apart.passes():
            found = parted(images(3 * step + 2))
            assert parted[1].num_batches_tracked is apart.aside[0]["num_batches_tracked"]
        assert torch.equal(found, expected)
        torch.testing.assert_close(parted.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)


def test_running_statistics_move_by_every_pass_through_a_layer():
    """A penalty may go through the network several times, and a network through a layer, by a momentum of its own."""
    plain, parted = network(), network()
    for model in (plain, parted):
        model.append(model[4])
        model[1].momentum = 0.3
    apart = Apart(parted)
    assert suits(parted)
    for step in range(2):
        for model, passes in ((plain, contextlib.nullcontext()), (parted, apart.passes())):
            model(images(step))
            with passes:
                model(images(step + 2))
                model(images(step + 3))
        torch.testing.assert_close(parted.state_dict(), plain.state_dict(), rtol=1e-6, atol=1e-7)
    assert parted[4].num_batches_tracked == 12


def test_layers_in_eval_mode_have_counters_of_their_own():
    """The kernels of their backward count by them, and two chains go back at a time."""
    model = nn.Sequential(BatchNorm(4), BatchNorm(4))
    own = [torch.zeros(4, dtype=torch.int32) for _ in model]
    for layer, arrivals in zip(model, own, strict=True):
        layer.arrivals = arrivals
    model[0].eval()
    with Apart(model).passes():
        assert all(layer.arrivals is not arrivals for layer, arrivals in zip(model, own, strict=True))
        assert model[0].running_var.eq(1).all()
    assert all(layer.arrivals is arrivals for layer, arrivals in zip(model, own, strict=True))


def test_layers_in_eval_mode_are_left_alone():
    model = network()
    model[1].eval()
    before = model[1].running_mean.clone()
    apart = Apart(model)
    with apart.passes():
        model(images(1))
    assert torch.equal(model[1].running_mean, before)
    assert model[1].num_batches_tracked == 0
    assert model[4].num_batches_tracked == 1


def test_a_network_without_batch_norm_has_nothing_to_write():
    model = SmallCNN((3, 32, 32), 10, nn.ReLU)
    x = torch.rand(2, 3, 32, 32)
    with Apart(model).passes():
        found = model(x)
    assert torch.equal(found, model(x))


def test_statistics_that_were_not_finite_are_not_remembered():
    model = network()
    apart = Apart(model)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with apart.passes():
        model(images(1) * torch.inf)
    assert not model[1].running_mean.isfinite().all()
    model.load_state_dict(kept)
    with apart.passes():
        model(images(1))
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_what_fails_leaves_the_layers_as_they_were():
    model = network()
    with pytest.raises(RuntimeError), Apart(model).passes():
        model(torch.zeros(1, 5, 8, 8))
    assert model[1].momentum == 0.1
    assert set(dict(model.named_buffers())) == set(dict(network().named_buffers()))


OPTIONS = {
    "plain": {}, "several forwards": {"alpha": "max"}, "a share": {"share": 0.5}, "two pairs": {"samples": 2},
    "five points": {"form": "5-point"}, "logits": {"on": "logits", "norm": "l2"},
}  # fmt: skip


@pytest.mark.parametrize("penalty", ["trained", "measured", "left out"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_is_the_one_in_a_row(monkeypatch, options, penalty):
    """Of a network with torch's BatchNorm, whose backward has the running statistics at hand."""
    states = []
    for parted in (False, True):
        monkeypatch.setattr(Step, "_may_run_apart", lambda step, parted=parted: parted and suits(step.model))
        step = make_step("elle", network=small_cnn, precision="fp16", weight=5.0)
        step.use(dataclasses.replace(step.method, regulariser=Linearity(**OPTIONS[options])))
        assert (step.apart is not None) == parted
        for number in range(2):
            step(torch.arange(8 * number, 8 * number + 8), penalty=penalty)
        states.append(step.state())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-6, equal_nan=True, msg=name)


@pytest.mark.parametrize(("penalty", "expected"), [("trained", 2), ("measured", 2), ("left out", 1)])
def test_a_step_without_its_penalty_is_one_chain_of_passes(monkeypatch, penalty, expected):
    """Beside one chain weight gradients may be computed, and not beside two."""
    chains, copies = [], engine_step.half_weights

    def half_weights(model, count, *args, **named):
        chains.append(count)
        return copies(model, count, *args, **named)

    monkeypatch.setattr(Step, "_may_run_apart", lambda step: True)
    monkeypatch.setattr(engine_step, "half_weights", half_weights)
    step = make_step("elle", network=small_cnn, precision="fp16", weight=5.0)
    step(torch.arange(8), penalty=penalty)
    assert chains == [expected]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (network(), True),
        (build_model("preact-resnet18", (3, 32, 32), 10, normalise=([0.5] * 3, [0.2] * 3)), True),
        (SmallCNN((3, 32, 32), 10, nn.ReLU), True),
        (nn.Sequential(network(), Counting()), False),
        (nn.Sequential(network(), nn.BatchNorm2d(4, momentum=0.2)), True),
        (nn.Sequential(network(), nn.BatchNorm2d(4).double()), False),
        (nn.Sequential(network(), nn.utils.weight_norm(nn.Conv2d(4, 4, 3))), False),
        (nn.Sequential(network(), nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 3))), False),
        (nn.BatchNorm2d(4, momentum=None), False),
        (nn.BatchNorm2d(4, track_running_stats=False), False),
        (RanksBatchNorm(nn.BatchNorm2d(4), ALONE), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU()), False),
    ],
)
def test_networks_that_write_something_else_are_passed_one_after_another(model, expected):
    assert suits(model) is expected
