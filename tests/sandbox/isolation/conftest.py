from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from mrl.sandbox.base import Limits
from mrl.sandbox.execution import Call, Execution, Observation
from mrl.sandbox.isolation import selftest
from mrl.sandbox.isolation.client import IsolatedExecutor
from tests.soak import slow_but

QUICK = Limits(wall_seconds=5, cpu_seconds=5)
Run = Callable[..., Observation]


@pytest.fixture(scope="package", params=slow_but(["A"], ["A", "B", "C"]))
def executor(request: pytest.FixtureRequest) -> Iterator[IsolatedExecutor]:
    result = selftest.test_layer(request.param)
    if not result.holds:
        pytest.skip(f"layer {request.param}: {result.reason}")
    executor = IsolatedExecutor(slots=2, layer=request.param)
    yield executor
    executor.shutdown()


@pytest.fixture
def run(executor: IsolatedExecutor) -> Run:
    """Run code, or a code's calls, in each layer there is here."""

    def run(code: str, *calls: Call, limits: Limits = QUICK, stdin: str = "", **more: object) -> Observation:
        execution = Execution(code, calls, stdin, limits, **more)  # type: ignore[arg-type]
        return asyncio.run(executor.execute([execution]))[0]

    return run
