"""The kernels of BatchNorm, ReLU and sums give what torch's operations give: values, gradients, running statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elle.models import batch_norm
from elle.models.batch_norm import BatchNorm, fusing, norm_act, sum_norm_act, use_fused
from elle.models.residual import PostActBlock, PreActResNet
from tests.networks import relative_distance
from tests.triton_kernels import DEVICE, GPU, INTERPRETED, MARKS, TRITON

pytestmark = MARKS
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [(3, 5, 4, 7), (5, 160, 3, 3), (9, 16, 1, 1), (2, 64, 8, 8)]
LARGE = [(128, 64, 32, 32), (128, 512, 4, 4), (384, 128, 16, 16), (128, 160, 32, 32), (127, 640, 8, 8)]
MANY_ROWS = (1100, 8, 64, 64)
"""More tiles than the second axis of a grid has programs."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(batch_norm, "_on_gpu", lambda x: True)


@pytest.fixture(params=["few", "many"])
def rows(request, monkeypatch):
    """The small arrays here as few rows, which they are, and dealt out as many are."""
    if TRITON and request.param == "many":
        monkeypatch.setattr(launches(), "FEW_ROWS", 0)


def use_tiles(monkeypatch, adding):
    for name in ("STATISTICS", "SUMS"):
        monkeypatch.setattr(launches(), name, adding)
    monkeypatch.setattr(launches(), "FEW_ROWS", 0)


def launches():
    from elle.models import batch_norm_launches

    return batch_norm_launches


def values(shape, dtype=torch.float32, mean=0.3, std=2.0):
    x = torch.randn(shape, device=DEVICE) * std + mean
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def layer(channels, **settings):
    norm = BatchNorm(channels).to(DEVICE)
    nn.init.uniform_(norm.weight, -1, 2)
    nn.init.uniform_(norm.bias, -1, 1)
    for name, value in settings.items():
        setattr(norm, name, value)
    use_fused(norm)
    return norm


def exact(norm):
    """torch's own layer in double precision, with the same weights and buffers."""
    other = nn.BatchNorm2d(norm.num_features, momentum=norm.momentum).to(DEVICE)
    other.load_state_dict(norm.state_dict())
    return other.double()


def plain(norm, x, addend, place):
    s = x + addend if place == "before" else x
    y = norm(s)
    return F.relu(y + addend if place == "after" else y), s


def fused(norm, x, addend, place):
    relu = nn.ReLU()
    return sum_norm_act(norm, relu, x, addend) if place == "before" else (norm_act(norm, relu, x, addend), x)


def apart_from_the_kink(norm, x, addend, place, for_y):
    """for_y without the entries where the ReLU's argument is 0 within rounding: there either slope is right."""
    y = norm(x.double())
    y = y + addend.double() if place == "after" else y
    return for_y * (y.abs() > 1e-4)


def outcome(work, norm, inputs, for_y, for_s, place):
    """Output, sum, gradients of x, addend, weight and bias, and buffers."""
    x, addend = (None if one is None else one.detach().requires_grad_() for one in inputs)
    y, s = work(norm, x, addend, place)
    loss = (y * for_y).sum() + ((s * for_s).sum() if for_s is not None else 0)
    wanted = [one for one in (x, addend, norm.weight, norm.bias) if one is not None]
    return [y.detach(), s.detach(), *torch.autograd.grad(loss, wanted), norm.running_mean, norm.running_var]


def compare(shape, dtype, place, skip_used=True, tolerance=None, **settings):
    torch.manual_seed(0)
    norm = layer(shape[1])
    reference = exact(norm)
    x = values(shape, dtype, **settings)
    addend = values(shape, dtype) if place != "none" else None
    for_s = values(shape, dtype) if place == "before" and skip_used else None
    s = x + addend if place == "before" else x
    for_y = apart_from_the_kink(copy.deepcopy(reference), s, addend, place, values(shape, dtype))
    found = outcome(fused, norm, (x, addend), for_y, for_s, place)
    if place == "before":
        torch.testing.assert_close(found[1], x + addend)
        # They normalise the sum as it is kept, as torch does: rounded.
        x, addend = found[1].double(), torch.zeros_like(x).double()
    doubles = [None if one is None else one.double() for one in (x, addend, for_y, for_s)]
    expected = outcome(plain, reference, doubles[:2], *doubles[2:], place)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.isfinite().all()
        assert relative_distance(mine.double(), theirs) < (tolerance or TOLERANCE[dtype])
    assert int(norm.num_batches_tracked) == 1
    assert not norm.arrivals.any()


@pytest.mark.parametrize("place", ["none", "before", "after"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_gradients_and_statistics_are_torch_s(shape, dtype, place, rows):
    compare(shape, dtype, place)


@pytest.mark.skipif(not GPU, reason="large")
@pytest.mark.parametrize("place", ["none", "before", "after"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [*LARGE, MANY_ROWS], ids=str)
def test_of_whole_batches_too(shape, dtype, place):
    # A sum of very many values in float32 is as exact as torch's own.
    compare(shape, dtype, place, tolerance=max(TOLERANCE[dtype], 1e-5))


def test_a_sum_that_nobody_else_reads_gets_its_gradient():
    compare((3, 5, 4, 7), torch.float32, "before", skip_used=False)


@pytest.mark.parametrize("training", [True, False])
def test_what_goes_past_a_layer_without_a_sum_adds_its_gradient(training):
    torch.manual_seed(0)
    norm = layer(5).train(training)
    reference = exact(norm).train(training)
    x, for_y, for_x = (values((3, 5, 4, 7)) for _ in range(3))
    for_y = apart_from_the_kink(copy.deepcopy(reference), x, None, "none", for_y)
    gradients = []
    for one, inputs in ((norm, (x, for_y, for_x)), (reference, (x.double(), for_y.double(), for_x.double()))):
        start, of_y, of_past = inputs[0].detach().requires_grad_(), *inputs[1:]
        y, past = sum_norm_act(one, nn.ReLU(), start)
        assert torch.equal(past, start)
        assert one is reference or past.grad_fn is y.grad_fn  # not added up behind the kernels' back
        loss = (y * of_y).sum() + (past * of_past).sum()
        gradients.append(torch.autograd.grad(loss, start)[0])
    assert relative_distance(gradients[0].double(), gradients[1]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("tiles", ["default", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("mean", "std"), [(1000.0, 0.1), (100.0, 0.1), (-3.0, 1e-4), (0.0, 1e-6)])
def test_a_large_mean_does_not_swallow_a_small_variance(mean, std, dtype, tiles, monkeypatch):
    if tiles == "small":  # several chunks a part
        use_tiles(monkeypatch, launches().Adding(8, 4, 1, 2))
    torch.manual_seed(0)
    norm = layer(6)
    reference = exact(norm)
    x = values((4, 6, 16, 16), dtype, mean=mean, std=std)
    found, expected = norm_act(norm, nn.ReLU(), x), F.relu(reference(x.double()))
    # What float32 can know of the distance from the mean, in units of sqrt(variance + eps), and the result's rounding.
    known = 4 * torch.finfo(torch.float32).eps * abs(mean) / (std**2 + 1e-5) ** 0.5 + 1e-5
    rounding = torch.finfo(dtype).eps * expected.abs().max()
    assert (found - expected).abs().max() < known * norm.weight.abs().max() + rounding
    torch.testing.assert_close(norm.running_var, reference.running_var.float(), rtol=1e-4, atol=0)


def test_first_values_far_from_all_others_do_not_spoil_the_variance(monkeypatch):
    """The distances are taken from each place's first value: here 16 places with 256 values."""
    use_tiles(monkeypatch, launches().Adding(8, 4, 1, 1))
    torch.manual_seed(0)
    norm = layer(8)
    reference = exact(norm)
    x = values((16, 8, 16, 16), mean=0.0, std=0.1)
    x[0, :, 0] = 1000.0
    norm_act(norm, nn.ReLU(), x)
    reference(x.double())
    torch.testing.assert_close(norm.running_var, reference.running_var.float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("shape", "place", "adding", "writing"),
    [
        ((7, 24, 5, 5), "before", (16, 2, 1, 4), (16, 16, 4)),
        ((7, 24, 5, 5), "after", (8, 8, 2, 64), (64, 32, 4)),
        ((5, 24, 11, 11), "none", (64, 1, 1, 1000), (32, 64, 1)),  # more parts than are merged in one round
    ],
)
def test_other_tiles_give_the_same(shape, place, adding, writing, monkeypatch):
    kernels = launches()
    use_tiles(monkeypatch, kernels.Adding(*adding))
    monkeypatch.setattr(kernels, "WRITING", kernels.Writing(*writing))
    compare(shape, torch.float32, place)


def test_two_runs_are_bitwise_the_same(rows):
    torch.manual_seed(0)
    norm, x, g = layer(48), values((5, 48, 6, 6), torch.float16), values((5, 48, 6, 6), torch.float16)
    runs = [outcome(fused, copy.deepcopy(norm), (x, None), g, None, "none") for _ in range(2)]
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_nan_and_infinity_go_through_as_in_torch(rows):
    norm, x = layer(3), values((2, 3, 4, 4))
    x[0, 0, 0, 0], x[0, 1, 0, 0] = torch.nan, torch.inf
    y = norm_act(norm, nn.ReLU(), x)
    assert y[:, :2].isnan().all()
    assert y[:, 2].isfinite().all()


def test_momentum_0_and_no_count_leave_the_buffers_alone():
    norm = layer(3, momentum=0.0, num_batches_tracked=None)
    norm_act(norm, nn.ReLU(), values((2, 3, 4, 4)))
    assert torch.equal(norm.running_mean, torch.zeros(3, device=DEVICE))
    assert torch.equal(norm.running_var, torch.ones(3, device=DEVICE))


def test_a_layer_alone_and_before_another_activation_is_fused_without_a_relu():
    norm, x = layer(5), values((3, 5, 4, 4))
    reference = exact(norm)
    assert type(norm(x).grad_fn).__name__ == "_TrainedBackward"
    reference(x.double())
    found, expected = norm_act(norm, nn.SiLU(), x), F.silu(reference(x.double()))
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_gets_no_weight_gradient():
    norm = layer(5).requires_grad_(False)
    x = values((3, 5, 4, 4)).requires_grad_()
    norm_act(norm, nn.ReLU(), x).sum().backward()
    assert norm.weight.grad is None
    assert x.grad.isfinite().all()


def test_a_gradient_of_a_gradient_is_refused_not_wrong():
    norm, x = layer(5), values((3, 5, 4, 4)).requires_grad_()
    (slope,) = torch.autograd.grad(norm_act(norm, nn.ReLU(), x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def pre_activation():
    return PreActResNet((3, 8, 8), 4, nn.ReLU, blocks=(2, 1), stem_width=8, widths=(8, 16))


def post_activation():
    return nn.Sequential(PostActBlock(3, 8, 1, False, nn.ReLU), PostActBlock(8, 4, 2, True, nn.ReLU), nn.Flatten(1))


@pytest.mark.parametrize("build", [pre_activation, post_activation])
def test_a_network_trains_as_without(build, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    unfused = build().to(DEVICE, memory_format=torch.channels_last).train()
    network = copy.deepcopy(unfused)
    use_fused(network)
    x, results = values((4, 3, 8, 8)), []
    for model in (network, unfused):
        logits = model(x)
        logits.square().sum().backward()
        results.append([logits.detach(), *(one.grad for one in model.parameters()), *model.state_dict().values()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 + 1e-4 * float(theirs.double().abs().max()))
    assert network.state_dict().keys() == unfused.state_dict().keys()


def evaluated(shape, dtype, trainable=False):
    """A layer in eval mode with statistics of its own, and torch's in double precision."""
    torch.manual_seed(0)
    norm = layer(shape[1]).eval().requires_grad_(trainable)
    nn.init.uniform_(norm.running_mean, -1, 1)
    nn.init.uniform_(norm.running_var, 0.1, 2)
    reference = exact(norm).eval().requires_grad_(trainable)
    x, addend, for_y, for_s = (values(shape, dtype) for _ in range(4))
    return norm, reference, x, addend, for_y, for_s


def input_gradients(work, norm, inputs, for_y, for_s, place):
    """Output, sum, and gradients of what can have one."""
    inputs = [one.detach().requires_grad_() for one in inputs]
    y, s = work(norm, *inputs, place)
    loss = (y * for_y).sum() + (s * for_s).sum()
    wanted = [*inputs[: 1 if place == "none" else 2], *(one for one in norm.parameters() if one.requires_grad)]
    return [y.detach(), s.detach(), *torch.autograd.grad(loss, wanted)]


def fused_without_the_sum(norm, x, addend, place):
    return norm_act(norm, nn.ReLU(), x, before=addend), x


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("place", ["none", "before", "after"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 4, 7), (5, 160, 3, 3), (1, 8, 1, 1)], ids=str)
def test_in_eval_mode_values_and_gradients_are_torch_s(shape, dtype, place, trainable):
    norm, reference, x, addend, for_y, for_s = evaluated(shape, dtype, trainable)
    s = x + addend if place == "before" else x
    for_y = apart_from_the_kink(reference, s, addend, place, for_y)
    work = fused if place != "none" else lambda norm, x, addend, place: fused(norm, x, None, place)
    found = input_gradients(work, norm, (x, addend), for_y, for_s, place)
    if place == "before":  # they normalise the sum as it is kept: rounded
        torch.testing.assert_close(found[1], s)
        x, addend = found[1], torch.zeros_like(x)
    expected = input_gradients(plain, reference, (x.double(), addend.double()), for_y.double(), for_s.double(), place)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_distance(mine.double(), theirs) < TOLERANCE[dtype]
    assert int(norm.num_batches_tracked) == 0
    assert torch.equal(norm.running_mean.double(), reference.running_mean)


@pytest.mark.parametrize("trainable", [False, True])
def test_a_sum_that_is_not_kept_changes_nothing_else(trainable):
    norm, _, x, addend, for_y, _ = evaluated((3, 5, 4, 7), torch.float16, trainable)
    runs = [
        input_gradients(work, norm, (x, addend), for_y, torch.zeros_like(x), "before")
        for work in (fused, fused_without_the_sum)
    ]
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(runs[0][2:], runs[1][2:], strict=True))


def test_an_attack_in_eval_mode_computes_no_gradients_of_weights(monkeypatch):
    norm, _, x, _, _, _ = evaluated((3, 5, 4, 7), torch.float32, trainable=True)
    asked, sums = [], launches().sums
    monkeypatch.setattr(launches(), "sums", lambda *given, **more: asked.append(1) or sums(*given, **more))
    x.requires_grad_()
    torch.autograd.grad(norm_act(norm, nn.ReLU(), x).sum(), x)
    assert not asked
    norm_act(norm, nn.ReLU(), x).sum().backward()
    assert len(asked) == 1


@pytest.mark.parametrize("build", [pre_activation, post_activation])
def test_a_network_in_eval_mode_is_differentiated_as_without(build):
    torch.manual_seed(0)
    network = build().to(DEVICE, memory_format=torch.channels_last)
    network(values((8, 3, 8, 8)))  # statistics of their own
    network.eval().requires_grad_(False)
    x, results = values((4, 3, 8, 8)), []
    for wanted in (True, False):
        images = x.clone().requires_grad_()
        with fusing(network, wanted):
            logits = network(images)
        results.append([logits.detach(), *torch.autograd.grad(logits.square().sum(), images)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))
