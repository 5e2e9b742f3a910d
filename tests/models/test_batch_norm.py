"""Which layers the fused kernels would take over, and that all others, on a CPU all, do what they always did."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import replace_all_batch_norm_modules_

from elle.config import load_config
from elle.core.second_order import twice_differentiable
from elle.engine.draws import Draws
from elle.models import batch_norm
from elle.models.batch_norm import BatchNorm, fusing, norm_act, sum_norm_act, use_fused
from elle.models.recomputing import recomputed
from elle.models.registry import build_model
from elle.models.residual import PostActBlock, PreActBlock, PreActResNet, ResNet
from tests.engine.steps import make_step


def image(channels=4, batch=3, size=6):
    torch.manual_seed(1)
    return torch.randn(batch, channels, size, size).contiguous(memory_format=torch.channels_last)


def marked(model):
    """The network with its layers marked for the kernels, as `use_fused` does where there is Triton."""
    for layer in model.modules():
        if isinstance(layer, BatchNorm):
            layer.arrivals = torch.zeros(1, dtype=torch.int32)
    return model.train()


def small_network():
    torch.manual_seed(0)
    return PreActResNet((4, 6, 6), 5, nn.ReLU, blocks=(2, 1), stem_width=4, widths=(4, 8)).train()


@pytest.fixture
def fused(monkeypatch):
    """The layers taken over, as (layer, what is fused with it), by torch's operations in place of the kernels."""
    found = []

    def take_over(norm, x, *, relu=True, before=None, after=None, keep_sum=False, fork=False):
        parts = {"sum before": before is not None, "sum after": after is not None, "relu": relu, "fork": fork}
        found.append((norm, tuple(name for name, there in parts.items() if there)))
        s = x if before is None else x + before
        y = nn.BatchNorm2d.forward(norm, s)
        y = y if after is None else y + after
        y = F.relu(y) if relu else y
        return y, s if keep_sum else None, y if fork else None

    monkeypatch.setattr(batch_norm, "_on_gpu", lambda x: True)
    monkeypatch.setattr(batch_norm, "_fused", take_over)
    return found


def outcome(model, x, forward=None):
    """Logits, gradients and state of a copy of the network after one pass."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    y = (forward or type(model).forward)(model, x)
    y.square().sum().backward()
    state = [value for name, value in model.state_dict().items()]
    return [y, x.grad, *(one.grad for one in model.parameters()), *state]


def same(found, expected):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def pre_activation_before(block, x):
    out = F.relu(block.bn1(x))
    skip = x if block.shortcut is None else block.shortcut(out)
    return block.conv2(F.relu(block.bn2(block.conv1(out)))) + skip


def post_activation_before(block, x):
    skip = x if block.downsample is None else block.downsample(x)
    return F.relu(block.bn2(block.conv2(F.relu(block.bn1(block.conv1(x))))) + skip)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("kind", "before"), [(PreActBlock, pre_activation_before), (PostActBlock, post_activation_before)]
)
@pytest.mark.parametrize("mark", [marked, lambda block: block], ids=["marked", "not marked"])
def test_on_a_cpu_a_block_in_train_mode_is_bitwise_its_modules_one_by_one(kind, before, stride, mark):
    torch.manual_seed(0)
    block = mark(kind(4, 4, stride, False, nn.ReLU))
    assert same(outcome(block, image()), outcome(block, image(), before))


def test_on_a_cpu_a_marked_network_is_bitwise_the_plain_one():
    model = small_network()
    assert same(outcome(marked(copy.deepcopy(model)), image()), outcome(model, image()))


def test_the_state_has_the_names_of_torch_s_layer():
    assert list(marked(BatchNorm(3)).state_dict()) == list(nn.BatchNorm2d(3).state_dict())


def test_every_batchnorm_of_a_network_is_taken_over_with_its_relu_and_the_sum_before_it(fused):
    model = small_network()
    expected = outcome(model, image())
    model = marked(model)
    found = model(image())
    assert torch.equal(found, expected[0])
    layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm)]
    assert {layer for layer, _ in fused} == set(layers)
    assert len(fused) == len(layers) == 7
    expected = dict.fromkeys(layers, ("relu",))
    expected |= dict.fromkeys((model.blocks[1].bn1, model.bn), ("sum before", "relu"))
    expected[model.blocks[2].bn1] = ("sum before", "relu", "fork")  # its shortcut starts behind it
    assert dict(fused) == expected


def test_a_resnet_s_block_is_taken_over_with_the_sum_after_it(fused):
    block = marked(PostActBlock(4, 4, 2, False, nn.ReLU))
    block(image())
    assert [parts for _, parts in fused] == [(), ("relu",), ("sum after", "relu")]
    model = marked(ResNet((3, 8, 8), 5, nn.ReLU, blocks=(1, 1, 1, 1)))
    fused.clear()
    model(image(3, size=8))
    assert len(fused) == sum(isinstance(layer, BatchNorm) for layer in model.modules())


def small_resnet():
    torch.manual_seed(0)
    return ResNet((3, 8, 8), 5, nn.ReLU, blocks=(1, 2, 1, 1)).train()


def last_layers(model):
    return {block.bn2 for block in model.modules() if isinstance(block, PostActBlock)}


def test_a_resnet_s_blocks_give_the_next_one_their_output_twice(fused):
    model = small_resnet()
    expected = outcome(model, image(3, size=8))
    assert same(outcome(marked(model), image(3, size=8)), expected)
    fused.clear()
    model(image(3, size=8))
    assert {layer for layer, parts in fused if "fork" in parts} == {model.bn1} | last_layers(model)


@pytest.mark.parametrize("watched", ["layer2", "layer2.1", "layer2.0", "maxpool"])
def test_a_hook_in_a_resnet_sees_what_it_would_and_may_change_it(watched, fused):
    model = small_resnet()
    shown = []
    model.get_submodule(watched).register_forward_hook(lambda module, given, output: shown.append((*given, output)))
    expected = model(image(3, size=8))
    assert torch.equal(marked(model)(image(3, size=8)), expected)
    assert len(shown) == 2
    assert same(*shown)
    assert not any("fork" in parts for _, parts in fused)
    model.get_submodule(watched).register_forward_hook(lambda module, given, output: 2 * output)
    assert not torch.equal(model(image(3, size=8)), expected)


def test_a_resnet_with_another_stage_in_place_is_left_as_it_is(fused):
    model = small_resnet()
    model.layer4 = nn.Conv2d(256, 512, 1)
    expected = model(image(3, size=8))
    assert torch.equal(marked(model)(image(3, size=8)), expected)
    assert not any("fork" in parts for _, parts in fused)


def test_in_eval_mode_the_same_layers_are_taken_over(fused):
    model = marked(small_network()).eval()
    with fusing(model, False):
        expected = model(image())
    assert fused == []
    assert torch.equal(model(image()), expected)
    assert len(fused) == 7


def test_a_compiler_sees_torch_s_operations(fused, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    marked(small_network())(image())
    assert fused == []


def test_fusing_leaves_the_layers_as_they_were(monkeypatch):
    kernels = SimpleNamespace(arrivals=lambda channels, device: torch.zeros(channels, dtype=torch.int32))
    monkeypatch.setattr(batch_norm, "_kernels", lambda: kernels)
    model = nn.Sequential(marked(BatchNorm(3)), BatchNorm(4))
    before = [layer.arrivals for layer in model]
    for wanted in (True, False):
        with fusing(model, wanted):
            assert [layer.arrivals is not None for layer in model] == [wanted, wanted]
        assert all(layer.arrivals is mark for layer, mark in zip(model, before, strict=True))


def test_another_activation_is_left_outside(fused):
    norm, x = marked(BatchNorm(4)), image()
    expected = F.silu(nn.BatchNorm2d(4)(x) + x)
    assert torch.equal(norm_act(norm, nn.SiLU(), x, x), expected)
    assert fused == [(norm, ())]


def hooked(norm, activation, x):
    norm.register_forward_hook(lambda *_: None)
    return x


def momentum_none(norm, activation, x):
    norm.momentum = None
    return x


def no_running_statistics(norm, activation, x):
    replace_all_batch_norm_modules_(norm)
    return x


REFUSED = {
    "not marked": lambda norm, activation, x: use_fused(norm, False) or x,
    "a hook": hooked,
    "a cumulative average": momentum_none,
    "no running statistics": no_running_statistics,
    "channels first": lambda norm, activation, x: x.contiguous(),
    "double precision": lambda norm, activation, x: norm.double() and x.double(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_do_not_know_stays_with_torch(case, fused):
    norm, activation = marked(BatchNorm(4)), nn.ReLU()
    x = REFUSED[case](norm, activation, image())
    reference = copy.deepcopy(norm)
    s = x + x
    expected = F.relu(nn.BatchNorm2d.forward(reference, s))
    y, total = sum_norm_act(norm, activation, x, x)
    assert torch.equal(y, expected)
    assert torch.equal(total, s)
    assert same(norm.state_dict().values(), reference.state_dict().values())
    assert not [one for one in fused if one[1]]


def test_a_watched_activation_sees_what_it_would(fused):
    norm, activation, seen = marked(BatchNorm(4)), nn.ReLU(), []
    activation.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    y = norm_act(norm, activation, image())
    assert torch.equal(F.relu(seen[0]), y)
    assert fused == [(norm, ())]


def test_transforms_of_functions_see_torch_s_operations(fused):
    model, x = marked(small_network()).eval(), image()
    expected, (slope,) = model(x), torch.autograd.grad(model(asked := x.clone().requires_grad_()).sum(), asked)
    fused.clear()
    torch.testing.assert_close(torch.func.vmap(model)(x.unsqueeze(1)).squeeze(1), expected)
    torch.testing.assert_close(torch.func.grad(lambda x: model(x).sum())(x), slope)
    assert fused == []


def test_double_backpropagation_keeps_its_own_batchnorm(fused):
    model = marked(small_network())
    with twice_differentiable():
        model(image())
    assert fused == []


@pytest.mark.parametrize(("rank", "ranks", "parts"), [(1, 2, 1), (0, 1, 2)])
def test_parts_of_a_batch_are_fused_too(rank, ranks, parts, fused):
    norm = marked(BatchNorm(4))
    with Draws(rank, ranks, parts).part(0, 2):
        norm_act(norm, nn.ReLU(), image())
    assert fused


def test_a_tensor_of_a_kind_of_its_own_is_left_to_torch(fused):
    class Own(torch.Tensor):
        pass

    norm_act(marked(BatchNorm(4)), nn.ReLU(), image().as_subclass(Own))
    assert fused == []


def test_a_single_value_a_channel_is_refused_as_torch_does(fused):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_act(marked(BatchNorm(4)), nn.ReLU(), image(batch=1, size=1))


def test_a_hook_on_a_block_sees_the_sum_and_may_change_it(fused):
    model = small_network()
    expected = outcome(model, image())[0]
    model, seen = marked(model), []
    handle = model.blocks[1].register_forward_hook(lambda module, given, output: seen.append(output))
    assert torch.equal(model(image()), expected)
    assert seen[0].shape == (3, 4, 6, 6)
    assert all("sum before" not in parts for _, parts in fused)
    handle.remove()
    model.blocks[1].register_forward_hook(lambda module, given, output: 2 * output)
    assert not torch.equal(model(image()), expected)


def test_low_memory_computes_the_same_anew_and_moves_the_statistics_once(fused):
    model = small_network()

    def recomputing(model, x):
        with recomputed(model, list(model.blocks)):
            return model(x)

    expected = outcome(model, image(), recomputing)
    assert not fused
    found = outcome(marked(model), image(), recomputing)
    assert same(found, expected)
    # Six layers of blocks, each computed anew, and the last one; sums are kept, not what they are made of.
    assert len(fused) > 7
    assert all("sum before" not in parts for _, parts in fused)


def test_without_triton_nothing_is_marked(monkeypatch):
    monkeypatch.setattr(batch_norm, "_kernels", lambda: None)
    model = small_network()
    use_fused(model)
    assert all(layer.arrivals is None for layer in model.modules() if isinstance(layer, BatchNorm))


def test_where_triton_cannot_launch_torch_stays_and_a_warning_says_why(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(batch_norm, "_kernels", lambda: SimpleNamespace(evaluated=fails))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for name in ("zeros", "ones"):
        monkeypatch.setattr(torch, name, lambda *size, device=None: torch.empty(size))
    with pytest.warns(UserWarning, match=r"left to torch: .*\(Failed to find C compiler\.\)"):
        assert not batch_norm.launchable.__wrapped__(torch.device("cuda"))


@pytest.mark.parametrize(("setting", "wanted"), [({}, True), ({"fused": "off"}, False)])
def test_a_step_marks_the_network_unless_told_otherwise(setting, wanted, monkeypatch):
    asked = []
    monkeypatch.setattr("elle.engine.step.use_fused", lambda model, wanted: asked.append(wanted))
    make_step("fgsm", **setting)
    assert asked == [wanted]


def test_a_run_may_be_resumed_with_or_without():
    assert load_config([]).differences(load_config(["fused=off"])) == []


def test_a_network_that_was_marked_can_be_exported(fused):
    model = build_model("preact-resnet18", (3, 8, 8), 4)
    marked(model).eval()
    x = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    traced = torch.jit.trace(model, x, check_trace=False)
    assert fused == []
    assert torch.equal(traced(x), model(x))
