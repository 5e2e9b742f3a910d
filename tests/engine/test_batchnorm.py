"""The BatchNorm of many ranks is torch's own where there is one: values, gradients, second gradients, statistics."""

import copy

import pytest
import torch
from torch import nn

from elle.engine.batchnorm import RanksBatchNorm, running_statistics, synchronise
from elle.engine.ranks import ALONE
from elle.errors import InputError

LAYERS = {
    "images": (lambda: nn.BatchNorm2d(3), (8, 3, 5, 5)),
    "vectors": (lambda: nn.BatchNorm1d(3), (16, 3)),
    "not affine": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 4, 4)),
    "all batches alike": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 4, 4)),
    "no statistics kept": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 4, 4)),
}


def differentiated_twice(layer, x):
    """The output of two batches, and the gradients of a penalty on an input gradient."""
    parameters = list(layer.parameters())
    with torch.no_grad():
        for k, parameter in enumerate(parameters):
            parameter.uniform_(0.5 + k, 1.5 + k, generator=torch.Generator().manual_seed(k))
    layer(x + 1)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    (slope,) = torch.autograd.grad(y.sin().sum(), leaf, create_graph=True)
    return [y, slope, *torch.autograd.grad((slope**2).sum() + y.cos().sum(), [leaf, *parameters])]


@pytest.mark.parametrize("name", LAYERS)
def test_on_one_rank_it_is_torchs_own(name):
    make, shape = LAYERS[name]
    x = 3 + 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    native = make()
    own = synchronise(copy.deepcopy(native), ALONE)
    assert isinstance(own, RanksBatchNorm)
    for mine, theirs in zip(differentiated_twice(own, x), differentiated_twice(native, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.state_dict(), native.state_dict())
    torch.testing.assert_close(own.eval()(x), native.eval()(x))


def test_every_layer_of_a_network_is_replaced_under_its_name():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sequential(nn.BatchNorm2d(2), nn.ReLU()))
    names, weight = list(network.state_dict()), network[1][0].weight
    assert len(running_statistics(network)) == 2
    synchronised = synchronise(network, ALONE)
    assert list(synchronised.state_dict()) == names
    assert synchronised[1][0].weight is weight
    assert running_statistics(synchronised) == []
    assert isinstance(copy.deepcopy(synchronised)[1][0], RanksBatchNorm)


def test_a_layer_with_two_names_is_replaced_under_both():
    network = nn.Module()
    network.first = network.second = nn.BatchNorm2d(2)
    synchronise(network, ALONE)
    assert isinstance(network.first, RanksBatchNorm)
    assert isinstance(network.second, RanksBatchNorm)


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, x):
        return super().forward(x).relu()


def test_a_batchnorm_that_does_more_than_normalise_is_refused_instead_of_cut_short():
    with pytest.raises(InputError, match=r"sync_bn=true: .*WithActivation is a BatchNorm with a forward of its own"):
        synchronise(nn.Sequential(nn.Conv2d(1, 2, 3), WithActivation(2)), ALONE)


def test_the_statistics_that_an_instance_norm_keeps_are_of_all_ranks():
    network = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.InstanceNorm2d(2))
    assert running_statistics(network) == [network[0].running_mean, network[0].running_var]
