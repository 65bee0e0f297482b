"""Where the actor's tensors are: on its device, or in host memory while another process has the device (`colocate`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mrl.errors import TrainingError
from mrl.system.transfers import asynchronous, wait


class Residence:
    """Moves models and an optimizer's state off their device and back.

    Parameters stay the same objects, so that optimizer, adapters, ties and compiled layers go on with them. Host memory
    is taken once, pinned where there is a GPU, and used again; what does not train is copied out only the first time.
    Buffers stay where they are: they are small.
    """

    def __init__(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.models, self.optimizer, self.device = models, optimizer, device
        self.away = False
        self.moved_states: list[tuple[dict[str, Any], str]] = []
        """Of the optimizer's, which are in host memory now."""
        self.host: dict[tuple[int, str], Tensor] = {}
        """By parameter and the name of what belongs to it; "" is the parameter itself."""

    def leave(self) -> None:
        """Nothing of it but buffers is on the device afterwards. Calling it twice is allowed."""
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
        wait(self.device)  # the copies have to be whole before what they are of is let go
        for parameter, host in moved:
            _put(parameter, host)
        for state, name, host in stored:
            state[name] = host
        self.moved_states = [(state, name) for state, name, _ in stored]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # torch would keep it for itself
        self.away = True

    def come_back(self) -> None:
        """Everything is on the device again. Calling it twice is allowed. Raises TrainingError where it has no room."""
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
        # A copy also where both are the CPU: the host's memory is written to the next time.
        return host.to(self.device, non_blocking=asynchronous(self.device), copy=True)


def _put(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Let a parameter have this tensor, in the way in which `Module.to` does."""
    if torch.__future__.get_swap_module_params_on_conversion():
        torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
    else:
        parameter.data = tensor
