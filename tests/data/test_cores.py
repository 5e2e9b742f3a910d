"""Cores to use, where the operating system tells which and where it does not."""

import os

import pytest

from elle.data.cores import usable_cores


def test_a_process_uses_the_cores_it_was_given(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_cores() == 2


@pytest.mark.parametrize(("counted", "expected"), [(8, 8), (None, 1)])
def test_elsewhere_all_there_are(monkeypatch, counted, expected):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert usable_cores() == expected
