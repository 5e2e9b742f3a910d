"""AutoAttack on a GPU: captured steps, reduced precision, channels-last weights, and no waiting within a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elle.evaluation.autoattack import ORDER, Budget, search
from elle.evaluation.autoattack.oracle import Oracle, constant, tf32
from elle.evaluation.autoattack.registry import make_attack
from elle.models.registry import build_model
from tests.gpu.waiting import without_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
EPS = {"linf": 0.06, "l2": 1.0, "l1": 12.0}
BUDGET = Budget(steps=30, queries=200, targets=3)


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, Tensor, Tensor]:
    """A PreActResNet18 trained for some steps on noisy patterns: (model, x [300, 3, 32, 32], y), all known to it."""
    torch.manual_seed(0)
    patterns = torch.rand(10, 3, 32, 32, device=DEVICE)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(10, (count,), device=DEVICE)
        return 0.15 * patterns[y] + 0.85 * torch.rand(count, 3, 32, 32, device=DEVICE), y

    model = build_model("preact-resnet18", (3, 32, 32), 10).to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for _ in range(60):
        x, y = drawn(128)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    model.eval()
    x, y = drawn(600)
    with torch.no_grad():
        known = (model(x).argmax(1) == y).nonzero().squeeze(1)[:300]
    assert len(known) > 100
    return model, x[known], y[known]


def broken(network, name, norm, **options) -> Tensor:
    model, x, y = network
    x_adv = search(name, model, x, y, EPS[norm], norm=norm, classes=10, seed=0, batch=64, budget=BUDGET, **options)
    changed = (x_adv != x).flatten(1).any(1)
    with torch.no_grad(), tf32(False):  # what counts is float32 proper
        logits = model(x_adv)
    of_y = logits.gather(1, y[:, None]).squeeze(1)
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    # FAB stops at the boundary, and a batch of another size is rounded otherwise.
    assert bool((of_y - others < 1e-4)[changed].all())
    return changed


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ORDER)
def test_a_captured_search_breaks_the_points_of_an_eager_one(network, name, norm):
    eager, captured = (broken(network, name, norm, graph=graph) for graph in (False, True))
    assert (eager != captured).sum() <= 0.02 * len(eager)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32"])
@pytest.mark.parametrize("name", ORDER)
def test_reduced_precision_breaks_as_many_points(network, name, precision):
    exact, rough = broken(network, name, "linf"), broken(network, name, "linf", precision=precision, graph=True)
    assert abs(int(exact.sum()) - int(rough.sum())) <= 0.03 * len(exact)


@pytest.mark.parametrize("norm", EPS)
@pytest.mark.parametrize("name", ORDER)
def test_a_step_never_waits_for_the_device(network, name, norm):
    model, x, y = network
    oracle = Oracle(model, DEVICE, "fp16")
    with constant(model), torch.no_grad():
        attack = make_attack(name, oracle, x, y, EPS[norm], norm, 10, 0, BUDGET)
        rows = attack.start(torch.arange(32, device=DEVICE), torch.zeros(32, dtype=torch.int64, device=DEVICE))
        attack.step(rows)
        with without_waiting():
            attack.step(rows)


def test_the_same_seed_gives_the_same_points(network):
    model, x, y = network
    options = {"classes": 10, "seed": 0, "batch": 64, "graph": True, "precision": "fp16", "budget": BUDGET}
    first, again = (search("apgd-t", model, x, y, EPS["linf"], **options) for _ in range(2))
    assert torch.equal(first, again)


def test_weights_are_laid_out_as_before_afterwards(network):
    model = network[0]
    before = [parameter.data_ptr() for parameter in model.parameters()]
    broken(network, "apgd-ce", "linf", graph=True, precision="fp16")
    assert before == [parameter.data_ptr() for parameter in model.parameters()]
