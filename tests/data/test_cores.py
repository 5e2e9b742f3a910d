"""Cores to use, where the operating system tells which and where it does not."""

import os

import pytest

from elle.data import cores
from elle.data.cores import usable_cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A function that makes the machine: its cores, the groups this process is in, and the files of their limits."""

    def make(seen: int, groups: str = "", files: dict[str, str] | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(seen)), raising=False)
        monkeypatch.setattr(cores, "OWN_GROUPS", tmp_path / "groups")
        monkeypatch.setattr(cores, "LIMITS", tmp_path)
        if groups:
            (tmp_path / "groups").write_text(groups)
        for name, text in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return make


def test_a_process_uses_the_cores_it_was_given(machine):
    machine(2)
    assert usable_cores() == 2


@pytest.mark.parametrize(("counted", "expected"), [(8, 8), (None, 1)])
def test_elsewhere_all_there_are(machine, monkeypatch, counted, expected):
    machine(2)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="a container"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 1, id="half a core"),
        pytest.param("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3, id="around it"),
        pytest.param("0::/../b\n", {"cpu.max": "max 100000\n"}, 64, id="no limit"),
        pytest.param("0::/\n", {}, 64, id="not told"),
        pytest.param(
            "9:memory:/m\n4:cpu,cpuacct:/docker/7f\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            4,
            id="version 1, shown its own group as the outermost",
        ),
        pytest.param(
            "4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64, id="version 1, none"
        ),
    ],
)
def test_a_container_may_give_the_time_of_some_cores(machine, groups, files, expected):
    machine(64, groups, files)
    assert usable_cores() == expected
