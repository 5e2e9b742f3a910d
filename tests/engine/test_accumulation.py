"""Micro-batches leave the gradient, the weight and the records of the whole batch, up to BatchNorm."""

import dataclasses

import pytest
import torch
from torch import nn

from elle.core.controller import OnOff
from elle.core.linearity import Linearity
from elle.engine.step import RECORDED
from elle.methods import METHODS

from .steps import make_step, plain_network, take

# NuAT's nuclear norm is of the whole batch's logits: it does not divide into parts.
DIVISIBLE = [name for name in METHODS if name != "nuat"]


@pytest.mark.parametrize("method", DIVISIBLE)
def test_micro_batches_train_as_the_whole_batch(method):
    whole, parts = (make_step(method, weight=5.0 if "elle" in method else None, crop=1) for _ in range(2))
    parts.accumulate = 4
    assert_alike(whole, parts)


def assert_alike(whole, parts, **how):
    """Five steps on the same images and draws leave the same records and parameters."""
    for step in (whole, parts):
        torch.manual_seed(1)
        for number in range(5):
            step(torch.arange(8 * number, 8 * number + 8), **how)
    torch.testing.assert_close(parts.records[:5], whole.records[:5], rtol=1e-4, atol=1e-5, equal_nan=True)
    for mine, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5)


def test_the_weight_of_the_rule_acts_on_the_step_that_raised_it():
    step = make_step("elle-a", weight=5.0)
    step.accumulate = 2
    step.rule["count"].fill_(5)  # any error lies above a history of zeros
    take(step, 0)
    assert step.records[0, RECORDED.index("weight")] == 5
    assert float(step.rule["count"]) == 6  # one observation a step, not one a micro-batch


@pytest.mark.parametrize("penalty", ["measured", "left out"])
def test_what_a_step_leaves_out_of_its_penalty_its_micro_batches_leave_out(penalty):
    whole, parts = (make_step("elle", weight=50.0) for _ in range(2))
    parts.accumulate = 4
    assert_alike(whole, parts, penalty=penalty)
    assert (parts.records[:5, RECORDED.index("weight")] > 0).sum() == 0


def test_a_weight_that_acts_from_the_next_step_does_so_for_all_micro_batches():
    steps = [make_step("elle-a", weight=5.0) for _ in range(2)]
    for step in steps:
        step.use(dataclasses.replace(step.method, weight=OnOff(5.0, sensitivity=-0.5, next_step=True)))
    steps[1].accumulate = 2
    assert_alike(*steps)
    weight = steps[1].records[:5, RECORDED.index("weight")]
    assert weight[0] == 0
    assert weight.max() == 5


def test_a_share_of_one_image_has_points_of_its_own_in_every_micro_batch(monkeypatch):
    seen = []
    draw = Linearity.draw
    monkeypatch.setattr(Linearity, "draw", lambda *given: seen.append(draw(*given)) or seen[-1])
    step = make_step("elle", weight=5.0)
    step.use(dataclasses.replace(step.method, regulariser=Linearity(share=0.25)))
    step.accumulate = 2
    step(torch.tensor([0, 1, 2, 3] * 2))  # the same images in both
    (first, _, position), (second, _, other) = seen
    assert first.shape == second.shape == (1, 1, 8, 8)
    assert (first != second).all()
    assert position != other


class WithUnusedHead(nn.Module):
    """A network with a part that no image reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = plain_network(), nn.Linear(4, 4)

    def forward(self, x):
        return self.used(x)


def test_micro_batches_leave_what_no_image_reaches_as_it_is():
    step = make_step("elle", weight=5.0, network=WithUnusedHead)
    step.accumulate = 2
    before = step.model.unused.weight.detach().clone()
    take(step, 0, 1)
    assert torch.equal(step.model.unused.weight, before)


class Block(nn.Module):
    """Two layers without BatchNorm, to be computed anew."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh()).tanh()


def blocks():
    return nn.Sequential(Block(), nn.Flatten(), nn.Linear(4 * 16, 10))


def test_micro_batches_whose_blocks_are_computed_anew_train_as_the_whole_batch():
    whole, parts = (make_step("elle", weight=50.0, network=blocks) for _ in range(2))
    parts.accumulate, parts.memory = 4, "low"
    parts.use(parts.method)
    assert len(parts.blocks) == 1
    assert_alike(whole, parts)


def test_in_half_precision_loss_and_penalty_share_the_copies_of_the_weights():
    whole, parts = (make_step("elle", weight=5.0, precision="fp16") for _ in range(2))
    parts.accumulate = 2
    for step in (whole, parts):
        torch.manual_seed(1)
        take(step, *range(3))
    names = [RECORDED.index(name) for name in ("loss", "weight")]
    torch.testing.assert_close(parts.records[:3, names], whole.records[:3, names], rtol=5e-3, atol=0)
