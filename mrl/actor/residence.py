"""Offloads the actor's tensors to host memory while another process uses its device (`colocate`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mrl.errors import TrainingError
from mrl.system.transfers import asynchronous, wait


class Residence:
    """Moves models and an optimizer's state off their device and back.

    Parameters stay the same objects, so that optimizer, adapters, ties and compiled layers stay valid. Host memory is
    allocated once and reused, pinned if there is a GPU; frozen parameters are copied to the host only the first time.
    Buffers stay on the device: they are small.
    """

    def __init__(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.models, self.optimizer, self.device = models, optimizer, device
        self.away = False
        self.moved_states: list[tuple[dict[str, Any], str]] = []
        """Optimizer tensors that are in host memory now: (state of a parameter, key)."""
        self.host: dict[tuple[int, str], Tensor] = {}
        """By parameter id and the key of its optimizer state; "" is the parameter itself."""

    def leave(self) -> None:
        """Move everything but buffers to host memory. Calling it twice is allowed."""
        if self.away:
            return
        moved: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in self._parameters():
            parameter.grad = None
            known = not parameter.requires_grad and (id(parameter), "") in self.host
            moved.append((parameter, self._to_host(parameter.data, (id(parameter), ""), known=known)))
        stored = [
            (state, name, self._to_host(value, (id(parameter), name)))
            for parameter, state in self.optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.device == self.device
        ]
        wait(self.device)  # copies must be complete before their sources are freed
        for parameter, host in moved:
            _put(parameter, host)
        for state, name, host in stored:
            state[name] = host
        self.moved_states = [(state, name) for state, name, _ in stored]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise torch's allocator keeps it
        self.away = True

    def come_back(self) -> None:
        """Move everything back to the device. Calling it twice is allowed. Raises TrainingError if it has no room."""
        if not self.away:
            return
        try:
            for parameter in self._parameters():
                _put(parameter, self._to_device(parameter.data))
            for state, name in self.moved_states:
                state[name] = self._to_device(state[name])
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"colocate: the actor's weights and optimizer state do not fit on {self.device} beside the sleeping "
                f"vLLM ({str(error).splitlines()[0]}): set offload_optimizer: true or use_lora: true, end what else "
                "uses the GPU, or use a smaller model"
            ) from error
        wait(self.device)
        self.away = False

    # --- inner ------------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[nn.Parameter]:
        for model in self.models:
            yield from model.parameters()

    def _to_host(self, tensor: Tensor, key: tuple[int, str], *, known: bool = False) -> Tensor:
        host = self.host.get(key)
        if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.host[key] = host
        if not known:
            host.copy_(tensor, non_blocking=asynchronous(self.device))
        return host

    def _to_device(self, host: Tensor) -> Tensor:
        # A copy even if the device is the CPU: the host buffer will be overwritten.
        return host.to(self.device, non_blocking=asynchronous(self.device), copy=True)


def _put(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Give a parameter this tensor, in the way `Module.to` does."""
    if torch.__future__.get_swap_module_params_on_conversion():
        torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    else:
        parameter.data = tensor
