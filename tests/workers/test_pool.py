"""Spreading requests over workers, and replacing those that cannot be updated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mrl.backends.inline import InlineHandle
from mrl.errors import EngineDied, EngineError, SyncError
from mrl.sync.base import WeightSync
from mrl.system.gather import all_of
from mrl.types import Completion, GenerateRequest, SamplingParams, WeightRef
from mrl.workers.pool import RolloutPool


class Sampler:
    """Stands in for a rollout worker: takes `max_tokens` milliseconds a request, many at a time."""

    def __init__(
        self, capacity: int | None, *, version: int = 0, dies_after: int | None = None, fault: str = ""
    ) -> None:
        self.limit, self.version, self.dies_after, self.fault = capacity, version, dies_after, fault
        self.served: list[str] = []
        self.prefilled: int | None = None
        self.at_once = self.most_at_once = 0

    def capacity(self) -> int | None:
        return self.limit

    async def generate(self, requests: list[GenerateRequest], call_batch: object = None) -> list[Completion]:
        self.at_once += len(requests)
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(max(r.sampling.max_tokens for r in requests) / 1000)
        self.at_once -= len(requests)
        if self.dies_after is not None and len(self.served) >= self.dies_after:
            raise EngineDied("gone")
        self.served += [r.id for r in requests]
        return [Completion(r.id, [1], [0.0], "stop", self.version, prefilled=self.prefilled) for r in requests]

    def initialize_for_weight_sync(self) -> dict[str, object]:
        return {"accepts": ["weights"], "dtype": None, "machine": "here"}

    async def update_weights(self, ref: WeightRef) -> dict[str, object]:
        if self.fault == "refuses":
            raise SyncError("no room")
        if self.fault == "hangs":
            await asyncio.sleep(60)
        if self.fault != "forgets":
            self.version = ref.version
        return {"version": self.version, "checksum": "other" if self.fault == "holds others" else ref.checksum}


class Publish(WeightSync):
    async def publish(self, actor: object, workers: object, version: int) -> WeightRef:
        return WeightRef(version, path="somewhere", checksum="c", bytes=7)


async def pool(*workers: Sampler, **options: object) -> RolloutPool:
    handles = [InlineHandle(worker, f"rollout-{i}", 60) for i, worker in enumerate(workers)]
    client = RolloutPool(handles, 1000, **options)
    await client.ask_capacity()
    return client


async def generate(client: RolloutPool, wanted: list[GenerateRequest]) -> list[Completion]:
    return await all_of([client.generate(request) for request in wanted])


def requests(lengths: list[int], prompts: int = 1000) -> list[GenerateRequest]:
    return [
        GenerateRequest(str(i), (i % prompts,), SamplingParams(max_tokens=n), seed=i) for i, n in enumerate(lengths)
    ]


async def test_long_completions_do_not_hold_back_short_ones() -> None:
    workers = Sampler(2), Sampler(2)
    lengths = [400] + [20] * 39
    start = asyncio.get_running_loop().time()
    done = await generate(await pool(*workers), requests(lengths))
    seconds = asyncio.get_running_loop().time() - start
    assert [c.request_id for c in done] == [str(i) for i in range(40)]
    assert seconds < 0.4 + 0.15, "39 short ones go past the long one in the three other places"
    assert max(w.most_at_once for w in workers) <= 2
    busy = next(w for w in workers if "0" in w.served)
    other = next(w for w in workers if w is not busy)
    assert len(other.served) > len(busy.served)


async def test_a_prompts_group_stays_together_unless_that_would_be_unfair() -> None:
    together = Sampler(64), Sampler(64)
    await generate(await pool(*together), requests([20] * 8, prompts=1))
    assert sorted(len(w.served) for w in together) == [0, 8]
    split = Sampler(64), Sampler(64)
    await generate(await pool(*split), requests([20] * 64, prompts=1))
    assert min(len(w.served) for w in split) >= 24


async def test_requests_of_a_worker_that_dies_run_again_on_the_others() -> None:
    told: list[str] = []
    bad, good = Sampler(4, dies_after=3), Sampler(4)
    done = await generate(await pool(bad, good, note=told.append), requests([5] * 30))
    assert len(done) == 30
    assert sorted([*bad.served, *good.served], key=int) == [str(i) for i in range(30)]
    assert "rollout-0 is gone" in told[0]
    with pytest.raises(EngineDied):
        await generate(await pool(Sampler(4, dies_after=0)), requests([5] * 3))


@pytest.mark.parametrize("capacity", [4, None])
async def test_a_worker_that_dies_is_replaced_and_its_requests_run_again(capacity: int | None, tmp_path: Path) -> None:
    """Whatever it was asked: all requests of one call and those of another that runs at the same time."""
    told: list[str] = []
    spawned: list[Sampler] = []

    async def spawn(index: int) -> InlineHandle:
        spawned.append(Sampler(capacity))
        return InlineHandle(spawned[-1], f"rollout-{index}", 60)

    bad = Sampler(capacity, dies_after=0)
    client = await pool(bad, spawn=spawn, note=told.append)
    await client.sync(Publish(tmp_path), None, 5)
    both = await asyncio.gather(generate(client, requests([5] * 9)), generate(client, requests([300, 5, 5, 5])))
    assert [[c.request_id for c in done] for done in both] == [[str(i) for i in range(n)] for n in (9, 4)]
    assert {c.policy_version for done in both for c in done} == {5}
    assert [len(spawned), len(told), client.restarts] == [1, 1, 1]
    assert "rollout-0 is replaced: gone" in told[0]
    assert client.dead == {}, "what failed as the old one was ended is no news of the new one"


async def test_workers_that_die_together_are_replaced_together(tmp_path: Path) -> None:
    """Each waits for a machine of its own, none for the others': but for the first, whose death is noticed alone."""
    begun: list[int] = []
    others = asyncio.Event()

    async def spawn(index: int) -> InlineHandle:
        begun.append(index)
        if len(begun) == 4:
            others.set()
        if len(begun) > 1:
            await asyncio.wait_for(others.wait(), 30)
        await asyncio.sleep(0.01)
        return InlineHandle(Sampler(4), f"rollout-{index}", 60)

    client = await pool(*(Sampler(4, dies_after=0) for _ in range(4)), spawn=spawn)
    await client.sync(Publish(tmp_path), None, 5)
    done = await generate(client, requests([5] * 16))
    assert [c.policy_version for c in done] == [5] * 16
    assert (sorted(begun), client.restarts, client.down, client.dead) == ([0, 1, 2, 3], 4, set(), {})


async def test_workers_that_keep_dying_end_the_run(tmp_path: Path) -> None:
    async def spawn(index: int) -> InlineHandle:
        return InlineHandle(Sampler(4, dies_after=0), f"rollout-{index}", 60)

    client = await pool(Sampler(4, dies_after=0), spawn=spawn, max_restarts=3)
    await client.sync(Publish(tmp_path), None, 1)
    with pytest.raises(EngineError, match=r"the 4th of this run \(max_worker_restarts: 3\): gone"):
        await generate(client, requests([5] * 3))


async def test_calls_at_the_same_time_share_the_workers_room() -> None:
    workers = Sampler(2), Sampler(2)
    client = await pool(*workers)
    done = await asyncio.gather(*(generate(client, requests([5] * 5)) for _ in range(4)))
    assert [len(d) for d in done] == [5] * 4
    assert [w.most_at_once for w in workers] == [2, 2]
    assert client.load == [0, 0]


async def test_a_call_that_is_given_up_frees_its_places() -> None:
    worker = Sampler(2)
    client = await pool(worker)
    task = asyncio.create_task(generate(client, requests([400] * 5)))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.load == [0]
    assert len(await generate(client, requests([5] * 3))) == 3


async def test_workers_that_take_any_number_get_all_at_once_and_the_same_ones_every_time() -> None:
    for _ in range(3):
        workers = Sampler(None), Sampler(None)
        await generate(await pool(*workers), requests([5] * 16, prompts=4))
        assert [w.most_at_once for w in workers] == [8, 8]
        assert [{int(i) % 4 for i in w.served} for w in workers] == [{0, 2}, {1, 3}], "equal prompts together"


async def test_who_is_asked_does_not_depend_on_earlier_steps() -> None:
    """Which requests decode together decides the last bits, and a resumed run has no earlier steps."""
    fresh, used = (Sampler(None), Sampler(None)), (Sampler(None), Sampler(None))
    client = await pool(*used)
    earlier = requests([5] * 4)
    await generate(client, earlier)
    before = [len(worker.served) for worker in used]
    step = [*earlier[1:2], *requests([5] * 9, prompts=5)[4:]]
    await generate(client, step)
    await generate(await pool(*fresh), step)
    assert [w.served[n:] for w, n in zip(used, before, strict=True)] == [w.served for w in fresh]


async def test_a_session_stays_with_the_worker_that_has_its_prefix() -> None:
    workers = Sampler(64), Sampler(64)
    client = await pool(*workers)

    async def conversation(number: int) -> None:
        for turn in range(5):
            prompt = (*range(turn + 1), number)
            await client.generate(GenerateRequest(f"{number}", prompt, SamplingParams(max_tokens=2), 0, f"s{number}"))
            await asyncio.sleep(0.001 * (number % 3))

    await asyncio.gather(*(conversation(number) for number in range(6)))
    assert not set(workers[0].served) & set(workers[1].served)
    assert workers[0].served
    assert workers[1].served


async def test_what_was_prefilled_is_counted_since_the_last_look() -> None:
    says, silent = Sampler(4), Sampler(4)
    says.prefilled = 3
    asked = [GenerateRequest(str(i), (1, 2, 3, 4), SamplingParams(max_tokens=1), seed=i) for i in range(5)]
    client = await pool(says)
    await generate(client, asked)
    expected = {"rollout/prefill_tokens": 15.0, "rollout/prefill_saved_fraction": 0.25}
    with client.not_counted():
        await generate(client, asked[:1])
    assert client.prefill_metrics() == expected
    assert client.prefill_metrics() == {}
    client = await pool(silent)
    await generate(client, asked)
    assert client.prefill_metrics() == {}


async def test_a_request_that_an_engine_cannot_serve_takes_no_other_with_it() -> None:
    class Picky(Sampler):
        async def generate(self, requests: list[GenerateRequest], call_batch: object = None) -> list[Completion]:
            if requests[0].id == "3":
                raise EngineError("no")
            return await super().generate(requests, call_batch)

    done = await generate(await pool(Picky(4)), requests([5] * 6))
    assert [(c.finish_reason, c.error) for c in done] == [
        ("error", "no") if i == 3 else ("stop", None) for i in range(6)
    ]


@pytest.mark.parametrize("fault", ["refuses", "hangs", "forgets", "holds others"])
async def test_a_worker_that_cannot_update_is_replaced_by_one_that_has(fault: str, tmp_path: Path) -> None:
    told: list[str] = []
    spawned: list[Sampler] = []

    async def spawn(index: int) -> InlineHandle:
        spawned.append(Sampler(4))
        return InlineHandle(spawned[-1], f"rollout-{index}", 60)

    workers = Sampler(4), Sampler(4), Sampler(4)
    client = await pool(*workers, spawn=spawn, note=told.append)
    method = Publish(tmp_path, deadline=0.2)
    await client.sync(method, None, 2)
    workers[1].fault = fault
    report = await client.sync(method, None, 3)
    assert list(report.failed) == ["rollout-1"]
    assert report.bytes == 7
    assert told[0].startswith("rollout-1 is replaced: ")
    assert [w.version for w in (workers[0], spawned[0], workers[2])] == [3, 3, 3]
    done = await generate(client, requests([5] * 30))
    assert {c.policy_version for c in done} == {3}
    assert not workers[1].served
    assert spawned[0].served
    with pytest.raises(SyncError, match="rollout-1: "):
        await (await pool(*workers)).sync(Publish(tmp_path, deadline=0.2), None, 4)
    with pytest.raises(SyncError, match="rollout-1: "):
        await Publish(tmp_path, deadline=0.2).sync(
            None, [*client.workers[:1], InlineHandle(workers[1], "rollout-1", 60)], 5
        )
