"""Recording steps: what a recorder does, and the one that makes CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Recorder(Protocol):
    """Turns a call into one that can be repeated without Python: with every number in it frozen, on the same memory."""

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call it in the surroundings in which it will be recorded."""

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The repeatable call. Raises RuntimeError when `run` does what cannot be recorded."""


class CudaGraphs:
    """A `Recorder` whose graphs share one pool of memory; they must be replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call it on the stream that records: workspaces of libraries are made per stream."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            output = run()
        current.wait_stream(self.stream)
        output.record_stream(current)
        return output

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture it; the result's tensor is the same at every replay. Raises RuntimeError when CUDA refuses."""
        with torch.cuda.device(self.device):  # a capture begins by waiting for the current device, which is another
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            try:
                # Other threads (the actor's, another engine's) may use the device meanwhile.
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    output = run()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails as it ends leaves the thread on its own stream

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
