"""`devices=N` on one machine: torchrun started for the user, and one line about what went wrong in N processes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch

from elle.config import Config
from elle.data.cores import usable_cores
from elle.engine.ranks import LOST
from elle.errors import REASONS, InputError, Interrupted, WorkError, stopped_by


def speaks() -> bool:
    """Whether this process is the one of its job that talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def launch_ranks(config: Config, arguments: list[str]) -> bool:
    """Run `elle ARGUMENTS` in as many processes as `devices` says; False: this process is to do the work itself."""
    if config.devices == 1 or "RANK" in os.environ:  # torchrun is there already
        return False
    on_gpus = config.device != "cpu" and torch.cuda.is_available()
    if on_gpus and config.devices > torch.cuda.device_count():
        raise InputError(f"devices={config.devices}: this machine has {torch.cuda.device_count()} GPUs")
    _check_parts(config.resolved())
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.CRITICAL)  # what torchrun logs at a failure is said in one line below
    threads = 1 if on_gpus else max(1, usable_cores() // config.devices)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    hangup = signal.getsignal(signal.SIGHUP)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[REASONS] = folder
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.devices,
            run_id=f"elle-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/logs"),
            # torchrun would hear of a terminal that closes also under nohup, and end the ranks.
            signals_to_handle="SIGTERM,SIGINT,SIGQUIT" + ("" if hangup is signal.SIG_IGN else ",SIGHUP"),
        )
        try:
            elastic_launch(settings, sys.executable)("-m", "elle", *arguments)
        except ChildFailedError as problem:
            raise _reason(Path(folder), {rank: one.exitcode for rank, one in problem.failures.items()}) from None
        except SignalException as problem:
            raise _reason(Path(folder), {}, problem.sigval.name) from None
        finally:
            del os.environ[REASONS]
            logging.disable(logging.NOTSET)
    return True


def _check_parts(config: Config) -> None:
    """Refuse a batch of fewer images than parts before any process starts; the ranks refuse other remainders."""
    smallest = min((phase.batch for phase in config.phases or ()), default=config.batch)
    parts = config.devices * config.accumulate
    if smallest is not None and parts > smallest:  # an image folder's batch is known when its images are counted
        how = f" with accumulate={config.accumulate}" if config.accumulate > 1 else ""
        raise InputError(f"devices={config.devices}{how}: a batch of {smallest} images has no {parts} parts; use fewer")


def _reason(folder: Path, codes: dict[int, int], heard: str | None = None) -> InputError | WorkError:
    """The likeliest cause: a rank that was killed, else one whose own words do not just say that another was lost."""
    for rank, code in sorted(codes.items()):
        if code < 0 and -code != signal.SIGTERM:
            name = signal.Signals(-code).name
            memory = ", perhaps for lack of memory" if -code == signal.SIGKILL else ""
            return WorkError(
                f"rank {rank} was killed by {name}{memory}; what was saved stays; continue with the same command "
                f"and --resume"
            )
    found = {
        int(file.name.removeprefix("rank-")): file.read_text("utf-8").partition(" ") for file in folder.glob("rank-*")
    }
    said = {rank: (int(code), text) for rank, (code, _, text) in found.items()}
    causes = {rank: one for rank, one in said.items() if not one[1].startswith(LOST)} or said
    if not causes and heard is not None:  # told to stop before any rank could save, or after all were done
        return stopped_by(heard, "; what was saved stays; continue with the same command and --resume")
    if not causes:
        rank, code = min(codes.items(), default=(0, 1))
        return WorkError(f"rank {rank} ended with exit code {code}; continue with the same command and --resume")
    rank = min(causes)
    code, text = causes[rank]
    # What the first rank says, or several say alike, is of the whole job; and so is wrong input, which all were given.
    common = rank == 0 or code == InputError.exit_code or len(causes) > len(set(causes.values()))
    line = text if common else f"rank {rank}: {text}"
    kinds: dict[int, type[InputError | WorkError]] = {
        InputError.exit_code: InputError,
        Interrupted.exit_code: Interrupted,
    }
    return kinds.get(code, WorkError)(line)
