"""The plug-in in a user's own training loop."""

import copy
import gc
import io
import math
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F

import elle
from elle.core.controller import Constant, OnOff
from elle.core.linearity import Linearity, triplet_error
from elle.engine.footprint import PeakBytes
from elle.models.registry import build_model
from tests.networks import (
    Affine,
    bfloat16_autocast,
    conv_net,
    gradient,
    images,
    own_logit,
    relative_distance,
    smooth_net,
    trained,
)

EPS = 8 / 255
# Radii of successive calls: the sixth error leaves the history of the first five.
JUMP = [EPS] * 5 + [20 * EPS] + [EPS] * 3


@pytest.fixture
def data():
    return images(8)


@pytest.fixture
def model():
    return smooth_net(64)


def call(reg, model, x, y, seed=0):
    torch.manual_seed(seed)
    return reg(model, x, y)


def observe(reg, model, data, radii, seed=0):
    """(error, weight, threshold) after each of several calls with these radii."""
    seen = []
    for number, eps in enumerate(radii):
        reg.eps = eps
        call(reg, model, *data, seed + number)
        seen.append((float(reg.error), float(reg.weight), float(reg.threshold)))
    return seen


def test_the_contract_works_in_a_training_loop():
    model = conv_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    reg = elle.ELLE(eps=EPS, weight=4000, adaptive=True)
    losses = []
    for step in range(20):
        x, y = images(32, seed=step)
        x_adv = elle.attacks.fgsm(model, x, y, eps=EPS)
        loss = F.cross_entropy(model(x_adv), y) + reg(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert 0 < float(reg.error) < 1
    assert 0 <= float(reg.weight) <= 4000
    assert 0 < float(reg.threshold) < math.inf


def test_the_value_is_the_weight_times_the_mean_error(model, data):
    reg = elle.ELLE(EPS, weight=50, adaptive=False)
    value = call(reg, model, *data)
    torch.manual_seed(0)
    error = triplet_error(model, *data, EPS).mean()
    torch.testing.assert_close(value, 50 * error, rtol=1e-4, atol=0)
    torch.testing.assert_close(reg.error, error.detach(), rtol=1e-4, atol=0)
    assert value.requires_grad


def test_what_a_loop_keeps_of_a_call_is_not_changed_by_the_next(model, data):
    """Numbers are read later, as reading waits for the device; a state_dict may be that of the best epoch so far."""
    reg, kept, read = elle.ELLE(EPS, weight=100, decay=0.9), [], []
    for eps in JUMP:
        reg.eps = eps
        call(reg, model, *data)
        values = {"error": reg.error, "weight": reg.weight, "threshold": reg.threshold} | reg.state_dict()
        kept.append(values)
        read.append({name: value.item() for name, value in values.items()})
    assert [{name: value.item() for name, value in values.items()} for values in kept] == read
    assert len({values["error"] for values in read}) > 1


def test_without_adaptation_the_weight_is_constant(model, data):
    seen = observe(elle.ELLE(EPS, weight=7, adaptive=False), model, data, JUMP)
    assert {(weight, threshold) for _, weight, threshold in seen} == {(7, math.inf)}


def test_an_error_out_of_its_history_turns_the_weight_on(model, data):
    seen = observe(elle.ELLE(EPS, weight=100, decay=0.9), model, data, JUMP)
    assert [weight for _, weight, _ in seen] == pytest.approx([0] * 5 + [100, 90, 81, 72.9])
    past = torch.tensor([error for error, _, _ in seen[:5]], dtype=torch.float64)
    assert seen[5][2] == pytest.approx(float(past.mean() + 2 * past.std(correction=0)), rel=1e-4)


def test_the_new_weight_acts_on_the_step_of_its_own_error(model, data):
    reg = elle.ELLE(EPS, weight=100)
    observe(reg, model, data, JUMP[:5])
    reg.eps = JUMP[5]
    value = call(reg, model, *data, seed=5)
    assert float(value.detach()) == pytest.approx(100 * float(reg.error))


def test_before_the_first_call_there_is_no_error():
    assert elle.ELLE(EPS).error.isnan()


def test_the_defaults_are_those_of_the_paper():
    reg = elle.ELLE(EPS)
    assert reg.rule == OnOff(4000, decay=0.99, sensitivity=2.0, history=None)
    assert reg.regulariser == Linearity(samples=1, alpha="uniform", norm="linf", clip=False)


def test_every_option_reaches_its_part():
    reg = elle.ELLE(
        EPS, 5, samples=2, alpha=0.5, norm="l2", history=10, decay=0.5, sensitivity=1.0, criterion=own_logit, clip=True
    )
    assert reg.rule == OnOff(5, 0.5, 1.0, 10)
    assert reg.regulariser == Linearity(2, 0.5, "l2", True)
    assert reg.criterion is own_logit
    assert elle.ELLE(EPS, 5, adaptive=False).rule == Constant(5)


def test_the_criterion_given_is_the_one_used():
    x, y = images(8, shape=(12,))
    reg = elle.ELLE(EPS, 1, adaptive=False, criterion=own_logit)
    assert float(call(reg, Affine(), x, y).detach()) < 1e-10
    assert float(call(elle.ELLE(EPS, 1, adaptive=False), Affine(), x, y).detach()) > 1e-9


@pytest.mark.parametrize("eps", [0, -EPS, math.nan, math.inf, 8, 1.01])
def test_a_bad_radius_is_refused_with_the_way_to_write_it(eps):
    with pytest.raises(ValueError, match=r"eps is .*8/255"):
        elle.ELLE(eps)


def test_an_l2_radius_may_exceed_one():
    elle.ELLE(2.5, norm="l2")


@pytest.mark.parametrize(
    "options",
    [
        *({"weight": -1}, {"weight": math.nan}, {"decay": 2}, {"history": 2}, {"history": "al"}, {"history": 4.5}),
        *({"weight": "4000"}, {"samples": 0}, {"samples": 1.5}, {"alpha": 3}, {"norm": "l0"}, {"memory": "lo"}),
        *({"decay": "0.99"}, {"sensitivity": None}, {"adaptive": "no"}, {"clip": (-1, 1)}, {"criterion": None}),
        {"criterion": torch.nn.CrossEntropyLoss},
    ],
    ids=str,
)
def test_a_bad_option_is_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        elle.ELLE(EPS, **options)


@pytest.mark.parametrize("history", ["all", 4])
def test_a_saved_and_restored_plug_in_continues_identically(model, data, history):
    whole = elle.ELLE(EPS, weight=100, history=history)
    expected = observe(whole, model, data, JUMP)
    first = elle.ELLE(EPS, weight=100, history=history)
    observe(first, model, data, JUMP[:6])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = elle.ELLE(EPS, weight=100, history=history)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert observe(second, model, data, JUMP[6:], seed=6) == expected[6:]


def test_a_weight_given_anew_is_the_one_that_acts_after_a_restoration(model, data):
    first, second = (elle.ELLE(EPS, weight=weight, adaptive=False) for weight in (100, 200))
    second.load_state_dict(first.state_dict())
    second(model, *data)
    assert float(second.weight) == 200


def test_a_network_that_is_made_without_memory_and_then_loaded_can_hold_it(model, data):
    class Holding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.reg = elle.ELLE(EPS)

    with torch.device("meta"):
        made = Holding()
    made.load_state_dict(Holding().state_dict(), assign=True)
    assert torch.isfinite(made.reg(model, *data))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda reg: pickle.loads(pickle.dumps(reg))], ids=["copy", "pickle"])
def test_a_copy_continues_identically_and_on_its_own(model, data, copied):
    reg = elle.ELLE(EPS, weight=100)
    observe(reg, model, data, JUMP[:6])
    twin = copied(reg)
    expected = observe(reg, model, data, JUMP[6:], seed=6)
    assert observe(twin, model, data, JUMP[6:], seed=6) == expected


class Token:
    """Something a graph can hold and a weak reference can watch."""


class Holding(torch.autograd.Function):
    """The identity, whose node in the graph holds a token."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_no_reference_to_the_graph_is_kept(model, data):
    reg, tokens = elle.ELLE(EPS), []

    def held(points):
        token = Token()
        tokens.append(weakref.ref(token))
        return Holding.apply(model(points), token)

    value = call(reg, held, *data)
    assert tokens[0]() is not None, "the graph does not hold the token: the test shows nothing"
    del value
    gc.collect()
    assert tokens[0]() is None
    assert not any(buffer.requires_grad for buffer in reg.buffers())


def test_the_network_is_not_registered_in_the_plug_in(model, data):
    reg = elle.ELLE(EPS)
    call(reg, model, *data)
    assert list(reg.parameters()) == []
    assert len(list(reg.modules())) == 1


def test_accumulated_gradients_are_the_gradient_of_the_sum(data):
    x, y = data
    gradients = []
    for accumulate in (True, False):
        model, reg = smooth_net(64), elle.ELLE(EPS, weight=1e4, adaptive=False)
        parts = [(x[:4], y[:4]), (x[4:], y[4:])]
        if accumulate:
            for seed, part in enumerate(parts):
                call(reg, model, *part, seed).backward()
        else:
            sum(call(reg, model, *part, seed) for seed, part in enumerate(parts)).backward()
        gradients.append(gradient(model))
    assert gradients[1].any()
    assert relative_distance(*gradients) < 1e-5


def test_two_calls_before_one_backward_use_their_own_weights(model, data):
    """The sixth call jumps and the seventh decays: the gradient is that of 100 * error_6 + 50 * error_7."""
    reg = elle.ELLE(EPS, weight=100, decay=0.5)
    observe(reg, model, data, JUMP[:5])
    total = 0
    for seed in (5, 6):
        reg.eps = JUMP[seed]
        total = total + call(reg, model, *data, seed)
    total.backward()
    found = gradient(model)
    model.zero_grad()
    for seed, weight in ((5, 100), (6, 50)):
        torch.manual_seed(seed)
        (weight * triplet_error(model, *data, JUMP[seed]).mean()).backward()
    assert relative_distance(found, gradient(model)) < 1e-5


def test_weight_zero_adds_nothing_to_the_gradient(model, data):
    value = call(elle.ELLE(EPS, weight=0), model, *data)
    value.backward()
    assert float(value.detach()) == 0
    assert not gradient(model).any()


def test_a_compiled_network_gives_the_same_value(data):
    model = conv_net().eval()
    expected = call(elle.ELLE(EPS, 10, adaptive=False), model, *data)
    compiled = torch.compile(model, backend="eager")
    found = call(elle.ELLE(EPS, 10, adaptive=False), compiled, *data)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=0)


def test_a_whole_compiled_step_gives_the_same_values_and_gradients(data):
    x, y = data
    runs = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
        model, reg = smooth_net(64), elle.ELLE(EPS, weight=100)

        @wrap
        def step(x, y, model=model, reg=reg):
            return F.cross_entropy(model(x), y) + reg(model, x, y)

        trace = []
        for number in range(4):
            torch.manual_seed(number)
            model.zero_grad()
            loss = step(x, y)
            loss.backward()
            trace += [loss.detach(), reg.error.clone(), reg.weight.clone(), gradient(model).norm()]
        runs.append(torch.stack(trace))
        torch._dynamo.reset()
    torch.testing.assert_close(*runs, rtol=1e-3, atol=0)


def test_a_bfloat16_autocast_does_not_change_the_error():
    x, y = images(64)
    model = trained(conv_net(), x, y, steps=12, lr=0.02).eval()
    reg = elle.ELLE(EPS)
    call(reg, model, x, y)
    exact = float(reg.error)
    with bfloat16_autocast():
        value = F.cross_entropy(model(x), y) + call(reg, model, x, y)
    value.backward()
    assert float(reg.error) == pytest.approx(exact, rel=0.05)
    assert gradient(model).isfinite().all()


def test_it_works_under_no_grad(model, data):
    reg = elle.ELLE(EPS, 10, adaptive=False)
    with torch.no_grad():
        value = call(reg, model, *data)
    torch.testing.assert_close(value, 10 * reg.error, rtol=1e-4, atol=0)


@pytest.mark.parametrize("samples", [1, 2])
def test_labels_may_be_probabilities(model, data, samples):
    x, y = data
    found = [
        call(elle.ELLE(EPS, 10, adaptive=False, samples=samples), model, x, labels)
        for labels in (y, F.one_hot(y, 4).float())
    ]
    torch.testing.assert_close(*found, rtol=1e-3, atol=0)


@pytest.mark.parametrize("samples", [1, 2])
def test_the_points_keep_the_memory_format_of_the_images(samples):
    x, y = images(8, shape=(3, 8, 8))
    model, seen = conv_net(3).to(memory_format=torch.channels_last), []
    model.register_forward_pre_hook(lambda _, points: seen.append(points[0]))
    elle.ELLE(EPS, samples=samples)(model, x.to(memory_format=torch.channels_last), y)
    assert [points.is_contiguous(memory_format=torch.channels_last) for points in seen] == [True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_that_holds_it_does_not_round_its_statistics(model, data, dtype):
    network = torch.nn.ModuleList([torch.nn.Linear(1, 1), elle.ELLE(EPS)])
    observe(network[1], model, data, JUMP)
    expected = {name: value.clone() for name, value in network[1].state_dict().items()}
    network.to(dtype)
    assert network[0].weight.dtype is dtype
    assert all(torch.equal(network[1].state_dict()[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("dtype", "kept"), [("float16", "float32"), ("bfloat16", "float32"), ("float64", "float64")])
def test_the_weights_of_classes_in_its_criterion_are_moved_with_it(model, data, dtype, kept):
    criterion = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="none")
    reg = elle.ELLE(EPS, criterion=criterion).to(getattr(torch, dtype))
    assert criterion.weight.dtype is getattr(torch, kept)
    assert reg.weight.dtype is torch.float32
    x, y = data
    assert reg(model.to(criterion.weight.dtype), x.to(criterion.weight.dtype), y).isfinite()


def test_a_network_that_is_bfloat16_by_itself_is_told_of(model, data):
    with pytest.warns(UserWarning, match="computes in bfloat16 by itself"):
        elle.ELLE(EPS)(lambda x: model(x).bfloat16(), *data)


def test_a_network_that_draws_at_each_point_is_told_of_once_where_the_loop_calls(data):
    network, reg = torch.nn.Sequential(smooth_net(64), torch.nn.Dropout(0.5)), elle.ELLE(EPS)
    with pytest.warns(UserWarning, match="layer 1 of this network draws anew for each point") as told:
        observe(reg, network, data, [EPS, EPS])
    assert [warning.filename for warning in told] == [__file__]


def test_a_network_that_draws_nothing_in_its_mode_is_not_told_of(data):
    network = torch.nn.Sequential(smooth_net(64), torch.nn.Dropout(0.5)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        elle.ELLE(EPS)(network, *data)


def test_a_network_of_one_logit_needs_a_criterion_of_its_own():
    x, _ = images(4, shape=(12,))
    network, y = Affine(classes=1), torch.ones(4, 1)
    with pytest.raises(ValueError, match=r"logits of shape \[12, 1\]"):
        elle.ELLE(EPS)(network, x, y)

    def binary(logits, y):
        return F.binary_cross_entropy_with_logits(logits, y, reduction="none").squeeze(1)

    assert elle.ELLE(EPS, 1, adaptive=False, criterion=binary)(network, x, y) > 0


def test_a_radius_that_a_schedule_sets_is_looked_at_too(model, data):
    reg = elle.ELLE(EPS)
    reg.eps = 8
    with pytest.raises(ValueError, match=r"eps is 8; .*8/255"):
        reg(model, *data)
    reg.eps = 0.0  # where a schedule may begin
    reg(model, *data)


def residual_net():
    torch.manual_seed(0)
    return build_model("preact-resnet18", (3, 8, 8), 10)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_low_memory_gives_the_same_penalty_gradient_and_statistics(precision):
    x, y = torch.rand(4, 3, 8, 8), torch.arange(4)
    found = []
    for memory in ("auto", "low"):
        model, reg = residual_net().train(), elle.ELLE(EPS, adaptive=False, memory=memory)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            value = call(reg, model, x, y)
        value.backward()
        found.append((value.detach(), [one.grad for one in model.parameters()], dict(model.named_buffers())))
    (value, gradients, buffers), (same, again, still) = found
    torch.testing.assert_close(same, value, rtol=0, atol=0)
    torch.testing.assert_close(still, buffers, rtol=0, atol=0)
    assert all(relative_distance(one, other) < 1e-4 for one, other in zip(again, gradients, strict=True))


def peak(memory):
    """Bytes that a call of the plug-in and its backward take at most."""
    model, reg = residual_net().train(), elle.ELLE(EPS, adaptive=False, memory=memory)
    x, y = torch.rand(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
    with PeakBytes(*model.parameters(), *model.buffers()) as footprint:
        reg(model, x, y).backward()
    return footprint.peak - sum(4 * one.numel() for one in model.parameters())  # their gradients


def test_low_memory_takes_less():
    assert peak("low") < 0.4 * peak("auto")


def with_dropout():
    return torch.nn.Sequential(residual_net(), torch.nn.Dropout(0.5))


def on_two_devices():
    parallel = torch.nn.DataParallel(residual_net())
    parallel.device_ids = [0, 1]
    return parallel


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: lambda x: residual_net()(x), "needs the network itself"),
        (on_two_devices, "use DistributedDataParallel"),
        (lambda: torch.compile(residual_net(), backend="eager"), "not compiled"),
        (with_dropout, "draws anew each time"),
        (lambda: smooth_net(192), "has no blocks"),
    ],
    ids=["function", "devices", "compiled", "dropout", "no blocks"],
)
def test_low_memory_is_refused_where_it_would_be_wrong_or_useless(network, message):
    reg = elle.ELLE(EPS, memory="low")
    with pytest.raises(ValueError, match=message):
        reg(network(), torch.rand(2, 3, 8, 8), torch.arange(2))


def test_images_that_are_not_floats_are_refused(model, data):
    with pytest.raises(ValueError, match=r"x is torch.uint8.*x.float\(\) / 255"):
        elle.ELLE(EPS)(model, (data[0] * 255).byte(), data[1])


@pytest.mark.parametrize(("images", "labels"), [(0, 0), (4, 3)])
def test_images_without_a_label_each_are_refused(model, data, images, labels):
    with pytest.raises(ValueError, match=f"x has {images} images and y {labels} labels"):
        elle.ELLE(EPS)(model, data[0][:images], data[1][:labels])


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], None, {"labels": torch.arange(4)}])
def test_labels_that_are_no_tensor_are_refused(model, data, labels):
    with pytest.raises(ValueError, match=r"y is a (list|NoneType|dict); give a tensor"):
        elle.ELLE(EPS)(model, data[0][:4], labels)


def test_an_image_without_a_batch_is_refused(model, data):
    with pytest.raises(ValueError, match="y no labels; give at least one image"):
        elle.ELLE(EPS)(model, data[0][0], data[1][0])


def test_its_description_names_the_radius_and_the_rule():
    assert "eps=0.0313725" in repr(elle.ELLE(EPS))
    assert "OnOff(value=4000.0" in repr(elle.ELLE(EPS))
    assert "eps of shape [1, 3, 1, 1]" in repr(elle.ELLE(torch.full((1, 3, 1, 1), EPS)))


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="EELLE"):
        _ = elle.EELLE


@pytest.mark.parametrize("name", elle.__all__)
def test_every_public_name_resolves(name):
    assert getattr(elle, name) is not None
    assert name in dir(elle)


def test_a_network_that_returns_more_than_logits_is_named():
    class Two(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1), x

    x, y = torch.rand(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
    calls = (
        lambda: elle.attacks.fgsm(Two(), x, y, 8 / 255),
        lambda: elle.ELLE(eps=8 / 255, weight=1)(Two(), x, y),
        lambda: elle.evaluate(Two(), x, y, attack="pgd-2", eps=8 / 255),
        lambda: elle.CollapseMonitor(x, y, eps=8 / 255).check(Two(), 1),
    )
    for call in calls:
        with pytest.raises(ValueError, match="returned a tuple, not logits"):
            call()
