from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.sandbox import plain
from mrl.sandbox.execution import Call, Execution
from mrl.sandbox.isolation.wire import decode_observation, not_run

atoms = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
keys = st.recursive(atoms, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=6)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner) | st.sets(keys) | st.frozensets(keys)
    ),
    max_leaves=20,
)


def exact(value: object) -> object:
    """Something equal only for values of the same types and the same bits."""
    kind = type(value)
    if kind is float:
        return ("float", "nan" if math.isnan(value) else struct.pack(">d", value))  # type: ignore[arg-type, call-overload]
    if kind is complex:
        return ("complex", exact(value.real), exact(value.imag))  # type: ignore[attr-defined]
    if kind in (list, tuple):
        return (kind.__name__, [exact(item) for item in value])  # type: ignore[attr-defined]
    if kind in (set, frozenset):
        return (kind.__name__, sorted(repr(exact(item)) for item in value))  # type: ignore[attr-defined]
    if kind is dict:
        return ("dict", [(exact(key), exact(item)) for key, item in value.items()])  # type: ignore[attr-defined]
    return (kind.__name__, value)


@given(values)
def test_what_crosses_is_what_was_there(value: object) -> None:
    assert exact(plain.loads(plain.dumps(value))) == exact(value)


@pytest.mark.parametrize(
    "value", [10**4000, -(2**20000), 2**62, -(2**62), 2**62 - 1, -0.0, "\ud800\0é", b"\xff\0"], ids=type
)
def test_edges_cross(value: object) -> None:
    assert exact(plain.loads(plain.dumps(value))) == exact(value)


def test_dictionaries_of_the_standard_library_cross_as_dict() -> None:
    for value in (Counter("aab"), OrderedDict(a=2, b=1), defaultdict(int, a=2, b=1)):
        got = plain.loads(plain.dumps(value))
        assert type(got) is dict
        assert got == {"a": 2, "b": 1}


def test_nothing_of_a_foreign_class_is_called() -> None:
    called = []

    def hostile(base: type) -> type:
        def method(self: object, *args: object) -> object:
            called.append(base)
            raise AssertionError

        names = (
            "__iter__",
            "__eq__",
            "__len__",
            "__str__",
            "__repr__",
            "__index__",
            "__reduce__",
            "items",
            "__getitem__",
        )
        return type("Hostile", (base,), dict.fromkeys(names, method) | {"__hash__": lambda self: 1})

    for base in (int, float, str, list, tuple, dict, set, bytes, object, Counter):
        got = plain.loads(plain.dumps(hostile(base)()))
        assert type(got) is plain.Opaque
        assert got.type_name == "Hostile"
    assert called == []


def test_a_lying_type_name_is_seen_through() -> None:
    class Meta(type):
        @property
        def __name__(cls) -> str:
            raise AssertionError

    assert plain.type_name(Meta("Real", (), {})()) == "Real"


@pytest.mark.parametrize("value", [deque(), lambda: 0, [object()], {"a": 1j, "b": {(1, type)}}, [[] for _ in range(2)]])
def test_one_foreign_thing_makes_it_opaque(value: object) -> None:
    got = plain.loads(plain.dumps(value))
    assert (type(got) is plain.Opaque) == (value != [[], []])


def test_too_deep_too_many_too_long_are_opaque() -> None:
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    wide: object = "x"
    for _ in range(40):
        wide = [wide, wide]
    loop: list = []
    loop.append(loop)
    for value in (deep, wide, loop, "x" * (plain.MAX_BYTES + 1), b"x" * plain.MAX_BYTES):
        assert type(plain.loads(plain.dumps(value))) is plain.Opaque


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "{}", '{"x":1}', '{"t":1,"l":2}', '{"t":1}', '{"d":[[1]]}', '{"d":[1]}', '{"d":["ab"]}',
        '{"s":[[]]}', '{"i":5}', '{"i":"zz"}', '{"f":"1"}', '{"b":"0"}', '{"c":[1,2]}', '{"o":[1,2]}', "NaN",
        "Infinity", "[" * 100_000, '{"t":[' * 3000, '{"":1}', '{"d":[[[1],2]]}', '"\xff', "1" * 5000,
    ],
    ids=range(24),
)  # fmt: skip
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(plain.PlainError):
        plain.loads(text)


@pytest.mark.slow
def test_colliding_keys_are_refused_at_once() -> None:
    prime = 2**61 - 1
    for keys in ([k * prime for k in range(50_000)], [f for k in range(50_000) for f in [{"t": [k * prime]}]]):
        body = [{"i": hex(key)} if isinstance(key, int) else key for key in keys]
        if isinstance(keys[0], dict):
            body = [{"t": [{"i": hex(key["t"][0])}]} for key in keys]
        for text in (json.dumps({"s": body}), json.dumps({"d": [[key, 1] for key in body]})):
            with pytest.raises(plain.PlainError, match="collide"):
                plain.loads(text)


def test_opaque_can_be_kept_and_restored() -> None:
    kept: list[object] = []

    def keep(value: object) -> plain.Opaque:
        kept.append(value)
        return plain.Opaque("thing", str(len(kept) - 1))

    thing = object()
    text = plain.dumps([1, (thing, {"a": thing})], keep)
    got = plain.loads(text, lambda opaque: kept[int(opaque.reason)])
    assert got == [1, (thing, {"a": thing})]


def test_small_text_that_would_take_much_memory_is_refused() -> None:
    empty_sets = "[" + ",".join(['{"s":[]}'] * 300_000) + "]"
    with pytest.raises(plain.PlainError, match="more values"):
        plain.loads(empty_sets)


def test_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides count alike, so that an honest answer is not refused where it is read. Values near the bound."""
    monkeypatch.setattr(plain, "MAX_NODES", 100_000)
    for value in ([0] * 90_000, dict.fromkeys(range(30_000), 1), [(k,) for k in range(15_000)]):
        assert plain.loads(plain.dumps(value)) == value


@pytest.mark.slow
def test_answers_of_one_execution_share_a_bound() -> None:
    execution = Execution("", tuple(Call("f") for _ in range(8)))
    answer = ["V", "[" + ",".join(["[]"] * 190_000) + "]"]
    seen = decode_observation(execution, {**not_run(""), "status": "done", "answers": [answer] * 8})
    assert seen.status == "protocol"
    assert [a.kind for a in seen.answers] == ["value"] * 4 + ["unanswered"] * 4
