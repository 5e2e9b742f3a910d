"""Accuracies are exact counts, attacks are what their names say, and evaluating changes nothing."""

import math

import pytest
import torch
from torch import nn

import elle
from elle.core.attacks import SignStep
from elle.errors import InputError
from elle.evaluation.autoattack import ORDER
from elle.evaluation.evaluate import evaluate, surviving
from elle.evaluation.names import parse_attacks
from elle.evaluation.results import wilson_interval
from tests.networks import conv_net, images, trained


class Threshold(nn.Module):
    """Class 1 where the mean pixel is above one half."""

    def forward(self, x):
        level = 20 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-level, level], 1)


def grey(levels):
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 1, 4, 4).contiguous()


@pytest.fixture(scope="module")
def data():
    return images(60, seed=1)


@pytest.fixture(scope="module")
def model(data):
    """A network that PGD breaks on some of the images."""
    return trained(conv_net(), *images(64), steps=15, lr=0.05)


RADIUS = 0.1
NAMES = "clean,fgsm,pgd-5,pgd-10-2"


@pytest.mark.parametrize("attack", ["fgsm", "pgd-5", "pgd-5-2"])
def test_exactly_the_images_closer_than_eps_are_broken(attack):
    """The mean pixel can be moved by eps, so an image survives where |level - 1/2| > eps."""
    x = grey([0.1, 0.45, 0.48, 0.52, 0.55, 0.9, 0.7, 0.3])
    y = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])  # the last two are wrong from the start
    result = evaluate(Threshold(), x, y, f"clean,{attack}", eps=0.04)
    assert (result["clean"]["correct"], result["clean"]["total"]) == (6, 8)
    assert result["clean"]["accuracy"] == 6 / 8
    assert result[attack]["correct"] == 4
    assert result[attack]["accuracy"] == 4 / 8


def test_the_survivors_are_named_image_by_image():
    x, y = grey([0.1, 0.48, 0.9, 0.3]), torch.tensor([0, 0, 1, 1])
    (attack,) = parse_attacks("fgsm")
    assert surviving(Threshold(), x, y, attack, eps=0.04, batch=3).tolist() == [True, False, True, False]


def test_a_result_has_its_interval_and_its_time():
    result = elle.evaluate(Threshold(), grey([0.1] * 10), torch.zeros(10, dtype=torch.long), attack="clean")
    assert list(result) == ["clean"]
    assert set(result["clean"]) == {"accuracy", "correct", "total", "interval", "seconds"}
    assert result["clean"]["interval"] == pytest.approx([0.7225, 1], abs=1e-4)
    assert result["clean"]["seconds"] >= 0


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        (0, 10, 0, 0.27753),
        (5, 10, 0.23659, 0.76341),
        (10, 10, 0.72247, 1),
        (50, 100, 0.40383, 0.59617),
        (1, 1, 0.20654, 1),
    ],
)
def test_the_interval_is_wilson_s(correct, total, low, high):
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize("total", [16, 400, 1000, 10000])
def test_the_interval_of_none_begins_at_0_and_of_all_ends_at_1(total):
    assert wilson_interval(0, total)[0] == 0.0
    assert wilson_interval(total, total)[1] == 1.0


def test_more_restarts_never_raise_the_accuracy(model, data):
    correct = [evaluate(model, *data, name, RADIUS)[name]["correct"] for name in ("pgd-10", "pgd-10-2", "pgd-10-4")]
    assert correct == sorted(correct, reverse=True)
    assert 0 < correct[0] < len(data[0]), "the attack breaks nothing or everything: the test shows nothing"


@pytest.mark.parametrize(("name", "forwards"), [("clean", 1), ("fgsm", 3), ("pgd-3", 5), ("pgd-3-4", 17)])
def test_an_image_that_survives_is_attacked_at_every_restart(name, forwards):
    """Once clean, then at each restart the steps and a look at where they ended."""
    passes = []

    class Counting(Threshold):
        def forward(self, x):
            passes.append(len(x))
            return super().forward(x)

    evaluate(Counting(), grey([0.1, 0.9]), torch.tensor([0, 1]), name, eps=0.01)
    assert passes == [2] * forwards


def test_a_broken_image_is_not_attacked_again():
    """The middle image is broken at the first restart: the second attacks the other two."""
    passes = []

    class Counting(Threshold):
        def forward(self, x):
            passes.append(len(x))
            return super().forward(x)

    evaluate(Counting(), grey([0.1, 0.49, 0.9]), torch.tensor([0, 0, 1]), "pgd-2-2", eps=0.04)
    steps_and_look, verified = 3, 1
    assert passes == [3] + [3] * steps_and_look + [verified] + [2] * steps_and_look


@pytest.mark.parametrize("labels", [[1, 0], [0, 1]], ids=["none-right", "all-broken-at-once"])
def test_a_network_is_never_asked_about_no_images(labels):
    """Many have no answer: torch cannot tell what -1 stands for."""

    class Viewing(Threshold):
        def forward(self, x):
            return super().forward(x.view(len(x), -1))

    x, y = grey([0.49, 0.51]), torch.tensor(labels)
    (attack,) = parse_attacks("pgd-2-2")
    assert not surviving(Viewing(), x, y, attack, eps=0.04, batch=2).any()
    record = elle.assess(Viewing(), x, y, "clean,pgd-2-2,square", eps=0.04)
    assert [record["attacks"][name]["correct"] for name in ("pgd-2-2", "square")] == [0, 0]


def test_stronger_attacks_leave_less(model, data):
    result = evaluate(model, *data, "clean,fgsm,pgd-20,pgd-50-5", RADIUS)
    correct = [entry["correct"] for entry in result.values()]
    assert correct == sorted(correct, reverse=True)
    assert correct[-1] < correct[0]


@pytest.mark.parametrize(
    ("name", "attack", "restarts"),
    [
        ("clean", None, 1),
        ("fgsm", SignStep(clip=True), 1),
        ("pgd-1", SignStep(1, 1, noise=1, clip=True), 1),
        ("pgd-20", SignStep(1 / 8, 20, noise=1, clip=True), 1),
        ("pgd-50-10", SignStep(1 / 4, 50, noise=1, clip=True), 10),
    ],
)
def test_an_attack_s_name_gives_its_settings(name, attack, restarts):
    (parsed,) = parse_attacks(name)
    assert (parsed.name, parsed.attack, parsed.restarts) == (name, attack, restarts)


def test_names_are_split_at_commas_and_the_norm_is_passed_on():
    attacks = parse_attacks(" clean, fgsm ,pgd-20,", "l2")
    assert [one.name for one in attacks] == ["clean", "fgsm", "pgd-20"]
    assert [one.attack.norm for one in attacks[1:]] == ["l2", "l2"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", "no attack given"),
        (" , ", "no attack given"),
        ("pgd", "does not exist"),
        ("pgd-0", "does not exist"),
        ("pgd-20-0", "does not exist"),
        ("pgd-20-", "does not exist"),
        ("pgd-x", "does not exist"),
        ("clean,pdg-20", "did you mean 'pgd-20'"),
        ("pdg-5", "did you mean 'pgd-5'"),
        ("pdg-10-3", "did you mean 'pgd-10-3'"),
        ("claen", "did you mean 'clean'"),
    ],
)
def test_a_name_that_is_no_attack_is_refused(names, message):
    with pytest.raises(InputError, match=message):
        parse_attacks(names)


@pytest.mark.parametrize(("count_x", "count_y"), [(0, 0), (4, 3), (3, 4)])
def test_nothing_to_evaluate_or_a_missing_label_is_refused(count_x, count_y):
    with pytest.raises(InputError, match=f"{count_x} images and {count_y} labels"):
        evaluate(Threshold(), torch.rand(count_x, 1, 4, 4), torch.zeros(count_y, dtype=torch.long))


def test_labels_that_are_no_class_numbers_are_refused():
    with pytest.raises(InputError, match=r"labels have shape \(4, 2\)"):
        evaluate(Threshold(), torch.rand(4, 1, 4, 4), torch.zeros(4, 2))


@pytest.mark.parametrize("eps", [8, -0.1, math.nan, torch.tensor(8), torch.full((2, 1, 1, 1), 0.1)])
def test_a_radius_that_is_no_fraction_is_refused(eps):
    with pytest.raises(ValueError, match="^eps "):
        evaluate(Threshold(), grey([0.1, 0.9]), torch.tensor([0, 1]), "fgsm", eps=eps)


class Failing(nn.Module):
    """Fails at its second forward."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.BatchNorm2d(1), nn.Dropout()), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("out of memory")
        return self.inner(x).flatten(1)


def modes(model):
    return [module.training for module in model.modules()]


def test_the_mode_of_every_part_is_put_back(model, data):
    model.train()
    model[1].eval()
    before = modes(model)
    evaluate(model, *data, NAMES, RADIUS)
    assert modes(model) == before


def test_after_an_exception_everything_is_put_back_too():
    model = Failing().train()
    model.inner[1].eval()
    before, random = modes(model), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(model, torch.zeros(4, 1, 4, 4), torch.zeros(4, dtype=torch.long), "clean", batch=2)
    assert modes(model) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_the_network_is_evaluated_in_eval_mode(model, data):
    model.train()
    in_train_mode = evaluate(model, *data, "clean,fgsm", RADIUS)
    model.eval()
    in_eval_mode = evaluate(model, *data, "clean,fgsm", RADIUS)
    assert [e["correct"] for e in in_train_mode.values()] == [e["correct"] for e in in_eval_mode.values()]


def test_evaluating_leaves_no_trace_on_the_network_or_the_caller(model, data):
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, random = data[0].clone(), torch.get_rng_state()
    evaluate(model, *data, NAMES, RADIUS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(data[0], x)
    assert torch.is_grad_enabled()


def counts(result):
    return {name: entry["correct"] for name, entry in result.items()}


def test_the_same_seed_gives_the_same_result(model, data):
    first = counts(evaluate(model, *data, NAMES, RADIUS, seed=3))
    torch.manual_seed(12345)
    assert counts(evaluate(model, *data, NAMES, RADIUS, seed=3)) == first


def test_the_seed_reaches_the_random_starts(model, data):
    (attack,) = parse_attacks("pgd-1")
    points = []

    class Watching(nn.Module):
        def forward(self, x):
            points.append(x.detach().clone())
            return model(x)

    for seed in (0, 1):
        evaluate(Watching(), *data, attack.name, RADIUS, seed=seed)
    half = len(points) // 2
    assert not torch.equal(points[1], points[half + 1])


def test_the_result_of_an_attack_does_not_depend_on_the_others_named(model, data):
    """The random starts come from the seed alone."""
    starts = []

    class Watching(nn.Module):
        def forward(self, x):
            if x.requires_grad:
                starts.append(x.detach().clone())
            return model(x)

    for names in ("pgd-1", "pgd-2,pgd-1"):
        evaluate(Watching(), *data, names, RADIUS)
    # The first and the last run: the start and the end of the only step of each.
    alone, after_another = starts[0], starts[-2]
    assert torch.equal(alone, after_another)


@pytest.mark.parametrize("batch", [1, 7, 60, 1000])
def test_the_batch_size_does_not_change_the_result(model, data, batch):
    assert counts(evaluate(model, *data, "clean,fgsm", RADIUS, batch=batch)) == counts(
        evaluate(model, *data, "clean,fgsm", RADIUS)
    )


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_radius_zero_breaks_nothing(model, data, norm):
    result = counts(evaluate(model, *data, "clean,fgsm,pgd-3", 0.0, norm=norm))
    assert result["clean"] == result["fgsm"] == result["pgd-3"]


def test_it_works_under_no_grad(model, data):
    expected = counts(evaluate(model, *data, NAMES, RADIUS))
    with torch.no_grad():
        assert counts(evaluate(model, *data, NAMES, RADIUS)) == expected


def test_an_autocast_around_it_has_no_effect():
    class Watching(Threshold):
        def forward(self, x):
            assert not torch.is_autocast_enabled("cpu")
            return super().forward(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluate(Watching(), grey([0.1, 0.9]), torch.tensor([0, 1]), "clean,fgsm")


def test_an_image_whose_logits_are_not_a_number_is_not_correct():
    class Diverged(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] * math.nan

    x, y = torch.rand(6, 1, 4, 4), torch.arange(6) % 3
    assert counts(evaluate(Diverged(), x, y, "clean,fgsm")) == {"clean": 0, "fgsm": 0}


@pytest.mark.parametrize("attack", ["fgsm", *ORDER])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_attack_that_makes_the_logits_overflow_has_broken_the_image(attack, value):
    """As without an attack; argmax takes NaN for the largest, so that class 0 would pass for right."""

    class Overflowing(Threshold):
        def forward(self, x):
            level = x.flatten(1).mean(1, keepdim=True) - 0.5
            upwards = torch.tensor([-value, value])
            overflown = torch.where(level > 0, upwards, -upwards)
            return torch.where(level.abs() < 0.05, overflown, super().forward(x))

    result = evaluate(Overflowing(), grey([0.42, 0.58]), torch.tensor([0, 1]), f"clean,{attack}", RADIUS)
    assert counts(result) == {"clean": 2, attack: 0}


def test_the_memory_layout_of_the_images_does_not_change_where_an_attack_starts():
    starts = []

    class Watching(nn.Module):
        def forward(self, x):
            starts.append(x.detach().clone())
            return torch.stack([x.flatten(1).sum(1), -x.flatten(1).sum(1)], 1)

    x, y = torch.rand(4, 3, 4, 4), torch.zeros(4, dtype=torch.long)
    for layout in (torch.contiguous_format, torch.channels_last):
        evaluate(Watching(), x.contiguous(memory_format=layout), y, "pgd-1", RADIUS)
    assert len(starts) == 6
    assert torch.equal(starts[1], starts[4])
