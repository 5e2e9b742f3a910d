"""The processes of one training, a rank each: which one this is, and the few things they do together."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elle.errors import InputError, WorkError
from elle.evaluation.capture import waiting_is_refused
from elle.signals import handling

Value = TypeVar("Value")
STEP_TIMEOUT = timedelta(seconds=60)
"""How long a rank waits for the others inside a step before it takes one of them for dead."""
START_TIMEOUT = timedelta(minutes=10)
"""How long the ranks wait for each other to start."""
PATIENCE = timedelta(days=2)
"""How long the others wait for what the first rank does alone; its death is noticed at once all the same."""
LOST = "lost contact with another rank"
_REMEDY = "start the job with torchrun, or unset RANK"
_SIGNALS_EVERY = 8
"""Steps between the looks for a stop signal on any rank: each costs the hosts, not the devices, a round of messages."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process, number `rank` of `count`, and what they do together; for a single process all of it is trivial."""

    rank: int = 0
    count: int = 1
    on_this_machine: int = 1
    control: Any = None
    """A gloo process group with a long timeout, for messages between hosts; gradients have their own."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and speaks to the user."""
        return self.rank == 0

    def __deepcopy__(self, memory: Any) -> Ranks:
        return self  # a network that is copied stays in its job

    def share(self, batch: int, accumulate: int) -> int:
        """How many images of a batch are this rank's; InputError where the batch does not divide into equal parts."""
        parts = self.count * accumulate
        if batch % parts:
            how = f"{self.count} ranks" + (f" with accumulate={accumulate}" if accumulate > 1 else "")
            near = max(1, batch // parts) * parts
            raise InputError(f"batch={batch} does not divide into {parts} equal parts ({how}); use batch={near}")
        return batch // self.count

    def mean(self, value: Tensor) -> Tensor:
        """The mean over the ranks of a tensor of the same shape on each."""
        if self.count == 1:
            return value
        total = value.detach().clone(memory_format=torch.contiguous_format)
        with _contact():
            dist.all_reduce(total)
        return total / self.count

    def average(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its mean over the ranks, all in one message."""
        if self.count == 1:
            return
        with torch.no_grad():
            mean = self.mean(torch.cat([tensor.flatten() for tensor in tensors]))
            parts = torch.split(mean, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def average_gradients(self, parameters: Sequence[nn.Parameter], others: list[Tensor]) -> None:
        """Average the gradients, and the `others`, in one message.

        Which parameters have one may depend on a rank's images, as in a network that sends each to a part of its own: a
        rank without it counts as 0, and a parameter that no rank has reached stays without, which only the host can
        tell. A captured step does not choose by its images.
        """
        if self.count == 1:
            return
        if waiting_is_refused():
            self.average([*[one.grad for one in parameters if one.grad is not None], *others])
            return
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        missing = torch.zeros(len(parameters), device=others[0].device)
        without = [number for number, one in enumerate(parameters) if one.grad is None]
        if without:
            missing[without] = 1
        self.average([*gradients, *others, missing])
        if without:
            for one, gradient, share in zip(parameters, gradients, missing.tolist(), strict=True):
                one.grad = gradient if share < 1 else None

    def gathered(self, value: Tensor) -> Tensor:
        """The rows of all ranks, in their order."""
        if self.count == 1:
            return value
        parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(self.count)]
        with _contact():
            dist.all_gather(parts, value.contiguous())
        return torch.cat(parts)

    def own(self, rows: Tensor) -> Tensor:
        """This rank's part of what `gathered` returned."""
        return rows.chunk(self.count)[self.rank]

    def copy_from_first(self, tensors: list[Tensor]) -> None:
        """Every rank takes over the first one's values, once all are ready: some load their images faster."""
        if self.count > 1:
            self.exchanged(None)
            with torch.no_grad(), _contact():
                for tensor in tensors:
                    value = tensor.detach().clone(memory_format=torch.contiguous_format)
                    dist.broadcast(value, 0)
                    tensor.copy_(value)

    def from_first(self, work: Callable[[], Value]) -> Value:
        """Call `work` on the first rank alone; all ranks return its result, or raise its error."""
        if self.count == 1:
            return work()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer = [work(), None]
            except (InputError, WorkError) as problem:
                answer = [None, problem]
        with _contact():
            dist.broadcast_object_list(answer, 0, group=self.control)
        if answer[1] is not None:
            raise answer[1]
        value: Value = answer[0]
        return value

    def exchanged(self, value: Value) -> list[Value]:
        """The values of all ranks, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with _contact():
            # Some come minutes before the others: they wait in Python, which hears a signal, as a message does not.
            ready = dist.barrier(group=self.control, async_op=True)
            while not ready.is_completed():
                time.sleep(0.01)
            ready.wait()
            dist.all_gather_object(values, value, group=self.control)
        return values

    def stop_signal(self, heard: str | None, step: int, must: bool) -> str | None:
        """The stop signal that any rank has heard, the same on all; asked for every few steps, and always if `must`."""
        if self.count == 1:
            return heard
        if step % _SIGNALS_EVERY and not must:
            return None
        number = torch.tensor(0 if heard is None else int(signal.Signals[heard]))
        with _contact():
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.control)
        return signal.Signals(int(number)).name if number else None


ALONE = Ranks()


def ranks_announced() -> int:
    """How many processes the launcher (torchrun) says this job has; 1 where there is no launcher."""
    if "RANK" not in os.environ:
        return 1
    rank, count = os.environ["RANK"], os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
        raise InputError(f"the environment has RANK={rank} and WORLD_SIZE={count}, which no process can be; {_REMEDY}")
    return int(count)


def check_launched(devices: int) -> None:
    """Refuse to train in one process what was to be trained in several."""
    if devices > 1 and "RANK" not in os.environ:
        raise InputError(
            f"devices={devices}: `elle train` starts so many processes; start any other program with "
            f"torchrun --nproc-per-node={devices}, or set devices=1"
        )


def check_not_launched() -> None:
    """Refuse to evaluate in each of torchrun's processes, which would get in one another's way."""
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks_announced() > 1:
        raise InputError("elle evaluate uses several GPUs by itself; start it without torchrun, with --devices 0,1")


def restarts() -> int:
    """How often torchrun has started this job again after a failure (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def own_device(name: str) -> str:
    """The device of this rank: a GPU each, or the CPU."""
    if ranks_announced() == 1 or name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return name
    if name not in ("auto", "cuda"):
        raise InputError(f"device={name} is one device, and {ranks_announced()} ranks want one each; use device=cuda")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


@contextlib.contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """Join the job that the launcher announces; without a launcher the process is alone."""
    count = ranks_announced()
    if count == 1:
        yield ALONE
        return
    ours = not dist.is_initialized()  # a program that uses elle may have a group already
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with _contact():
        if ours:
            _meet(device, one_machine=here == count)
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
    ranks = Ranks(dist.get_rank(), count, here, control)
    yield ranks
    # Reached only without an error: after one the others may be gone, and taking leave would wait for them.
    ranks.exchanged(None)
    dist.destroy_process_group(None if ours else control)
    # A group ends, and waits for its threads, with the last that refers to it; a thread that lets go of its last
    # message while Python itself ends would bring the process down.
    del control
    object.__setattr__(ranks, "control", None)
    gc.collect()


def _meet(device: torch.device, one_machine: bool) -> None:
    from torch.distributed.rendezvous import rendezvous

    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise InputError(f"the environment has WORLD_SIZE={os.environ['WORLD_SIZE']} but no {name}; {_REMEDY}")
    place = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    # Ctrl-C ends the process itself: it waits in a library, which would not return to Python to hear of it.
    with handling(signal.SIG_DFL, signal.SIGINT):
        try:
            store, rank, count = next(rendezvous("env://", timeout=START_TIMEOUT))
        except (RuntimeError, ValueError) as problem:  # a port that is taken, or none at all
            raise InputError(f"the ranks cannot meet at {place}: {_said_in(problem)}") from None
        if one_machine:
            # torchrun keeps its store over restarts, with the addresses of the dead in it. Several machines may count
            # their restarts differently, so there the store is left as it is (docs/scaling.md).
            store = dist.PrefixStore(f"restart-{restarts()}", store)  # type: ignore[attr-defined]
        store.set(f"rank-{rank}", "here")
        store.wait([f"rank-{one}" for one in range(count)], START_TIMEOUT)  # some start faster
    known: dict[str, Any] = {"store": store, "rank": rank, "world_size": count, "timeout": STEP_TIMEOUT}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **known)
    else:
        dist.init_process_group("gloo", **known)


@contextlib.contextmanager
def _contact() -> Iterator[None]:
    """Turn the error of a collective, whose peer is gone, into one line."""
    try:
        yield
    except RuntimeError as problem:
        rank = os.environ.get("RANK", "0")
        raise WorkError(
            f"{LOST} (rank {rank} heard: {_said_in(problem)}); what was saved stays; continue with --resume"
        ) from None


def _said_in(problem: Exception) -> str:
    """The first sentence of a library's message, without the place in its source that it begins with."""
    first = (str(problem).splitlines() or ["no reason given"])[0]
    return re.sub(r"^\[[^\]]*/[^\]]*\] *", "", first).partition(". ")[0][:160]
