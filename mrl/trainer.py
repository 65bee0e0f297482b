"""`MRLTrainer`: a run in one object, with every option under its flat name."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from mrl.backends.torchrun import take_part
from mrl.config import ModelConfig, OrchestratorConfig
from mrl.config.dialects import in_python
from mrl.config.keywords import Options
from mrl.errors import ConfigError, DataError, ModelError, MRLError, RewardError
from mrl.loop.elsewhere import RunElsewhere, elsewhere
from mrl.loop.orchestrator import Orchestrator
from mrl.loop.recorded_run import RecordedRun, RunResult
from mrl.loop.report import write_png
from mrl.loop.resume import existing_run, resume_hint, resumed_config
from mrl.store.run import runs_root
from mrl.system.interrupts import interrupts
from mrl.system.threads import release_openmp_threads

if TYPE_CHECKING:
    from mrl.loop.given_model import GivenModel

T = TypeVar("T")


class MRLTrainer:
    """Train a model by reinforcement learning.

        trainer = MRLTrainer(model="starter", dataset_name="tiny-code", max_steps=10)
        result = trainer.train()

    Takes every option of `OrchestratorConfig` by its flat name (`mrl train --help-all` lists them), or a finished
    `config`. `model` may be a loaded model of transformers, with its `tokenizer`: a copy of it is trained.
    Raises ConfigError for options that are unknown, out of range or do not go together.
    """

    def __init__(self, config: OrchestratorConfig | None = None, **options: Unpack[Options]) -> None:
        take_part()
        if config is not None and options:
            raise TypeError(f"give a config or options, not both (got config and {', '.join(options)})")
        self._arguments: dict[str, Any] = {**options}
        self._given: GivenModel | None = None
        self.wording: Callable[[str], str] = self._in_arguments
        """Rewords option names in what the run says. The command line sets its own."""
        try:
            self.config = config if config is not None else self._from_arguments()
            self.run_dir, self.resume = choose_run(self.config)
            if self._given is not None:
                self.config.model.model = str(self._given.folder(self.run_dir).absolute())
        except MRLError as error:
            self._reword(error)
            raise

    def train(self) -> RunResult:
        """Run to the end and return what it came to. Raises a subclass of MRLError.

        Works in a notebook too, where an event loop is already running. On the main thread, Ctrl-C, SIGTERM and SIGHUP
        end it in good order with a checkpoint, and `status` is then `interrupted`; a second one ends the process, or
        in a notebook the call (KeyboardInterrupt).
        """
        try:
            if self._given is not None:
                self._given.write(self.run_dir, resume=self.resume)
            run = self._make_run()
            run.wording = self.wording
            result = run_to_end(run.run(), run)
        except MRLError as error:
            self._reword(error)
            raise
        finally:
            if self._given is not None:
                self._given.remove(self.run_dir)
        if (self.run_dir / "config.yaml").exists():  # it was not stopped before it began
            write_png(self.run_dir)
        return result

    def _from_arguments(self) -> OrchestratorConfig:
        options = dict(self._arguments)
        model, tokenizer = options.get("model"), options.pop("tokenizer", None)
        if model is None or isinstance(model, (str, dict, ModelConfig)):
            if tokenizer is not None:
                raise ConfigError(
                    "tokenizer: goes with a model that is an object too; a model by name brings its own, so save yours "
                    "into the model's folder"
                )
            return make_config(options)
        if options.get("revision") is not None:
            raise ConfigError("revision: a loaded model is what it is; leave it out, or give the model by name")
        from mrl.loop.given_model import GivenModel

        self._given = GivenModel(model, tokenizer)
        return make_config(options | {"model": self._given.name})

    def _reword(self, error: MRLError) -> None:
        """Errors about what was given speak of arguments where arguments were given."""
        if (
            self._arguments
            and isinstance(error, (ConfigError, DataError, ModelError, RewardError))
            and not error.worded
        ):
            error.reword(self._in_arguments(str(error)))

    def _in_arguments(self, message: str) -> str:
        return in_python(message, self._arguments) if self._arguments else message

    def _make_run(self) -> RecordedRun | RunElsewhere:
        if (made := elsewhere(self.config)) is not None:
            return made(self.config, self.run_dir, resume=self.resume, make_run=make_run)
        return make_run(self.config, self.run_dir, self.resume)


def train_simple(**options: Unpack[Options]) -> RunResult:
    """Train with one of TRL's trainers (docs/simple-mode.md); `MRLTrainer(mode="simple", **options).train()`.

    train_simple(model="starter", dataset_name="answers.jsonl", algorithm="sft", max_steps=10)
    """
    options.setdefault("mode", "simple")
    return MRLTrainer(**options).train()


def make_run(config: OrchestratorConfig, run_dir: Path, resume: bool) -> RecordedRun:
    """The run of a configuration, in this process. resume: `run_dir` holds one of it."""
    if config.trl.mode == "simple":
        from mrl.simple.run import SimpleRun

        return SimpleRun(config, run_dir, resume=resume)
    return Orchestrator(config, run_dir, resume=resume)


def make_config(options: dict[str, Any]) -> OrchestratorConfig:
    """A configuration from flat options; where they resume a run by name, from its own options and these.

    Raises ConfigError.
    """
    name = options.get("resume")
    if name is None or name == "auto":
        return OrchestratorConfig.from_flat(**options)
    return resumed_config(existing_run(name), options)


def choose_run(config: OrchestratorConfig) -> tuple[Path, bool]:
    """The run's folder, and whether it is a run to go on with. Raises ConfigError."""
    if config.run.resume is None:
        return choose_run_dir(config), False
    if config.run.resume == "auto":
        folder = choose_run_dir(config)
        return folder, (folder / "config.yaml").exists()
    return existing_run(config.run.resume), True


def choose_run_dir(config: OrchestratorConfig) -> Path:
    """The run's folder: `run_dir`, or `run_name` (default: model, dataset and time) below the runs' root."""
    if config.run.run_dir is not None:
        return Path(config.run.run_dir).expanduser()
    if config.run.run_name is not None:
        return runs_root() / config.run.run_name
    model = Path(config.model.model).name or "model"
    test = config.rollout.evaluation_test
    named = config.data.dataset_name if test is None else _test_name(test)
    data = re.sub(r"[^\w.-]+", "-", named if ":" in named else Path(named).stem) if named else "data"
    return runs_root() / f"{model}-{data}-{datetime.now():%Y%m%d-%H%M%S}"


def _test_name(test: Any) -> str:
    """Of a function, a file or a module."""
    named = test if isinstance(test, str) else str(getattr(test, "name", None) or getattr(test, "__name__", "test"))
    where, _, name = named.partition(":")
    return name.strip(":") or (Path(where).stem if where.endswith(".py") else where)


def run_to_end(work: Coroutine[Any, Any, T], run: RecordedRun | RunElsewhere | None = None) -> T:
    """`asyncio.run`, also from a thread whose event loop is running. run: what signals stop, where `work` is its."""
    release_openmp_threads()  # which the caller may have from models of its own; workers compute on other threads
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        if run is None:
            return asyncio.run(work)
        with interrupts(run.request_stop, run.end_at_once):
            return asyncio.run(work)
    return _run_in_thread(work, run)


class _Interrupted(KeyboardInterrupt):
    """Raised by a signal in a thread that waits."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number


def _run_in_thread(work: Coroutine[Any, Any, T], run: RecordedRun | RunElsewhere | None) -> T:
    """Run `work` on an event loop of its own and wait. The first interrupt stops `run`; the next one ends the wait."""
    outcome: list[T] = []
    errors: list[BaseException] = []
    cancel: list[Callable[[], object]] = []
    ended = threading.Event()

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def target() -> None:
        try:
            outcome.append(asyncio.run(cancellable()))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    def interrupt(number: int) -> None:
        raise _Interrupted(number)

    threading.Thread(target=target, name="mrl-run", daemon=True).start()
    asked = run is None
    with interrupts(interrupt, interrupt):
        while not ended.is_set():
            try:
                ended.wait()
            except KeyboardInterrupt as error:
                if asked:
                    for give_up in cancel:
                        give_up()
                    if run is not None:
                        print(f"stopped at once. {resume_hint(run.run_dir)}")
                    raise
                assert run is not None
                asked = True
                run.request_stop(getattr(error, "number", signal.SIGINT))
    if errors:
        raise errors[0]
    return outcome[0]
