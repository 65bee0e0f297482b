"""Executions as the supervisor reads them, and what it answers as observations."""

from __future__ import annotations

import json
from typing import Any

from mrl.sandbox import plain
from mrl.sandbox.execution import Answer, Execution, Observation

MAX_VALUES = 4 * plain.MAX_NODES
"""In all answers of one execution: they are read and kept in the trainer's process."""
FIELDS = ("exception", "stdout", "stderr", "exit_code", "signal", "wall_seconds", "cpu_seconds", "peak_memory_mb")


def encode_request(execution: Execution) -> bytes:
    limits = execution.limits
    calls = [
        {
            "function": call.function,
            "args": [plain.dumps(value) for value in call.args],
            "kwargs": [[name, plain.dumps(value)] for name, value in call.kwargs],
        }
        for call in execution.calls
    ]
    request = {
        "code": execution.code,
        "stdin": execution.stdin,
        "calls": calls,
        "peer": None if execution.peer is None else list(execution.peer),
        "limits": {
            "wall_seconds": limits.wall_seconds,
            "cpu_seconds": limits.cpu_seconds,
            "memory_mb": limits.memory_mb,
            "output_bytes": limits.output_bytes,
            "file_mb": limits.file_mb,
            "open_files": limits.open_files,
            "processes": limits.processes,
        },
    }
    return json.dumps(request).encode()


def decode_observation(execution: Execution, data: dict[str, Any]) -> Observation:
    """What the supervisor passed on. A value that cannot be read ends the answers there: `protocol`."""
    status, detail, answers = data["status"], data["detail"], []
    left = [MAX_VALUES]
    for kind, text in data["answers"]:
        try:
            answers.append(decode_answer(kind, text, left))
        except (plain.PlainError, ValueError, TypeError) as error:
            status, detail = "protocol", str(error)[:500]
            break
    answers += [Answer("unanswered") for _ in execution.calls[len(answers) :]]
    blocks = None
    if execution.peer is not None:
        blocks = [decode_block(block) for block in data["blocks"][: len(execution.peer)]]
        blocks += [Answer("unanswered") for _ in execution.peer[len(blocks) :]]
    return Observation(status, answers, detail=detail, peer=blocks, **{name: data[name] for name in FIELDS})


def not_run(detail: str) -> dict[str, Any]:
    """What is answered in the place of a supervisor that was of no use."""
    nothing = {"exception": "", "stdout": "", "stderr": "", "exit_code": None, "signal": None}
    used = {"wall_seconds": 0.0, "cpu_seconds": 0.0, "peak_memory_mb": 0.0}
    return {"status": "sandbox_error", "detail": detail, "answers": [], "blocks": [], **nothing, **used}


def decode_answer(kind: str, text: str, left: list[int]) -> Answer:
    """Raises PlainError or ValueError."""
    if kind == "V":
        value = plain.loads(text, left=left)
        if type(value) is plain.Opaque:
            return Answer("value", type_name=value.type_name, detail=value.reason, opaque=True)
        return Answer("value", value, type_name=plain.type_name(value))
    bases, detail = json.loads(text)
    if not isinstance(detail, str) or not bases or not all(isinstance(name, str) for name in bases):
        raise ValueError("an exception that cannot be read")
    return Answer("raised", type_name=bases[0][:100], detail=detail[:2000], bases=tuple(b[:100] for b in bases[:20]))


def decode_block(block: list[Any]) -> Answer:
    """What the tester, which is ours, said of one block: nothing, or the exception's bases and detail."""
    if not block:
        return Answer("value", True, type_name="bool")
    bases, detail = block
    return Answer("raised", type_name=bases[0], detail=detail, bases=tuple(bases))
