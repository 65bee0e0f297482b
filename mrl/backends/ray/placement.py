"""What workers need, in Ray's terms, and whether a cluster can hold it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mrl.backends.base import Resources
from mrl.errors import ConfigError

Bundle = dict[str, float]
"""Ray's names of resources, and how much of each."""

TYPE = "accelerator_type:"
_TYPE_SHARE = 0.001
"""A node has 1 of its type, whatever the number of its GPUs: every worker takes a little of it."""
_SMALLEST_SHARE = 1 / 64
_NAMES = {"A10": ("A10", "A10G"), "A10G": ("A10G", "A10")}
"""One GPU under two names."""


def bundles(workers: Mapping[str, Resources], nodes: Sequence[Bundle], *, growing: bool = False) -> dict[str, Bundle]:
    """What to reserve for each worker, by name.

    nodes: everything that each of the cluster's machines has. growing: it can get further machines. Workers share
    processors where there are fewer of them than workers: nothing breaks by that. GPUs and memory are not shared.
    Raises ConfigError, with what is asked and what there is, for what the cluster can never hold.
    """
    share = 1.0
    while True:
        wanted = {name: bundle(needs, nodes, share) for name, needs in workers.items()}
        if growing or fit(wanted.values(), nodes):
            return wanted
        if share <= _SMALLEST_SHARE:
            break
        share /= 2
    raise ConfigError(
        f"backend: ray cannot place the run's workers: they need {_together(workers, nodes)}, and the cluster has "
        f"{'; '.join(_said(node) for node in nodes) or 'nothing'}. Ask for less (actor_gpu, rollout_gpu, "
        "num_rollout_workers) or add machines; if the cluster adds them itself, backend_options: {autoscaling: true}"
    )


def bundle(needs: Resources, nodes: Sequence[Bundle], share: float = 1.0) -> Bundle:
    """Of one worker. share: of the processors that it asks for. Raises ConfigError for a type of GPU that no machine
    has."""
    wanted: Bundle = {"CPU": max(0.01, round(needs.cpus * share, 2))} if needs.cpus else {}
    if needs.memory_mb is not None:
        wanted["memory"] = float(needs.memory_mb * 1024 * 1024)
    if needs.gpu is None or not needs.gpus:
        return wanted
    if needs.gpu == "any":
        return wanted | ({"GPU": float(needs.gpus)} if any(node.get("GPU") for node in nodes) else {})
    return wanted | {"GPU": float(needs.gpus), TYPE + accelerator(needs.gpu, nodes): _TYPE_SHARE}


def accelerator(kind: str, nodes: Sequence[Bundle]) -> str:
    """The cluster's name of this type of GPU. Raises ConfigError."""
    types = sorted({name.removeprefix(TYPE) for node in nodes for name in node if name.startswith(TYPE)})
    plain = _plain(kind)
    for wanted in _NAMES.get(plain, (plain,)):
        for there in types:
            if _plain(there) == wanted:
                return there
    has = f"has {', '.join(types)}" if types else "has no GPU whose type it knows"
    raise ConfigError(
        f"backend: ray has no GPU of type {kind}: the cluster {has}; name one of these in actor_gpu and rollout_gpu, "
        "or leave them out for any GPU"
    )


def fit(wanted: Iterable[Bundle], nodes: Sequence[Bundle]) -> bool:
    """Whether each bundle finds a machine, the largest first, each on the first machine with room."""
    free = [dict(node) for node in nodes]
    for one in sorted(wanted, key=_size, reverse=True):
        place = next((node for node in free if all(node.get(k, 0) + 1e-6 >= v for k, v in one.items())), None)
        if place is None:
            return False
        for name, number in one.items():
            place[name] -= number
    return True


def actor_options(wanted: Bundle) -> dict[str, Any]:
    """Ray's options of an actor that gets what a bundle holds."""
    options: dict[str, Any] = {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0)}
    if "memory" in wanted:
        options["memory"] = wanted["memory"]
    others = {name: number for name, number in wanted.items() if name not in ("CPU", "GPU", "memory")}
    return options | ({"resources": others} if others else {})


def _plain(kind: str) -> str:
    return kind.upper().replace("NVIDIA-", "").removesuffix("B") if kind.upper().endswith("GB") else kind.upper()


def _size(wanted: Bundle) -> tuple[float, float, float]:
    return wanted.get("GPU", 0), wanted.get("memory", 0), wanted.get("CPU", 0)


def _together(workers: Mapping[str, Resources], nodes: Sequence[Bundle]) -> str:
    counted: dict[str, int] = {}
    for needs in workers.values():
        said = _said(bundle(needs, nodes))
        counted[said] = counted.get(said, 0) + 1
    return ", ".join(f"{number} × ({said})" for said, number in counted.items())


def _said(wanted: Bundle) -> str:
    parts = []
    kinds = [name.removeprefix(TYPE) for name in wanted if name.startswith(TYPE)]
    if gpus := wanted.get("GPU"):
        parts.append(f"{gpus:g} GPU" + (f" {'/'.join(kinds)}" if kinds else ""))
    parts.append(f"{wanted.get('CPU', 0):g} CPU")
    if memory := wanted.get("memory"):
        parts.append(f"{memory / 1024**2:.0f} MB")
    return ", ".join(parts)
