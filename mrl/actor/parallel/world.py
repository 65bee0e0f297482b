"""Which of an actor's ranks this process is, and what ranks tell each other."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.errors import ConfigError, ModelError, MRLError, WorkerDied

VARIABLES = ("RANK", "MASTER_ADDR", "MASTER_PORT")
"""Of the environment, beside WORLD_SIZE and LOCAL_RANK, as torchrun sets them."""
T = TypeVar("T")
P = ParamSpec("P")
_LEAVING_SECONDS = 2.0
"""How long a rank that leaves waits for the others to leave too."""
_OF_COLLECTIVES = ("gloo", "nccl", "connection closed", "connection reset", "timed out waiting", "process group")
"""In the messages of errors that come out of collective operations: gloo's have no type of their own."""


class World:
    """Of one rank, where nothing has to be sent; `Ranks` are several.

    What is called here is called on every rank, in the same order.
    """

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this rank answers for all, and writes what is written once."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, elementwise. May overwrite `tensor`."""
        return tensor

    def each(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, stacked along a new first dimension; of one shape everywhere."""
        return tensor[None]

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        return number

    def lead(self, work: Callable[[], T]) -> T:
        """Have rank 0 do something. Its result, or its error, is every rank's: plain data."""
        return work()

    def tell(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Plain data."""
        return value

    def everyone(self, value: T) -> list[T]:
        """Every rank's value, on every rank. Plain data."""
        return [value]

    def check_same(self, what: str, value: str) -> None:
        """Raise ModelError when a rank has another value than rank 0."""

    def close(self) -> None:
        """Leave the other ranks."""


class Ranks(World):
    """Several ranks, in a process group of torch.distributed. A rank that does not answer within `timeout` seconds is
    an error of the others."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout: float) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "actor: its ranks are processes, and this one is a rank already; use a backend that gives every worker "
                "a process of its own"
            )
        self.rank, self.size, self.device, self.timeout = rank, size, device, timeout
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # What is said in host memory goes over gloo, whatever gradients take.
        over = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(over, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))

    def total(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def each(self, tensor: Tensor) -> Tensor:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor.contiguous())
        return torch.stack(found)

    def least(self, number: int) -> int:
        return int(self.each(torch.tensor(number)).min())

    def lead(self, work: Callable[[], T]) -> T:
        result: T | None = None
        error: Exception | None = None
        if self.first:
            try:
                result = work()
            except Exception as raised:
                error = raised
        result, told = self.tell((result, error if error is None else _that_travels(error)))
        if error is not None or told is not None:
            raise error or told
        return result

    def tell(self, value: Any) -> Any:
        values = [value]
        dist.broadcast_object_list(values)
        return value if self.first else values[0]

    def everyone(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def check_same(self, what: str, value: str) -> None:
        found = self.everyone(value)
        others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
        if others:
            raise ModelError(
                f"{what} of rank {others[0]} is not that of rank 0 ({found[others[0]]}, {found[0]}): every rank has to "
                "load the same files"
            )

    def close(self) -> None:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # nobody takes the group apart while another one still speaks
                dist.monitored_barrier(timeout=timedelta(seconds=_LEAVING_SECONDS))
            dist.destroy_process_group()


def wanted_size() -> int:
    """How many ranks the environment asks for. Raises ConfigError for one that is not complete."""
    size = os.environ.get("WORLD_SIZE", "1")
    if not size.isdigit() or size == "0":
        raise ConfigError(f"WORLD_SIZE: {size!r} is no number of processes; unset it, or start them with torchrun")
    missing = [name for name in VARIABLES if name not in os.environ]
    if int(size) > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE is {size} and {', '.join(missing)} not set: unset it to train in one process, or start all of "
            "them with torchrun"
        )
    return int(size)


def own_device(name: str, local_rank: int) -> torch.device:
    """This rank's device. name: as configured; local_rank: which of its machine's ranks it is. Raises ConfigError."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("auto", "cuda"):
        raise ConfigError(f"device: {name} is one device, and every rank of the actor needs its own; use auto or cpu")
    seen = torch.cuda.device_count()
    if seen == 1:  # each process sees its own
        return torch.device("cuda", 0)
    if local_rank >= seen:
        raise ConfigError(f"actor_gpu: this machine has {seen} GPUs, and rank {local_rank} on it has none left")
    return torch.device("cuda", local_rank)


def join(device: str, timeout: float) -> World:
    """The ranks that the environment names (WORLD_SIZE and `VARIABLES`); where it names none, a world of one.

    device: `ModelConfig.device`. timeout: `ddp_timeout`. Raises ConfigError, and
    RuntimeError when the others do not come.
    """
    size = wanted_size()
    if size == 1:
        return World()
    rank = os.environ["RANK"]
    own = own_device(device, int(os.environ.get("LOCAL_RANK", rank)))
    return Ranks(int(rank), size, own, timeout)


class _Worker(Protocol):
    world: World


W = TypeVar("W", bound=_Worker)


def together(method: Callable[Concatenate[W, P], T]) -> Callable[Concatenate[W, P], T]:
    """Of a worker's method that runs on every rank: the end of another rank is raised as WorkerDied."""

    @functools.wraps(method)
    def called(worker: W, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(worker, *args, **kwargs)
        except RuntimeError as error:
            if wanted_size() == 1 or not _of_collectives(error):
                raise
            rank = int(os.environ.get("RANK", "0"))
            raise WorkerDied(
                f"actor: rank {rank} got no answer from another rank in {method.__name__}(): it has died, stopped, or "
                f"takes longer than ddp_timeout ({_first_line(error)})"
            ) from error

    return called


def _of_collectives(error: RuntimeError) -> bool:
    said = str(error).lower()
    return isinstance(error, dist.DistError) or any(words in said for words in _OF_COLLECTIVES)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _that_travels(error: Exception) -> Exception:
    """Ours arrive as they are; of others, which may not come out of a pickle, the message."""
    return error if isinstance(error, MRLError) else RuntimeError(f"on rank 0: {type(error).__name__}: {error}")
