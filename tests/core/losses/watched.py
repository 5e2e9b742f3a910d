"""A network that is watched, images for it, and its loss as a function of flat parameters."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

EPS = 16 / 255


def when(steps=0, share=0.0):
    return torch.tensor(steps), torch.tensor(share)


class Watched(nn.Module):
    """A network that writes down the points it is given."""

    def __init__(self, network):
        super().__init__()
        self.network, self.seen = network, []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return self.network(x)


def flat_images(count=6, inputs=12):
    """Images away from 0 and 1, so that the ball alone bounds a step."""
    x = 0.3 + 0.4 * torch.rand(count, inputs, generator=torch.Generator().manual_seed(5))
    return x, torch.arange(count) % 4


def image_losses(network, parameters, x, y):
    return F.cross_entropy(functional_call(network, parameters, (x,)), y, reduction="none")


def unflattened(network, flat):
    sizes = [parameter.numel() for parameter in network.parameters()]
    parts = zip(network.named_parameters(), flat.split(sizes), strict=True)
    return {name: part.view(parameter.shape) for (name, parameter), part in parts}


def flattened(network):
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
