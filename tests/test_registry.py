"""What was registered in one process is there in another one."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from mrl.backends import Resources
from mrl.engines import ENGINES
from mrl.errors import ConfigError
from mrl.registry import Registry, adopt, registrations
from tests.process_backend import ProcessBackend


def test_members_are_listed_and_adopted_before_or_after_their_set_is_there() -> None:
    kind = f"things-{uuid.uuid4()}"
    adopt({kind: {"early": 1}})
    things: Registry[Any] = Registry(kind, "thing", {"builtin": "math:pi"})
    adopt({kind: {"late": 2}})
    things.register("mine")(3)
    assert [things.get(name) for name in ("early", "late", "mine")] == [1, 2, 3]
    assert registrations()[kind] == {"early": 1, "late": 2, "mine": 3}
    with pytest.raises(ConfigError, match="already registered"):
        things.register("early")(4)


class Asks:
    """A worker that looks up an engine."""

    def engine(self, name: str) -> str:
        return ENGINES.get(name).__name__


@pytest.mark.slow
async def test_workers_elsewhere_have_what_was_registered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine:
        pass

    monkeypatch.setitem(ENGINES._registered, "mine", Mine)
    backend = ProcessBackend(60.0)
    worker = await backend.spawn(Asks, name="w", resources=Resources(), args={})
    assert await worker.call("engine", "mine") == "Mine"
    await backend.close()
