"""memory=low: the plain gradients and statistics, in little more memory than an FGSM step takes."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from elle.data.resident import Resident
from elle.data.sources import Split
from elle.engine.footprint import PeakBytes
from elle.engine.step import Step
from elle.errors import InputError
from elle.methods import METHODS, configured
from elle.models.recomputing import blocks_to_recompute
from elle.models.registry import MODELS, build_model
from elle.models.residual import PreActResNet, ResNet
from tests.engine.steps import parameters

SHAPE = (3, 32, 32)


def narrow(width=8):
    """PreActResNet18 with an eighth of its channels."""
    widths = [width * factor for factor in (1, 2, 4, 8)]
    return PreActResNet(SHAPE, 10, nn.ReLU, blocks=(2, 2, 2, 2), stem_width=width, widths=widths)


def post_activation():
    return ResNet(SHAPE, 10, nn.ReLU, blocks=(1, 2, 1, 1))


def with_bottlenecks():
    return ResNet((3, 65, 65), 10, nn.ReLU, blocks=(1, 1, 1, 1), bottleneck=True)


def make_step(method, memory="auto", *, precision="fp32", network=narrow, batch=4, size=8, accumulate=1):
    torch.manual_seed(0)
    stream = np.random.default_rng(0)
    data = Split(stream.integers(0, 256, (batch, 3, size, size), dtype=np.uint8), stream.integers(0, 10, batch))
    step = Step(
        network().train(),
        configured(method, weight=50.0),
        Resident(data, "cpu"),
        eps=8 / 255,
        momentum=0.0,
        weight_decay=0.0,
        precision=precision,
        steps_per_epoch=4,
        total_steps=4,
        memory=memory,
        accumulate=accumulate,
    )
    step.lr.fill_(1.0)
    return step


def after_one_step(step):
    before = parameters(step)
    torch.manual_seed(1)
    step(torch.arange(len(step.data)))
    update = torch.cat([(new - old).flatten() for new, old in zip(parameters(step), before, strict=True)])
    return update, dict(step.model.named_buffers())


@pytest.mark.parametrize(
    ("network", "size", "precision"),
    [(narrow, 8, "fp32"), (narrow, 8, "fp16"), (post_activation, 8, "fp16"), (with_bottlenecks, 65, "fp32")],
)
def test_the_update_and_the_running_statistics_are_the_plain_step_s(network, size, precision):
    plain, low, fgsm = (
        make_step(method, memory, precision=precision, network=network, size=size)
        for method, memory in (("elle", "auto"), ("elle", "low"), ("fgsm", "auto"))
    )
    (expected, statistics), (found, still) = after_one_step(plain), after_one_step(low)
    own_part = (expected - after_one_step(fgsm)[0]).norm()
    assert own_part > 0.1 * expected.norm()
    assert (found - expected).norm() < {"fp32": 1e-5, "fp16": 1e-2}[precision] * own_part
    torch.testing.assert_close(still, statistics, rtol=0, atol=0)
    torch.testing.assert_close(low.records, plain.records, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_computed_anew_sees_the_half_precision_copies_again(accumulate):
    """With the parameters themselves other kernels would run on a GPU, which keep other things for the backward."""
    step, seen = make_step("elle", "low", precision="fp16", accumulate=accumulate), []
    step.model.blocks[0].conv1.register_forward_hook(lambda layer, given, out: seen.append(layer.weight.dtype))
    after_one_step(step)
    assert seen == [torch.float16] * 4 * accumulate  # attack, loss, penalty, and that once more


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.double_backpropagation])
def test_a_penalty_beside_double_backpropagation_is_that_of_the_plain_step(method):
    """The backward computes the blocks anew with the layers that the forward had, and not with torch's own."""
    plain, low = (make_step(f"{method}+elle", memory) for memory in ("auto", "low"))
    (expected, statistics), (found, still) = after_one_step(plain), after_one_step(low)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    torch.testing.assert_close(still, statistics, rtol=0, atol=0)
    torch.testing.assert_close(low.records, plain.records, rtol=0, atol=0, equal_nan=True)


def peak_activations(step):
    with PeakBytes(*step.model.parameters(), *step.model.buffers()) as footprint:
        step(torch.arange(len(step.data)))
    return footprint.peak


def test_it_takes_less_than_1_25_times_the_memory_of_fgsm():
    # As many images as make activations outweigh weights, as they do in training.
    fgsm, plain, low = (
        peak_activations(make_step(method, memory, network=lambda: narrow(16), batch=24, size=32))
        for method, memory in (("fgsm", "auto"), ("elle", "auto"), ("elle", "low"))
    )
    assert low < 1.25 * fgsm
    assert plain > 3 * fgsm


class Uncomputed(Step):
    """A step on tensors that have shapes but no values, where an update cannot ask whether a gradient is finite."""

    def _update(self):
        pass


class Shapes:
    def __init__(self, images, shape):
        self.images, self.shape = images, shape

    def __len__(self):
        return self.images

    def batch(self, index):
        return torch.rand(self.images, *self.shape), torch.zeros(self.images, dtype=torch.int64)


def peak_of_shapes(method, memory, model="preact-resnet18", shape=SHAPE, batch=128):
    """What a step in half precision holds of the network and the batch that are trained on a GPU."""
    with FakeTensorMode():
        step = Uncomputed(
            build_model(model, shape, MODELS[model].classes).train(),
            configured(method),
            Shapes(batch, shape),
            eps=8 / 255,
            momentum=0.0,
            weight_decay=0.0,
            precision="fp16",
            steps_per_epoch=4,
            total_steps=4,
            memory=memory,
            fused="off",  # the same with and without Triton
        )
        return peak_activations(step)


class ConvolutionProducts(TorchDispatchMode):
    """The multiplications of all convolutions forward."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.convolution.default:
            self.total += made.numel() * args[1][0].numel()
        return made


def rows_of_the_page():
    text = (Path(__file__).parents[2] / "docs" / "speed.md").read_text()
    pattern = r"^\| `(\S+)` \| (\d+) of (\d+) x \d+ \| ([\d.]+) \| ([\d.]+) \| (\d+) % \|$"
    return re.findall(pattern, text, re.MULTILINE)


@pytest.mark.parametrize("row", rows_of_the_page(), ids=lambda row: row[0])
def test_in_half_precision_at_full_size_it_takes_what_the_page_says(row):
    model, images, size, *told = row
    setting = (model, (3, int(size), int(size)), int(images))
    fgsm = peak_of_shapes("fgsm", "auto", *setting)
    found = []
    for memory in ("auto", "low"):
        with ConvolutionProducts() as products:
            found.append((peak_of_shapes("elle", memory, *setting) / fgsm, products.total))
    (plain, once), (low, with_recomputing) = found
    again = (with_recomputing - once) / (once * 3 / 5)  # forwards: two of FGSM and the penalty's three
    assert told == [f"{plain:.2f}", f"{low:.2f}", f"{100 * again:.0f}"]


def test_the_networks_of_the_paper_take_less_than_1_25_times_fgsm_s():
    low = {row[0]: float(row[4]) for row in rows_of_the_page()}
    assert max(low[name] for name in ("preact-resnet18", "wide-resnet-28-10", "resnet50")) < 1.25


def test_what_is_counted_is_what_a_gpu_holds():
    assert 290 < peak_of_shapes("fgsm", "auto") / 2**20 < 310  # 303 to 311 on a GPU


class CountedConvolutions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.images = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.images += len(args[0])
        return function(*args, **(kwargs or {}))


def test_it_computes_half_of_the_penalty_s_convolutions_anew():
    counts = []
    for memory in ("auto", "low"):
        step = make_step("elle", memory)
        with CountedConvolutions() as counted:
            after_one_step(step)
        counts.append(counted.images)
    assert counts[0] == 20 * (2 + 3) * 4  # convolutions x points x images
    # Not those of the last three blocks, nor the last of a block, which its inner values do not need; but the stem's.
    assert counts[1] - counts[0] == 10 * 3 * 4


def test_peak_bytes_are_those_alive_at_one_time():
    x = torch.zeros(1000)
    with PeakBytes(x) as footprint:
        y = x + 1
        z = y * 2
        del y
        z = z.view(10, 100) + 1
        x.add_(1)
    assert footprint.peak == 8000


def test_the_network_is_left_as_it_was():
    step = make_step("elle", "low")
    after_one_step(step)
    assert not any({"forward", "layer", "stem"} & set(vars(module)) for module in step.model.modules())
    layers = [module for module in step.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all((layer.momentum, int(layer.num_batches_tracked)) == (0.1, 3) for layer in layers)


def wide():
    return PreActResNet(SHAPE, 10, nn.ReLU, blocks=(4, 4, 4), stem_width=2, widths=(20, 40, 80))


@pytest.mark.parametrize(("network", "count"), [(narrow, 5), (wide, 9), (post_activation, 3)])
def test_the_blocks_are_the_residual_blocks_also_behind_a_first_layer(network, count):
    """But for the last ones of networks whose blocks' sizes are known: in their place memory is kept."""
    model = network()
    for one in (model, nn.Sequential(nn.Identity(), model)):
        assert len(blocks_to_recompute(one)) == count


def test_of_a_network_s_blocks_the_first_are_computed_anew():
    model = narrow()
    assert set(blocks_to_recompute(model)) == set(model.blocks[:5])


def with_dropout():
    return nn.Sequential(narrow(), nn.Dropout(0.1))


class DropPath(nn.Identity):
    """As timm's, which is known by its name."""


def with_drop_path():
    return nn.Sequential(narrow(), DropPath())


def without_blocks():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (with_dropout, "draws anew each time"),
        (with_drop_path, "draws anew each time"),
        (without_blocks, "has no blocks"),
    ],
)
def test_where_it_would_be_wrong_or_useless_it_is_refused(network, message):
    with pytest.raises(InputError, match=message):
        make_step("elle", "low", network=network)


def test_so_is_the_form_that_keeps_the_attack_s_forward():
    step = make_step("elle", "low")
    with pytest.raises(InputError, match="not for method.regulariser.form=2p"):
        step.use(configured("elle", options={"regulariser": {"form": "2p"}}))


def test_dropout_in_eval_mode_draws_nothing():
    model = with_dropout()
    model[1].eval()
    assert len(blocks_to_recompute(model)) == 5


def test_a_method_without_the_penalty_is_not_changed_by_it():
    (expected, _), (found, _) = (after_one_step(make_step("fgsm", memory)) for memory in ("auto", "low"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_tensor_that_takes_the_place_of_one_made_before_is_counted():
    footprint = PeakBytes(*(torch.empty(1000) for _ in range(50)))
    with footprint:
        kept = [torch.empty(1000) for _ in range(50)]
    assert footprint.peak == len(kept) * 4000
