"""Shortcuts in captured steps: two graphs for one training, and memory=low."""

import pytest
import torch

from elle.data.resident import Resident
from elle.engine.bench import Setting, measure
from elle.engine.leaving_out import LeavingOut
from elle.engine.runtime import GraphedStep, prepare_device
from elle.engine.step import RECORDED, Step
from elle.methods import configured
from elle.models.registry import build_model
from tests.gpu.test_cuda import images, losses
from tests.gpu.waiting import without_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
LAZY = {"weight": {"next_step": True, "negligible": 0.3, "decay": 0.5, "sensitivity": 0.5}}


def make_step(method, precision="fp32", memory="auto", options=None, steps=40):
    prepare_device(DEVICE, precision)
    torch.manual_seed(0)
    model = build_model("preact-resnet18", (3, 32, 32), 10).to(DEVICE, memory_format=torch.channels_last)
    step = Step(
        model.train(),
        configured(method, weight=100.0, options=options),
        Resident(images(1024), DEVICE),
        eps=8 / 255,
        momentum=0.9,
        weight_decay=5e-4,
        precision=precision,
        steps_per_epoch=steps,
        total_steps=steps,
        memory=memory,
    )
    step.prepare(64, (3, 32, 32))
    step.lr.fill_(0.01)
    return step


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_both_graphs_are_used_and_each_where_the_weight_says(precision):
    # Errors so far from their mean as to make the weight jump do not occur; it is set, and decays.
    rule = LAZY["weight"] | {"decay": 0.8, "sensitivity": 1e6}
    step = make_step("elle-a", precision, options={"weight": rule})
    step.rule["weight"].fill_(100.0)
    run = LeavingOut(step, lambda form: GraphedStep(form, 64, DEVICE))
    losses(step, run, 12)
    # To a history of errors far below any that there are, the next is a jump.
    step.rule["mean"].fill_(-1000.0)
    step.rule["spread"].zero_()
    losses(step, run, 4)
    assert set(run.forms) == {"trained", "measured"}
    assert all(form.captured.graph is not None for form in run.forms.values())
    rows = step.records[:16].cpu()
    expected = torch.tensor([100.0 * 0.8**k for k in range(6)] + 7 * [0.0] + [100.0, 80.0, 64.0])
    torch.testing.assert_close(rows[:, RECORDED.index("weight")], expected)
    assert rows[:, RECORDED.index("loss")].isfinite().all()


def test_captured_and_eager_steps_leave_out_the_same(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    rows = []
    for prepare in (lambda form: form, lambda form: GraphedStep(form, 64, DEVICE)):
        step = make_step("elle-a", options=LAZY)
        torch.manual_seed(1)
        rows.append(losses(step, LeavingOut(step, prepare), 12))
    columns = [RECORDED.index(name) for name in ("loss", "error", "weight")]
    torch.testing.assert_close(rows[1][:6, columns], rows[0][:6, columns], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_low_memory_trains_in_a_captured_step_as_the_plain_one_does(precision, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    rows = []
    for memory in ("auto", "low"):
        step = make_step("elle", precision, memory)
        torch.manual_seed(1)
        rows.append(losses(step, GraphedStep(step, 64, DEVICE), 8))
    assert rows[0].isfinite()[:, :4].all()
    columns = [RECORDED.index(name) for name in ("loss", "error")]
    tolerance = {"fp32": 1e-2, "fp16": 0.1}[precision]
    torch.testing.assert_close(rows[1][:4, columns], rows[0][:4, columns], rtol=tolerance, atol=1e-4)


def test_low_memory_takes_at_most_1_3_times_fgsm_s_and_1_35_times_the_plain_step_s_time():
    prepare_device(DEVICE, "fp16")
    fgsm, plain, low = (
        measure(method, Setting(DEVICE, "fp16", memory=memory))
        for method, memory in (("fgsm", "auto"), ("elle", "auto"), ("elle", "low"))
    )
    assert low["peak_mib"] < 1.3 * fgsm["peak_mib"]
    assert plain["peak_mib"] > 2 * fgsm["peak_mib"]
    assert low["ms"] < 1.35 * plain["ms"]


@pytest.mark.parametrize(("method", "memory"), [("elle", "low"), ("gradalign", "auto")])
def test_these_steps_never_wait_for_the_device(method, memory):
    step = make_step(method, "fp16", memory)
    index = torch.arange(64, device=DEVICE)
    step(index)
    with without_waiting():
        step(index)
    assert int(step.done) == 2
