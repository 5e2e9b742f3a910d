"""The update by a kernel, of weights whose gradients are in float16, is torch's of the same gradients in float32."""

import pytest
import torch
from torch import nn

from elle.engine import sgd
from elle.engine.loss_scale import LossScale
from elle.engine.sgd import SGD
from tests.triton_kernels import DEVICE, MARKS

pytestmark = MARKS
SCALE = 1024.0


def parameters():
    torch.manual_seed(0)
    shapes = [(16, 24, 3, 3), (10, 40), (10,), (2, 8, 1, 1), (40,)]  # of the third, 10 elements, no multiple of 8
    made = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in shapes]
    made[0] = nn.Parameter(made[0].detach().contiguous(memory_format=torch.channels_last))
    return made


def updated(weights, momentum, half, overflow_at, bad):
    groups = [{"params": weights[:4], "weight_decay": 0.1}, {"params": weights[4:], "weight_decay": 0.0}]
    update = SGD(groups, torch.tensor(0.3, device=DEVICE), momentum)
    update.expect_half(weights[:4] if half else [])
    scale = LossScale(torch.device(DEVICE))
    for step in range(3):
        update.lr.fill_(0.3 / (step + 1))
        update.zero_grad()
        for number, one in enumerate(weights[: 4 if step == 1 else 5]):
            generator = torch.Generator().manual_seed(10 * step + number)
            gradient = (torch.randn(one.shape, generator=generator) * SCALE).to(DEVICE).half()
            if step == overflow_at and number == 1:
                gradient[0, 0] = bad
            one.grad = torch.empty_like(one, dtype=one.grad_dtype).copy_(gradient)
        if half:
            assert [one.grad_dtype is torch.float16 for one in weights] == [True, True, False, True, False]
        update.step(scale)
        scale.update()
    return weights, float(scale.value)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("overflow_at", "bad"), [(None, 0.0), (0, torch.inf), (2, -torch.inf), (2, torch.nan)])
def test_it_is_torchs_update(monkeypatch, momentum, overflow_at, bad):
    monkeypatch.setattr(sgd, "CHUNK", 256)
    found, scale = updated(parameters(), momentum, True, overflow_at, bad)
    expected, expected_scale = updated(parameters(), momentum, False, overflow_at, bad)
    assert scale == expected_scale == (SCALE if overflow_at is None else SCALE / 2)
    for here, there, start in zip(found, expected, parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)
        assert not torch.equal(here, start)


def test_not_of_a_weight_that_a_thread_cannot_read_16_bytes_at_a_time():
    whole = torch.zeros(33, 8, device=DEVICE)
    weights = [nn.Parameter(whole[1:]), nn.Parameter(whole.flatten()[1:257]), nn.Parameter(whole[:, :4])]
    update = SGD([{"params": weights, "weight_decay": 0.0}], torch.tensor(0.1, device=DEVICE), 0.9)
    update.expect_half(weights)
    assert [one.grad_dtype for one in weights] == [torch.float16, torch.float32, torch.float32]
    update.expect_half([])
    assert all(one.grad_dtype is torch.float32 for one in weights)
