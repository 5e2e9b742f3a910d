"""Networks of timm and torchvision by name, played by modules that answer as those packages do."""

import sys
import types

import pytest
import torch
from torch import nn

from elle.errors import InputError
from elle.models.registry import build_model


def linear(inputs, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


@pytest.fixture
def timm(monkeypatch):
    module = types.ModuleType("timm")

    def create_model(model_name, pretrained=False, *, num_classes, in_chans=3):
        if model_name != "vit_tiny":
            raise RuntimeError(f"Unknown model ({model_name})")
        return linear(in_chans * 64, num_classes)

    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)


@pytest.fixture
def torchvision(monkeypatch):
    module, models = types.ModuleType("torchvision"), types.ModuleType("torchvision.models")

    def get_model(name, **config):
        if name != "convnext_tiny":
            raise ValueError(f"Unknown model {name}")
        return linear(3 * 64, config["num_classes"])

    module.models, models.get_model = models, get_model
    monkeypatch.setitem(sys.modules, "torchvision", module)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_timm_gets_the_channels_and_classes_of_the_data(timm, channels):
    model = build_model("timm:vit_tiny", (channels, 8, 8), 7)
    assert model(torch.rand(2, channels, 8, 8)).shape == (2, 7)


def test_a_network_of_torchvision_gets_the_classes_of_the_data(torchvision):
    assert build_model("torchvision:convnext_tiny", (3, 8, 8), 7)(torch.rand(2, 3, 8, 8)).shape == (2, 7)


def test_a_network_that_takes_other_images_is_refused(torchvision):
    with pytest.raises(InputError, match=r"model=torchvision:convnext_tiny does not take images of shape \(1, 8, 8\)"):
        build_model("torchvision:convnext_tiny", (1, 8, 8), 7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "timm:vit_huge",
            r"Unknown model \(vit_huge\) \(it is called as create_model\('vit_huge', num_classes=7, in_ch",
        ),
        ("torchvision:vgg", r"Unknown model vgg \(it is called as get_model\('vgg', num_classes=7\)\)"),
    ],
)
def test_a_name_the_package_does_not_know_is_refused_in_its_words(timm, torchvision, name, message):
    with pytest.raises(InputError, match=f"model={name} could not be built: {message}"):
        build_model(name, (3, 8, 8), 7)


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, package):
    class Missing:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(InputError, match=f"model={package}:net needs the package {package}: pip install {package}"):
        build_model(f"{package}:net", (3, 8, 8), 7)
