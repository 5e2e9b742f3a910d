"""The pool: verified successes, balls and boxes, seeds, few and many classes, and no work for broken points."""

import pytest
import torch
from torch import nn

from elle.errors import InputError
from elle.evaluation.autoattack import ORDER, Budget, adaptations, reference, search
from tests.networks import bfloat16_autocast, conv_net, images

from .conftest import size

EPS = {"linf": 0.1, "l2": 0.6, "l1": 1.5}
SHORT = Budget(steps=20, queries=100)


def changed(x: torch.Tensor, x_adv: torch.Tensor) -> torch.Tensor:
    return (x != x_adv).flatten(1).any(1)


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ORDER)
def test_what_comes_back_is_broken_inside_ball_and_box_or_untouched(digits_net, name, norm):
    model, x, y = digits_net
    budget = Budget(steps=20, queries=100, targets=2)
    x_adv = search(name, model, x, y, EPS[norm], norm=norm, classes=10, seed=0, budget=budget)
    with torch.no_grad():
        broken = model(x_adv).argmax(1) != y
    assert torch.equal(broken, changed(x, x_adv))
    assert 10 < broken.sum() < 115
    assert x_adv.min() >= 0
    assert x_adv.max() <= 1
    assert size(x_adv - x, norm).max() <= EPS[norm] + 1e-6


@pytest.mark.parametrize("name", ORDER)
def test_the_same_seed_gives_the_same_points_whatever_the_random_state(digits_net, name):
    model, x, y = digits_net
    x, y, budget = x[:20], y[:20], Budget(steps=20, queries=100, targets=2)
    first = search(name, model, x, y, 0.1, classes=10, seed=3, budget=budget)
    torch.manual_seed(12)
    before = torch.get_rng_state()
    again = search(name, model, x, y, 0.1, classes=10, seed=3, budget=budget)
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["apgd-ce", "square"])
def test_another_seed_searches_elsewhere(digits_net, name):
    model, x, y = digits_net
    one, other = (search(name, model, x[:40], y[:40], 0.1, classes=10, seed=seed, budget=SHORT) for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("name", ORDER)
def test_the_size_of_the_batch_does_not_matter(digits_net, name):
    model, x, y = digits_net
    budget = Budget(steps=20, queries=60, targets=3)
    results = [
        search(name, model, x[:20], y[:20], 0.1, classes=10, seed=0, batch=batch, budget=budget) for batch in (6, 500)
    ]
    assert torch.equal(*(changed(x[:20], x_adv) for x_adv in results))


def test_more_restarts_and_targets_break_what_fewer_break_and_more(digits_net):
    model, x, y = digits_net

    def broken(name, **budget):
        return changed(x, search(name, model, x, y, 0.1, classes=10, seed=0, budget=Budget(**budget)))

    for name, kind, few, many in (
        ("apgd-ce", "restarts", 1, 3),
        ("apgd-t", "targets", 1, 4),
        ("fab-t", "targets", 1, 4),
    ):
        one, more = broken(name, steps=10, **{kind: few}), broken(name, steps=10, **{kind: many})
        assert bool((one <= more).all()), name
        assert more.sum() > one.sum() or kind == "restarts"


@pytest.mark.parametrize(
    ("name", "knob"), [("apgd-ce", "steps"), ("apgd-t", "steps"), ("fab-t", "steps"), ("square", "queries")]
)
def test_a_longer_search_breaks_more_points(digits_net, name, knob):
    model, x, y = digits_net
    counts = [
        int(changed(x, search(name, model, x, y, 0.1, classes=10, seed=0, budget=Budget(**{knob: n}, targets=1))).sum())
        for n in (1, 5, 30)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.parametrize("classes", [2, 3, 10, 1000])
@pytest.mark.parametrize("name", ORDER)
def test_few_and_many_classes(name, classes):
    model = conv_net(channels=3, classes=classes).eval()
    x, _ = images(12, (3, 8, 8))
    with torch.no_grad():
        y = model(x).argmax(1)
    x_adv = search(name, model, x, y, 0.4, classes=classes, seed=0, budget=SHORT)
    assert changed(x, x_adv).any()


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 14, 9), (1, 28, 28), (1, 30, 4)])
def test_images_of_any_size(norm, shape):
    """Some make the original stumble: its tiles for l2 and l1 step over the edge of a 14-pixel image."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 4))
    x = 0.5 + 0.02 * torch.randn(6, *shape)
    with torch.no_grad():
        y = model(x).argmax(1)
    large = {"linf": 0.4, "l2": 5.0, "l1": 60.0}[norm]
    for name in ORDER:
        x_adv = search(name, model, x, y, large, norm=norm, classes=4, seed=0, budget=SHORT)
        assert changed(x, x_adv).any(), name


class ThirdPlace(nn.Module):
    """Three classes, of which the least likely alone can be reached."""

    def forward(self, x):
        brightness = x.flatten(1).mean(1)
        return torch.stack([0 * brightness, -1 + 0 * brightness, 50 * brightness - 27], 1)


def test_of_three_classes_the_least_likely_is_reached_too():
    x, y = torch.full((4, 1, 4, 4), 0.5), torch.zeros(4, dtype=torch.long)
    assert changed(x, search("apgd-t", ThirdPlace(), x, y, 0.1, classes=3, seed=0, budget=SHORT)).all()


class WithMaskedClasses(nn.Module):
    """Classes that are never to be answered have the logit minus infinity."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return nn.functional.pad(self.network(x), (0, 2), value=-torch.inf)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ORDER)
def test_masked_classes_protect_no_image(digits_net, name, precision):
    model, x, y = digits_net
    options = {"seed": 0, "precision": precision, "budget": SHORT}
    plain = changed(x, search(name, model, x, y, 0.1, classes=10, **options))
    masked = changed(x, search(name, WithMaskedClasses(model), x, y, 0.1, classes=12, **options))
    assert plain.sum() > 10
    assert (plain != masked).sum() <= 1


def test_adaptations_are_said():
    assert adaptations("apgd-ce", 2) == []
    assert adaptations("fab-t", 10) == []
    assert adaptations("fab-t", 4) == ["fab-t: 3 targets instead of 9, one for each other class"]
    assert len(adaptations("apgd-t", 3)) == 2
    assert "margin" in adaptations("apgd-t", 2)[1]
    assert adaptations("apgd-t", 6, "l1") == []
    assert adaptations("apgd-t", 5, "l1") == ["apgd-t: 4 targets instead of 5, one for each other class"]


class _WrongInReducedPrecision(nn.Module):
    """Says class 0 in float32 and class 1 wherever autocast is on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 2)

    def forward(self, x):
        sign = -1 if torch.is_autocast_enabled(x.device.type) else 1
        return self.linear(x.flatten(1)) * 0.001 + torch.tensor([1.0, 0.0]) * sign


@pytest.mark.parametrize("name", ORDER)
def test_a_success_seen_in_reduced_precision_alone_does_not_count(name):
    x, y = torch.rand(5, 1, 8, 8), torch.zeros(5, dtype=torch.int64)
    with bfloat16_autocast():
        x_adv = search(name, _WrongInReducedPrecision(), x, y, 0.1, classes=2, seed=0, precision="bf16", budget=SHORT)
    assert torch.equal(x, x_adv)


@pytest.mark.parametrize("name", ORDER)
def test_a_search_in_reduced_precision_breaks_as_many(digits_net, name):
    model, x, y = digits_net
    budget = Budget(steps=20, queries=60, targets=1)
    exact = search(name, model, x, y, 0.1, classes=10, seed=0, budget=budget)
    with bfloat16_autocast():
        rough = search(name, model, x, y, 0.1, classes=10, seed=0, precision="bf16", budget=budget)
    with torch.no_grad():
        assert torch.equal(model(rough).argmax(1) != y, changed(x, rough))
    assert abs(int(changed(x, exact).sum()) - int(changed(x, rough).sum())) <= 4


class _Counting(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.images = model, 0

    def forward(self, x):
        self.images += len(x)
        return self.model(x)


@pytest.mark.parametrize("name", ["apgd-ce", "apgd-t", "fab-t"])
def test_a_broken_point_costs_nothing_more(digits_net, name):
    """At this radius the first few steps break every point: neither the other steps nor the other targets are run."""
    model, x, y = digits_net
    counting = _Counting(model)
    x_adv = search(name, counting, x, y, 0.5, classes=10, seed=0, batch=50)
    assert changed(x, x_adv).all()
    assert counting.images < 30 * len(x)


def test_the_model_is_left_as_it_was():
    model = conv_net()
    model[0].requires_grad_(False)
    model[1].eval()
    x, y = images(8)
    search("apgd-ce", model, x, y, 0.1, classes=4, seed=0, budget=SHORT)
    assert [module.training for module in model] == [True, False, True, True, True]
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4
    assert all(p.grad is None for p in model.parameters())


def test_no_points_no_work(digits_net):
    model, x, y = digits_net
    assert len(search("apgd-t", model, x[:0], y[:0], 0.1, classes=10, seed=0)) == 0


def test_an_unknown_attack_is_named():
    with pytest.raises(InputError, match="apgd-tt.*did you mean 'apgd-t'"):
        search("apgd-tt", nn.Identity(), torch.rand(1, 4), torch.zeros(1), 0.1, classes=4, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDER)
def test_a_compiled_network_is_attacked_as_well(digits_net, name):
    """Four full batches and a rest: the compiled network answers for the full ones, for square four times as large."""
    model, x, y = digits_net
    budget = Budget(steps=10, queries=30, targets=1)
    plain, compiled = (
        search(name, model, x[:90], y[:90], 0.2, classes=10, seed=0, batch=20, budget=budget, compile=compile)
        for compile in (False, True)
    )
    assert (changed(x[:90], plain) != changed(x[:90], compiled)).sum() <= 1
    assert changed(x[:90], compiled).sum() > 5


@pytest.mark.parametrize("engine", [search, reference.search], ids=["fast", "reference"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm": "Linf"}, "norm 'Linf' does not exist, did you mean 'linf'"),
        ({"eps": 8}, "eps is 8; for images in"),
        ({"eps": -0.1}, "eps is -0.1; for images in"),
        ({"x": 255 * torch.ones(2, 1, 8, 8)}, r"images lie in 255 to 255; they must lie in \[0, 1\]"),
        ({"y": torch.zeros(3, dtype=torch.long)}, "2 images and 3 labels cannot be attacked"),
    ],
)
def test_what_would_be_another_attack_in_silence_is_refused(digits_net, engine, changes, words):
    model, x, y = digits_net
    given = {"name": "apgd-ce", "model": model, "x": x[:2], "y": y[:2], "eps": 0.1, "classes": 10, "seed": 0} | changes
    with pytest.raises(InputError, match=words):
        engine(**given)
