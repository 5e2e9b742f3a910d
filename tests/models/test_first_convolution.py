"""Which convolutions the kernels of a network's first one are for; what they compute is tested beside this."""

import pytest
import torch
from torch import nn

from elle.models.first_convolution import suits, takes


def layer(channels=3, outputs=16, kernel=3, **settings):
    return nn.Conv2d(channels, outputs, kernel, bias=False, **{"padding": 1} | settings)


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (layer(), True),
        (layer(channels=4, outputs=128), True),
        (layer(channels=5), False),
        (layer(outputs=24), False),
        (layer(outputs=144), False),
        (layer(kernel=5, padding=2), False),
        (layer(padding=0), False),
        (layer(stride=2), False),
        (layer(dilation=2, padding=2), False),
        (layer(channels=4, groups=2), False),
    ],
)
def test_other_convolutions_are_left_to_torch(conv, expected):
    assert suits(conv) is expected


def test_on_a_cpu_all_are():
    conv = layer().half()
    assert not takes(conv, torch.zeros(1, 3, 8, 8), conv.weight)
