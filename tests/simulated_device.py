"""A simulated accelerator, `sim`: its memory is the CPU's, but tensors of `sim` and of the CPU refuse to meet.

    import tests.simulated_device          # before models are loaded: it changes torch for the whole process
    model.to("sim")                        # forward, backward, optimizers: with the CPU's numbers

What fails on it would fail on CUDA: operations that mix devices (all but 0-dimensional tensors and indices), `.numpy()`
on device memory, tensors made on the wrong side, what is read before its copy has arrived. `waits()` counts how often
the host waits for the device, by what makes it wait.

Copies with `non_blocking=True` to the host, and on a side stream, happen as late as streams and events allow: at the
`synchronize`, `wait_stream` or `wait_event` that asks for them. What is copied to the host is NaN (or -1) until then.

It says nothing of speed, of kernels, of graphs. Built on
torch's experimental Python backend for the PrivateUse1 device (torch 2.13).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.backend_registration as registration
from torch.library import Library
from torch.utils._device import _device_constructors

_waits: Counter[str] = Counter()
_late: list[tuple[Stream, Callable[[], None]]] = []
"""Copies that were asked for and have not happened, in their order, with the stream they are on."""


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """The times the host waits for the device meanwhile, by the operation that makes it."""
    _waits.clear()
    found: Counter[str] = Counter()
    try:
        yield found
    finally:
        found.update(_waits)


class Stream:
    """Of work on the device. Only copies are late; all else happens at once."""

    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    def wait_stream(self, stream: Stream) -> None:
        """What is given to this stream from now on comes after all that `stream` was given: that happens now."""
        _arrive(stream)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            _arrive(event.stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream = self
        return event

    def synchronize(self) -> None:
        _waits["synchronize"] += 1
        _arrive(self)


class Event:
    def __init__(self, **_: Any) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or _current

    def synchronize(self) -> None:
        _waits["synchronize"] += 1
        if self.stream is not None:
            _arrive(self.stream)


def _arrive(stream: Stream | None = None) -> None:
    """Let the late copies of a stream happen; None = of all."""
    kept = []
    for at, (on, copy) in enumerate(list(_late)):
        if stream is None or on is stream:
            copy()
        else:
            kept.append(_late[at])
    _late[:] = kept


_main = _current = Stream()


class _Module(registration._DummyBackendModule):
    """What `torch.cuda` is to CUDA: `torch.sim`."""

    Stream, Event = Stream, Event
    free = 1 << 30
    """Bytes that are free, as `mem_get_info` says."""

    def current_stream(self, device: Any = None) -> Stream:
        return _current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        global _current
        before, _current = _current, stream
        try:
            yield
        finally:
            _current = before

    def synchronize(self, device: Any = None) -> None:
        _waits["synchronize"] += 1
        _arrive()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, 1 << 31

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_autocast_available(self) -> bool:
        return True

    def get_rng_state(self, device: Any = 0) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None: ...


MODULE = _Module()
registration._setup_privateuseone_for_python_backend("sim", backend_module=MODULE)
DEVICE = torch.device("sim", 0)


class SimTensor(torch.Tensor):
    """A tensor on `sim`; `raw` is the CPU tensor that holds its numbers."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor, requires_grad: bool = False) -> SimTensor:
        made: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"sim({self.raw!r})"

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            made: torch.Tensor = SimTensor(self.raw.detach().clone(), self.requires_grad)
            is_parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(made, self.requires_grad) if is_parameter else made
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as what it would be in host memory."""
        return self.raw.__reduce_ex__(protocol)


aten = torch.ops.aten
_KINDS: dict[Any, str] = {
    **dict.fromkeys((aten._to_copy.default, aten.copy_.default, aten._copy_from.default), "copy"),
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default), "indexing"),
    **dict.fromkeys((aten.index_put_.default, aten._index_put_impl_.default), "indexing"),
    # Their result's shape, or a number for Python, depends on the data.
    **dict.fromkeys(
        (
            *(aten.nonzero.default, aten.masked_select.default, aten.equal.default, aten._local_scalar_dense.default),
            *(aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default),
            aten.repeat_interleave.Tensor,
        ),
        "sized by data",
    ),
    # Products of narrow factors that come out in float32.
    **dict.fromkeys((aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out), "widening"),
}
"""Operations that are not like others. One look-up for each operation: to hash one takes Python's time."""


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    kind = _KINDS.get(func)
    if kind == "widening":  # as CUDA has them; the CPU widens the factors
        *factors, dtype = args
        args = [x.to(dtype) for x in factors]
        func = getattr(func.overloadpacket, "out" if "out" in kwargs else "default")
    tensors: list[torch.Tensor] = []
    raw_args, raw_kwargs = _raw(args, tensors), dict(zip(kwargs, _raw(kwargs.values(), tensors), strict=True))
    sims = [x for x in tensors if type(x) is SimTensor]
    if sims and kind not in ("copy", "indexing"):
        for x in tensors:
            if type(x) is not SimTensor and x.dim() > 0:
                raise RuntimeError(f"{func}: tensors on sim:0 and on {x.device} (shape {tuple(x.shape)})")
    if sims and kind is not None:
        _count(func, kind, args, kwargs)
    target = kwargs.get("device")
    onto = type(args[0]) is SimTensor if func is aten.copy_.default else True
    to_host = bool(sims) and ((target is not None and torch.device(target).type == "cpu") or not onto)
    if kind == "copy":
        non_blocking = kwargs.get("non_blocking", func is aten.copy_.default and len(args) > 2 and args[2])
        if _current is not _main or (to_host and non_blocking):
            return _copy_late(func, args, kwargs, to_host=to_host)
    if target is not None:
        raw_kwargs["device"] = torch.device("cpu")
        if func is aten._to_copy.default and to_host and not kwargs.get("dtype"):
            raw_kwargs["dtype"] = raw_args[0].dtype
    result = func(*raw_args, **raw_kwargs)
    to_sim = bool(sims) and onto if target is None else torch.device(target).type == "sim"
    known = {id(x.raw): x for x in sims}

    def wrap(x: torch.Tensor) -> torch.Tensor:
        if id(x) in known:
            return known[id(x)]
        return SimTensor(x) if to_sim and type(x) is not SimTensor else x

    return _map(wrap, result)


def _raw(trees: Iterable[Any], tensors: list[torch.Tensor]) -> list[Any]:
    """The same with what tensors of the device hold; `tensors` gets those that were there."""
    found = []
    for tree in trees:
        kind = type(tree)
        if kind is SimTensor:
            tensors.append(tree)
            tree = tree.raw
        elif kind is list or kind is tuple:
            tree = kind(_raw(tree, tensors))
        elif isinstance(tree, torch.Tensor):
            tensors.append(tree)
        found.append(tree)
    return found


def _map(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same lists, tuples and dictionaries with other tensors in them."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in (list, tuple):
        return type(tree)([_map(function, x) for x in tree])
    if type(tree) is dict:
        return {name: _map(function, x) for name, x in tree.items()}
    return tree


def _count(func: Any, kind: str, args: Any, kwargs: Any) -> None:
    """Whether the host waits for this operation, which has a tensor of the device."""
    if kind == "sized by data":
        _waits[str(func)] += 1
    elif kind == "indexing":
        indices = [x for x in args[1] if x is not None]
        scalar = func is not aten.index.Tensor and args[2].numel() == 1  # becomes a masked_fill
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not scalar:
            _waits[f"{func} by a mask"] += 1
        if any(not isinstance(x, SimTensor) and x.dim() > 0 for x in indices):
            _waits[f"{func} by an index on the host"] += 1
    elif func is aten.copy_.default and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
        if args[1].dim() > 0 and isinstance(args[0], SimTensor) != isinstance(args[1], SimTensor):
            _waits["copy_"] += 1
    elif func is aten._to_copy.default and not kwargs.get("non_blocking"):
        target = kwargs.get("device")
        if target is not None and torch.device(target).type != "sim":
            _waits["to the host"] += 1


def _copy_late(func: Any, args: Any, kwargs: Any, *, to_host: bool) -> Any:
    """A copy that happens when its stream is waited for: until then its source may still be written over."""
    if func is aten.copy_.default:
        target, source = args[0], args[1]
    else:
        source = args[0]
        target = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if not to_host:
            target = SimTensor(target)
    into, given = (x.detach() for x in _raw((target, source), []))
    if to_host:
        into.fill_(float("nan") if into.is_floating_point() else into.dtype != torch.bool and -1)
    if _current is _main:  # in the order of the stream: what is written there later comes later
        given = given.clone()
    _late.append((_current, lambda: into.copy_(given)))
    return target


_LIBRARY = Library("_", "IMPL")
_LIBRARY.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")

_AUTOCAST = Library("aten", "IMPL", "AutocastPrivateUse1")
_LIBRARY.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _in_autocast_dtype(name: str) -> None:
    """Products take their arguments in autocast's dtype, as on CUDA; what CUDA's autocast keeps in float32 stays."""
    op = getattr(aten, name)

    def cast(x: Any) -> Any:
        return x.to(torch.get_autocast_dtype("sim")) if x.dtype == torch.float32 else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return op(*_map(cast, args), **_map(cast, kwargs))

    _AUTOCAST.impl(name, run)


for _name in ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "scaled_dot_product_attention"):
    _in_autocast_dtype(_name)

_device_constructors()  # cached, while torch.tensor is still the real one: `with torch.device(...)` looks it up there
_tensor = torch.tensor


def _make_tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    if device is not None and torch.device(device).type == "sim":
        return _to_sim(_tensor(*args, **kwargs), "sim")
    return _tensor(*args, **kwargs) if device is None else _tensor(*args, device=device, **kwargs)


torch.tensor = _make_tensor  # type: ignore[assignment]
_to = torch.Tensor.to


def _to_sim(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to` from the host: the one way onto the device; it waits unless it is told not to."""
    moved = _to(self, *args, **kwargs)
    if isinstance(moved, SimTensor) and not isinstance(self, SimTensor) and self.dim() > 0 and self.numel():
        waits = not kwargs.get("non_blocking", False) and True not in args
        _waits["from the host"] += waits
    return moved


torch.Tensor.to = _to_sim  # type: ignore[method-assign]


def _host_side(name: str) -> None:
    real = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, SimTensor):
            return real(self, *args, **kwargs)
        if name == "numpy":
            raise TypeError("can't convert a sim tensor to numpy; copy it to the CPU first")
        _waits[name] += 1
        return real(self.raw, *args, **kwargs)

    setattr(torch.Tensor, name, method)


for _name in ("tolist", "numpy"):
    _host_side(_name)


# A parameter that becomes a SimTensor would become a new object, once for each place that shares it (tied weights);
# swapping keeps the object.
torch.__future__.set_swap_module_params_on_conversion(True)
