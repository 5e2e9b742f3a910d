"""Where tests of Triton's kernels run: on a GPU (make test-gpu), or at the speed of Python with TRITON_INTERPRET=1."""

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if GPU else "cpu"
MARKS = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(not TRITON or not (GPU or INTERPRETED), reason="needs Triton, and a GPU or TRITON_INTERPRET=1"),
]
