"""What a function does, as data: its outputs over a fixed grid of inputs.

Two programs are "the same function" here when they agree on every probe of their kind of input, whatever their text.
Only programs that this package generated are run in this process; what a model wrote goes to a sandbox.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

EDGES = [(b * k, b) for k in range(1, 18) for b in (1, 2, 3)] + [(a, a * k) for k in range(1, 18) for a in (1, 2, 3)]
EDGES += [(k, m) for k in range(1, 18) for m in (3, 6, 10, 15)] + [(m, k) for k in range(1, 18) for m in (3, 6, 10, 15)]
"""Pairs where `a > k * b`, `a + k > b`, `a > k and b > m` and the like change their answer."""
TEXT = "abcdeilmnorst" * 2 + "ABCDET xyz"


def load(program: str) -> Callable:
    """The function `f` that `program` defines."""
    namespace: dict = {}
    exec(compile(program, "<starter>", "exec"), namespace)
    return namespace["f"]


def output(function: Callable, arguments: tuple) -> str:
    """repr of the result, or the exception's name: wrong types and crashes are behaviour too."""
    try:
        return repr(function(*arguments))
    except Exception as error:  # any exception of the probed function is its output
        return f"raises {type(error).__name__}"


def outputs(program: str, inputs: list[tuple]) -> list[str]:
    function = load(program)
    return [output(function, arguments) for arguments in inputs]


def signature(program: str, kind: str) -> str:
    """Digest of kind and outputs over the probe grid: equal for equal functions."""
    joined = "\n".join([kind, *outputs(program, PROBES[kind])])
    return hashlib.sha256(joined.encode()).hexdigest()[:20]


def _pairs() -> list[tuple]:
    near = [(a, b) for a in range(-4, 22, 2) for b in range(-3, 22)]
    # Where `a + k > b`, `a > k * b` and `a + b > k` change their answer, for every constant in use.
    edges = [(b * k, b) for k in range(1, 18) for b in (1, 2, 3)] + [
        (a, a * k) for k in range(1, 18) for a in (1, 2, 3)
    ]
    return near + edges + [(a, b) for a in (0, 30, 61) for b in range(0, 80, 3)]


def _texts() -> list[tuple]:
    rng = random.Random("probe texts")
    drawn = ["".join(rng.choices(TEXT, k=length)) for length in range(1, 16) for _ in range(3)]
    return [(text,) for text in ["", *drawn]]


def _lists() -> list[tuple]:
    rng = random.Random("probe lists")
    drawn = [rng.choices(range(-8, 31), k=length) for length in range(11) for _ in range(4)]
    return [(items,) for items in [*drawn, list(range(-10, 60)), *([value] for value in range(30))]]


PROBES: dict[str, list[tuple]] = {
    "number": [(n,) for n in range(-16, 65)],
    "pair": _pairs(),
    "text": _texts(),
    "list": _lists(),
}
