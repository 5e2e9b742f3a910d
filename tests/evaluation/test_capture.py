"""Captured work, with torch's CUDA replaced by stand-ins: what runs when. tests/gpu has the real thing."""

import contextlib
import gc

import pytest
import torch

from elle.engine.runtime import GraphedStep
from elle.errors import InputError
from elle.evaluation.capture import CannotCapture, Captured, waiting_is_refused


class Stream:
    def __init__(self, *_):
        self.waited = 0

    def wait_stream(self, _):
        self.waited += 1


class Graph:
    def replay(self):
        Graph.replays += 1


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    """A device on which the mode that refuses waiting is a variable, and a capture runs the work."""
    mode = {"now": 0}
    Graph.replays = 0
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode["now"])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: mode.update(now=new))
    return mode


def test_work_runs_eagerly_is_captured_once_and_replayed_from_then_on(stand_ins):
    modes = []

    def work():
        modes.append(stand_ins["now"])
        return len(modes)

    captured = Captured(work, torch.device("cpu"), eager=2)
    assert [captured() for _ in range(5)] == [1, 2, 3, 3, 3]
    assert modes == [0, "error", 0]  # the last eager run alone may not wait
    assert Graph.replays == 3


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_keeps_still_while_work_is_captured(on, monkeypatch):
    """A graph that it freed would end the capture."""
    state = {"on": on}
    monkeypatch.setattr(gc, "isenabled", lambda: state["on"])
    monkeypatch.setattr(gc, "disable", lambda: state.update(on=False))
    monkeypatch.setattr(gc, "enable", lambda: state.update(on=True))
    seen = []
    captured = Captured(lambda: seen.append(state["on"]), torch.device("cpu"), eager=1)
    captured()
    captured()
    assert seen == [on, False]
    assert state["on"] == on


def test_work_that_waits_is_refused_before_the_capture_and_the_mode_put_back(stand_ins):
    def work():
        if stand_ins["now"] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    captured = Captured(work, torch.device("cpu"))
    captured()
    captured()
    with pytest.raises(CannotCapture):
        captured()
    assert stand_ins["now"] == 0
    assert captured.graph is None


def test_other_errors_pass_as_they_are():
    def work():
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as told:
        Captured(work, torch.device("cpu"), eager=1)()
    assert not isinstance(told.value, CannotCapture)


def test_a_training_step_that_waits_says_what_to_do(stand_ins):
    def step(index):
        if stand_ins["now"] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    run = GraphedStep(step, 4, torch.device("cpu"))
    run(torch.arange(4))
    run(torch.arange(4))
    with pytest.raises(InputError, match="train with compile=off"):
        run(torch.arange(4))


@pytest.mark.parametrize(("capturing", "mode", "refused"), [(True, 0, True), (False, 2, True), (False, 0, False)])
def test_waiting_is_refused_in_a_capture_and_in_the_run_before_it(monkeypatch, capturing, mode, refused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode)  # 2 is "error", as torch tells it
    assert waiting_is_refused() is refused
