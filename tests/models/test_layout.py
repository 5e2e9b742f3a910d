"""Networks that view what a convolution gives them are trained and evaluated with the channels first."""

import textwrap

import pytest
import torch
from torch import nn

from elle.config import load_config
from elle.engine.loop import train
from elle.models import first_convolution
from elle.models.half_weights import half_weights
from elle.models.layout import give_channels_first, layout_of, takes_channels_last
from elle.models.registry import build_model
from tests.conftest import QUICK

NETWORK = """
    from torch import nn

    class Viewing(nn.Module):
        def __init__(self, channels, classes):
            super().__init__()
            self.convolution = nn.Conv2d(channels, 4, 3, bias=False)
            self.linear = nn.Linear(144, classes)

        def forward(self, x):
            x = self.convolution(x).relu()
            return self.linear(x.view(x.size(0), -1))

    def grey(num_classes):
        return Viewing(1, num_classes)

    def coloured(num_classes):
        return Viewing(3, num_classes)

    def flat(num_classes):
        return nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.Flatten(), nn.Linear(144, num_classes))
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "viewing.py").write_text(textwrap.dedent(NETWORK))
    monkeypatch.syspath_prepend(tmp_path)
    return "viewing"


@pytest.mark.parametrize(("name", "channels"), [("grey", 1), ("coloured", 3)])
def test_a_network_that_views_its_features_gets_images_with_the_channels_first(module, name, channels):
    shape = (channels, 8, 8)
    model = build_model(f"{module}:{name}", shape, 10)
    assert layout_of(model) is torch.contiguous_format
    x = torch.rand(5, *shape)
    strided = torch.empty_strided(x.shape, (64 * channels, 1, 8 * channels, channels)).copy_(x)
    expected = model(x)
    assert torch.equal(model(x.contiguous(memory_format=torch.channels_last)), expected)
    assert torch.equal(model(strided), expected)
    x.requires_grad_()
    strided.requires_grad_()
    slopes = [torch.autograd.grad(model(one).sum(), one)[0] for one in (x, strided)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("name", ["flat", "preact-resnet18"])
def test_others_get_them_as_they_come(module, name):
    model = build_model(name if name == "preact-resnet18" else f"{module}:{name}", (1, 8, 8), 10)
    assert layout_of(model) is torch.channels_last
    assert not model._forward_pre_hooks


def test_it_is_for_as_long_as_it_is_wanted(module):
    model = build_model(f"{module}:coloured", (3, 8, 8), 10)
    model._forward_pre_hooks.clear()
    x = torch.rand(2, 3, 8, 8)
    assert not takes_channels_last(model, x)
    with give_channels_first(model):
        assert layout_of(model) is torch.contiguous_format
    assert layout_of(model) is torch.channels_last


def test_a_network_with_another_fault_is_not_said_to_mind_the_layout():
    assert takes_channels_last(nn.Linear(3, 2), torch.rand(2, 3, 8, 9))


@pytest.mark.parametrize("words", [("method=elle-a",), ("method=gradalign", "normalise=dataset")])
def test_such_a_network_is_trained_looked_at_evaluated_and_exported(module, words, tmp_path, elle):
    run = tmp_path / "run"
    more = ["eval_every=1", "track=clean,pgd-2", "probe_every=9", f"out={run}"]
    train(load_config([*QUICK, f"model={module}:grey", *more, *words]))
    assert elle("evaluate", run, "--attack", "clean,pgd-2,square", "--limit", "20").code == 0
    assert elle("metrics", run, "--limit", "10").code == 0
    for form in ("safetensors", "torchscript", "torch-export"):
        assert elle("export", run, "--to", form).code == 0


def test_kernels_that_lay_out_otherwise_compute_nothing_of_such_a_network(module, monkeypatch):
    asked = []
    monkeypatch.setattr(first_convolution, "takes", lambda *_: asked.append(1))
    for name in ("flat", "grey"):
        model = build_model(f"{module}:{name}", (1, 8, 8), 10)
        with torch.autocast("cpu", torch.float16), half_weights(model):
            model(torch.rand(2, 1, 8, 8))
        assert len(asked) == 1
