"""What a training step asks of the device, counted on a CPU: no wait for a value, no pass beyond the declared."""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elle.core.linearity import Linearity
from elle.engine.leaving_out import LeavingOut
from elle.engine.loop import train
from elle.engine.watcher import Watcher
from elle.methods import METHODS, configured
from tests.engine.steps import make_step, small_cnn

WAITING_METHODS = ("item", "tolist", "cpu", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__")
WAITING_FUNCTIONS = ("nonzero", "masked_select", "unique", "equal", "allclose", "_local_scalar_dense", "is_nonzero")


class Waits(TorchFunctionMode):
    """Writes down calls that on a GPU make the host wait, by name: what torch is asked for in Python."""

    def __init__(self):
        super().__init__()
        self.found = []
        self.operations = _Operations(self.found)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        to_host = name == "to" and any(str(one) == "cpu" for one in (*args[1:], *(kwargs or {}).values()))
        if name in WAITING_METHODS or to_host:
            self.found.append(name)
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.operations.__enter__()
        return super().__enter__()

    def __exit__(self, *problem):
        super().__exit__(*problem)
        self.operations.__exit__(*problem)


class _Operations(TorchDispatchMode):
    """The same for what reaches the device in any way, an index by a mask among it."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masked = name in ("index", "index_put_") and any(
            one is not None and one.dtype is torch.bool for one in (args[1] or ())
        )
        if name in WAITING_FUNCTIONS or masked:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


class Passes(TorchDispatchMode):
    """Images that pass the network's convolutions, by kind of pass, and how many operations there are in all."""

    def __init__(self):
        super().__init__()
        self.images, self.operations = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        if function is torch.ops.aten.convolution.default:
            self.images["forwards"] += len(args[0])
        if function is torch.ops.aten.convolution_backward.default:
            for kind, wanted in zip(("input_gradients", "weight_gradients"), args[-1], strict=False):
                self.images[kind] += len(args[0]) * wanted
        return function(*args, **(kwargs or {}))


def step_of(method):
    step = make_step(method, weight=1.0, network=small_cnn, precision="fp32", crop=1)
    step(torch.arange(8))  # what is set up once is not counted
    return step


# Methods that only a GPU test covers: see tests/gpu/test_cuda.py, where torch itself refuses to wait.
@pytest.mark.parametrize("method", ["standard", "fgsm", "n-fgsm", "pgd-2", "gradalign", "elle", "elle-a"])
def test_a_step_waits_for_nothing(method):
    step = step_of(method)
    with Waits() as waits:
        step(torch.arange(8))
    assert waits.found == []


@pytest.mark.parametrize("penalty", ["measured", "left out"])
def test_a_step_that_leaves_its_penalty_out_waits_for_nothing(penalty):
    step = step_of("elle-a")
    with Waits() as waits:
        step(torch.arange(8), penalty=penalty)
    assert waits.found == []


def test_choosing_what_to_leave_out_reads_one_value_a_step():
    step = step_of("elle-a")
    step.use(configured("elle-a", options={"weight": {"next_step": True, "negligible": 0.1}}))
    run = LeavingOut(step, lambda form: form)
    run(torch.arange(8))
    with Waits() as waits:
        run(torch.arange(8))
    assert waits.found == ["__float__", "_local_scalar_dense"]


def test_nor_does_what_the_loop_does_between_two_steps(settings):
    waits = Waits()

    def stepped(step):
        if step == 2:
            waits.__enter__()
        elif step == 5:
            waits.__exit__(None, None, None)

    config = settings("method=elle-a", "epochs=1", "max_steps=6", "probe_every=0", "final=clean")
    train(config, watcher=Watcher(stepped=stepped))
    assert waits.found == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.tolist(),
        lambda x: x[x > 0.5],
        lambda x: torch.nonzero(x),
        lambda x: torch.equal(x, x),
        lambda x: list(range(int(x.sum()))),
    ],
)
def test_a_wait_is_found(wait):
    class Waiting(Linearity):
        def __call__(self, model, x, y, eps, **others):
            wait(x)
            return super().__call__(model, x, y, eps, **others)

    step = step_of("elle-a")
    object.__setattr__(step.method, "regulariser", Waiting())
    with Waits() as waits:
        step(torch.arange(8))
    assert waits.found


@pytest.mark.parametrize("method", ["standard", "fgsm", "n-fgsm", "elle", "elle-a"])
def test_a_step_makes_the_declared_passes_and_no_other(method):
    step = step_of(method)
    with Passes() as passes:
        step(torch.arange(8))
    layers, images, cost = 3, 8, METHODS[method].cost
    assert passes.images["forwards"] == layers * images * cost.forwards
    # Where a pass is made for the weights alone, the first layer's images need no gradient.
    spared = images * (cost.input_gradients - (method != "standard"))
    assert passes.images["input_gradients"] == layers * images * cost.input_gradients - spared
    assert passes.images["weight_gradients"] == layers * images * cost.weight_gradients


def test_a_measured_penalty_costs_three_forwards_and_no_gradient():
    counts = []
    for penalty in ("left out", "measured"):
        step = step_of("elle-a")
        with Passes() as passes:
            step(torch.arange(8), penalty=penalty)
        counts.append(passes.images)
    assert counts[1] - counts[0] == Counter(forwards=3 * 8 * 3)


# Operations of a step now; each is a kernel launch or two on a GPU. A few more need a reason, a few less a new number.
@pytest.mark.parametrize(("method", "most"), [("fgsm", 165), ("elle-a", 333)])
def test_a_step_gains_no_operations_unnoticed(method, most):
    step = step_of(method)
    with Passes() as passes:
        step(torch.arange(8))
    assert 0.9 * most < passes.operations <= most
