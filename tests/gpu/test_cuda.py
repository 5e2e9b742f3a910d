"""What only a GPU can show: the captured step, its freedom from synchronisation, and reduced precision."""

import gc
import weakref

import pytest
import torch

import elle
from elle.core.linearity import Linearity
from elle.core.precision import autocast
from elle.data.resident import Resident
from elle.data.sources import Split
from elle.engine.runtime import GraphedStep, prepare_device
from elle.engine.step import RECORDED, Step
from elle.errors import InputError
from elle.methods import METHODS, configured
from elle.models.registry import build_model
from tests.gpu.waiting import without_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
EPS = 8 / 255


def images(count: int, seed: int = 0) -> Split:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (count,), generator=generator)
    x = torch.randint(256, (count, 3, 32, 32), generator=generator) // 2 + 12 * y.view(-1, 1, 1, 1)
    return Split(x.clamp(0, 255).to(torch.uint8).numpy(), y.numpy())


def make_step(
    method: str, precision: str, steps: int = 40, crop: int = 4, network: str = "preact-resnet18", **rest: float
) -> Step:
    prepare_device(DEVICE, precision)
    torch.manual_seed(0)
    model = build_model(network, (3, 32, 32), 10).to(DEVICE, memory_format=torch.channels_last)
    data = Resident(images(1024), DEVICE, crop, flip=crop > 0)
    step = Step(
        model.train(),
        configured(method, weight=4000),
        data,
        eps=EPS,
        momentum=0.9,
        weight_decay=5e-4,
        precision=precision,
        steps_per_epoch=steps,
        total_steps=steps,
        **rest,
    )
    step.prepare(64, (3, 32, 32))
    step.lr.fill_(0.05)
    return step


def losses(step: Step, run, steps: int) -> torch.Tensor:
    for k in range(steps):
        start = 64 * (k % 16)
        run(torch.arange(start, start + 64, device=DEVICE))
    return step.records[:steps].cpu()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
def test_a_captured_step_trains_every_method(method, precision):
    step = make_step(method, precision)
    before = [p.detach().clone() for p in step.model.parameters()]
    rows = losses(step, GraphedStep(step, 64, DEVICE), 12)
    assert rows[:, RECORDED.index("loss")].isfinite().all()
    assert all(p.isfinite().all() for p in step.model.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, step.model.parameters(), strict=True))
    assert int(step.done) == 12


@pytest.mark.parametrize("method", ["standard", "fgsm", "n-fgsm", "pgd-10", "gradalign", "elle", "elle-a"])
def test_a_captured_step_learns(method):
    step = make_step(method, "fp16")
    loss = losses(step, GraphedStep(step, 64, DEVICE), 40)[:, RECORDED.index("loss")]
    assert loss[-8:].mean() < loss[:8].mean()


def test_a_captured_step_equals_an_eager_one(monkeypatch):
    eager, captured = (make_step("elle-a", "fp32", crop=0, average=0.5) for _ in range(2))
    # Trials could choose other kernels for either; the attack's signs would then differ.
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(1)
    expected = losses(eager, eager, 8)
    torch.manual_seed(1)
    found = losses(captured, GraphedStep(captured, 64, DEVICE), 8)
    columns = [RECORDED.index(name) for name in ("loss", "accuracy", "error")]
    torch.testing.assert_close(found[:, columns], expected[:, columns], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(captured.average.tensors, eager.average.tensors, rtol=1e-2, atol=1e-4)


def test_a_captured_step_draws_new_random_numbers_at_each_replay():
    step = make_step("elle-a", "fp16")
    step.lr.fill_(0.0)
    run = GraphedStep(step, 64, DEVICE)
    for _ in range(12):
        run(torch.arange(64, device=DEVICE))
    errors = step.records[4:12, RECORDED.index("error")].cpu()
    assert len(errors.unique()) == 8


def test_a_network_that_waits_for_the_device_is_refused_before_a_capture():
    step = make_step("n-fgsm", "fp16")
    step.model.register_forward_pre_hook(lambda _, given: float(given[0].min()) and None)
    run = GraphedStep(step, 64, DEVICE)
    with pytest.raises(InputError, match="train with compile=off"):
        losses(step, run, 4)
    assert len(torch.rand(8, device=DEVICE).unique()) == 8  # a failed capture would have spoilt the generator
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_step_never_waits_for_the_device(method):
    step = make_step(method, "fp16")
    index = torch.arange(64, device=DEVICE)
    step(index)
    with without_waiting():
        step(index)
    assert int(step.position) == 2


def test_the_plug_in_never_waits_for_the_device():
    model = build_model("preact-resnet18", (3, 32, 32), 10).to(DEVICE)
    reg = elle.ELLE(eps=EPS)
    x, y = torch.rand(32, 3, 32, 32, device=DEVICE), torch.randint(10, (32,), device=DEVICE)
    reg(model, x, y).backward()
    with without_waiting():
        reg(model, x, y).backward()
    assert reg.error.device.type == "cuda"
    assert reg.error.isfinite()


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_reduced_precision_does_not_change_the_error(precision):
    """The error in training mode, same network, images and random points, within 5 % of float32's.

    But for the square of what rounding to fp16 makes of a loss, a thousandth: a network may be nearer to linear.
    """
    step = make_step("n-fgsm", "fp16")
    losses(step, GraphedStep(step, 64, DEVICE), 40)
    data = images(1024, seed=1)
    x, y = torch.from_numpy(data.x).to(DEVICE).float() / 255, torch.from_numpy(data.y).to(DEVICE)

    def error(kind: str) -> float:
        prepare_device(DEVICE, kind)
        torch.manual_seed(2)
        with torch.no_grad(), autocast(DEVICE, kind):
            return float(Linearity()(step.model, x, y, 16 / 255).mean())

    assert error(precision) == pytest.approx(error("fp32"), rel=0.05, abs=1e-6)


def captured_gigabyte() -> GraphedStep:
    """A captured step that needs a GiB."""
    run = GraphedStep(lambda index: torch.empty(2**28, device=DEVICE).fill_(1).sum(), 1, DEVICE)
    for _ in range(GraphedStep.WARM_UP + 2):
        run(torch.zeros(1, dtype=torch.int64, device=DEVICE))
    return run


def test_a_captured_step_gives_its_memory_back():
    """The next phase of a run needs it, for another size of images."""
    run = captured_gigabyte()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    del run
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held - 2**30


def test_a_dead_graph_does_not_end_the_capture_of_another():
    def step(index: torch.Tensor) -> None:
        index.add_(1)
        objects.extend([] for _ in range(10_000))  # at which the collector would free the dead graph

    objects: list[list[int]] = []
    index = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    dead, run = captured_gigabyte(), GraphedStep(step, 1, DEVICE)
    for _ in range(GraphedStep.WARM_UP):
        run(index)
    dead.circle = dead
    held = weakref.ref(dead)
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(100, 1, 1)
    try:
        del dead
        run(index)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert held() is None
    assert run.captured.graph is not None
