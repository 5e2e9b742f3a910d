"""What no loss can be set to."""

import math

import pytest

from elle.core.attacks.network import in_eval_mode
from elle.core.linearity import input_gradient
from elle.core.losses import Bilevel, Guided, WorstGap


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Guided(in_eval_mode, "cosine"), "distance"),
        (lambda: Guided(in_eval_mode, weight=-1.0), "weight"),
        (lambda: Guided(in_eval_mode, weight=math.nan), "weight"),
        (lambda: Bilevel(input_gradient, weight=0.0), "weight"),
        (lambda: Bilevel(input_gradient, weight=math.inf), "weight"),
        (lambda: Bilevel(input_gradient, steps=0), "steps"),
        (lambda: WorstGap(input_gradient, weight=-1.0), "weight"),
        (lambda: WorstGap(input_gradient, slope=-0.1), "slope"),
        (lambda: WorstGap(input_gradient, nominal=-1.0), "nominal"),
        (lambda: WorstGap(input_gradient, steps=0), "steps"),
    ],
)
def test_a_bad_setting_is_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"^{name} is "):
        make()
