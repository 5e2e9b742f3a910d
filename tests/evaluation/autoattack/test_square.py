"""Square, query by query: its sizes and bumps are the original's, its moves those of the paper's formulas."""

import math
from itertools import product

import pytest
import torch
from pyautoattack.square import SquareAttack
from torch import Tensor

from elle.evaluation.autoattack.norms import inside
from elle.evaluation.autoattack.objectives import violation
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.autoattack.square import Square, SquareSlots
from elle.evaluation.autoattack.windows import Windows, two_bumps, window_plan
from tests.networks import Affine

CPU = torch.device("cpu")
EPS = {"linf": 0.05, "l2": 0.5, "l1": 2.0}
ORDER = {"l2": 2, "l1": 1}
COUNT, CHANNELS, SIDE = 6, 2, 10


def original(norm: str) -> SquareAttack:
    """As the original AutoAttack makes it."""
    return SquareAttack(None, norm=norm.capitalize(), p_init=0.8, resc_schedule=False, device="cpu")


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("size", [(32, 32), (8, 8), (6, 40), (2, 2)])
def test_the_windows_are_as_large_as_the_original_s_at_every_query(norm, size):
    sides = window_plan(9000, 1, size, norm, 0, CPU).side.tolist()
    attack = original(norm)
    for query, side in enumerate(sides):
        expected = max(round(math.sqrt(attack.p_selection(query) * size[0] * size[1])), 1 if norm == "linf" else 3)
        expected += norm != "linf" and expected % 2 == 0
        assert side == min(expected, *size), query


@pytest.mark.parametrize("norm", EPS)
def test_the_windows_are_everywhere_on_an_image_of_any_shape_but_in_the_last_row_and_column(norm):
    """The original draws from 0 to below the last place as well."""
    windows = window_plan(6000, 1, (9, 30), norm, 0, CPU)
    small = windows.side == windows.side.min()
    side = int(windows.side.min())
    for column, room in enumerate((9 - side, 30 - side) * 2):
        assert windows.corner[small, column].unique().tolist() == list(range(room))


@pytest.mark.parametrize("norm", ORDER)
@pytest.mark.parametrize("side", [2, 3, 4, 5, 9])
def test_a_pair_of_bumps_is_the_original_s(norm, side):
    expected = original(norm).eta(side)  # laid on its side at random
    found = two_bumps(side, norm)
    assert any(torch.allclose(found, one, atol=1e-6) for one in (expected, expected.T))
    assert (found[: side // 2] > 0).all()
    assert (found[side // 2 :] < 0).all()


def started(norm: str, size: tuple[int, int] = (SIDE, SIDE), edge: float = 0.1) -> tuple[Square, SquareSlots]:
    """All points of an affine network, far from the ends of [0, 1] unless `edge` is large."""
    model = Affine(CHANNELS * size[0] * size[1], 3)
    x = (0.5 + edge * torch.randn(COUNT, CHANNELS, *size, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    with torch.no_grad():
        y = model(x).argmax(1)
    attack = Square(Oracle(model, CPU, "fp32"), x, y, EPS[norm], norm, seed=0, queries=40)
    return attack, attack.start(torch.arange(COUNT), torch.zeros(COUNT, dtype=torch.int64))


def test_in_linf_it_begins_with_vertical_stripes_of_each_channel():
    _, slots = started("linf")
    delta = (slots.x_adv - slots.x) / EPS["linf"]
    torch.testing.assert_close(delta.abs(), torch.ones_like(delta), rtol=1e-4, atol=0)
    assert torch.equal(delta.sign(), delta[:, :, :1].sign().expand_as(delta))
    assert len(delta[:, :, 0].sign().flatten(1).unique(dim=0)) == COUNT


@pytest.mark.parametrize("norm", ORDER)
def test_in_the_other_norms_it_begins_at_the_edge_of_the_ball(norm):
    _, slots = started(norm)
    lengths = torch.linalg.vector_norm((slots.x_adv - slots.x).flatten(1), ORDER[norm], dim=1)
    torch.testing.assert_close(lengths, torch.full((COUNT,), EPS[norm]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [(10, 10), (11, 16)])
def test_in_l2_it_begins_with_tiles_of_bumps_of_random_signs(size):
    _, slots = started("l2", size)
    side, across = size[0] // 5, size[1] // (size[0] // 5)
    delta = (slots.x_adv - slots.x) / EPS["l2"] * math.sqrt(5 * across * CHANNELS)
    bumps, signs, turned = two_bumps(side, "l2"), [], []
    for row, column in product(range(5), range(across)):
        tile = delta[:, :, row * side : (row + 1) * side, column * side : (column + 1) * side]
        # Two bumps of norm 1 that are the same but for their sign: their product sums to it.
        products = {lying: (tile * (bumps.T if lying else bumps)).sum((2, 3)) for lying in (False, True)}
        (lying,) = [key for key, value in products.items() if torch.allclose(value.abs(), torch.ones(1), atol=1e-4)]
        turned.append(lying)
        signs.append(products[lying].sign())
    assert 0.3 < (torch.stack(signs) > 0).float().mean() < 0.7
    assert 0.2 < sum(turned) / len(turned) < 0.8
    assert not delta[:, :, 5 * side :].any()
    assert not delta[..., across * side :].any()


def proposals(norm: str, windows: Windows, query: int, x: Tensor, x_best: Tensor) -> list[Tensor]:
    """What query number `query` may ask about one image [C, H, W]: in l2 and l1 one for each choice of signs."""
    eps, side = EPS[norm], int(windows.side[query])
    top, left, top2, left2 = windows.corner[query].tolist()
    window = (slice(None), slice(top, top + side), slice(left, left + side))
    other = (slice(None), slice(top2, top2 + side), slice(left2, left2 + side))
    if norm == "linf":
        moved = x_best.clone()
        moved[window] += 2 * eps * windows.sign[query].view(-1, 1, 1)
        return [torch.minimum(torch.maximum(moved, x - eps), x + eps).clamp(0, 1)]

    def mass(values: Tensor) -> Tensor:
        return torch.linalg.vector_norm(values, ORDER[norm], dim=(1, 2), keepdim=True)

    delta = x_best - x
    touched = torch.zeros_like(delta)
    touched[window] = touched[other] = 1
    spare, both = torch.linalg.vector_norm(delta, ORDER[norm]), mass(delta * touched)
    bumps = two_bumps(side, norm)
    bumps = bumps.T if windows.turned[query] else bumps
    found = []
    for signs in product((-1.0, 1.0), repeat=CHANNELS):
        new = bumps * torch.tensor(signs).view(-1, 1, 1) + delta[window] / mass(delta[window]).clamp(min=1e-12)
        if norm == "l2":
            to = ((eps**2 - spare**2).clamp(min=0) / CHANNELS + both**2).sqrt()
        else:
            to = ((eps - spare).clamp(min=0) / CHANNELS + both) * CHANNELS
        changed = delta.clone()
        changed[other] = 0
        changed[window] = new / mass(new) * to
        if norm == "l2":
            found.append((x + eps * changed / torch.linalg.vector_norm(changed)).clamp(0, 1))
        else:
            found.append(inside((x + changed)[None], x[None], torch.full((1, 1, 1, 1), eps), "l1")[0])
    return found


@pytest.mark.parametrize("norm", EPS)
def test_each_query_moves_its_own_window_from_the_best_point_so_far(norm):
    attack, slots = started(norm, edge=1.0)
    asked, chosen = [], []
    for query in range(30):
        asked.append(slots.x_adv.clone())
        assert ((asked[-1] >= 0) & (asked[-1] <= 1)).all()
        attack.step(slots)
        values = torch.stack([violation(attack.oracle.exact(points), slots.y) for points in asked])
        best = torch.stack(asked)[values.argmax(0), torch.arange(COUNT)]
        assert torch.equal(slots.x_best, best)
        for image in range(COUNT):
            candidates = proposals(norm, attack.windows, query, slots.x[image], best[image])
            gaps = [float((slots.x_adv[image] - one).abs().max()) for one in candidates]
            assert min(gaps) < 1e-5, (query, image)
            chosen.append(gaps.index(min(gaps)))
    assert len(set(chosen)) == (1 if norm == "linf" else 2**CHANNELS)
    assert (slots.left == attack.questions - 30).all()


def test_it_asks_about_its_start_and_once_for_each_window():
    attack, slots = started("linf")
    assert attack.questions == 41
    for _ in range(attack.questions):
        assert (slots.left > 0).all()
        attack.step(slots)
    assert not slots.left.any()
