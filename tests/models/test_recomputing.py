"""Blocks that are computed anew: the plain gradients and statistics, whatever a user has made of the network."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.core.second_order import twice_differentiable
from elle.errors import InputError
from elle.models.recomputing import blocks_to_recompute, recomputed
from elle.models.residual import PreActResNet, ResNet

SHAPE = (3, 8, 8)


class Block(nn.Module):
    """A user's own."""

    def __init__(self, norm=nn.BatchNorm2d, width=8):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm = norm(width)

    def forward(self, x):
        return x + self.second(F.relu(self.norm(self.first(x))))


def own(*blocks):
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(*blocks), *head)


def with_instance_norm():
    return own(Block(lambda width: nn.InstanceNorm2d(width, track_running_stats=True)), Block())


def pre_activation(kind=PreActResNet):
    return kind(SHAPE, 10, nn.ReLU, blocks=(1, 1, 1, 1), stem_width=8, widths=(8, 16, 32, 64))


def post_activation():
    return ResNet(SHAPE, 10, nn.ReLU, blocks=(1, 1, 1, 1))


def with_a_forward_of_its_own():
    model = pre_activation()
    block = model.blocks[0]
    whole = block.forward
    block.forward = lambda x: 2 * whole(x)
    return model


def with_hooks_on_the_first_block():
    model = pre_activation()
    model.blocks[0].register_forward_pre_hook(lambda block, given: (given[0].square(),))
    model.blocks[0].register_full_backward_hook(lambda block, inward, outward: (2 * inward[0],))
    return model


def with_a_hook_on_the_first_stage():
    model = post_activation()
    model.layer1.register_forward_pre_hook(lambda stage, given: (given[0].square(),))
    return model


class ReadsTheStemTwice(PreActResNet):
    def forward(self, x):
        stem = self.stem(x)
        features = self.bn(self.blocks(stem)).mean((2, 3))
        return self.linear(features) + stem.mean((1, 2, 3)).unsqueeze(1) * torch.arange(10.0)


def with_batch_norm_in_the_stem():
    model = pre_activation()
    model.conv = nn.Sequential(model.conv, nn.BatchNorm2d(8))
    return model


def with_blocks_of_others():
    model = pre_activation()
    model.blocks = nn.Sequential(Block(), Block(), nn.Conv2d(8, 64, 1))
    return model


def with_a_wrapped_convolution():
    model = pre_activation()
    model.blocks[1].conv1 = nn.Sequential(model.blocks[1].conv1)
    return model


def of_nested_sequentials():
    parts = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(3 * SHAPE[1] * SHAPE[2], 10))


class Dense(nn.Module):
    """Its blocks are given the list of all features so far, which grows behind them, or by themselves."""

    def __init__(self, appends):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(SumsUp(appends) for _ in range(3))

    def forward(self, x):
        features = [self.stem(x)]
        for block in self.blocks:
            found = block(features=features)
            if not block.appends:
                features.append(found)
        return self.head(features[-1].mean((2, 3)))


class SumsUp(Block):
    def __init__(self, appends):
        super().__init__()
        self.appends = appends

    def forward(self, features):
        found = super().forward(sum(features))
        if self.appends:
            features.append(found)
        return found


def after_two_passes(network, low):
    torch.manual_seed(0)
    model, x = network().train(), torch.rand(4, *SHAPE)
    for _ in range(2):
        with recomputed(model, blocks_to_recompute(model)) if low else contextlib.nullcontext():
            loss = F.cross_entropy(model(x), torch.arange(4))
        loss.backward()
    return [one.grad for one in model.parameters()], dict(model.named_buffers())


@pytest.mark.parametrize(
    "network",
    [
        with_instance_norm,
        with_a_forward_of_its_own,
        with_hooks_on_the_first_block,
        with_a_hook_on_the_first_stage,
        lambda: pre_activation(ReadsTheStemTwice),
        with_batch_norm_in_the_stem,
        with_blocks_of_others,
        with_a_wrapped_convolution,
        of_nested_sequentials,
        lambda: Dense(appends=False),
        lambda: Dense(appends=True),
    ],
)
def test_gradients_and_statistics_are_the_plain_ones(network):
    torch.testing.assert_close(after_two_passes(network, low=True), after_two_passes(network, low=False))


@pytest.mark.parametrize("network", [pre_activation, lambda: Dense(appends=True)])
def test_a_graph_that_is_kept_may_be_gone_through_again(network):
    model = network().train()
    with recomputed(model, blocks_to_recompute(model)):
        loss = model(torch.rand(4, *SHAPE)).square().sum()
    first, second = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(second, first)


def test_a_backward_outside_of_what_replaces_layers_enters_it_anew():
    gradients = []
    for low in (True, False):
        torch.manual_seed(0)
        model, x = pre_activation().train(), torch.rand(4, *SHAPE)
        again = recomputed(model, blocks_to_recompute(model)) if low else contextlib.nullcontext()
        with twice_differentiable(), again:
            loss = model(x).square().sum()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*gradients)


def test_the_mode_is_that_of_the_forward():
    model = pre_activation().train()
    with recomputed(model, blocks_to_recompute(model)):
        loss = model(torch.rand(4, *SHAPE)).square().sum()
    model.eval()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss.backward()
    assert not any(module.training for module in model.modules())
    torch.testing.assert_close(dict(model.named_buffers()), expected, rtol=0, atol=0)


class Drops(Block):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.1, self.training))


class ChangesItsInput(Block):
    def forward(self, x):
        return super().forward(F.relu(x, inplace=True))


class KeepsNothingOfItsInput(Block):
    """Without memory=low, its input may be changed behind it."""

    def forward(self, x):
        return self.first(F.relu(x))


class HasItChanged(nn.Sequential):
    def forward(self, x):
        for block in self:
            x += block(x)
        return x


class PowerIteration(Block):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.first)


class Attends(Block):
    """Without dropout, although torch's attention is said to draw numbers."""

    def forward(self, x):
        y = super().forward(x).flatten(2).unsqueeze(1)
        return x + F.scaled_dot_product_attention(y, y, y).view(x.shape)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Drops, "bernoulli_.float of this network draws anew each time"),
        (PowerIteration, "1.0.first.parametrizations.weight.0._[uv] of this network changes each time"),
        (ChangesItsInput, "that of 1.0 is changed in place"),
        (lambda: HasItChanged(KeepsNothingOfItsInput()), "that of 1.0.0 is changed in place"),
        (lambda: torch.jit.script(Block()), "cannot compute parts of TorchScript anew"),
    ],
    ids=["draws", "state", "in-place", "in-place-behind", "script"],
)
def test_a_block_that_cannot_be_computed_twice_is_refused(block, message):
    with pytest.raises(InputError, match=message):
        after_two_passes(lambda: own(block(), Block()), low=True)


def test_attention_without_dropout_is_not():
    passes = (after_two_passes(lambda: own(Attends(), Block()), low=low) for low in (True, False))
    torch.testing.assert_close(*passes)


class Excitation(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1))

    def forward(self, x):
        return x * self.layers(x).sigmoid()


class Excited(nn.Module):
    """As EfficientNet's: its parts are members of a Sequential, and one of them has several layers."""

    def __init__(self):
        super().__init__()
        self.parts = nn.Sequential(
            nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.SiLU(), Excitation(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        )

    def forward(self, x):
        return x + self.parts(x)


def test_a_block_is_taken_whole_where_little_of_it_is_in_a_block_within():
    model = own(Excited(), nn.Sequential(Excited(), Block()))
    first, second = model[1]
    assert blocks_to_recompute(model) == [first, *second]


def test_not_so_most_of_a_network():
    model = nn.Sequential(nn.Identity(), Excited())
    assert blocks_to_recompute(model) == [model[1].parts[3]]


class Inverted(nn.Module):
    """As MobileNet's: its parts are Sequentials of a convolution and a BatchNorm."""

    def __init__(self):
        super().__init__()
        part = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.parts = nn.Sequential(part, nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x):
        return x + self.parts(x)


def test_a_sequential_of_bare_layers_is_a_block_unless_it_is_part_of_one():
    model = of_nested_sequentials()
    assert blocks_to_recompute(model) == list(model[:3])
    model = own(Inverted(), Inverted())
    assert blocks_to_recompute(model) == list(model[1])


def test_a_block_with_two_names_is_one():
    block = Block()
    assert blocks_to_recompute(own(block, nn.Sequential(block))) == [block]
