"""The search asks for fused layers; what counts, the answer in float32, is torch's own."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.core.attacks import SignStep
from elle.evaluation import autoattack, pgd
from elle.evaluation.autoattack import oracle
from elle.evaluation.autoattack.oracle import Oracle, constant
from elle.evaluation.mode import evaluation_mode
from elle.models import batch_norm
from elle.models.batch_norm import BatchNorm, use_fused
from elle.models.residual import PreActResNet
from tests.networks import images

EPS = 0.1
PGD = SignStep(alpha=0.25, steps=2, noise=1, clip=True)


@pytest.fixture
def fused(monkeypatch):
    """The layers taken over, with whether they are in train mode; by torch's operations in place of the kernels."""
    found = []

    def take_over(norm, x, *, relu=True, before=None, after=None, keep_sum=False, fork=False):
        found.append(norm.training)
        s = x if before is None else x + before
        y = nn.BatchNorm2d.forward(norm, s)
        y = y if after is None else y + after
        y = F.relu(y) if relu else y
        return y, s if keep_sum else None, y if fork else None

    kernels = SimpleNamespace(arrivals=lambda channels, device: torch.zeros(channels, dtype=torch.int32))
    monkeypatch.setattr(batch_norm, "_kernels", lambda: kernels)
    monkeypatch.setattr(batch_norm, "_on_gpu", lambda x: True)
    monkeypatch.setattr(batch_norm, "_channels_last", lambda x: True)
    monkeypatch.setattr(batch_norm, "_fused", take_over)
    monkeypatch.setattr(oracle, "FUSED_SEARCH", True)
    return found


@pytest.fixture
def exact(monkeypatch, fused):
    """How many layers were taken over by each exact answer."""
    counts, answer = [], Oracle.exact

    def counted(*given):
        before = len(fused)
        logits = answer(*given)
        counts.append(len(fused) - before)
        return logits

    monkeypatch.setattr(Oracle, "exact", counted)
    return counts


def network():
    torch.manual_seed(0)
    return PreActResNet((1, 8, 8), 4, nn.ReLU, blocks=(1, 1), stem_width=4, widths=(4, 8)).train()


def searched(model, name):
    x, y = images(4)
    if name == "pgd":
        return pgd.search(PGD, model, x, y, EPS, norm="linf")
    budget = autoattack.Budget(steps=2, queries=2)
    return autoattack.search(name, model, x, y, EPS, classes=4, seed=0, budget=budget)


@pytest.mark.parametrize("name", ["pgd", "apgd-ce", "square"])
def test_the_search_is_fused_and_the_answer_that_counts_is_not(name, fused, exact):
    model = network()
    searched(model, name)
    assert fused
    assert not any(fused), "in train mode"
    assert exact
    assert not any(exact)
    assert all(layer.arrivals is None for layer in model.modules() if isinstance(layer, BatchNorm))


def test_one_line_turns_it_off(fused, monkeypatch):
    monkeypatch.setattr(oracle, "FUSED_SEARCH", False)
    searched(network(), "pgd")
    assert not fused


def test_a_network_that_is_trained_fused_is_evaluated_by_torch_and_trained_fused_again(fused):
    model, x = network(), images(4)[0]
    use_fused(model)
    marks = [layer.arrivals for layer in model.modules() if isinstance(layer, BatchNorm)]
    with evaluation_mode(model, 0, x.device):
        model(x)
        assert not fused
        with constant(model):
            model(x)
        assert len(fused) == len(marks)
    assert all(
        layer.arrivals is mark
        for layer, mark in zip((one for one in model.modules() if isinstance(one, BatchNorm)), marks, strict=True)
    )


def test_the_original_attacks_get_torch_s_operations(fused):
    model, x = network(), images(4)[0]
    with constant(model, channels_last=False):
        model(x)
    assert not fused
