"""Actors of several ranks, each in a process of its own, as a backend starts them."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.ports import free_port
from tests.process_backend import context


class Processes:
    """Processes that each run `serve(work)`; what `run` is given runs on every rank at once."""

    def __init__(self, size: int) -> None:
        port = str(free_port())
        self.size = size
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank in range(size):
            here, there = multiprocessing.Pipe()
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = context().Process(target=_serve, args=(there, env), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, work: Callable[..., Any], *args: Any) -> None:
        for pipe in self.pipes:
            pipe.send((work, args))

    def answers(self, ranks: list[int] | None = None, timeout: float = 120.0) -> list[Any]:
        """What `work` returned on the ranks; an exception that it raised is returned too."""
        found = []
        for rank in range(self.size) if ranks is None else ranks:
            assert self.pipes[rank].poll(timeout), f"rank {rank} did not answer in {timeout:.0f} s"
            answer, trace = self.pipes[rank].recv()
            if trace is not None:
                answer.add_note(f"on rank {rank}:\n{trace}")
            found.append(answer)
        return found

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        self.start(work, *args)
        found = self.answers()
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found


@contextmanager
def processes(size: int) -> Iterator[Processes]:
    started = Processes(size)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.join()


def _serve(pipe: Any, env: dict[str, str]) -> None:
    os.environ.update(env)
    torch.set_num_threads(1)
    faulthandler.enable()
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer, trace = work(*args), None
        except BaseException as error:
            answer, trace = error, traceback.format_exc()
        pipe.send((answer, trace))
