"""A program and its tests in, executions out; what was observed in, a verdict out.

Three kinds of executions. The calls of all rewritten asserts run in one process. Asserts that could not be rewritten,
and those whose answer is an object rather than plain data, run in a second sandboxed process that reaches the first
through proxies. Every `IOTest` is a run of the program as a script. They follow one another and share the time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from mrl.sandbox.base import IOTest, Limits, Program, Status, TestResult, Verdict
from mrl.sandbox.execution import Answer, Call, EndStatus, Execution, Observation
from mrl.sandbox.grading.compare import compare_output
from mrl.sandbox.grading.conditions import NOT_REACHED, Undecided, decide
from mrl.sandbox.grading.rewrite import Rewritten, rewrite

Execute = Callable[[Execution], Awaitable[Observation]]
NO_TIME = "not run: the program's time was used up"
assert set(get_args(EndStatus)) - {"done"} < set(get_args(Status))


async def judge(program: Program, execute: Execute) -> Verdict:
    """Run what the tests need, compare, and say what happened. Raises only what `execute` raises."""
    grading = _Grading(program, execute)
    try:
        await grading.run()
    except _SandboxFailed as failure:
        return Verdict("sandbox_error", detail=str(failure))
    return grading.verdict()


class _SandboxFailed(Exception):
    pass


@dataclass(slots=True)
class _Part:
    """One execution and the tests that it decided."""

    status: Status
    detail: str = ""
    observation: Observation = field(default_factory=lambda: Observation("done"))


class _Grading:
    def __init__(self, program: Program, execute: Execute) -> None:
        self.program = program
        self.execute = execute
        self.results = [TestResult(False, NOT_REACHED) for _ in program.tests]
        self.parts: list[_Part] = []
        self.left = program.limits

    async def run(self) -> None:
        asserts = [k for k, test in enumerate(self.program.tests) if isinstance(test, str)]
        if asserts or not self.program.tests:
            await self.run_asserts(asserts)
        for index, test in enumerate(self.program.tests):
            if isinstance(test, IOTest):
                await self.run_script(index, test)

    async def run_asserts(self, indices: list[int]) -> None:
        texts = [str(self.program.tests[k]) for k in indices]
        rewritten = rewrite(self.program.code, texts)
        proxied = [k for k, test in zip(indices, rewritten.tests, strict=True) if test.steps is None]
        if len(proxied) < len(indices) or not indices:
            calls = tuple(rewritten.calls) or _LOADED * bool(indices)
            observation = await self.observe(Execution(self.program.code, calls))
            proxied = sorted(proxied + self.decide_calls(indices, rewritten, observation))
            if observation.status not in ("done", "crashed", "exited", "killed", "memory"):
                return
        if proxied:
            await self.run_proxied(proxied, dict(zip(indices, texts, strict=True)))

    def decide_calls(self, indices: list[int], rewritten: Rewritten, observation: Observation) -> list[int]:
        """Enter the results of the rewritten tests. Returns the tests that need the objects themselves."""
        undecided = []
        answers = observation.answers[: len(rewritten.calls)]
        finished = observation.status == "done" and len(observation.answers) >= max(1, len(rewritten.calls))
        for index, test in zip(indices, rewritten.tests, strict=True):
            if test.steps is None:
                continue
            try:
                self.results[index] = decide(test, answers, finished)
            except Undecided:
                undecided.append(index)
        decided = [k for k in indices if k not in undecided and rewritten.tests[indices.index(k)].steps is not None]
        self.conclude(observation, decided, memory=_ran_out(answers))
        return undecided

    async def run_proxied(self, indices: list[int], texts: dict[int, str]) -> None:
        """All in one peer process, in order, so that one test may use the names of another."""
        last = indices[-1]
        tests = tuple(text for k, text in texts.items() if k <= last)
        observation = await self.observe(Execution(self.program.code, peer=tests))
        if observation.peer is None and observation.status == "done":
            raise _SandboxFailed(f"test {indices[0]} needs a second process for the tests, and this executor has none")
        answers = observation.peer or []
        for index, answer in zip((k for k in texts if k <= last), answers, strict=False):
            if index in indices:
                self.results[index] = _proxied_result(answer)
        self.conclude(observation, indices, memory=_ran_out(answers))

    async def run_script(self, index: int, test: IOTest) -> None:
        observation = await self.observe(Execution(self.program.code, stdin=test.input))
        if observation.status == "exited" and observation.exit_code == 0:
            observation = replace(observation, status="done")
        if observation.status == "done":
            detail = compare_output(test, observation.stdout)
            self.results[index] = TestResult(not detail, detail)
        self.conclude(observation, [index])
        if observation.status != "done":
            self.results[index] = TestResult(False, self.parts[-1].detail)

    async def observe(self, execution: Execution) -> Observation:
        """Run with what is left of the time. Raises _SandboxFailed."""
        if self.left.wall_seconds <= 0 or self.left.cpu_seconds <= 0:
            return Observation("timeout", detail=NO_TIME)
        observation = await self.execute(replace(execution, limits=self.left))
        if observation.status == "sandbox_error":
            raise _SandboxFailed(observation.detail or "the sandbox failed and does not say why")
        self.left = replace(
            self.left,
            wall_seconds=self.left.wall_seconds - observation.wall_seconds,
            cpu_seconds=self.left.cpu_seconds - observation.cpu_seconds,
        )
        return observation

    def conclude(self, observation: Observation, indices: Sequence[int], memory: bool = False) -> None:
        """Enter what the execution means for the program as a whole."""
        failed = next((k for k in indices if not self.results[k].passed), None)
        if observation.status != "done":
            detail = _explain(observation, self.program.limits)
            self.parts.append(_Part(_STATUS[observation.status], detail, observation))
        elif failed is None:
            self.parts.append(_Part("passed", "", observation))
        elif memory:
            self.parts.append(_Part("memory", f"MemoryError (limit {self.program.limits.memory_mb} MB)", observation))
        else:
            self.parts.append(_Part("failed", f"test {failed}: {self.results[failed].detail}", observation))

    def verdict(self) -> Verdict:
        """Status and output of the first part that did not pass."""
        worst = next((part for part in self.parts if part.status != "passed"), self.parts[-1])
        observations = [part.observation for part in self.parts]
        return Verdict(
            worst.status,
            self.results,
            worst.detail,
            worst.observation.stdout,
            worst.observation.stderr,
            wall_seconds=sum(o.wall_seconds for o in observations),
            cpu_seconds=sum(o.cpu_seconds for o in observations),
            peak_memory_mb=max(o.peak_memory_mb for o in observations),
        )


_LOADED = (Call("(lambda: None)"),)
"""Asked when the tests ask nothing: it shows that the program was loaded, and did not just leave."""
_STATUS: dict[EndStatus, Status] = {
    "error": "error",
    "timeout": "timeout",
    "memory": "memory",
    "crashed": "crashed",
    "killed": "killed",
    "exited": "exited",
    "output_limit": "output_limit",
    "protocol": "protocol",
}


def _proxied_result(answer: Answer) -> TestResult:
    if answer.kind == "value" and answer.value is True and not answer.opaque:
        return TestResult(True)
    if answer.kind == "unanswered":
        return TestResult(False, NOT_REACHED)
    return TestResult(False, f"{answer.type_name}: {answer.detail}".strip(": ")[:1500] or "failed")


def _ran_out(answers: Sequence[Answer]) -> bool:
    return any(answer.kind == "raised" and answer.type_name == "MemoryError" for answer in answers)


def _explain(observation: Observation, limits: Limits) -> str:
    """One line on what ended it, for the log."""
    if observation.detail:
        return observation.detail
    texts = {
        "error": observation.exception,
        "timeout": f"no end after {limits.wall_seconds:g} s, or more than {limits.cpu_seconds:g} s of processor time",
        "memory": f"out of memory (limit {limits.memory_mb} MB)",
        "crashed": f"signal {observation.signal}",
        "killed": f"signal {observation.signal}",
        "exited": f"left with exit code {observation.exit_code} before the tests were done",
        "output_limit": f"more than {limits.output_bytes} bytes of output",
        "protocol": "what came back could not be read",
    }
    return texts.get(observation.status, "") or observation.exception
