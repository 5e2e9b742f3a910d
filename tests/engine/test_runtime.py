"""Device, precision and signals: what is refused, and that everything is put back."""

import gc
import os
import signal
import threading
import weakref

import pytest
import torch

from elle.core.precision import autocast
from elle.engine import runtime
from elle.engine.loop import train
from elle.engine.runtime import GraphedStep, pick_device, pick_precision, stop_signals, stopped_at_once
from elle.errors import InputError, Interrupted
from elle.signals import handling

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize("name", ["gpu", "", "0", "CPU!", "cuda:-1", "cuda:x", "cpu:x"])
def test_what_is_no_device_is_refused_with_the_choices(name):
    with pytest.raises(InputError, match=f"device={name} is not a device; use auto, cpu, cuda or cuda:N"):
        pick_device(name)


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_a_device_of_another_kind_is_refused_with_the_choices(name):
    with pytest.raises(InputError, match=f"device={name} is not supported; use auto"):
        pick_device(name)


def test_a_gpu_that_is_not_there_is_refused_with_the_number_there_is():
    with pytest.raises(InputError, match=f"device=cuda:99: this machine has {torch.cuda.device_count()} CUDA devices"):
        pick_device("cuda:99")


@pytest.mark.parametrize(("ours", "expected"), [(2, [2]), (64, [])])
def test_on_a_cpu_torch_uses_no_more_cores_than_are_ours(monkeypatch, ours, expected):
    chosen = []
    monkeypatch.setattr(runtime, "usable_cores", lambda: ours)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    pick_device("cpu")
    assert chosen == expected


@without_gpu
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(InputError, match="this machine has 0 CUDA devices"):
        pick_device("cuda")


@without_gpu
def test_auto_is_the_cpu_where_there_is_no_gpu():
    assert pick_device("auto") == CPU


@pytest.mark.parametrize(("name", "expected"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_the_precision_on_a_cpu(name, expected):
    assert pick_precision(name, CPU) == expected


def test_tf32_on_a_cpu_is_refused():
    with pytest.raises(InputError, match="precision=tf32 needs an NVIDIA GPU"):
        pick_precision("tf32", CPU)


@pytest.mark.parametrize("word", ["precision=tf32", "compile=graph", "device=gpu"])
def test_a_run_refuses_what_a_cpu_cannot_do(settings, word):
    with pytest.raises(InputError, match=word):
        train(settings(word))


@pytest.mark.parametrize(("name", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_is_on_for_half_precision_only(name, dtype):
    with autocast(CPU, name):
        assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        assert dtype is None or torch.get_autocast_dtype("cpu") == dtype
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_remembered_instead_of_acted_on(number):
    with stop_signals() as stopped:
        assert stopped() is None
        os.kill(os.getpid(), number)
        assert stopped() == number.name


@pytest.mark.parametrize(("before", "heard"), [(lambda *_: None, "SIGHUP"), (signal.SIG_IGN, None)])
def test_a_terminal_that_closes_is_remembered_too_but_not_under_nohup(before, heard):
    with handling(before, signal.SIGHUP), stop_signals() as stopped:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stopped() == heard


def test_the_first_of_several_signals_is_the_one_named():
    with stop_signals() as stopped:
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stopped() == "SIGTERM"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_a_signal_interrupts_at_once(first):
    with stop_signals():
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("problem", [None, RuntimeError, KeyboardInterrupt])
def test_the_former_handlers_are_put_back_however_the_block_ends(problem):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with stop_signals():
            assert signal.getsignal(signal.SIGINT) not in before
            if problem:
                raise problem
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_nothing_is_handled_and_nothing_fails():
    seen = []

    def work():
        with stop_signals() as stopped:
            seen.append(stopped())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


def test_work_that_is_ended_by_a_signal_is_not_ended_again_by_the_next():
    def work():
        with stopped_at_once(lambda: "; two are saved"):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGTERM)

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(Interrupted, match=r"^stopped by SIGINT; two are saved$"):
        work()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_captured_step_that_nobody_holds_is_freed_at_once(monkeypatch):
    """Its graph holds all the memory of a step, which the next phase's needs; a circle would wait for the collector."""
    monkeypatch.setattr("elle.engine.runtime.Captured", lambda work, device, eager: work)
    step = GraphedStep(lambda index: None, 4, torch.device("cpu"))
    held = weakref.ref(step)
    gc.disable()
    try:
        del step
        assert held() is None
    finally:
        gc.enable()
