"""`openenv`: attempts in environments that speak OpenEnv's protocol, or are OpenEnv classes (docs/openenv.md).

A session of an environment is taken for each attempt and reset with the row's columns; from then on observations and
actions go to and fro (episode.py) until it is done or a limit is reached. Sessions are used again (pool.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any, Self

from mrl.backends import Backend
from mrl.errors import ConfigError, DataError, EnvError
from mrl.rollouts.base import PolicyClient, SourceSetup
from mrl.rollouts.chat import ToolSpec
from mrl.rollouts.multi_turn import play
from mrl.rollouts.openenv.episode import OpenEnvEpisode, reset_arguments
from mrl.rollouts.openenv.mcp import has_tools, list_tools
from mrl.rollouts.openenv.options import Options
from mrl.rollouts.openenv.places import Schema
from mrl.rollouts.openenv.pool import Pool
from mrl.rollouts.openenv.results import Result
from mrl.rollouts.openenv.sessions import Session
from mrl.rollouts.openenv.texts import ActionParser, PromptBuilder, check_reward_type
from mrl.types import Rollout, Task, derive_seed


class OpenEnvSource:
    """Attempts in OpenEnv environments."""

    scores = True
    keeps_time = True
    metric_names = ("environment_restarts",)
    may_change = (
        *("base_url", "headers", "env_python", "env_in", "sessions", "servers"),
        *("request_timeout_s", "connect_timeout_s", "start_timeout_s"),
    )

    def __init__(self, setup: SourceSetup, options: Options, builder: PromptBuilder, parser: ActionParser) -> None:
        self.setup, self.options, self.builder, self.parser = setup, options, builder, parser
        self.chat = setup.chat()
        self.places_of: dict[str, int] = {}
        """Of a row: its place in its dataset, which decides its turn of `tasks`."""
        self.rows: list[Task] = []
        self._reset()

    def _reset(self) -> None:
        """As before `start`."""
        self.pools: dict[str, Pool] = {}
        """By what stands in the environment variable `task_var`, or ""."""
        self.tools: list[ToolSpec] | None = None
        self.backend: Backend | None = None
        self.note: Callable[[str], None] = lambda message: None
        self.told = 0
        """Restarts that `metrics` has told."""
        self.trial: asyncio.Task[None] | None = None

    @classmethod
    def create(
        cls,
        setup: SourceSetup,
        *,
        base_url: str | list[str] | None = None,
        docker_image: str | None = None,
        hub_repo_id: str | None = None,
        env_class: Any = None,
        env_in: str = "process",
        env_command: str | list[str] | None = None,
        env_factory: Any = None,
        env_client_cls: Any = None,
        env_args: dict[str, Any] | None = None,
        env_vars: dict[str, str] | None = None,
        env_python: str | None = None,
        provider: Any = None,
        prompt_builder: Any = None,
        action_parser: Any = None,
        tasks: list[str] | None = None,
        task_var: str | None = None,
        sessions: int | None = None,
        servers: int = 1,
        headers: dict[str, str] | None = None,
        request_timeout_s: float | None = None,
        connect_timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
    ) -> Self:
        given = {name: value for name, value in locals().items() if name not in ("cls", "setup", "__class__")}
        for name in ("prompt_builder", "action_parser"):
            given.pop(name)
        options = Options.checked(given, setup.limits.step_seconds)
        return cls(setup, options, PromptBuilder(prompt_builder), ActionParser(action_parser))

    def check_tasks(self, tasks: list[Task]) -> None:
        """Raise DataError for a row that cannot be sent to `reset`. `tasks` take turns in the order of the rows."""
        for number, task in enumerate(tasks):
            self.places_of.setdefault(task.id, number)
            self.options.check_row(task)
        self.rows += tasks

    # --- a run's beginning and end ----------------------------------------------------------------------------------

    async def start(self, backend: Backend | None = None, note: Callable[[str], None] = lambda message: None) -> None:
        """Begin an attempt with the first row and give it up again, so that what cannot work is known before anything
        expensive starts. Raises ConfigError.

        backend: where workers are spawned (`env_in: worker`). note: gets what a user should know.
        """
        self.backend, self.note = backend, note
        if self.rows:
            await self._try(self.rows[0])
        if (number := len(self.options.tasks)) > len(self.rows) > 0:
            note(
                f"rollout_options: there are {number} tasks and {len(self.rows)} rows, which take turns: some have none"
            )

    async def close(self) -> None:
        """End sessions, and what was started for them."""
        pools = list(self.pools.values())
        if self.trial is not None:
            self.trial.cancel()
        self._reset()
        await asyncio.gather(*(pool.close() for pool in pools))

    def metrics(self) -> dict[str, float]:
        """Since it was last asked: environments that had died and were started anew."""
        restarts = sum(room.place.restarts for pool in self.pools.values() for room in pool.rooms)
        new, self.told = restarts - self.told, restarts
        return {"environment_restarts": float(new)}

    async def _try(self, task: Task) -> None:
        pool = self._pool(task)
        try:
            seat, first = await pool.begin(self._arguments(task))
        except EnvError as error:
            raise ConfigError(f"rollout_options: the environment cannot be used: {error}") from error
        usable = False
        try:
            await self._learn(pool, seat.session)
            episode = self._episode(task, seat.session, first)
            await episode.begin()
            doubt = None if self.tools else self.parser.broken()
            if doubt is not None:
                self.note(doubt)
            usable = not self.tools  # whose environments have counted the listing as a step
        except (EnvError, DataError, ValueError) as error:
            raise ConfigError(f"rollout_options: the first observation cannot be used: {error}") from error
        finally:
            pool.give_back(seat, usable=usable)

    async def _learn(self, pool: Pool, session: Session) -> None:
        """Which actions there are, and which tools."""
        schema: Schema = await pool.rooms[0].place.schema()
        check_reward_type(schema)
        self.tools = []
        if self.parser.function is None and has_tools(schema):
            if not self.chat.takes_tools:
                raise ConfigError(
                    "rollout_options: the environment's actions are calls of tools, and this model's chat template "
                    "writes none that can be read back; use a model whose template does, or give an action_parser"
                )
            self.tools = await list_tools(session)
        elif not self.options.typed:
            self.parser.fit(schema)
        elif self.parser.function is None:
            self.parser.fit_class(self.options.action_class)

    # --- attempts ---------------------------------------------------------------------------------------------------

    async def run(self, task: Task, attempt: int, policy: PolicyClient, seed: int) -> Rollout:
        """One attempt. Waiting for a session takes nothing from its time."""
        if self.tools is None:
            await self._once_tried(task)
        pool, begun = self._pool(task), perf_counter()
        seat, first = await pool.begin(self._arguments(task), self.setup.limits.step_seconds)
        waited, usable = perf_counter() - begun, False
        try:
            episode = self._episode(task, seat.session, first)
            rollout = await play(episode, self.chat, self.setup, task, attempt, policy, seed)
            usable = rollout.limit not in ("step_timeout", "rollout_timeout")
        finally:
            pool.give_back(seat, usable=usable)
        rollout.seconds["session"] = waited
        return rollout

    async def _once_tried(self, task: Task) -> None:
        """For whoever did not `start` it: the first attempt does, the others wait."""
        if self.trial is None:
            self.trial = asyncio.create_task(self._try(task))
        await asyncio.shield(self.trial)

    def _episode(self, task: Task, session: Session, first: Result) -> OpenEnvEpisode:
        return OpenEnvEpisode(self.setup, task, session, first, self.builder, self.parser, self.tools or [])

    def _pool(self, task: Task) -> Pool:
        """The sessions that serve a row: one pool for all, unless its task is an environment variable."""
        key = self._turn(task) if self.options.task_is_variable else ""
        if key not in self.pools:
            variables = {self.options.task_var: key} if key and self.options.task_var else {}
            self.pools[key] = Pool(
                self.options.places(self.backend, variables),
                self.options.most,
                self.options.timing.connect,
                lambda message: self.note(message),
            )
        return self.pools[key]

    def _arguments(self, task: Task) -> dict[str, Any]:
        as_argument = self.options.tasks and not self.options.task_is_variable
        extra = {str(self.options.task_var): self._turn(task)} if as_argument else {}
        # Of the row, not of the attempt: attempts at a row are compared with each other.
        return reset_arguments(task, derive_seed("openenv", task.id) % 2**31, extra)

    def _turn(self, task: Task) -> Any:
        """A row's task: what its own column says, else they take turns in the order of the rows."""
        own = task.columns.get(str(self.options.task_var))
        if own is not None:
            return own
        place = self.places_of.get(task.id, derive_seed("turn", task.id))
        return self.options.tasks[place % len(self.options.tasks)]
