from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mrl.sandbox.base import Limits
from mrl.sandbox.confine import selftest
from mrl.sandbox.engine.client import IsolatedExecutor
from tests.sandbox.asking import Call, Seen, ask
from tests.soak import slow_but

QUICK = Limits(wall_seconds=5, cpu_seconds=5)
Run = Callable[..., Seen]


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

    def run(code: str, *calls: Call, limits: Limits = QUICK, stdin: str = "") -> Seen:
        return ask(executor, code, *calls, limits=limits, stdin=stdin)

    return run
