"""Recording decode steps: the interface, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """Turns a call into one that replays without Python, with all Python numbers frozen and on the same memory."""

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call `run` in the environment in which it will be recorded."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The replayable call. Raises RuntimeError when `run` cannot be recorded."""


class CudaGraphs:
    """A `Recorder` whose graphs share one memory pool; they must be replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call `run` on the recording stream: libraries allocate workspaces per stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            output = run()
        current.wait_stream(self.stream)
        output.record_stream(current)
        return output

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `run`; every replay returns the same tensor. Raises RuntimeError when CUDA refuses."""
        with torch.cuda.device(self.device):  # a capture first synchronises the current device, which may be another
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            try:
                # Other threads (the actor's, another engine's) may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    output = run()
            finally:
                torch.cuda.set_stream(
                    current
                )  # a capture that fails at its end leaves the thread on the capture stream

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
