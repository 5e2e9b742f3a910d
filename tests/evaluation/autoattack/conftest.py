"""A small network on scikit-learn's digits, trained in a second or two, and images of the rest that it knows."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from elle.models.small_cnn import SmallCNN


def size(delta: Tensor, norm: str) -> Tensor:
    """The norm of each image's perturbation in float64, by torch and not by the code that is tested."""
    order = {"linf": math.inf, "l2": 2, "l1": 1}[norm]
    length: Tensor = torch.linalg.vector_norm(delta.flatten(1).double(), order, dim=1)
    return length


@pytest.fixture(scope="session")
def digits_net() -> tuple[nn.Module, Tensor, Tensor]:
    """(model in eval mode, x [120, 1, 8, 8], y [120]), all classified correctly."""
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = SmallCNN((1, 8, 8), 10, nn.ReLU)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(6):
        for index in torch.randperm(1200).split(100):
            noisy = x[index] + 0.2 * (torch.rand(len(index), 1, 8, 8) - 0.5)
            optimizer.zero_grad()
            F.cross_entropy(model(noisy), y[index]).backward()
            optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        known = (model(x[1200:]).argmax(1) == y[1200:]).nonzero().squeeze(1)[:120] + 1200
    return model, x[known], y[known]
