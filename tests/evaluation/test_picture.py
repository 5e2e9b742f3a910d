"""The picture shows what the attacks made, under the names of what the network sees."""

import numpy as np
import pytest
import torch
from PIL import Image

from elle.errors import InputError
from elle.evaluation.names import parse_attacks
from elle.evaluation.picture import CAPTION, GAP, MARGIN, RIGHT, TILE, WRONG, attacked_rows, draw
from tests.networks import conv_net, images, trained

EPS = 0.1


@pytest.fixture(scope="module")
def model():
    return trained(conv_net(3), *images(64, (3, 8, 8)), steps=15, lr=0.05)


@pytest.fixture(scope="module")
def data():
    x, y = images(40, (3, 8, 8), seed=1)
    return (x * 255).to(torch.uint8).numpy(), y.numpy()


def rows(model, data, count=5):
    return attacked_rows(model, *data, parse_attacks("fgsm,pgd-50"), EPS, count=count)


def test_the_rows_are_correct_images_and_points_inside_the_ball(model, data):
    original, single, multi = rows(model, data)
    assert [row.name for row in (original, single, multi)] == ["original", "fgsm", "pgd-50"]
    assert original.predicted == original.y
    for row in (single, multi):
        assert torch.equal(row.x - original.x, row.delta)
        assert row.delta.abs().max() <= EPS + 1e-6
    assert multi.predicted != multi.y, "PGD breaks nothing: the test shows nothing"


def test_sorted_images_are_shown_from_every_class():
    def class_of(x):
        """Class 0 for dark images, 1 for bright ones."""
        level = x.mean((1, 2, 3))
        return torch.stack([0.5 - level, level - 0.5], 1)

    x = np.concatenate([np.zeros((50, 3, 4, 4), np.uint8), np.full((50, 3, 4, 4), 255, np.uint8)])
    y = np.repeat(np.arange(2), 50)
    network = torch.nn.Module()
    network.forward = class_of
    (original,) = attacked_rows(network, x, y, [], 0.1, count=4)
    assert original.y == [0, 0, 1, 1]


def test_the_png_has_a_tile_for_each_image_and_perturbation(model, data, tmp_path):
    drawn = rows(model, data)
    draw(drawn, EPS, ["cat", "dog", "a very long name of a class", "deer"], tmp_path / "new" / "picture.png")
    picture = np.asarray(Image.open(tmp_path / "new" / "picture.png"))
    height = 3 * (TILE + GAP + CAPTION) + 2 * (TILE + GAP) + GAP
    assert picture.shape == (height, MARGIN + 5 * (TILE + GAP), 3)
    tile = picture[GAP : GAP + TILE, MARGIN : MARGIN + TILE]
    first = (drawn[0].x[0] * 255).round().byte().permute(1, 2, 0).numpy()
    assert np.array_equal(tile[:: TILE // 8, :: TILE // 8], first)
    colours = {tuple(pixel) for pixel in picture.reshape(-1, 3).tolist()}
    assert {RIGHT, WRONG} <= colours


def test_a_name_that_the_font_has_no_letters_for_is_no_row_of_boxes(model, data, tmp_path):
    drawn = rows(model, data)
    draw(drawn, EPS, ["p\u00eache s\u00fc\u00df", "\u68a8", "chien", "cerf"], tmp_path / "given.png")
    draw(drawn, EPS, ["peche suss", "class 1", "chien", "cerf"], tmp_path / "legible.png")
    assert (tmp_path / "given.png").read_bytes() == (tmp_path / "legible.png").read_bytes()
    assert {0, 1} <= {k for row in drawn for k in row.predicted}, "they are not drawn: the test shows nothing"


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_largest_perturbation_of_a_row_is_black_or_white(model, data, norm, tmp_path):
    """By eps, an l2 perturbation, of which each pixel has a small part, would be plain grey."""
    drawn = attacked_rows(model, *data, parse_attacks("fgsm", norm), EPS, count=3)
    draw(drawn, EPS, ["a", "b", "c", "d"], tmp_path / "picture.png")
    top = GAP + 2 * (TILE + GAP + CAPTION)
    tiles = np.asarray(Image.open(tmp_path / "picture.png"))[top : top + TILE, MARGIN:]
    shown = np.stack([tiles[:: TILE // 8, k * (TILE + GAP) : k * (TILE + GAP) + TILE : TILE // 8] for k in range(3)])
    delta = drawn[1].delta.permute(0, 2, 3, 1).numpy()
    assert np.abs(shown / 255 - 0.5 - delta / (2 * np.abs(delta).max())).max() < 0.01


def test_a_network_that_is_never_right_cannot_be_shown(model, data):
    x, _ = data
    with pytest.raises(InputError, match="classifies no test image correctly"):
        attacked_rows(
            model, x[:4], (model.eval()(torch.tensor(x[:4]) / 255).argmax(1).numpy() + 1) % 4, [], EPS, count=2
        )


def test_an_image_whose_logits_are_no_number_is_wrong_and_of_no_class(tmp_path):
    """argmax takes NaN for the largest: such an image of class 0 would pass for one that withstands."""

    class Overflowing(torch.nn.Module):
        def forward(self, x):
            level = x.mean((1, 2, 3))
            logits = torch.stack([0.5 - level, level - 0.5], 1)
            return logits.masked_fill(level[:, None] != 0, torch.nan)

    dark = np.zeros((2, 3, 8, 8), np.uint8), np.zeros(2, np.int64)
    drawn = attacked_rows(Overflowing(), *dark, parse_attacks("fgsm"), EPS, count=2)
    assert [row.predicted for row in drawn] == [[0, 0], [None, None]]
    draw(drawn, EPS, ["dark", "bright"], tmp_path / "picture.png")
    second = TILE + GAP + CAPTION + GAP + TILE
    caption = np.asarray(Image.open(tmp_path / "picture.png"))[second : second + CAPTION, MARGIN:]
    colours = {tuple(pixel) for pixel in caption.reshape(-1, 3).tolist()}
    assert WRONG in colours
    assert RIGHT not in colours


def test_a_network_without_a_gradient_cannot_be_shown_under_attack(model, data):
    class Detached(torch.nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return model(x)

    with pytest.raises(InputError, match="fgsm finds no gradient of the network to follow: element 0"):
        attacked_rows(Detached(), *data, parse_attacks("fgsm"), EPS, count=2)
