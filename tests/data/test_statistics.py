"""Mean and standard deviation of the channels: exact, of any number of images, or as published."""

from dataclasses import replace

import numpy as np
import pytest

from elle.data.registry import DATASETS, dataset_statistics, load_dataset
from elle.data.sources import Split
from elle.data.statistics import channel_statistics


@pytest.mark.parametrize("count", [1, 7, 1024, 1025, 2100])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_statistics_are_numpy_s(count, channels):
    x = np.random.default_rng(0).integers(0, 256, (count, channels, 3, 4), dtype=np.uint8)
    x[:, 0] //= 2
    mean, std = channel_statistics(x)
    np.testing.assert_allclose(mean, (x / 255).mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, (x / 255).std((0, 2, 3)), rtol=1e-12)


def test_a_channel_of_one_value_is_left_in_its_scale():
    assert channel_statistics(np.full((5, 2, 3, 3), 51, dtype=np.uint8)) == ((0.2, 0.2), (1.0, 1.0))


def test_a_set_has_its_published_statistics_or_those_of_its_training_images(monkeypatch):
    train = load_dataset("digits").train
    assert dataset_statistics("digits", train) == channel_statistics(train.x)
    published = ((0.5,), (0.25,))
    monkeypatch.setitem(DATASETS, "digits", replace(DATASETS["digits"], statistics=published))
    assert dataset_statistics("digits", Split(train.x[:0], train.y[:0])) == published
