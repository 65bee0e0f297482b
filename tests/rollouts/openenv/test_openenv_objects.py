"""OpenEnv environments as objects: in this process, and in workers of a backend."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from mrl.backends.inline import InlineBackend
from mrl.errors import ConfigError, DataError, EnvError, WorkerDied
from mrl.rollouts import TurnLimits
from mrl.rollouts.openenv import places, serve, sessions
from mrl.rollouts.openenv.mcp import result_text
from mrl.rollouts.openenv.places import Here, Place
from mrl.rollouts.openenv.pool import Pool
from mrl.rollouts.openenv.results import Lost, result_of
from tests.rollouts.openenv.attempts import ROWS, outcome, play, source_of, tasks
from tests.rollouts.openenv.duck_games import Alone, Asynchronous, Guess, TwoTexts, both, parse, strict, wrong

FILE = str(Path(__file__).parent / "duck_games.py")


@pytest.fixture(autouse=True)
def _nobody_made() -> None:
    Guess.made.clear()


def secrets(text: str) -> str:
    """The number guessed goes up with each answer."""
    return str(text.count("wrong"))


@pytest.mark.parametrize("given", [Guess, f"{FILE}:Guess", Asynchronous])
async def test_a_class_is_played_in_this_process(given: Any) -> None:
    rollouts = await outcome([secrets], env_class=given, limits=TurnLimits(turns=3))
    assert [r.metrics["turns"] for r in rollouts] == [1, 2, 3, 3]
    assert [r.step_rewards for r in rollouts] == [[1.0], [0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert [r.limit for r in rollouts] == ["", "", "", "max_turns"]
    assert [r.rewards for r in rollouts] == [{"environment": 1.0}] * 3 + [{"environment": 0.0}]
    assert rollouts[0].messages[0]["content"] == "Play.\n\nGuess a number below 10."
    assert [m["content"] for m in rollouts[1].messages[1:]] == ["0", "wrong", "1"]
    assert rollouts[1].samples[0].mask.count(0) > 0


async def test_sessions_are_used_again_and_closed_at_the_end() -> None:
    rollouts = await outcome([secrets], n=6, env_class=Guess, sessions=3, limits=TurnLimits(turns=5))
    assert all(r.status == "ok" for r in rollouts)
    assert len(Guess.made) == 3
    assert all(game.closed for game in Guess.made)
    assert sum(len(game.resets) for game in Guess.made) == 24 + 1


async def test_attempts_at_a_row_begin_alike() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "seed": 3}]
    await outcome(["0"], n=3, rows=rows, env_class=Guess, sessions=1, limits=TurnLimits(turns=1))
    seeds = [reset["seed"] for reset in Guess.made[0].resets[1:]]
    assert seeds == [seeds[0]] * 3 + [3] * 3
    assert 0 <= seeds[0] < 2**31


async def test_a_class_that_cannot_share_has_one_session() -> None:
    rollouts = await outcome([secrets], n=3, env_class=Alone, limits=TurnLimits(turns=5))
    assert len(Guess.made) == 1
    assert all(r.status == "ok" for r in rollouts)
    with pytest.raises(ConfigError, match=r"Alone \(.*:\d+\) does not have SUPPORTS_CONCURRENT_SESSIONS"):
        source_of(env_class=Alone, sessions=2)


async def test_builder_and_parser_make_what_is_seen_and_done() -> None:
    rows = [{"prompt": "Look."}]
    (rollout,) = await outcome(
        ["go"], rows=rows, env_class=TwoTexts, prompt_builder=both, action_parser=parse, limits=TurnLimits(turns=2)
    )
    assert [m["content"] for m in rollout.messages] == [
        "Look.\n\n1. ab []",
        "go",
        "2. cd ['Step 1: go -> reward +0.50']",
        "go",
        "3. cd ['Step 1: go -> reward +0.50', 'Step 2: go -> reward +0.50']",
    ]
    (rollout,) = await outcome([" "], rows=rows, env_class=TwoTexts, prompt_builder=both, action_parser=parse)
    assert (rollout.status, rollout.metrics["malformed_calls"], rollout.rewards) == ("ok", 1.0, {"environment": 0.0})


async def test_parts_of_a_reward_have_names() -> None:
    rows, limits = [{"prompt": "Play."}], TurnLimits(turns=2)
    (rollout,) = await outcome(["parts", "more parts"], rows=rows, env_class=Guess, limits=limits)
    assert rollout.step_rewards == [0.25, 1.0]
    assert rollout.rewards == {"environment": 0.75, "style": 0.5}


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ("raise", r"Guess.step \(.*duck_games.py:\d+\) raised ValueError: no such move"),
        ("exit", r"Guess.step \(.*duck_games.py:\d+\) raised RuntimeError: SystemExit: 3"),
        ("string", r"Guess.step \(.*duck_games.py:\d+\) gave the reward '1.0', of type str, not a finite number"),
        ("long", "returned 10,000,000 characters, more than 1,000,000"),
    ],
)
async def test_what_goes_wrong_ends_that_attempt_only(says: str, message: str) -> None:
    def by_row(text: str) -> str:
        return says if "third" in text else "0"

    rows = [{"prompt": word, "secret": 0} for word in ("first", "second", "third", "fourth")]
    rollouts = await outcome([by_row], n=2, rows=rows, env_class=Guess)
    assert [r.status for r in rollouts] == ["ok"] * 4 + ["failed"] * 2 + ["ok"] * 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(rollouts[4].error)


async def test_a_step_that_takes_too_long_is_truncated_and_never_repeated() -> None:
    rows = [{"prompt": "Play."}]
    (rollout,) = await outcome(["sleep"], rows=rows, env_class=Guess, limits=TurnLimits(step_seconds=0.1))
    assert (rollout.limit, rollout.status) == ("step_timeout", "ok")
    (rollout,) = await outcome(["sleep"], rows=rows, env_class=Guess, request_timeout_s=0.1)
    assert rollout.error is not None
    assert "took longer than 0.1 s (request_timeout_s)" in rollout.error
    assert [game.steps for game in Guess.made] == [1, 1]


async def test_what_is_made_for_a_cancelled_attempt_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a step or a constructor takes longer than closing is waited for."""
    monkeypatch.setattr(sessions, "CLOSING_SECONDS", 0.01)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Guess):
        def __init__(self, waits: bool = False) -> None:
            if waits:
                begun.set()
                go_on.wait(20)
            super().__init__()

        def step(self, action: Any) -> Any:
            go_on.wait(20)

    making = asyncio.create_task(sessions.ObjectSession.make(lambda: Slow(waits=True), 60.0, typed=False))
    assert await asyncio.to_thread(begun.wait, 20)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    session = await sessions.ObjectSession.make(Slow, 0.01, typed=False)
    with pytest.raises(EnvError, match=r"Slow.step .* took longer than 0.01 s"):
        await session.step("x")
    await session.close()
    assert not hasattr(Guess.made[0], "closed"), "its step is not over"
    go_on.set()
    for _ in range(1000):
        if [getattr(made, "closed", False) for made in Guess.made] == [True, True]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not closed")


async def test_a_worker_that_is_stuck_is_not_waited_for() -> None:
    class Stuck:
        waited: ClassVar[list[float]] = []

        async def call(self, *args: Any, timeout: float) -> Any:
            self.waited.append(timeout)
            raise WorkerDied("worker environment-0 did not answer")

    session = places.WorkerSession(Stuck(), 0, 60.0)  # type: ignore[arg-type]
    with pytest.raises(Lost, match="environment-0 did not answer"):
        await session.step({})
    await session.close()
    assert Stuck.waited == [65.0, 15.0]


def test_what_an_environments_process_started_ends_with_it() -> None:
    """As a browser would not, that an environment has opened."""
    code = f"import runpy, subprocess; subprocess.Popen(['sleep', '60']); runpy.run_path({serve.__file__!r})"
    ending = [sys.executable, "-c", f"{code}['_end_with_parent']()"]
    process = subprocess.Popen(ending, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    said, _ = process.communicate(timeout=30)
    assert said == b"", "nobody has the other end any more"


async def test_tasks_take_turns_and_a_rows_own_comes_first() -> None:
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "c", "task": "own"}]
    rollouts = await outcome(
        ["0"], n=2, rows=rows, env_class=Guess, tasks=["one", "two"], task_var="task", limits=TurnLimits(turns=1)
    )
    assert [r.messages[0]["content"].rpartition(".")[2] for r in rollouts] == ["one"] * 2 + ["two"] * 2 + ["own"] * 2


async def test_workers_of_the_backend_have_environments(processes: None) -> None:
    """Each in a process of its own; one that is killed ends its rollouts, and the next ones have another."""
    from tests.process_backend import ProcessBackend

    source = source_of(
        env_class=f"{FILE}:Guess", env_in="worker", servers=2, env_args={"limit": 4}, limits=TurnLimits(turns=5)
    )
    backend = ProcessBackend(60.0)
    try:
        await source.start(backend)
        rollouts = await play(source, [secrets], n=2)
        assert [r.metrics["turns"] for r in rollouts] == [1, 1, 2, 2, 3, 3, 4, 4]
        assert rollouts[0].messages[0]["content"].endswith("below 4.")
        for handle in backend.handles:
            handle.process.kill()
        rollouts = await play(source, ["0"], rows=ROWS[:1])
        assert all(r.status == "ok" for r in rollouts)
        assert source.metrics() == {"environment_restarts": pytest.approx(1, abs=1)}
        (rollout,) = await play(source, ["raise"], rows=ROWS[:1])
        assert "Guess.step" in str(rollout.error)
    finally:
        await source.close()
        await backend.close()


async def test_workers_in_this_process() -> None:
    source, backend = source_of(env_class=Guess, env_in="worker", limits=TurnLimits(turns=5)), InlineBackend(60.0)
    await source.start(backend)
    assert [r.rewards["environment"] for r in await play(source, [secrets])] == [1.0] * 4
    await source.close()
    assert all(game.closed for game in Guess.made)


async def test_a_factory_makes_what_is_played() -> None:
    def make() -> Guess:
        return Guess(limit=3)

    rollouts = await outcome(["0"], env_factory=make, action_parser=Saying_of, limits=TurnLimits(turns=1))
    assert [r.rewards["environment"] for r in rollouts] == [1.0, 0.0, 0.0, 0.0]


def Saying_of(text: str) -> Any:  # noqa: N802
    from tests.rollouts.openenv.duck_games import Saying

    return Saying(text=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_class": f"{FILE}:TwoTexts"}, r"has 2 texts \(its fields: picture \(str\), caption \(str\)"),
        ({"env_class": f"{FILE}:WordyReward"}, "reward of type null or string; it has to be a num"),
        ({"env_class": f"{FILE}:Broken"}, r"Broken.reset \(.*duck_games.py:\d+\) raised KeyError: 'level'"),
        ({"env_class": Guess, "env_args": {"size": 3}}, r"Guess \(.*duck_games.py:\d+\) could not be made: TypeError"),
        ({"env_class": Guess, "action_parser": wrong}, r"wrong \(.*duck_games.py:\d+\) raised AttributeError"),
        ({"env_factory": Guess}, "does not say what its actions are; give action_parser"),
    ],
)
async def test_what_cannot_work_is_known_before_a_run(options: dict[str, Any], message: str) -> None:
    source = source_of([{"prompt": "Play."}], **options)
    with pytest.raises(ConfigError, match=message):
        await source.start(None)
    await source.close()


async def test_a_parser_that_refuses_made_up_texts_is_doubtful_only() -> None:
    said: list[str] = []
    source = source_of(env_class=Guess, action_parser=strict)
    await source.start(None, said.append)
    assert "strict" in said[0]
    assert "raised ValueError" in said[0]
    first, *_ = await play(source, ["word"])
    assert "action_parser: strict" in str(first.error)
    assert (await play(source, ["0"], rows=ROWS[:1]))[0].rewards == {"environment": 1.0}
    await source.close()


class Dead(Place):
    name, tries = "dead", 0

    async def open(self) -> Any:
        self.tries += 1
        raise Lost("nobody answers")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"reward": float("nan")}, "the reward nan, of type float, not a finite number"),
        ({"reward": [1.0]}, r"the reward \[1.0\], of type list"),
        ({"done": "false"}, "the `done` 'false', of type str"),
        ({"metadata": {"rewards": [1.0]}}, "`rewards` of type list"),
        ({"metadata": {"rewards": {"a": "1"}}}, "the reward '1', of type str"),
    ],
)
def test_garbage_in_an_answer_is_named(answer: dict[str, Any], message: str) -> None:
    given = {"observation": {}, "reward": None, "done": False} | answer
    with pytest.raises(EnvError, match=f"who gave {message}"):
        result_of(SimpleNamespace(**given), "who", typed=False)


def test_what_a_tool_of_an_environment_answers() -> None:
    text, failed = result_text({"error": {"message": "x" * 10_000_000}})
    assert (len(text) < 5000, failed) == (True, True)
    with pytest.raises(EnvError, match="answered with an observation of type str"):
        result_text("garbage")


async def test_a_place_that_is_gone_leaves_the_work_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrl.rollouts.openenv.pool.LOST_WAIT", 0.0)
    dead, alive = Dead(), Here(Guess, Guess, "alive", 60.0, None, typed=False)
    pool = Pool([dead, alive], most=8, connect_seconds=0.0, note=print)
    seats = [(await pool.begin({}))[0] for _ in range(3)]
    assert [seat.room.place.name for seat in seats] == ["alive"] * 3
    assert dead.tries == 1, "it is tried again after a while"
    for seat in seats:
        pool.give_back(seat, usable=True)
    await pool.close()
    with pytest.raises(Lost):
        await Pool([dead, Dead()], most=8, connect_seconds=0.0, note=print).begin({})


async def test_whoever_does_not_start_it_gets_a_first_attempt_that_does() -> None:
    source = source_of(env_class=Guess)
    rollouts = await play(source, ["0"], n=3, rows=ROWS[:1])
    assert [r.status for r in rollouts] == ["ok"] * 3
    await source.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "none of these is given; rollout_source openenv needs one of base_url"),
        ({"env_class": Guess, "env_factory": Guess}, "env_class and env_factory are given"),
        ({"env_class": Guess, "env_python": "python"}, "another interpreter is another process"),
        ({"env_class": Guess, "env_vars": {"A": "1"}}, "need processes of their own; use env_in: subprocess"),
        ({"env_class": Guess, "env_in": "cloud"}, "'cloud' is none of process, subprocess, worker"),
        ({"env_class": Guess, "headers": {"a": "b"}}, "headers goes with base_url"),
        ({"env_class": Guess, "sessions": 0}, "sessions: 0 is no number"),
        ({"env_class": Guess, "request_timeout_s": -1}, "request_timeout_s: -1 is no number of seconds"),
        ({"env_class": Guess, "tasks": ["a"]}, "tasks and task_var go together"),
        ({"env_class": Guess, "tasks": ["a"], "task_var": "TASK"}, "this process has one for all"),
        ({"env_class": dict}, "dict is no environment: it has no method `reset`"),
        ({"env_class": "nowhere.py:Game"}, "rollout_options: env_class: 'nowhere.py:Game' does not import"),
        (
            {"env_class": Guess, "prompt_builder": parse},
            r"parse \(.*:\d+\) is called as prompt_builder\(obs",
        ),
        ({"env_class": Guess, "action_parser": 3}, "action_parser: 3 is no function"),
        ({"base_url": "localhost"}, "base_url: 'localhost' is no address of a server"),
        ({"env_command": "serve"}, "env_command: say where the port goes"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source_of(**options)


def test_rows_have_to_travel() -> None:
    source = source_of(env_class=Guess, env_in="worker")
    with pytest.raises(DataError, match="task '0', column 'thing': it is sent to the environment's reset"):
        source.check_tasks(tasks([{"prompt": "a", "thing": object()}]))
