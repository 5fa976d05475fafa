"""Runs of several processes: checks before nerfstudio starts them, and taking part where torchrun has started them.

Nerfstudio starts processes itself (``--machine.num-devices``, CUDA only). torchrun starts ``ns-train`` once for each
process and says by environment variables which one it is; there nerfstudio thinks that each is alone.
"""

import atexit
import os
import shlex
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from nerfstudio.configs.base_config import MachineConfig
from nerfstudio.utils import comms

from f3rm_ext import compat, errors
from f3rm_ext.engine.random_state import seed_all
from f3rm_ext.engine.ranks import PATIENCE
from f3rm_ext.errors import EXIT_CODE, ConfigError, RankError, reason_of

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets in the environment of each process."""


def is_torchrun() -> bool:
    """Returns whether torchrun (or a program that sets the same variables) has started this process with others."""
    numbers = [os.environ.get(name, "") for name in VARIABLES[:4]]
    return all(name in os.environ for name in VARIABLES) and all(map(str.isdigit, numbers)) and int(numbers[1]) > 1


def processes(machine: MachineConfig) -> int:
    """Returns how many processes a run with these options has, or will have once they are started.

    >>> processes(MachineConfig(num_devices=4, num_machines=2))
    8
    """
    return int(os.environ["WORLD_SIZE"]) if is_torchrun() else machine.num_devices * machine.num_machines


def check_machines(machine: MachineConfig) -> None:
    """Checks the options of a run on several devices.

    Raises:
        ConfigError: the devices are not there, or the options contradict each other.
    """
    if is_torchrun():
        if machine.num_devices * machine.num_machines > 1:
            raise ConfigError(
                f"torchrun has started {os.environ['WORLD_SIZE']} processes and --machine.num-devices and "
                f"--machine.num-machines ask for {machine.num_devices * machine.num_machines} more in each: give "
                "these numbers to torchrun only (--nproc-per-node, --nnodes)."
            )
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if machine.device_type == "cuda" and compat.has_cuda() and here > torch.cuda.device_count():
            raise ConfigError(
                f"torchrun has started {here} processes on this machine, but there are {torch.cuda.device_count()} "
                f"CUDA devices: use --nproc-per-node {torch.cuda.device_count()}."
            )
    if machine.num_machines < 1:
        raise ConfigError(
            f"--machine.num-machines is {machine.num_machines}, but training needs one: use --machine.num-machines 1."
        )
    if machine.num_machines > 1 and machine.device_type != "cuda":
        raise ConfigError(
            f"--machine.num-machines is {machine.num_machines}, but nerfstudio connects machines with CUDA only, not "
            f"with {machine.device_type}: start the processes with torchrun."
        )
    if machine.num_machines > 1 and machine.dist_url == "auto":
        raise ConfigError(
            f"--machine.num-machines is {machine.num_machines}, but the machines do not know where to meet: give all "
            "of them the same --machine.dist-url tcp://HOST:PORT, with a free port of the first machine."
        )
    if not 0 <= machine.machine_rank < machine.num_machines:
        raise ConfigError(
            f"--machine.machine-rank is {machine.machine_rank}, but the {machine.num_machines} machines of the run "
            f"have the ranks 0 to {machine.num_machines - 1}: give each machine its own."
        )
    compat.check_device(machine.device_type, machine.num_devices)


def remember_interruption() -> None:
    """Makes Ctrl-C end this process with code 130 although nerfstudio takes it for a success.

    For the process that starts the others: nerfstudio waits there until they have saved, and returns.
    """
    signals: list[int] = []

    def on_signal(number: int, _frame: Any) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    def end() -> None:
        if signals:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + signals[0])  # a SystemExit raised at exit does not change the code

    atexit.register(end)  # Runs after what is registered later, such as nerfstudio's writers.
    signal.signal(signal.SIGINT, on_signal)


def join(machine: MachineConfig) -> None:
    """Joins the other processes that torchrun has started; does nothing in all other cases, or the second time.

    Raises:
        ConfigError: see :func:`check_machines`.
        RankError: the other processes cannot be reached.
        SystemExit: another process of this machine has said what is wrong.
    """
    if not is_torchrun() or dist.is_initialized():
        return
    try:
        check_machines(machine)
    except ConfigError:
        if int(os.environ["LOCAL_RANK"]) == 0:
            raise
        raise SystemExit(EXIT_CODE) from None
    backend = "cpu:gloo,cuda:nccl" if machine.device_type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = reason_of(error)
        raise RankError(
            f"The processes that torchrun has started cannot meet at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} ({reason}): check --rdzv-endpoint and the firewall."
        ) from error
    errors.install_excepthook()  # before torch's, which collects what is printed and loses it when the process ends
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    for first in range(0, dist.get_world_size(), here):
        group = dist.new_group(list(range(first, first + here)))
        if first <= dist.get_rank() < first + here:
            comms.LOCAL_PROCESS_GROUP = group


def leave() -> None:
    """Undoes :func:`join`; nerfstudio does it itself where it has started the processes."""
    if is_torchrun() and dist.is_initialized():
        comms.LOCAL_PROCESS_GROUP = None
        dist.destroy_process_group()


def place() -> tuple[int, int] | None:
    """Returns local rank and number of processes where torchrun has started them; None elsewhere."""
    if not is_torchrun() or not dist.is_initialized():
        return None
    return int(os.environ["LOCAL_RANK"]), dist.get_world_size()


def seed(machine_seed: int) -> None:
    """Seeds this process as nerfstudio does where it starts the processes: with the machine's seed plus the rank."""
    seed_all(machine_seed + dist.get_rank())


def broadcast_first(value: Any) -> Any:
    """Returns the value of rank 0 where torchrun has started this process; elsewhere the value itself."""
    if place() is None:
        return value
    # On the CPU, since no process has chosen its GPU yet.
    values = [value]
    dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
    return values[0]


def first_only(work: Callable[[], None]) -> None:
    """Runs something on rank 0 only, where torchrun has started this process; elsewhere runs it.

    The other ranks wait, and end when it fails.

    Raises:
        SystemExit: on another rank, with the code with which rank 0 ends.
        BaseException: raised by the work, on rank 0.
    """
    if place() is None:
        work()
        return
    if dist.get_rank() == 0:
        try:
            work()
        except BaseException as error:
            broadcast_first(error.code if isinstance(error, SystemExit) else EXIT_CODE)
            raise
    code = broadcast_first(None)
    if code is not None:
        raise SystemExit(code)


def command_prefix() -> str:
    """Returns what stands before ``ns-train`` in the command that started this run.

    >>> command_prefix()
    ''
    """
    if not is_torchrun():
        return ""
    words = ["torchrun", "--nproc-per-node", os.environ["LOCAL_WORLD_SIZE"], "--no-python"]
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        words[1:1] = ["..."]
    return shlex.join(words).replace("'...'", "...") + " "
