"""Whole steps with BatchNorm, ReLU and sums fused: they train as without, can be captured, and never wait."""

import pytest
import torch

from elle.core.linearity import Linearity
from elle.core.precision import autocast
from elle.engine.runtime import GraphedStep, prepare_device
from elle.engine.step import RECORDED
from elle.models import batch_norm
from elle.models.batch_norm import fusing, use_fused
from elle.models.registry import build_model
from tests.gpu.test_cuda import images, losses
from tests.gpu.test_speed_cuda import make_step
from tests.gpu.waiting import without_waiting
from tests.models.test_batch_norm_forks import GradientSums
from tests.networks import gradient, relative_distance

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")


@pytest.fixture
def deterministic(monkeypatch):
    """Kernels chosen by rule instead of by trial, which may choose others in the next run."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)

    def make(method, precision, fused, memory="auto"):
        step = make_step(method, precision, memory)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        use_fused(step.model, fused)
        torch.manual_seed(1)
        return step

    return make


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels were asked for a layer."""
    found, fused = [], batch_norm._fused
    monkeypatch.setattr(batch_norm, "_fused", lambda *given, **more: found.append(1) or fused(*given, **more))
    return found


@pytest.mark.parametrize(("method", "forwards"), [("fgsm", 2), ("elle", 3), ("slat", 2)])
def test_every_layer_of_every_forward_is_fused(method, forwards, deterministic, calls):
    step = deterministic(method, "fp16", fused=True)
    step(torch.arange(64, device=DEVICE))
    assert len(calls) == 17 * forwards


def test_double_backpropagation_is_not(deterministic, calls):
    deterministic("gradalign", "fp16", fused=True)(torch.arange(64, device=DEVICE))
    assert not calls


def forward_and_gradient(step, precision):
    """Logits, weight gradients and running statistics of one forward and backward in train mode."""
    data = images(64, seed=1)
    x, y = torch.from_numpy(data.x).to(DEVICE).float() / 255, torch.from_numpy(data.y).to(DEVICE)
    with autocast(DEVICE, precision):
        logits = step.model(x.contiguous(memory_format=torch.channels_last))
    (torch.nn.functional.cross_entropy(logits.float(), y) * 128).backward()
    buffers = torch.cat([value.flatten() for name, value in step.model.state_dict().items() if "running" in name])
    return [logits.detach().float(), gradient(step.model), buffers]


def test_in_float32_a_forward_and_its_gradients_are_those_without(deterministic):
    results = [forward_and_gradient(deterministic("fgsm", "fp32", fused), "fp32") for fused in (True, False)]
    logits, gradients, buffers = (relative_distance(*pair) for pair in zip(*results, strict=True))
    # One ReLU in a million may switch, and a gradient differs by the root of their share.
    assert (logits < 1e-4, gradients < 1e-2, buffers < 1e-4) == (True, True, True), (logits, gradients, buffers)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_in_half_precision_they_are_as_near_to_float32_s_as_those_without(precision, deterministic):
    """Two roundings of one network differ by both their errors, which 17 layers enlarge: float32 is the judge."""
    exact = forward_and_gradient(deterministic("fgsm", "fp32", False), "fp32")
    mine, theirs = (
        [relative_distance(*pair) for pair in zip(forward_and_gradient(step, precision), exact, strict=True)]
        for step in (deterministic("fgsm", precision, fused) for fused in (True, False))
    )
    assert all(one < 1.5 * other + 1e-4 for one, other in zip(mine, theirs, strict=True)), (mine, theirs)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-2), ("fp16", 0.1)])
@pytest.mark.parametrize("memory", ["auto", "low"])
def test_a_captured_step_trains_as_without(precision, tolerance, memory, deterministic):
    rows = []
    for fused in (True, False):
        step = deterministic("elle", precision, fused, memory)
        rows.append(losses(step, GraphedStep(step, 64, DEVICE), 8))
    assert rows[0][:, :4].isfinite().all()
    columns = [RECORDED.index(name) for name in ("loss", "error")]
    torch.testing.assert_close(rows[0][:4, columns], rows[1][:4, columns], rtol=tolerance, atol=1e-4)


def test_the_counts_of_batches_are_torch_s(deterministic):
    counts = []
    for fused in (True, False):
        step = deterministic("elle", "fp16", fused)
        losses(step, GraphedStep(step, 64, DEVICE), 8)
        counts.append([int(value) for name, value in step.model.state_dict().items() if name.endswith("tracked")])
    assert counts[0] == counts[1]
    assert set(counts[0]) == {8 * 3}


@pytest.mark.parametrize("method", ["fgsm", "n-fgsm", "elle", "elle-a", "pgd-10", "trades"])
def test_a_captured_step_learns(method):
    step = make_step(method, "fp16")
    use_fused(step.model)
    loss = losses(step, GraphedStep(step, 64, DEVICE), 40)[:, RECORDED.index("loss")]
    assert loss.isfinite().all()
    assert loss[-8:].mean() < loss[:8].mean()


@pytest.mark.parametrize("name", ["preact-resnet18", "resnet18"])
def test_where_a_network_forks_no_gradients_are_added_up_apart_and_a_graph_computes_the_same(name, monkeypatch):
    prepare_device(DEVICE, "fp16")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    torch.manual_seed(0)
    model = build_model(name, (3, 32, 32), 10).to(DEVICE, memory_format=torch.channels_last).train()
    x = torch.rand(64, 3, 32, 32, device=DEVICE).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = torch.arange(64, device=DEVICE) % 10

    def gradients():
        with autocast(DEVICE, "fp16"):
            logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits.float(), y) * 128
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, [x, *model.parameters()])])

    with GradientSums() as sums:
        gradients()
    assert sums.count > 8  # the forward has one in each of its eight blocks
    with fusing(model):
        with GradientSums() as sums:
            expected = gradients()
        assert sums.count == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gradients()
        graph.replay()
    assert relative_distance(found, expected) < 1e-3


@pytest.mark.parametrize(("method", "memory"), [("fgsm", "auto"), ("elle", "auto"), ("elle", "low")])
def test_a_step_never_waits_for_the_device(method, memory):
    step = make_step(method, "fp16", memory)
    use_fused(step.model)
    index = torch.arange(64, device=DEVICE)
    step(index)
    with without_waiting():
        step(index)
    assert int(step.done) == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
def test_fused_the_error_is_as_near_to_float32_s_as_without(precision):
    """The error in training mode, same network and images, over four draws of points.

    The error is a mean of squares, so that rounding adds its own: of torch's in fp16 2 to 7 %, in bf16 more than the
    error itself. The kernels may add as much again.
    """
    step = make_step("n-fgsm", "fp16")
    losses(step, GraphedStep(step, 64, DEVICE), 40)
    data = images(1024, seed=1)
    x, y = torch.from_numpy(data.x).to(DEVICE).float() / 255, torch.from_numpy(data.y).to(DEVICE)
    x = x.contiguous(memory_format=torch.channels_last)

    def error(kind, fused):
        prepare_device(DEVICE, kind)
        use_fused(step.model, fused)
        torch.manual_seed(2)
        with torch.no_grad(), autocast(DEVICE, kind):
            return sum(float(Linearity()(step.model, x, y, 16 / 255).mean()) for _ in range(4)) / 4

    exact = error("fp32", False)
    mine, theirs = error(precision, True), error(precision, False)
    assert abs(mine - exact) < 0.05 * exact + 2 * abs(theirs - exact), (mine, theirs, exact)


def test_a_captured_attack_in_eval_mode_is_fused_and_trains_as_without(deterministic, calls):
    rows = []
    for fused in (True, False):
        step = deterministic("trades", "fp32", fused)
        rows.append(losses(step, GraphedStep(step, 64, DEVICE), 6)[:, RECORDED.index("loss")])
        # Ten steps of the attack, the prediction at x before it, and the loss at both points.
        assert len(calls) >= (17 * 12 if fused else 0)
        calls.clear()
    torch.testing.assert_close(rows[0][:4], rows[1][:4], rtol=1e-2, atol=1e-4)
