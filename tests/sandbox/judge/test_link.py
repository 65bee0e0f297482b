"""Whatever a program sends, its judge reads a value or says that the program broke off."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.sandbox import protocol
from mrl.sandbox.judge import link as link_module
from mrl.sandbox.judge.link import Gone, Link
from mrl.sandbox.judge.mirrors import LINK
from mrl.sandbox.judge.values import KINDS, Side

TOKEN = "0" * 16
DEEP = "[" * 100_000


def answered(*bodies: bytes, kind: protocol.Kind = protocol.Kind.ANSWER) -> Any:
    """What a question comes to when this lies on the link. Raises what the question raises."""
    ours, theirs = socket.socketpair()
    given = [1, 2]
    with pytest.MonkeyPatch.context() as patch, ours, theirs:
        patch.setattr(link_module.os, "urandom", bytes)
        for body in bodies:
            protocol.send(theirs.fileno(), kind, body)
        theirs.shutdown(socket.SHUT_WR)
        link = Link(ours.fileno(), lambda _: {})
        LINK[:] = [link]
        try:
            return link.ask("call", given)
        finally:
            LINK.clear()


def message(node: Any, changes: Any = (), forgotten: Any = (), printed: Any = (), token: Any = TOKEN) -> bytes:
    return json.dumps([token, changes, node, forgotten, printed, ""]).encode()


UNREADABLE = [
    b"", b"[", DEEP.encode(), b"{}", b"null", b"[1]", b"9" * 5000, b"\xff",
    *(message(node) for node in (
        {"a": 1}, [], ["?"], ["#", 7], ["#"], ["t"], ["t", 3], ["l", 1], ["l", 0, []], ["l", True, []], ["l", "x", []],
        ["d", 1, [1]], ["s", 1, [["l", 3, []]]], ["i", "zz"], ["i", 3], ["v", "os.system", ["ls"]], ["v", [], []],
        ["v", "builtins.range", [1, 2, 0]], ["L", "os", "system"], ["L", "builtins", "eval"], ["L", "builtins", "nope"],
        ["L", "unittest.mock", "ANY"], ["L", "mrl.sandbox.judge.link", "Link"], ["L", 3, 4], ["O", 99], ["O", "x"],
        ["o", "x"], ["o", 1], ["o", 1, "?"], ["o", 1, "x", 3], ["o", 1, "x", ["L", "builtins", "int"]],
        ["o", 1, "e", ["L", "builtins", "int"], [], "", None], ["c", 1], ["c", [], "K"], ["I", 1, [], ["O", 0]],
        ["c", 1, "K", "K", [["L", "builtins", "bool"]], [], [], True, None, None],
        ["c", 1, "K", "K", [3], [], [], True, None, None], ["u", ["L", "builtins", "tuple"], [1]],
    )),
    message(1, [[0]]), message(1, [["x", []]]), message(1, 3), message(1, [[99, []]]), message(1, (), [[]]),
    message(1, token="1" * 16), message(1, token=None),
]  # fmt: skip


@pytest.mark.parametrize("body", UNREADABLE, ids=lambda body: body[:60].decode(errors="replace"))
def test_what_cannot_be_read_is_the_programs_failure(body: bytes) -> None:
    with pytest.raises(Gone) as caught:
        answered(body)
    assert caught.value.broke


def test_a_program_that_ends_broke_nothing() -> None:
    with pytest.raises(Gone) as caught:
        answered()
    assert not caught.value.broke


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from(["", "f", "x", "e", "int", "builtins", TOKEN]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(st.sampled_from([*KINDS, *"#tivLOoceIuyY"]), inner, inner).map(list)
        | st.dictionaries(st.text(max_size=2), inner, max_size=1)
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(JSON, JSON, JSON)
def test_any_answer_is_a_value_or_the_end(node: Any, changes: Any, forgotten: Any) -> None:
    with contextlib.suppress(Gone):
        answered(message(node, changes, forgotten))


@settings(max_examples=200, deadline=None)
@given(JSON, JSON)
def test_any_callback_is_answered_or_the_end(target: Any, nodes: Any) -> None:
    with pytest.raises(Gone):
        answered(json.dumps([target, [], nodes, []]).encode(), kind=protocol.Kind.CALLBACK)


def test_changes_reach_only_what_was_given() -> None:
    """An answer that changes a list of the tests which an earlier question gave, and this one does not."""
    ours, theirs = socket.socketpair()
    first, second = [1], [2]
    with pytest.MonkeyPatch.context() as patch, ours, theirs:
        patch.setattr(link_module.os, "urandom", bytes)
        link = Link(ours.fileno(), lambda _: {})
        protocol.send(theirs.fileno(), protocol.Kind.ANSWER, message(None, [[0, [5]]]))
        link.ask("call", first)
        protocol.send(theirs.fileno(), protocol.Kind.ANSWER, message(None, [[0, [6]], [2, [7]]]))
        link.ask("call", second)
        assert (first, second) == ([5], [7])
        theirs.setblocking(False)
        os.read(theirs.fileno(), 1 << 16)
        protocol.send(theirs.fileno(), protocol.Kind.ANSWER, message(None))
        link.ask("call", second)
        sent = os.read(theirs.fileno(), 1 << 16)[protocol.HEADER.size :]
        assert json.loads(sent)[2] == [[0, [5]]]  # and is told again what the list holds


def test_values_cross_and_come_back_the_same() -> None:
    """One side's message read by the other's tables."""

    class Plain(Side):
        pass

    here, there = Plain(0), Plain(1)
    shared = [1, [2]]
    values: list[Any] = [shared, (shared, {"a": shared}), {1, 2}, b"\xff", 1 << 80, range(3), {}.keys(), float("inf")]
    found = there.decode_items(json.loads(json.dumps(here.encode_items(values))))
    assert found[0] == shared
    assert found[1][0] is found[0]
    assert found[1][1]["a"] is found[0]
    assert found[2:] == values[2:]
    found[0][1].append(3)
    for number, content in json.loads(json.dumps(there.changes())):
        here.update(number, content)
    assert shared == [1, [2, 3]]
