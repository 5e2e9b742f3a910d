"""Streaming to a GPU: the batches are those of the CPU, a captured step reads them, and the host runs ahead safely."""

import pytest
import torch

from elle.data.phases import Phase, Timetable
from elle.data.streaming import Streaming
from elle.engine.runtime import GraphedStep, prepare_device
from elle.engine.step import RECORDED, Step
from elle.methods import configured
from elle.models.registry import build_model

from ..data.photographs import write_photographs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
COUNT, BATCH, EPOCHS = 64, 16, 6
STEPS = [(epoch, step) for epoch in range(EPOCHS) for step in range(COUNT // BATCH)]
INDEX = torch.empty(0)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return write_photographs(tmp_path_factory.mktemp("photographs"), COUNT, classes=10)


def stream(split, device, sizes=(32,)):
    """With these image sizes in turn, an epoch each."""
    phases = tuple(Phase(1, sizes[epoch % len(sizes)], BATCH) for epoch in range(EPOCHS))
    return Streaming(split, device, Timetable(phases, len(split)), seed=0, workers=2)


@pytest.mark.parametrize("sizes", [(32,), (24, 32)], ids=["one-size", "two-sizes"])
def test_batches_are_those_of_the_cpu_though_the_host_runs_ahead(split, sizes):
    here, there = stream(split, "cpu", sizes), stream(split, DEVICE, sizes)
    busy = torch.rand(4096, 4096, device=DEVICE)
    found, expected = [], []
    for step in STEPS:
        there.stage(*step)
        for _ in range(20):
            busy = (busy @ busy).softmax(0)  # the device falls behind: a buffer reused too early would show
        x, y = there.batch(INDEX)
        found.append((x.clone(), y.clone()))
        here.stage(*step)
        expected.append(tuple(part.clone() for part in here.batch(INDEX)))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[0].cpu(), theirs[0], rtol=0, atol=1e-7)
        assert torch.equal(mine[1].cpu(), theirs[1])


def test_the_batch_stays_where_a_captured_step_reads_it(split):
    source = stream(split, DEVICE)
    places = set()
    for step in STEPS:
        source.stage(*step)
        places.add(tuple(part.data_ptr() for part in source._staged))
    assert len(places) == 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_trains_on_streamed_images(split, captured):
    prepare_device(DEVICE, "fp16")
    torch.manual_seed(0)
    model = build_model("preact-resnet18", (3, 32, 32), 10).to(DEVICE, memory_format=torch.channels_last)
    source = stream(split, DEVICE)
    step = Step(
        model.train(),
        configured("fgsm"),
        source,
        eps=2 / 255,
        momentum=0.9,
        weight_decay=5e-4,
        precision="fp16",
        steps_per_epoch=len(STEPS),
        total_steps=len(STEPS),
    )
    step.lr.fill_(0.02)
    run = GraphedStep(step, BATCH, DEVICE) if captured else step
    labels = []
    for place in STEPS:
        source.stage(*place)
        labels.append(source.batch(INDEX)[1].clone())
        run(torch.arange(BATCH, device=DEVICE))
    loss = step.records[:, RECORDED.index("loss")].cpu()
    assert loss.isfinite().all()
    assert loss[-8:].mean() < loss[:8].mean()
    assert len({tuple(one.tolist()) for one in labels}) > len(STEPS) // 2
