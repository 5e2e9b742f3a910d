"""A search sees the weights in half precision; what counts is computed with the weights themselves."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elle.core.linearity import cross_entropy
from elle.evaluation.autoattack import Budget, search
from elle.evaluation.autoattack.oracle import Oracle, constant
from elle.models.residual import PreActResNet
from tests.networks import images

CPU = torch.device("cpu")


class Conversions(TorchDispatchMode):
    """How often a weight, or a tensor of its shape, is converted by itself."""

    def __init__(self, model):
        super().__init__()
        self.shapes, self.found = {one.shape for one in model.parameters() if one.dim() > 1}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += function is torch.ops.aten._to_copy.default and args[0].shape in self.shapes
        return function(*args, **(kwargs or {}))


class Cosines(nn.Module):
    """Reads its last layer's weights past the layer, in whatever precision it is asked."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
        self.classes = nn.Linear(4 * 36, 4, bias=False)

    def forward(self, x):
        return 30 * F.normalize(self.features(x)) @ F.normalize(self.classes.weight).T


def network():
    torch.manual_seed(0)
    return PreActResNet((1, 8, 8), 4, nn.ReLU, blocks=(1, 1), stem_width=4, widths=(4, 8)).eval()


def asked(oracle, x, y):
    """Logits alone, and the logits and the gradient of an ascent."""
    with constant(oracle.model):
        answer = oracle.ascend(x, lambda logits: cross_entropy(logits, y))
        return oracle.logits(x), answer.logits, answer.gradient


def test_half_precision_weights_are_made_together_and_change_no_answer():
    model, (x, y) = network(), images(4)
    together = Oracle(model, CPU, "fp16")
    one_by_one = Oracle(model, CPU, "fp16")
    one_by_one._lowers = False
    with Conversions(model) as conversions:
        found = asked(together, x, y)
    assert conversions.found == 0
    with Conversions(model) as conversions:
        expected = asked(one_by_one, x, y)
    assert conversions.found > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not any({"weight", "forward"} & vars(layer).keys() for layer in model.modules())


def test_an_exact_answer_sees_the_weights_themselves(monkeypatch):
    model, (x, y) = Cosines().eval(), images(8)
    answered, exact = [], Oracle.exact

    def noted(oracle, x, *rest):
        answered.append((x, exact(oracle, x, *rest)))
        return answered[-1][1]

    monkeypatch.setattr(Oracle, "exact", noted)
    y = model(x).argmax(1)
    x_adv = search("apgd-ce", model, x, y, 0.3, classes=4, seed=0, precision="fp16", budget=Budget(steps=5))
    assert (model(x_adv).argmax(1) != y).any()
    assert answered
    for points, logits in answered:
        assert torch.equal(logits, model(points))


@pytest.mark.parametrize("of_all", [True, False])
def test_weights_that_a_compiler_has_seen_stay_what_they_are(of_all):
    model = network()
    assert Oracle(model, CPU, "fp16")._lowers
    if of_all:
        model.compile(backend="eager")
    else:
        model = nn.Sequential(torch.compile(model, backend="eager"))
    assert not Oracle(model, CPU, "fp16")._lowers
    assert not Oracle(network(), CPU, "fp16", compiled_for=4)._lowers
    assert not Oracle(network(), CPU, "fp32")._lowers
