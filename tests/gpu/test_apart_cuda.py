"""The penalty's passes on a stream of their own: nothing is read before it is there, nor given away too early."""

import contextlib
import dataclasses
import functools

import pytest
import torch

from elle.engine import apart
from elle.engine.runtime import GraphedStep
from elle.engine.step import Step
from tests.gpu.test_cuda import DEVICE, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 6


def taken(method, graph=True, penalty="trained", options=None, **rest):
    """What steps at a rate of 0 leave behind: nothing that one of them gets wrong is made worse by the next."""
    step = make_step(method, "fp16", steps=STEPS, **rest)
    step.use(
        dataclasses.replace(step.method, regulariser=dataclasses.replace(step.method.regulariser, **options or {}))
    )
    step.lr.zero_()
    once = functools.partial(step, penalty=penalty)
    run = GraphedStep(once, 64, DEVICE) if graph else once
    for k in range(STEPS):
        run(torch.arange(64 * k, 64 * k + 64, device=DEVICE))
    state = {f"momentum of {n}": step.optimizer.state[p]["momentum_buffer"] for n, p in step.model.named_parameters()}
    state |= {name: buffer.double() for name, buffer in step.model.named_buffers()}
    return state, step.records[:, :4]


def assert_alike(found, expected):
    state, records = found
    torch.testing.assert_close(records, expected[1], rtol=1e-3, atol=1e-7, equal_nan=True)
    for name, value in expected[0].items():
        assert (state[name] - value).norm() <= 1e-3 * value.norm() + 1e-6, name


class Late(apart.Apart):
    """Its passes come later than anything else."""

    @contextlib.contextmanager
    def passes(self):
        with super().passes():
            torch.cuda._sleep(4_000_000)
            yield


class Early(apart.Apart):
    """Anything else comes later than its passes."""

    def begin(self):
        super().begin()
        torch.cuda._sleep(4_000_000)


@pytest.mark.parametrize(
    ("method", "penalty"),
    [("elle", "trained"), ("elle-a", "trained"), ("n-fgsm+elle-a", "trained"), ("trades-single+elle", "trained"),
     ("gat+elle", "trained"), ("elle", "measured"), ("elle-a", "left out")],
)  # fmt: skip
def test_a_step_is_that_of_one_stream_whichever_chain_is_late(monkeypatch, method, penalty):
    plain = apart.Apart
    assert make_step(method, "fp16", steps=STEPS).apart is not None
    others = [taken(method, penalty=penalty), taken(method, graph=False, penalty=penalty)]
    for kind in (Late, Early):
        monkeypatch.setattr(apart, "Apart", kind)
        others.append(taken(method, penalty=penalty))
    monkeypatch.setattr(apart, "Apart", plain)
    # In a row, by the same operations: an attack in eval mode would make much of statistics rounded otherwise.
    monkeypatch.setattr(apart, "_stream", lambda device: None)
    in_a_row = taken(method, penalty=penalty)
    for found in others:
        assert_alike(found, in_a_row)


@pytest.mark.parametrize(
    "setting",
    [{"network": "small-cnn"}, {"fused": "off"}, {"options": {"alpha": "max"}}, {"options": {"samples": 2}}],
    ids=["torch's BatchNorm", "not fused", "several forwards", "two pairs"],
)
def test_networks_and_penalties_of_another_kind(monkeypatch, setting):
    beside, eager = taken("elle", **setting), taken("elle", graph=False, **setting)
    monkeypatch.setattr(apart, "_stream", lambda device: None)
    in_a_row = taken("elle", **setting)
    monkeypatch.setattr(Step, "_may_run_apart", lambda step: False)
    whole = taken("elle", **setting)
    for found in (beside, eager):
        assert_alike(found, in_a_row)
    counts = [name for name in whole[0] if name.endswith("num_batches_tracked")]
    assert all(torch.equal(beside[0][name], whole[0][name]) for name in counts)
