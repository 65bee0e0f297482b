"""Modal's types of GPU (https://modal.com/docs/guide/gpu). Its client sends any name on: they are checked here."""

from __future__ import annotations

import difflib

from mrl.errors import ConfigError

GPUS = {
    "T4": 8,
    "L4": 8,
    "A10": 4,
    "A100": 8,
    "A100-40GB": 8,
    "A100-80GB": 8,
    "L40S": 8,
    "RTX-PRO-6000": 8,
    "H100": 8,
    "H100!": 8,
    "H200": 8,
    "B200": 8,
    "B200+": 8,
}
"""The most of each in one container. `!` and `+` are Modal's: no other than that, and that or a newer one."""
_OTHER_NAMES = {"A10G": "A10"}


def modal_gpu(kind: str, number: int) -> str:
    """What Modal takes as `gpu=`: `A100:2`. Upper or lower case; A10G is an older name of A10. Raises ConfigError."""
    name = _OTHER_NAMES.get(kind.upper(), kind.upper())
    if name not in GPUS:
        close = difflib.get_close_matches(name, [*GPUS, *_OTHER_NAMES], n=2, cutoff=0.4)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise ConfigError(
            f"actor_gpu and rollout_gpu: Modal has no GPU of type {kind!r}{hint} (it has {', '.join(GPUS)}; "
            "cpu for none)"
        )
    if number > GPUS[name]:
        raise ConfigError(
            f"actor_gpu and rollout_gpu: {kind}:{number} is more than the {GPUS[name]} of this type that a container "
            "of Modal's can have; take fewer, a larger type, or for the actor several containers "
            f"(backend_options: {{actor_nodes: {-(-number // GPUS[name])}}})"
        )
    return name if number == 1 else f"{name}:{number}"
