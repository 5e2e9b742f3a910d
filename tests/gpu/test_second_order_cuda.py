"""The GPU kernels of BatchNorm's second derivative against the formula in torch, and in a captured GradAlign step."""

import pytest
import torch

from elle.core.second_order import normalisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 5, 6, 7), (128, 64, 32, 32), (128, 512, 4, 4), (2, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_the_kernels_give_what_the_formula_gives(dtype, shape, layout):
    pytest.importorskip("triton")
    torch.manual_seed(0)
    x, v, g = (
        torch.randn(shape, device="cuda").mul(2).add(0.3).to(dtype).contiguous(memory_format=layout) for _ in range(3)
    )
    weight, v_weight, v_bias = (torch.randn(shape[1], device="cuda") for _ in range(3))
    _, mean, rstd = torch.native_batch_norm(x.float(), weight, weight, None, None, True, 0.1, 1e-5)
    kernel = normalisation._kernel(x)
    assert kernel is not None
    assert kernel is not normalisation.second_derivatives
    found = kernel(v, v_weight, v_bias, g, x, weight, mean, rstd)
    given = (v, v_weight, v_bias, g, x, weight, mean, rstd)
    exact = normalisation.second_derivatives(*(value.double() for value in given))
    # Of two values a channel next to nothing is left of the terms: float32 itself is then that far off.
    single = normalisation.second_derivatives(*(value.float() for value in given))
    for mine, expected, rounded in zip(found, exact, single, strict=True):
        assert mine.isfinite().all()
        size = expected.norm().clamp(min=1e-6)
        distance, unavoidable = ((value.double() - expected).norm() / size for value in (mine, rounded))
        most = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[mine.dtype]
        assert distance < most + 4 * unavoidable
