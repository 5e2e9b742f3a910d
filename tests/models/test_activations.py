"""The activation and the normalising first layer: what they change, and that saved weights carry them."""

from typing import get_args

import pytest
import torch
from torch import nn

from elle.config import Config
from elle.errors import InputError
from elle.models.registry import ACTIVATIONS, MODELS, build_model

MEAN, STD = (0.5, 0.25, 0.125), (0.25, 0.5, 0.125)
SHAPE = (3, 8, 8)


def test_the_configuration_knows_every_activation():
    assert get_args(Config.model_fields["activation"].annotation) == tuple(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_network_has_one_kind_of_activation(name, activation):
    with torch.device("meta"):
        model = MODELS[name].build(SHAPE, 10, ACTIVATIONS[activation])
    kinds = {type(module) for module in model.modules()} & set(ACTIVATIONS.values())
    assert kinds == {ACTIVATIONS[activation]}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_changes_the_function_and_not_the_weights(activation):
    models = []
    for one in ("relu", activation):
        torch.manual_seed(0)
        models.append(build_model("small-cnn", SHAPE, 10, activation=one).eval())
    plain, other = models
    assert plain.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(mine, other.state_dict()[name]) for name, mine in plain.state_dict().items())
    x = torch.rand(2, *SHAPE)
    assert torch.equal(plain(x), other(x)) == (activation == "relu")


@pytest.mark.parametrize(
    ("activation", "smooth"), [("relu", False), ("silu", True), ("softplus", True), ("gelu", True)]
)
def test_only_smooth_activations_have_curvature(activation, smooth):
    """Of a random direction's second derivative: 0 almost everywhere in a piecewise linear network."""
    torch.manual_seed(0)
    model = build_model("small-cnn", SHAPE, 10, activation=activation).double().eval()
    x, direction = torch.rand(2, *SHAPE, dtype=torch.double, requires_grad=True), torch.randn(2, *SHAPE).double()
    slope = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)[0]
    curvature = torch.autograd.grad((slope * direction).sum(), x, allow_unused=True, materialize_grads=True)[0]
    assert bool(curvature.abs().max() > 1e-9) == smooth


@pytest.mark.parametrize("name", ["small-cnn", "preact-resnet18"])
def test_normalisation_is_a_first_layer(name):
    torch.manual_seed(0)
    bare = build_model(name, SHAPE, 10).eval()
    torch.manual_seed(0)
    model = build_model(name, SHAPE, 10, normalise=(MEAN, STD)).eval()
    x = torch.rand(4, *SHAPE)
    by_hand = torch.stack([(x[:, k] - MEAN[k]) / STD[k] for k in range(3)], 1)
    torch.testing.assert_close(model(x), bare(by_hand))
    assert [f"network.{key}" for key in bare.state_dict()] == list(model.state_dict())[2:]


def test_normalisation_is_saved_with_the_weights_and_is_not_trained():
    model = build_model("small-cnn", SHAPE, 10, normalise=(MEAN, STD))
    assert not any(name.startswith("normalise") for name, _ in model.named_parameters())
    other = build_model("small-cnn", SHAPE, 10, normalise=((0.0,) * 3, (1.0,) * 3))
    other.load_state_dict(model.state_dict())
    x = torch.rand(2, *SHAPE)
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_normalisation_keeps_the_memory_layout():
    model = build_model("small-cnn", SHAPE, 10, normalise=(MEAN, STD)).to(memory_format=torch.channels_last)
    x = torch.rand(2, *SHAPE).contiguous(memory_format=torch.channels_last)
    assert model.normalise(x).is_contiguous(memory_format=torch.channels_last)


def test_another_s_network_is_normalised_but_keeps_its_activation(tmp_path, monkeypatch):
    network = "nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))"
    source = f"from torch import nn\ndef tiny(num_classes):\n    return {network}\n"
    (tmp_path / "theirs_networks.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    model = build_model("theirs_networks:tiny", SHAPE, 5, normalise=(MEAN, STD))
    assert isinstance(model.network, nn.Sequential)
    with pytest.raises(InputError, match="activation=silu is for the rows of `elle models`; theirs_networks:tiny has"):
        build_model("theirs_networks:tiny", SHAPE, 5, activation="silu")


def test_an_unknown_activation_is_refused_with_the_choices():
    with pytest.raises(InputError, match="activation 'tanh' does not exist; choose from relu, silu, softplus, gelu"):
        build_model("small-cnn", SHAPE, 10, activation="tanh")
