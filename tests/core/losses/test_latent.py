"""SLAT: which activations are moved, how far, and the network that is left."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.core.losses import LatentStep
from elle.models.registry import build_model
from tests.networks import conv_net, gradient, images, relative_distance, smooth_net

from .watched import EPS, when


def latent_pass(loss, network, x, y, place):
    """What goes into module `place` + 1 in the last forward, and the output of `place` that it was made of."""
    outputs, inputs, images_in = [], [], []
    handles = [
        network[place].register_forward_hook(lambda module, arguments, output: outputs.append(output.detach())),
        network[place + 1].register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0].detach())),
        network[0].register_forward_pre_hook(lambda module, arguments: images_in.append(arguments[0].detach())),
    ]
    loss(network, x, y, x, EPS, when())
    for handle in handles:
        handle.remove()
    return outputs[-1], inputs[-1], images_in[-1]


def channel_range(values):
    return values.amin((2, 3), keepdim=True), values.amax((2, 3), keepdim=True)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_latent_step_moves_an_activation_along_the_sign_of_its_gradient_inside_its_range(place):
    network, (x, y) = conv_net(), images(8)
    output, moved, points = latent_pass(LatentStep(latent=1, bounded=True, layers=str(place)), network, x, y, place)
    leaf = x.clone().requires_grad_()
    hidden = network[: place + 1](leaf)
    loss = F.cross_entropy(network[place + 1 :](hidden), y)
    of_image, of_hidden = torch.autograd.grad(loss, [leaf, hidden])
    torch.testing.assert_close(points, (x + 0.9 * EPS * of_image.sign()).clamp(*channel_range(x)))
    expected = (output + EPS * of_hidden.sign()).clamp(*channel_range(output))
    torch.testing.assert_close(moved, expected)
    whole = ((moved - output).abs() - EPS).abs() < 1e-5
    assert 0.3 < whole.float().mean() < 1  # most go all the way, some are held by the range


def test_a_bounded_latent_step_is_a_constant_for_the_weights():
    network, (x, y) = conv_net(), images(8)
    loss = LatentStep(latent=1, bounded=True, layers="0")
    output, moved, points = latent_pass(loss, network, x, y, 0)
    loss(network, x, y, x, EPS, when())[0].backward()
    found = gradient(network)
    network.zero_grad()
    F.cross_entropy(network[1:](network[0](points) + (moved - output)), y).backward()
    assert relative_distance(found, gradient(network)) < 1e-4


def test_unbounded_a_latent_step_is_whole_and_the_image_stays_in_the_pixel_range():
    """The form of the authors of SLAT, whose latent step is 1.8 eps."""
    network, (x, y) = conv_net(), images(8)
    x = (0.2 + 0.6 * x).clamp(max=0.99)
    loss = LatentStep(layers="0")
    output, moved, points = latent_pass(loss, network, x, y, 0)
    leaf = x.clone().requires_grad_()
    hidden = network[0](leaf)
    slopes = torch.autograd.grad(F.cross_entropy(network[1:](hidden), y), [leaf, hidden])
    torch.testing.assert_close(points, (x + 0.9 * EPS * slopes[0].sign()).clamp(0, 1))
    torch.testing.assert_close(moved, output + 1.8 * EPS * slopes[1].sign())
    loss(network, x.round(), y, x, EPS, when())[0].backward()
    _, _, points = latent_pass(loss, network, x.round(), y, 0)
    assert points.min() >= 0
    assert points.max() <= 1


def test_a_latent_step_of_a_linear_layer_has_no_range():
    network, (x, y) = smooth_net(64), images(8)
    output, moved, _ = latent_pass(LatentStep(latent=1, bounded=True, layers="1"), network, x, y, 1)
    torch.testing.assert_close((moved - output).abs(), torch.full_like(output, EPS), rtol=1e-4, atol=1e-6)


def test_without_steps_the_latent_loss_is_the_clean_one():
    network, (x, y) = conv_net(), images(8)
    loss, logits = LatentStep(alpha=0, latent=0)(network, x, y, x, EPS, when())
    torch.testing.assert_close(logits, network(x))
    torch.testing.assert_close(loss, F.cross_entropy(network(x), y))


def test_the_default_layers_are_the_first_convolution_and_the_first_stage():
    resnet = build_model("preact-resnet18", (3, 8, 8), 10)
    assert LatentStep().modules(resnet) == [resnet.conv, resnet.blocks[1]]  # two blocks a stage
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    assert LatentStep().modules(plain) == [plain[0], plain[2]]
    assert LatentStep().modules(conv_net())[0].in_channels == 1

    def block(stride=1):
        return nn.Sequential(nn.Conv2d(4, 4, 3, stride), nn.ReLU(), nn.Conv2d(4, 4, 3))

    stages = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(block(), block()), nn.Sequential(block(2), block()))
    assert LatentStep().modules(stages) == [stages[0], stages[1][1]]
    for stride in (1, 2):  # without a block that shrinks, the first one
        blocks = nn.Sequential(nn.Conv2d(1, 4, 3), block(), block(stride))
        assert LatentStep().modules(blocks) == [blocks[0], blocks[1]]


def test_a_layer_is_found_by_name_or_refused_by_name():
    network = conv_net()
    assert LatentStep(layers=" 2 ,0, 2").modules(network) == [network[2], network[0]]
    with pytest.raises(ValueError, match="has no layer 'conv9'; it has 0, 1"):
        LatentStep(layers="0,conv9").modules(network)
    with pytest.raises(ValueError, match="has no convolution"):
        LatentStep().modules(smooth_net())


def test_a_network_behind_a_normalising_layer_keeps_its_names_and_default_layers():
    resnet = build_model("preact-resnet18", (3, 8, 8), 10, normalise=([0.5] * 3, [0.2] * 3))
    conv, blocks = resnet.network.conv, resnet.network.blocks
    assert LatentStep(layers="conv,blocks.0").modules(resnet) == [conv, blocks[0]]  # as docs/methods.md has it
    assert LatentStep(layers="network.conv,network.blocks.0").modules(resnet) == [conv, blocks[0]]
    assert LatentStep().modules(resnet) == [conv, blocks[1]]
    with pytest.raises(ValueError, match="has no layer 'conv9'; it has normalise, network, conv, "):
        LatentStep(layers="conv9").modules(resnet)


def test_the_order_in_which_layers_are_named_does_not_matter():
    x, y = images(8)
    losses = [LatentStep(layers=layers)(conv_net(), x, y, x, EPS, when())[0] for layers in ("0,1,2", "2,0,1", "1,0,2")]
    assert losses[0] == losses[1] == losses[2]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.last = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(self.shared(self.shared(x).tanh()).tanh().flatten(1))


def test_a_layer_that_is_called_twice_is_moved_at_each_call():
    network, (x, y) = Twice(), images(8)
    leaf = x.clone().requires_grad_()
    first = network.shared(leaf)
    second = network.shared(first.tanh())
    slopes = torch.autograd.grad(F.cross_entropy(network.last(second.tanh().flatten(1)), y), [first, second])
    with torch.no_grad():
        hidden = x
        for slope in slopes:
            output = network.shared(hidden)
            hidden = (output + EPS * slope.sign()).clamp(*channel_range(output)).tanh()
        expected = network.last(hidden.flatten(1))
    _, logits = LatentStep(alpha=0, latent=1, bounded=True, layers="shared")(network, x, y, x, EPS, when())
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("fails_at", [1, 2, None])
def test_the_hooks_are_gone_afterwards_even_where_the_network_raises(fails_at):
    class Failing(nn.Identity):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls == fails_at:
                raise RuntimeError("no memory")
            return x

    network = nn.Sequential(*conv_net(), Failing())
    x, y = images(8)
    try:
        LatentStep(layers="0,1")(network, x, y, x, EPS, when())
        assert fails_at is None
    except RuntimeError:
        assert fails_at is not None
    assert not any(module._forward_hooks for module in network.modules())
