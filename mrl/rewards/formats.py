"""Tests in the shapes that public data sets have: APPS' table of inputs and outputs, LiveCodeBench's typed items."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

from mrl.errors import DataError
from mrl.sandbox.base import IOTest, Test

COMPARE = get_args(get_type_hints(IOTest)["compare"])


def parse_table(table: dict[str, Any]) -> tuple[Test, ...]:
    """APPS: `{"inputs": [...], "outputs": [...]}` are pairs of stdin and stdout; with `fn_name`, arguments and results.
    A result is right when it equals the output, or the only item of the output. Raises DataError."""
    inputs, outputs = table.get("inputs"), table.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise DataError('"inputs" and "outputs" must be lists of the same length')
    name = table.get("fn_name")
    if name is None:
        return tuple(
            _io_test(_lines(given), _lines(wanted), table) for given, wanted in zip(inputs, outputs, strict=True)
        )
    tests = []
    for given, wanted in zip(inputs, outputs, strict=True):
        if not isinstance(given, list):
            raise DataError(f"the arguments {given!r:.80} are no list")
        accepted = [wanted, *(wanted if isinstance(wanted, list) and len(wanted) == 1 else [])]
        tests.append(call_test(name, given, accepted))
    return tuple(tests)


def parse_item(item: dict[str, Any]) -> Test | None:
    """`{"input": ..., "output": ...}`: stdin and stdout; with `"testtype": "functional"` and `fn_name` (LiveCodeBench)
    each line of the input is an argument, and the output the result, both as JSON. None: neither. Raises DataError."""
    given, wanted = item.get("input"), item.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str):
        return None
    if item.get("testtype", "stdin") == "stdin":
        return _io_test(given, wanted, item)
    name = item.get("fn_name") or item.get("func_name")
    if item["testtype"] != "functional" or not isinstance(name, str):
        raise DataError(f'testtype {item["testtype"]!r}; it must be "stdin", or "functional" with an "fn_name"')
    try:
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
        return call_test(name, arguments, [json.loads(wanted)])
    except ValueError as error:
        raise DataError(f"input and output of a functional test are JSON: {error}") from None


def call_test(name: str, arguments: list[Any], accepted: list[Any]) -> str:
    """An assert on JSON data: a tuple may stand for a list, as it does in JSON. `name` is a function, or a method of
    the program's class `Solution`. Raises DataError."""
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise DataError(f"{name!r} is no name of a function")
    call = f"json.loads(json.dumps({name}({', '.join(map(repr, arguments))})))"
    expected = f"== {accepted[0]!r}" if len(accepted) == 1 else f"in {accepted!r}"
    return f"import json\nassert {call} {expected}"


def _io_test(given: str, wanted: str, options: dict[str, Any]) -> IOTest:
    compare, tolerance = options.get("compare", "lines"), options.get("tolerance", 1e-6)
    if compare not in COMPARE:
        raise DataError(f"compare: {compare!r} is not one of {', '.join(COMPARE)}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise DataError(f"tolerance: {tolerance!r} is not a number from 0 to 1")
    return IOTest(given, wanted, compare, tolerance)


def _lines(text: Any) -> str:
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if isinstance(text, str):
        return text
    raise DataError(f"stdin and stdout are text or lists of lines, not {text!r:.80}")
