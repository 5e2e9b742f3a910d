"""Networks by name have their sizes and shapes; a user's own network is checked before it is trained."""

import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from elle.errors import InputError
from elle.models.registry import MODELS, build_model


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name, shape, classes, **settings):
    """The network without its memory: shapes and counts only."""
    with torch.device("meta"):
        return build_model(name, shape, classes, **settings)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        # Published for a network without a final BatchNorm: 11,171,146; it adds 2 * 512.
        ("preact-resnet18", (3, 32, 32), 10, 11_171_146 + 2 * 512),
        ("preact-resnet18", (3, 32, 32), 100, 11_218_340),
        ("resnet18", (3, 224, 224), 1000, 11_689_512),
        ("resnet34", (3, 224, 224), 1000, 21_797_672),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("resnet18", (3, 32, 32), 10, 11_173_962),
        ("resnet34", (3, 32, 32), 10, 21_282_122),
        ("resnet50", (3, 32, 32), 10, 23_520_842),
        ("wide-resnet-28-10", (3, 32, 32), 10, 36_479_194),
        ("wide-resnet-28-10", (3, 32, 32), 100, 36_536_884),
        ("wide-resnet-34-10", (3, 32, 32), 10, 46_160_474),
        ("small-cnn", (1, 28, 28), 10, 172_294),
        ("small-cnn", (1, 8, 8), 10, 28_294),
    ],
)
def test_a_network_has_its_published_number_of_parameters(name, shape, classes, count):
    assert parameters(on_meta(name, shape, classes)) == count


@pytest.mark.parametrize("row", MODELS.values(), ids=lambda row: row.name)
def test_the_declared_size_is_the_counted_one(row):
    model = on_meta(row.name, row.shape, row.classes)
    assert parameters(model) == row.parameters
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.zeros(2, *row.shape, device="meta"))
    assert counter.get_total_flops() / 2e9 == pytest.approx(row.gflop, abs=5e-4)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 96)])
@pytest.mark.parametrize("name", MODELS)
def test_a_network_takes_grey_and_colour_images_of_several_sizes(name, channels, size):
    model = on_meta(name, (channels, size, size), 7)
    with torch.no_grad():
        assert model(torch.rand(2, channels, size, size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("shape", [(1, 9, 14), (3, 1, 1)])
def test_the_small_network_takes_images_of_any_size(shape):
    with torch.no_grad():
        assert build_model("small-cnn", shape, 3)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", ["preact-resnet18", "resnet18", "small-cnn"])
def test_a_new_network_is_in_train_mode_with_fresh_statistics(name):
    model = build_model(name, (1, 8, 8), 10)
    assert all(module.training for module in model.modules())
    batch_norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert batch_norms
    assert all(int(module.num_batches_tracked) == 0 for module in batch_norms)


def test_the_same_seed_builds_the_same_network():
    states = []
    for _ in range(2):
        torch.manual_seed(5)
        states.append(build_model("small-cnn", (1, 8, 8), 10).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("preact-resnet-18", "did you mean 'preact-resnet18'"),
        ("small_cnn", "did you mean 'small-cnn'"),
        ("zzz", "choose"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, hint):
    with pytest.raises(InputError, match=hint):
        build_model(name, (3, 32, 32), 10)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A user's file in the current folder, written by the test; its name in `module:function`."""
    names = []

    def write(source):
        name = f"own_networks_{len(names)}"
        names.append(name)
        preamble = "import torch\nfrom torch import nn\n"
        (tmp_path / f"{name}.py").write_text(preamble + textwrap.dedent(source), encoding="utf-8")
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield write
    for name in names:
        sys.modules.pop(name, None)


LINEAR = "nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))"


def test_a_user_s_own_network_is_imported_from_the_current_folder(own_module):
    name = own_module(f"def tiny(num_classes):\n    return {LINEAR}\n")
    assert parameters(build_model(f"{name}:tiny", (1, 8, 8), 5)) == 64 * 5 + 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"return {LINEAR.replace('num_classes', '3')}", r"gives \(2, 3\) for 2 images; the data has 5 classes"),
        ("return 'network'", "returned str; it must return a torch.nn.Module"),
        ("raise RuntimeError('no such weights')", "could not be built: no such weights"),
        ("raise RuntimeError('first line\\nsecond line')", "could not be built: first line"),
        ("return nn.Sequential(nn.Flatten(), nn.Linear(63, 5))", r"does not take images of shape \(1, 8, 8\)"),
        ("return nn.LSTM(8, num_classes)", "does not take images|gives tuple"),
        ("return nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 5))", "an in-place operation"),
    ],
    ids=["classes", "no module", "raises", "raises two lines", "shape", "tuple", "in place"],
)
def test_a_user_s_network_that_does_not_fit_is_refused_on_one_line(own_module, body, message):
    name = own_module(f"def wrong(num_classes):\n    {body}\n")
    with pytest.raises(InputError, match=message) as problem:
        build_model(f"{name}:wrong", (1, 8, 8), 5)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("name", ["no_such_module:net", "torch:no_such_function", ":net", "math:pi", "torch:", "::"])
def test_a_module_or_function_that_does_not_exist_is_refused(name):
    with pytest.raises(InputError, match="could not be built"):
        build_model(name, (1, 8, 8), 5)


def test_a_part_that_a_user_has_frozen_in_eval_mode_stays_so(own_module):
    name = own_module(
        f"""
        def frozen(num_classes):
            model = nn.Sequential(nn.BatchNorm2d(1), {LINEAR})
            model[0].eval()
            return model
        """
    )
    model = build_model(f"{name}:frozen", (1, 8, 8), 5)
    assert model.training
    assert not model[0].training
