"""What only a GPU can show of an evaluation: fp16 searches in CUDA graphs that count what float32 counts."""

import time
from functools import partial

import pytest
import torch
from torch import nn

from elle.evaluation.autoattack import oracle
from elle.evaluation.evaluate import assess, evaluate
from elle.models import batch_norm, first_convolution, head
from elle.models.registry import build_model
from tests.networks import images, trained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
EPS = 8 / 255


@pytest.fixture(scope="module")
def data():
    x, y = images(600, (3, 32, 32), classes=10, seed=1)
    return (x * 255).to(torch.uint8).numpy(), y.numpy()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = build_model("preact-resnet18", (3, 32, 32), 10).to(DEVICE)
    x, y = (values.to(DEVICE) for values in images(256, (3, 32, 32), classes=10))
    return trained(network.train(), x, y, steps=10, lr=0.02).eval()


@pytest.mark.parametrize("name", ["fgsm", "pgd-20", "pgd-10-3", "apgd-ce", "apgd-t", "fab-t"])
def test_fp16_in_graphs_breaks_what_float32_breaks(model, data, name):
    exact = assess(model, *data, f"clean,{name}", EPS, precision="fp32")
    quick = assess(model, *data, f"clean,{name}", EPS)
    assert quick["precision"] == "fp16"
    assert quick["attacks"][name]["outside"] == quick["attacks"][name]["unverified"] == 0
    assert abs(quick["attacks"][name]["correct"] - exact["attacks"][name]["correct"]) <= 6


@pytest.mark.parametrize("name", ["fgsm", "pgd-20", "pgd-10-3", "apgd-ce", "apgd-t", "fab-t"])
def test_a_fused_search_breaks_what_one_without_breaks(model, data, name, monkeypatch):
    pytest.importorskip("triton")
    kernels = [(batch_norm, "_fused"), (first_convolution, "convolved"), (head, "logits_and_mean")]
    calls = set()
    for module, kernel in kernels:
        work = getattr(module, kernel)
        counted = partial(lambda kernel, work, *given, **more: calls.add(kernel) or work(*given, **more), kernel, work)
        monkeypatch.setattr(module, kernel, counted)
    correct = []
    for wanted in (True, False):
        monkeypatch.setattr(oracle, "FUSED_SEARCH", wanted)
        calls.clear()
        found = assess(model, *data, f"clean,{name}", EPS)["attacks"][name]
        assert calls == {kernel for _, kernel in kernels if wanted}
        assert found["outside"] == found["unverified"] == 0
        correct.append(found["correct"])
    assert abs(correct[0] - correct[1]) <= 0.01 * len(data[0])


def test_the_same_seed_gives_the_same_points(model, data):
    first, second = (assess(model, *data, "pgd-10-3,apgd-ce", EPS, chunk=256)["attacks"] for _ in range(2))
    assert [one["survived"] for one in first.values()] == [one["survived"] for one in second.values()]


def test_images_stay_on_the_host_until_their_chunk(model, data):
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    evaluate(model, *data, "clean", EPS, chunk=50, batch=50)
    small = torch.cuda.max_memory_allocated() - held
    torch.cuda.reset_peak_memory_stats()
    evaluate(model, *data, "clean", EPS, chunk=600, batch=50)
    assert small < torch.cuda.max_memory_allocated() - held


class Waiting(nn.Module):
    """Asks the device for a value in its forward, which no graph can hold."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        assert float(x.min()) > -1
        return self.inner(x)


def test_a_network_that_no_graph_can_hold_is_evaluated_all_the_same(model, data):
    x, y = data[0][:100], data[1][:100]
    waiting = evaluate(Waiting(model), x, y, "pgd-5", EPS)["pgd-5"]["correct"]
    assert abs(waiting - evaluate(model, x, y, "pgd-5", EPS)["pgd-5"]["correct"]) <= 2


def test_a_network_that_wants_the_channels_first_is_evaluated_all_the_same(data):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4 * 30 * 30, 10)

        def forward(self, x):
            return self.linear(self.convolution(x).relu().view(len(x), -1))

    network = Viewing().to(DEVICE)
    weights = network.convolution.weight.data_ptr()
    x, y = data
    result = evaluate(network, x[:64], y[:64], "clean,pgd-2,apgd-ce,square", 8 / 255)
    assert result["square"]["total"] == 64
    assert network.convolution.weight.data_ptr() == weights
    assert not network._forward_pre_hooks


def test_pgd_50_10_takes_at_most_25_seconds_where_half_of_ten_thousand_images_survive(model):
    """The survivors cost the time: 5,000 points that a radius of next to nothing does not break."""
    x, _ = images(5_000, (3, 32, 32), classes=10, seed=2)
    with torch.no_grad():
        y = torch.cat([model(part.to(DEVICE)).argmax(1) for part in x.split(500)]).cpu()
    evaluate(model, x[:600], y[:600], "pgd-5-10", EPS)
    started = time.perf_counter()
    result = evaluate(model, x, y, "pgd-50-10", 1e-7)["pgd-50-10"]
    assert result["correct"] > 4_900
    assert time.perf_counter() - started <= 25
