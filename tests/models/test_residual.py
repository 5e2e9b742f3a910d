"""Residual networks: their blocks written out, torchvision's names, the stem by image size, the initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.models.registry import ACTIVATIONS, MODELS, build_model
from elle.models.residual import PostActBlock, PreActBlock


def block_of(kind, width_in, stride, bottleneck, activation):
    """A block in eval mode whose BatchNorms do something."""
    torch.manual_seed(0)
    block = kind(width_in, 8, stride, bottleneck, ACTIVATIONS[activation]).eval()
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.bias, -1, 1)
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return block


PLANS = [
    # bottleneck, input width, stride of the block -> (stride, padding) of each convolution
    (False, 8, 1, [(1, 1), (1, 1)]),
    (False, 4, 2, [(2, 1), (1, 1)]),
    (True, 32, 1, [(1, 0), (1, 1), (1, 0)]),
    (True, 4, 2, [(1, 0), (2, 1), (1, 0)]),
]


@pytest.mark.parametrize(("bottleneck", "width_in", "stride", "plan"), PLANS)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_block_is_its_formula_written_out(bottleneck, width_in, stride, plan, activation):
    act = {"relu": F.relu, "silu": F.silu}[activation]
    block = block_of(PostActBlock, width_in, stride, bottleneck, activation)
    x = torch.randn(2, width_in, 6, 6)
    out = x
    for k, (step, padding) in enumerate(plan, 1):
        conv, bn = getattr(block, f"conv{k}"), getattr(block, f"bn{k}")
        out = bn(F.conv2d(out if k == 1 else act(out), conv.weight, stride=step, padding=padding))
    skip = x
    if stride == 2:
        skip = block.downsample[1](F.conv2d(x, block.downsample[0].weight, stride=2))
    assert (block.downsample is None) == (stride == 1)
    torch.testing.assert_close(block(x), act(out + skip))


@pytest.mark.parametrize(("bottleneck", "width_in", "stride", "plan"), PLANS)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_pre_activation_block_is_its_formula_written_out(bottleneck, width_in, stride, plan, activation):
    act = {"relu": F.relu, "silu": F.silu}[activation]
    block = block_of(PreActBlock, width_in, stride, bottleneck, activation)
    x = torch.randn(2, width_in, 6, 6)
    out = x
    for k, (step, padding) in enumerate(plan, 1):
        conv, bn = getattr(block, f"conv{k}"), getattr(block, f"bn{k}")
        out = F.conv2d(act(bn(out)), conv.weight, stride=step, padding=padding)
    skip = x if stride == 1 else F.conv2d(act(block.bn1(x)), block.shortcut.weight, stride=2)
    torch.testing.assert_close(block(x), out + skip)


def torchvision_names(blocks, convolutions, first_shortcut):
    """The state dict of torchvision's ResNets, by their documented scheme."""
    statistics = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    names = {"conv1.weight", "fc.weight", "fc.bias"} | {f"bn1.{one}" for one in statistics}
    for stage, count in enumerate(blocks, 1):
        for k in range(count):
            place = f"layer{stage}.{k}"
            for number in range(1, convolutions + 1):
                names |= {f"{place}.conv{number}.weight"} | {f"{place}.bn{number}.{one}" for one in statistics}
            if k == 0 and (stage > 1 or first_shortcut):
                names |= {f"{place}.downsample.0.weight"} | {f"{place}.downsample.1.{one}" for one in statistics}
    return names


@pytest.mark.parametrize(
    ("name", "blocks", "convolutions", "entries", "shapes"),
    [
        ("resnet18", (2, 2, 2, 2), 2, 122, {"layer4.1.conv2.weight": (512, 512, 3, 3)}),
        ("resnet34", (3, 4, 6, 3), 2, 218, {"layer3.0.downsample.0.weight": (256, 128, 1, 1)}),
        ("resnet50", (3, 4, 6, 3), 3, 320, {"layer1.0.downsample.0.weight": (256, 64, 1, 1),
                                            "layer4.2.conv3.weight": (2048, 512, 1, 1)}),
    ],
)  # fmt: skip
def test_a_resnet_has_torchvision_s_names_and_shapes(name, blocks, convolutions, entries, shapes):
    with torch.device("meta"):
        state = build_model(name, (3, 224, 224), 1000).state_dict()
    assert len(state) == entries
    assert set(state) == torchvision_names(blocks, convolutions, first_shortcut=convolutions == 3)
    shapes = shapes | {"conv1.weight": (64, 3, 7, 7), "fc.weight": (1000, 512 if convolutions == 2 else 2048)}
    assert {key: tuple(state[key].shape) for key in shapes} == shapes


@pytest.mark.parametrize("name", [name for name in MODELS if name != "small-cnn"])
@pytest.mark.parametrize(("size", "kernel", "features"), [(32, 3, 32), (64, 3, 64), (65, 7, 17), (224, 7, 56)])
def test_the_stem_keeps_small_images_whole_and_shrinks_large_ones_fourfold(name, size, kernel, features):
    with torch.device("meta"):
        model = MODELS[name].build((3, size, size), 10, nn.ReLU)
        x = torch.zeros(1, 3, size, size)
    convolution, pool = (model.conv, model.pool) if hasattr(model, "conv") else (model.conv1, model.maxpool)
    assert convolution.kernel_size == (kernel, kernel)
    assert pool(convolution(x)).shape[2:] == (features, features)


@pytest.mark.parametrize(("name", "he"), [("resnet18", True), ("preact-resnet18", False)])
def test_convolutions_are_drawn_as_their_papers_do(name, he):
    """He by outputs for ResNets (and WideResNets); torch's default, a third of the variance, for PreActResNets."""
    torch.manual_seed(0)
    layers = [m for m in build_model(name, (3, 8, 8), 10).modules() if isinstance(m, nn.Conv2d)]
    layer = next(one for one in layers if one.in_channels == one.out_channels == 512)
    fan = 512 * 9
    assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / fan) if he else math.sqrt(1 / (3 * fan)), rel=0.01)


def test_the_wide_network_is_drawn_as_he_and_computes():
    torch.manual_seed(0)
    model = build_model("wide-resnet-28-10", (3, 8, 8), 10)
    weight = model.blocks[-1].conv2.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (640 * 9)), rel=0.01)
    with torch.no_grad():
        assert model(torch.rand(2, 3, 8, 8)).isfinite().all()
