"""The parts of a batch draw what the whole batch draws, and leave the generator where the whole leaves it."""

import pytest
import torch

from elle.engine.draws import Draws

IMAGES = 6
KINDS = {
    "rand_like": lambda n: torch.rand_like(torch.empty(n, 3, 4, 4)),
    "channels last": lambda n: torch.rand_like(torch.empty(n, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
    "randn": lambda n: torch.randn((n, 5), dtype=torch.float64),
    "rand of numbers": lambda n: torch.rand(n, 1, 1),
    "rand by name": lambda n: torch.rand(size=(n,)),
    "randint": lambda n: torch.randint(9, (n,)),
    "randint from a bound": lambda n: torch.randint(3, 9, (n, 1), dtype=torch.int32),
}
"""Draws for n images."""


def drawn(images, kind, draws=None, part=None):
    torch.manual_seed(3)
    if draws is None:
        return [KINDS[kind](images), KINDS[kind](images)]
    with draws.whole(images) if part is None else draws.part(part, images):
        return [KINDS[kind](images), KINDS[kind](images)]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_draw_the_rows_of_the_whole(kind):
    ranks = [drawn(IMAGES // 3, kind, Draws(rank, 3)) for rank in range(3)]
    states = torch.get_rng_state()
    for whole, parts in zip(drawn(IMAGES, kind), zip(*ranks, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.get_rng_state(), states)


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_of_ranks_draw_the_rows_of_the_whole(kind):
    found = []
    for rank in range(2):
        draws = Draws(rank, 2, parts=3)
        torch.manual_seed(3)
        for part in range(3):
            with draws.part(part, 1):
                found.append([KINDS[kind](1), KINDS[kind](1)])
    for whole, parts in zip(drawn(IMAGES, kind), zip(*found, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_several_points_an_image_are_cut_within_each_block():
    torch.manual_seed(0)
    whole = torch.rand(2 * IMAGES, 4)  # two points for each image, all first ones before all second ones
    halves = []
    for rank in range(2):
        torch.manual_seed(0)
        with Draws(rank, 2).part(0, IMAGES // 2):
            halves.append(torch.rand(IMAGES, 4))
    first, second = (torch.cat([half.chunk(2)[k] for half in halves]) for k in range(2))
    assert torch.equal(torch.cat([first, second]), whole)


def test_one_number_for_the_batch_is_the_same_everywhere():
    seen = []
    for rank in range(2):
        torch.manual_seed(0)
        with Draws(rank, 2).part(0, 4):
            seen.append((torch.rand(()), torch.rand(1, 3)))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])


def test_alone_nothing_is_touched():
    assert [torch.equal(*pair) for pair in zip(drawn(4, "randn"), drawn(4, "randn", Draws(0, 1), 0), strict=True)] == [
        True,
        True,
    ]


@pytest.mark.parametrize("parts", [1, 2])
def test_one_image_of_several_that_is_drawn_for_has_numbers_of_its_own_in_every_part(parts):
    found = []
    for rank in range(2):
        draws = Draws(rank, 2, parts)
        torch.manual_seed(3)
        for part in range(parts):
            with draws.part(part, IMAGES, fewest=1):
                torch.rand(IMAGES, 4)  # the attack's, for every image
                found.append(torch.rand(1, 4))
    torch.manual_seed(3)
    torch.rand(2 * parts * IMAGES, 4)
    assert torch.equal(torch.cat(found), torch.rand(2 * parts, 4))
