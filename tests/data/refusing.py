"""Bad input: one line that says what is wrong."""

from collections.abc import Callable
from typing import Any

import pytest

from elle.errors import InputError


def assert_refused(load: Callable[[], Any], *words: object) -> None:
    with pytest.raises(InputError) as error:
        load()
    assert [word for word in map(str, words) if word not in str(error.value)] == [], error.value
    assert "\n" not in str(error.value)
