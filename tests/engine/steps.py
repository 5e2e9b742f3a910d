"""A step of a small network on random images, shared by the tests."""

import numpy as np
import torch
from torch import nn

from elle.data.resident import Resident
from elle.data.sources import Split
from elle.engine.step import Step
from elle.methods import configured
from elle.models.registry import build_model

SHAPE, CLASSES, COUNT = (1, 8, 8), 10, 48


def images(count=COUNT):
    stream = np.random.default_rng(0)
    return Split(stream.integers(0, 256, (count, *SHAPE), dtype=np.uint8), stream.integers(0, CLASSES, count))


def plain_network():
    """A network without BatchNorm, which would see the penalty's forwards in its statistics."""
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, CLASSES))


def make_step(
    method="fgsm", *, weight=None, precision="fp32", network=plain_network, momentum=0.9, seed=0, crop=0, **others
):
    torch.manual_seed(seed)
    step = Step(
        network().train(),
        configured(method, weight=weight),
        Resident(images(), "cpu", crop, flip=crop > 0),
        eps=0.1,
        momentum=momentum,
        weight_decay=5e-4,
        precision=precision,
        steps_per_epoch=6,
        total_steps=12,
        **others,
    )
    step.prepare(8, SHAPE)
    step.lr.fill_(0.1)
    return step


def take(step, *numbers):
    """Train on the batches with these numbers, 8 images each."""
    for number in numbers:
        step(torch.arange(8 * number, 8 * number + 8))


def small_cnn():
    return build_model("small-cnn", SHAPE, CLASSES)


def parameters(step):
    return [parameter.detach().clone() for parameter in step.model.parameters()]
