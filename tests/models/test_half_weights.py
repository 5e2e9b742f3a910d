"""Half-precision copies of all weights at once: what autocast does layer by layer."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from elle.engine import step as step_module
from elle.models.half_weights import half_weights
from elle.models.weight_gradients import Beside
from tests.engine.steps import make_step, parameters, small_cnn, take


class Conversions(TorchDispatchMode):
    """How often a tensor of one of these shapes is converted by itself."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.found = shapes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += function is torch.ops.aten._to_copy.default and args[0].shape in self.shapes
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("method", "others"),
    [
        *((name, {}) for name in ("fgsm", "elle-a", "gradalign", "trades-single", "fast-bat", "free", "slat")),
        ("elle-a", {"accumulate": 2}),
    ],
)
def test_a_step_is_the_one_that_autocast_makes(monkeypatch, method, others):
    trained = []
    for copies in (half_weights, lambda *given, **others: contextlib.nullcontext(contextlib.nullcontext)):
        monkeypatch.setattr(step_module, "half_weights", copies)
        step = make_step(method, network=small_cnn, precision="fp16", **others)
        start = parameters(step)
        take(step, 0, 1, 2)
        trained.append([*parameters(step), step.records.nan_to_num()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    assert not torch.equal(trained[0][0], start[0])


def test_no_weight_is_converted_by_itself():
    step = make_step("elle-a", network=small_cnn, precision="fp16")
    with Conversions([one.shape for one in step.model.parameters() if one.dim() > 1]) as conversions:
        take(step, 0)
    assert conversions.found == 0


def test_parameters_are_hidden_not_replaced_and_come_back():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2, bias=False))
    names, own = [name for name, _ in model.named_parameters()], list(model.parameters())
    with contextlib.suppress(ZeroDivisionError), half_weights(model):
        assert model[0].weight.dtype is model[0].bias.dtype is model[3].weight.dtype is torch.float16
        assert model[1].weight.dtype is torch.float32
        assert [name for name, _ in model.named_parameters()] == names
        assert all(value.dtype is torch.float32 for value in model.state_dict().values() if value.is_floating_point())
        raise ZeroDivisionError  # as an error within a step
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))
    assert model[0].weight is own[0]


def test_what_is_derived_from_a_layer_keeps_its_weights():
    class Standardised(nn.Conv2d):
        """Its weights' mean and deviation would suffer in half precision."""

    layer = Standardised(3, 4, 3)
    with half_weights(nn.Sequential(layer)):
        assert layer.weight.dtype is torch.float32


def test_a_layer_without_a_part_in_the_loss_has_no_gradient():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with half_weights(model):
        model[0](torch.ones(1, 2, dtype=torch.float16)).sum().backward()
    assert model[0].weight.grad.dtype is torch.float32
    assert model[1].weight.grad is None


class Additions(Conversions):
    """How often two tensors of one of these shapes are added up by themselves."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        adds = function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        self.found += adds and args[0].shape in self.shapes
        return function(*args, **(kwargs or {}))


def test_gradients_of_two_chains_are_added_up_together():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 2), nn.Linear(2, 2))
    x = torch.randn(2, 6, 3, 4, 4).half()
    found = []
    for chains in (1, 2):
        model.zero_grad()
        with half_weights(model, chains) as second:
            loss = model(x[0]).float().square().sum()
            with second():
                # The last layer has no part in the second chain.
                loss = loss + model[:4](x[1]).float().sum() * 3
        with Additions([one.shape for one in model.parameters()]) as additions:
            loss.backward()
        found.append([one.grad for one in model.parameters()])
        assert (additions.found == 0) == (chains == 2)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_parameters_come_back_after_two_chains():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    own = list(model.parameters())
    with half_weights(model, 2) as second:
        first = model[0].weight, model[1].weight
        with contextlib.suppress(ZeroDivisionError), second():
            assert all(layer.weight is not one for layer, one in zip(model, first, strict=True))
            assert all(torch.equal(layer.weight, one) for layer, one in zip(model, first, strict=True))
            raise ZeroDivisionError
        assert all(layer.weight is one for layer, one in zip(model, first, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), own, strict=True))
    assert "_conv_forward" not in vars(model[0])
    assert model[0].weight is own[0]


def test_gradients_come_in_the_type_that_a_weight_wants():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    x = torch.randn(5, 3).half()
    with half_weights(model):
        model(x).float().square().sum().backward()
    plain = [one.grad for one in model.parameters()]
    model.zero_grad()
    model[0].weight.grad_dtype = torch.float16
    with half_weights(model):
        model(x).float().square().sum().backward()
    assert [one.grad.dtype for one in model.parameters()] == [torch.float16, *3 * [torch.float32]]
    assert all(torch.equal(one.grad.float(), other) for one, other in zip(model.parameters(), plain, strict=True))


def replaced(layer):
    layer.forward = lambda x: nn.functional.conv2d(x, layer.weight * 2)
    return layer


@pytest.mark.parametrize(
    "changed",
    [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm, replaced,
     lambda layer: prune.l1_unstructured(layer, "weight", 0.5)],
    ids=["weight_norm", "spectral_norm", "parametrized", "replaced", "pruned"],
)  # fmt: skip
def test_a_layer_whose_weights_are_made_of_others_is_left_to_autocast(monkeypatch, changed):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(changed(nn.Conv2d(1, 4, 3, bias=False)), nn.Flatten(), nn.Linear(4 * 36, 10))

    trained = []
    for copies in (half_weights, lambda *given, **others: contextlib.nullcontext(contextlib.nullcontext)):
        monkeypatch.setattr(step_module, "half_weights", copies)
        step = make_step("elle-a", network=network, precision="fp16")
        start, names = parameters(step), set(vars(step.model[0]))
        take(step, 0, 1)
        assert set(vars(step.model[0])) == names
        trained.append([*parameters(step), step.records.nan_to_num()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    assert not torch.equal(trained[0][0], start[0])


class WholeHead(nn.Module):
    """The last layers leave autocast, as heads do that must not be rounded."""

    def __init__(self):
        super().__init__()
        self.body, self.mix = nn.Conv2d(1, 8, 3, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(input=self.mix(x.float()).flatten(1))


def test_layers_for_which_autocast_is_off_keep_their_weights(monkeypatch):
    trained = []
    for copies in (half_weights, lambda *given, **others: contextlib.nullcontext(contextlib.nullcontext)):
        monkeypatch.setattr(step_module, "half_weights", copies)
        step = make_step("elle-a", network=WholeHead, precision="fp16")
        take(step, 0, 1)
        trained.append([*parameters(step), step.records.nan_to_num()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_a_call_with_other_parameters_is_computed_by_those():
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 4), torch.randn(2, 3)
    others = {name: value.detach() * 2 for name, value in layer.named_parameters()}
    with torch.autocast("cpu", torch.float16):
        expected = torch.func.functional_call(layer, others, x)
        with half_weights(layer):
            assert torch.equal(torch.func.functional_call(layer, others, x), expected)
            assert not torch.equal(layer(x), expected)


def test_a_convolution_by_other_weights_is_torchs():
    layer = nn.Conv2d(3, 4, 3, bias=False)
    x, other = torch.randn(2, 3, 6, 6).half(), torch.randn(4, 3, 3, 3).half().requires_grad_()
    with half_weights(layer):
        y = layer._conv_forward(x, other, None)
        y.float().sum().backward()
    assert torch.equal(y, nn.functional.conv2d(x, other))
    assert other.grad is not None
    assert layer.weight.grad is None


def test_what_is_found_beside_is_added_to_what_a_weight_has_from_elsewhere(monkeypatch):
    """Autograd must not add it up: it is not finished until the copies' own backward has waited for it."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3, bias=False)
    x = torch.randn(2, 3, 6, 6).half()

    def gradient():
        layer.weight.grad = None
        with half_weights(layer):
            (layer(x).float().sum() + layer(2 * x).float().square().sum() + layer.weight.float().sum()).backward()
        return layer.weight.grad

    expected = gradient()

    def start(self, weight, work, *read):
        found = work()
        self.found[weight.data_ptr()] = self.found.get(weight.data_ptr(), 0) + found

    monkeypatch.setattr(Beside, "start", start)
    torch.testing.assert_close(gradient(), expected, rtol=2e-3, atol=1e-3)


def test_the_copies_stay_until_the_backward_has_ended(monkeypatch):
    """Streams beside each other read them, and none knows when the others have."""
    step = make_step("fgsm", network=small_cnn, precision="fp16")
    whole, seen = step._backward, []

    def backward(total, keep=False):
        whole(total, keep)
        seen.append([one.weight.dtype for one in step.model.modules() if isinstance(one, nn.Linear)])

    monkeypatch.setattr(step, "_backward", backward)
    take(step, 0)
    assert seen
    assert all(dtype is torch.float16 for layers in seen for dtype in layers)


class CompiledByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = small_cnn()

    @torch.compile(backend="eager")
    def forward(self, x):
        return self.inner(x)


def compiled_in_place():
    network = small_cnn()
    network.compile(backend="eager")
    return network


def compiled_forward():
    network = small_cnn()
    network.forward = torch.compile(network.forward, backend="eager")
    return network


@pytest.mark.parametrize(
    "network",
    [lambda: torch.compile(small_cnn(), backend="eager"), compiled_in_place, CompiledByItself, compiled_forward],
    ids=["wrapped", "in place", "by itself", "its forward"],
)
def test_a_compiled_network_keeps_its_weights_and_is_not_compiled_anew_in_every_step(network):
    torch._dynamo.reset()  # of what has been compiled before there might be too much for more
    plain = make_step("elle-a", network=small_cnn, precision="fp16")
    take(plain, 0, 1, 2)
    step = make_step("elle-a", network=network, precision="fp16")
    assert step.compiled
    take(step, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        take(step, 1, 2)
    for one, other in zip(parameters(plain), parameters(step), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)
