"""The update is torch's."""

import pytest
import torch
from torch import nn

from elle.engine.loss_scale import LossScale
from elle.engine.sgd import SGD


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4))]


def groups(of):
    return [{"params": of[:1], "weight_decay": 0.1}, {"params": of[1:], "weight_decay": 0.0}]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_torchs_update_bit_for_bit(momentum):
    ours, theirs = parameters(), parameters()
    lr = torch.tensor(0.3)
    updates = SGD(groups(ours), lr, momentum), torch.optim.SGD(groups(theirs), lr=lr, momentum=momentum, fused=True)
    for step in range(4):
        lr.fill_(0.3 / (step + 1))
        for found, update in zip((ours, theirs), updates, strict=True):
            update.zero_grad()
            assert all(one.grad is None for one in found)
            sum(((one - step) ** 3).sum() for one in found[: 1 + step % 2]).backward()  # the second has none at times
            update.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_scaling_is_undone_and_overflows_are_left_out():
    ours, theirs = parameters(), parameters()
    scale = LossScale(torch.device("cpu"))
    update = SGD(groups(ours), torch.tensor(0.3), 0.9)
    expected = torch.optim.SGD(groups(theirs), lr=0.3, momentum=0.9)
    for step in range(3):
        loss = sum((one**2).sum() for one in ours)
        update.zero_grad()
        (loss * (float("inf") if step == 0 else 1.0)).backward(scale.value)
        update.step(scale)
        scale.update()
        if step > 0:
            expected.zero_grad()
            sum((one**2).sum() for one in theirs).backward()
            expected.step()
    torch.testing.assert_close(ours, theirs)
    assert scale.value == 512.0


def test_weights_want_gradients_in_another_type_whatever_they_have():
    """As when a run goes on with another method behind its steps."""
    weight = nn.Parameter(torch.randn(8))
    update = SGD([{"params": [weight], "weight_decay": 0.0}], torch.tensor(0.3), 0.9)
    for wanted, dtype in (([weight], torch.float16), ([], torch.float32), ([weight], torch.float16)):
        update.expect_half(wanted)
        weight.sum().backward()
        assert weight.grad.dtype is dtype
