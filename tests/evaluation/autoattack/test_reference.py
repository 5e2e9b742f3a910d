"""Our attacks against the original, point by point, and the manners of its adapter."""

import sys

import pytest
import torch
from pyautoattack import AutoAttack
from torch import nn

from elle.errors import InputError, WorkError
from elle.evaluation.autoattack import ORDER, Budget, reference, search
from elle.evaluation.autoattack.oracle import Oracle
from elle.evaluation.autoattack.registry import make_attack
from tests.networks import Affine, bfloat16_autocast, images

EPS = {"linf": 0.1, "l2": 0.6, "l1": 1.2}


def broken_by(engine, name, network, norm, budget):
    model, x, y = network
    x_adv = engine(name, model, x, y, EPS[norm], norm=norm, classes=10, seed=0, budget=budget)
    return (x != x_adv).flatten(1).any(1)


@pytest.mark.parametrize("norm", EPS)
def test_the_standard_budget_is_the_original_s(norm):
    """A shorter search would leave more points standing and still be called AutoAttack."""
    model, x = Affine(4, 10), torch.full((1, 1, 2, 2), 0.5)
    theirs = AutoAttack(model, norm=norm.capitalize(), eps=0.1, device="cpu", version="standard")
    assert theirs.attacks_to_run == list(ORDER)
    targeted = theirs.apgd_targeted
    expected = {
        "apgd-ce": (theirs.apgd.n_restarts, theirs.apgd.n_iter),
        "apgd-t": (targeted.n_restarts * targeted.n_target_classes, targeted.n_iter),
        "fab-t": (theirs.fab.n_restarts * theirs.fab.n_target_classes, theirs.fab.n_iter),
        "square": (theirs.square.n_restarts, theirs.square.n_queries),
    }
    # Beside its steps an attack asks about each start: APGD one a phase, of which l1 has three, and Square one.
    starts = {"apgd-ce": 3 if norm == "l1" else 1, "apgd-t": 3 if norm == "l1" else 1, "fab-t": 0, "square": 1}
    oracle, y = Oracle(model, x.device, "fp32"), torch.zeros(1, dtype=torch.int64)
    for name in ORDER:
        attack = make_attack(name, oracle, x, y, 0.1, norm, 10, 0, Budget())
        assert (attack.variants, attack.questions - starts[name]) == expected[name], name


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t"])
def test_we_break_the_points_that_the_original_breaks(digits_net, name, norm):
    """FAB has no randomness; APGD's random starts let some points fall or stand, as they do in the original itself."""
    budget = Budget(targets=1, restarts=1, steps=50)
    ours, theirs = (broken_by(engine, name, digits_net, norm, budget) for engine in (search, reference.search))
    assert 20 < ours.sum() < 115
    assert (ours != theirs).sum() <= (1 if name == "fab-t" else 10)
    assert abs(int(ours.sum()) - int(theirs.sum())) <= 5


@pytest.mark.parametrize("norm", EPS)
def test_square_breaks_about_as_many_points_as_the_original(digits_net, norm):
    ours, theirs = (
        broken_by(engine, "square", digits_net, norm, Budget(queries=150)) for engine in (search, reference.search)
    )
    assert 10 < ours.sum() < 115
    assert abs(int(ours.sum()) - int(theirs.sum())) <= 8


def test_the_ensemble_leaves_the_same_points_standing(digits_net):
    model, x, y = (digits_net[0], digits_net[1][:40], digits_net[2][:40])
    standing = {}
    budget = Budget(steps=40, queries=50, targets=3)
    for label, engine in (("ours", search), ("theirs", reference.search)):
        alive = torch.arange(len(x))
        for name in ORDER:
            x_adv = engine(name, model, x[alive], y[alive], 0.1, classes=10, seed=0, budget=budget)
            alive = alive[(x_adv == x[alive]).flatten(1).all(1)]
        standing[label] = alive.tolist()
    assert len(set(standing["ours"]) ^ set(standing["theirs"])) <= 1
    assert 5 < len(standing["ours"]) < 35


def test_the_adapter_keeps_trace_function_random_state_and_mode(digits_net):
    model, x, y = digits_net
    state = torch.get_rng_state()

    def trace(frame, event, argument):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        reference.search("apgd-ce", model, x[:4], y[:4], 0.1, classes=10, seed=0, budget=Budget(steps=2))
        kept = sys.gettrace()
    finally:
        sys.settrace(before)
    assert kept is trace
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.requires_grad for p in model.parameters())


def test_the_original_is_asked_in_float32(digits_net):
    model, x, y = digits_net
    plain = reference.search("apgd-ce", model, x[:10], y[:10], 0.1, classes=10, seed=0, budget=Budget(steps=5))
    with bfloat16_autocast():
        cast = reference.search("apgd-ce", model, x[:10], y[:10], 0.1, classes=10, seed=0, budget=Budget(steps=5))
    torch.testing.assert_close(plain, cast, rtol=0, atol=1e-5)


def test_too_few_classes_for_the_original_are_refused_in_one_line():
    x, y = images(4, classes=3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(InputError, match="needs 4 classes, here are 3; use engine=fast"):
        reference.search("apgd-t", model, x, y, 0.1, classes=3, seed=0)
    assert reference.search("fab-t", model, x, y, 0.1, classes=3, seed=0, budget=Budget(steps=2)).shape == x.shape


def test_a_network_without_a_gradient_is_refused_in_one_line(digits_net):
    class Detached(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                return digits_net[0](x)

    with pytest.raises(WorkError, match="the original apgd-ce cannot attack this network .*; use engine=fast"):
        reference.search("apgd-ce", Detached(), *digits_net[1:], 0.1, classes=10, seed=0)


def test_a_missing_package_is_named(monkeypatch, digits_net):
    monkeypatch.setitem(sys.modules, "pyautoattack", None)
    model, x, y = digits_net
    with pytest.raises(InputError, match=r"pip install 'elle-at\[autoattack\]'"):
        reference.search("square", model, x, y, 0.1, classes=10, seed=0)


def test_points_that_only_tf32_misclassifies_are_attacked_too(digits_net):
    network, x, y = digits_net

    class Rounding(nn.Module):
        """The first images, as they are, look wrong to it as long as TF32 is allowed."""

        def forward(self, x_adv):
            logits = network(x_adv)
            if torch.backends.cudnn.allow_tf32:
                unchanged = (x_adv[:, None] == x[None, :10]).flatten(2).all(2).any(1)
                logits = torch.where(unchanged[:, None], -logits, logits)
            return logits

    options = {"classes": 10, "seed": 0, "budget": Budget(steps=20)}
    plain, rounded = (
        reference.search("apgd-ce", model, x[:20], y[:20], 0.2, precision="tf32", **options)
        for model in (network, Rounding())
    )
    for x_adv in (plain, rounded):
        assert (x_adv != x[:20]).flatten(1).any(1)[:10].sum() >= 5


@pytest.mark.parametrize("name", ORDER)
def test_where_all_points_are_broken_nothing_is_left_to_attack(digits_net, name):
    model, x, y = digits_net
    assert reference.search(name, model, x[:0], y[:0], 0.1, classes=10, seed=0).shape == x[:0].shape
