"""`mrl plan`: what `mrl train` would start with the same flags, and what that would cost."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mrl.cli.flags import argument, find_recipe, flat_options, parse
from mrl.cli.main import TRAIN_BASICS, _print_json
from mrl.config.dialects import in_flags
from mrl.config.recipe import located
from mrl.errors import ConfigError, MRLError
from mrl.system.units import duration, plural

if TYPE_CHECKING:
    from mrl.backends import Resources
    from mrl.config import OrchestratorConfig

HOUR = 3600.0


@dataclass(frozen=True)
class PlannedWorker:
    """A worker that would be started."""

    name: str
    gpu: str | None
    """Type; "any" = the backend's choice, None = none."""
    gpus: int
    cpus: float
    memory_mb: int | None
    dollars_per_hour: float | None
    """None = the backend knows no price."""


@dataclass(frozen=True)
class Plan:
    """What a run would start and do."""

    backend: str
    mode: str
    model: str
    workers: list[PlannedWorker]
    steps: int | None
    """That are left to do; None = the trainer says when it has seen the data."""
    weight_sync_method: str | None
    """None = no weights are sent: one worker trains and generates."""
    checkpoints: str
    save_steps: int
    dollars_per_hour: float | None
    step_seconds: float | None = None
    measured_in: str | None = None
    """The run whose mean `step_seconds` is, as the user named it."""
    notices: tuple[str, ...] = ()

    @property
    def dollars_per_step(self) -> float | None:
        """None where the price or the time of a step is unknown."""
        if self.dollars_per_hour is None or self.step_seconds is None:
            return None
        return self.dollars_per_hour * self.step_seconds / HOUR

    @property
    def dollars(self) -> float | None:
        """Of all steps; None where that of a step, or their number, is unknown."""
        each = self.dollars_per_step
        return None if each is None or self.steps is None else each * self.steps


def plan(argv: list[str]) -> int:
    """Print what a run would start and cost. Raises MRLError for whatever `mrl train` refuses before it starts."""
    given = parse(
        "mrl plan",
        "Say what `mrl train` would start with the same recipe and flags: workers, steps, weight sync, checkpoints,\n"
        "and what it would cost, where the backend has prices. It starts nothing and rents nothing.\n\n"
        "  mrl plan recipe.yaml --backend modal                      dollars per hour, in all and of each worker\n"
        "  mrl plan recipe.yaml --backend modal --step-seconds 42    and per step, and for the whole run\n"
        "  mrl plan recipe.yaml --backend modal --like my-run        with the seconds a step of that run took\n\n"
        "What `mrl train` would refuse before the run is refused here in the same words: it reads the data and the\n"
        "model's tokenizer for that. docs/cost.md explains prices; `mrl plan --help-all` shows every option.",
        argv,
        extra={
            "recipe": argument(
                "YAML file of options, or a shipped recipe's name.", positional=True, metavar="[RECIPE]"
            ),
            "simple_mode": argument("The same as --mode simple: one of TRL's trainers.", default="off", kind=bool),
            "step_seconds": argument("Seconds a step takes, to estimate costs with.", kind=float, metavar="FLOAT"),
            "like": argument("An earlier run: use the mean seconds of its steps.", metavar="RUN"),
            "json": argument("Print the plan as JSON.", default="off", kind=bool),
        },
        basics=TRAIN_BASICS,
    )
    as_json, recipe = given.pop("json", False), given.pop("recipe", None)
    if given.pop("simple_mode", False) and given.setdefault("mode", "simple") != "simple":
        raise ConfigError(f"mode: --simple-mode and --mode {given['mode']} say different things: give only one")
    seconds, like = _step_seconds(given.pop("step_seconds", None), given.pop("like", None))
    options: dict[str, Any] = {}
    try:
        with located(find_recipe(recipe) if recipe else None, given):
            from mrl.trainer import make_config

            options = flat_options(recipe, given)
            made = make_plan(make_config(options), step_seconds=seconds, measured_in=like)
    except MRLError as error:
        if not error.worded:
            error.reword(in_flags(str(error), keys=options.keys() - given.keys()))
        raise
    if as_json:
        _print_json(asdict(made) | {"dollars_per_step": made.dollars_per_step, "dollars": made.dollars})
    else:
        print("\n".join(shown(made)))
    return 0


def make_plan(config: OrchestratorConfig, *, step_seconds: float | None = None, measured_in: str | None = None) -> Plan:
    """Check a configuration as a run does, and say what it would start. Raises the typed error of whatever will not
    do."""
    from mrl.loop.cost import check_cost
    from mrl.loop.resume import check_same_run, existing_run, stored_options
    from mrl.loop.spawning import backend_of
    from mrl.trainer import choose_run

    run_dir, resume = choose_run(config)
    if not resume and (run_dir / "config.yaml").exists():
        raise ConfigError(f"run_dir: {run_dir} already holds a run; choose another name or delete it")
    if resume:
        check_same_run(run_dir, config)
    check_cost(config, run_dir, resume=resume)
    workers, steps, notices = _checked(config)
    if measured_in is not None:
        then = stored_options(existing_run(measured_in)).get("backend", "inline")
        if then != config.runtime.backend:
            notices = [*notices, f"{measured_in} ran on backend {then}: steps may take another time here"]
    backend = backend_of(config)
    planned = [_planned(name, needs, backend.price(name, needs)) for name, needs in workers.items()]
    prices = [worker.dollars_per_hour for worker in planned if worker.dollars_per_hour is not None]
    simple = config.trl.mode == "simple"
    return Plan(
        backend=config.runtime.backend,
        mode=config.trl.mode,
        model=config.model.model,
        workers=planned,
        steps=None if steps is None else max(steps - (_steps_done(run_dir) if resume else 0), 0),
        weight_sync_method=None if simple else config.runtime.weight_sync_method,
        checkpoints=str(run_dir / "checkpoints"),
        save_steps=config.training.save_steps,
        dollars_per_hour=sum(prices) if prices else None,
        step_seconds=step_seconds,
        measured_in=measured_in,
        notices=tuple(notices),
    )


def shown(plan: Plan) -> Iterable[str]:
    """A plan in lines for people."""
    done = "steps as the data gives" if plan.steps is None else plural(plan.steps, "step")
    yield f"{plan.model}: {done}, backend {plan.backend}, mode {plan.mode}"
    yield "would start"
    width = max(len(worker.name) for worker in plan.workers)
    for worker in plan.workers:
        gpu = "no GPU" if worker.gpu is None else f"{worker.gpu} × {worker.gpus}"
        memory = "" if worker.memory_mb is None else f", {worker.memory_mb:,} MB"
        price = "" if worker.dollars_per_hour is None else f"  {_dollars(worker.dollars_per_hour)} per hour"
        needs = f"{gpu}, {worker.cpus:g} CPU{memory}"
        yield f"  {worker.name:{width}}  {needs:24}{price}".rstrip()
    if plan.weight_sync_method is not None:
        yield f"weight sync   {plan.weight_sync_method}"
    when = f"every {plural(plan.save_steps, 'step')} and at the end" if plan.save_steps else "at the end"
    yield f"checkpoints   {plan.checkpoints}, {when}"
    if plan.dollars_per_hour is None:
        yield f"cost          backend {plan.backend} has no prices"
    else:
        yield f"cost          {_dollars(plan.dollars_per_hour)} per hour by list prices"
        if plan.dollars_per_step is None:
            yield "              for a step and the run: --step-seconds SECONDS, or --like RUN"
    if plan.step_seconds is not None:
        where = "" if plan.measured_in is None else f" (mean of {plan.measured_in})"
        each = "" if plan.dollars_per_step is None else f", {_dollars(plan.dollars_per_step)}"
        yield f"a step        {plan.step_seconds:.3g} s{each}{where}"
        if plan.steps is not None:
            total = "" if plan.dollars is None else f", {_dollars(plan.dollars)}"
            rest = "besides starting, evaluations and checkpoints"
            yield f"all steps     {duration(plan.step_seconds * plan.steps)}{total}, {rest}"
    yield from (f"note: {notice}" for notice in plan.notices)


# --- inner --------------------------------------------------------------------------------------------------------


def _checked(config: OrchestratorConfig) -> tuple[dict[str, Resources], int | None, list[str]]:
    """The workers by name, the steps of the whole run, and what there is to know before it starts."""
    from mrl.loop.elsewhere import elsewhere
    from mrl.loop.preflight import load_train_tasks, prepare, total_steps
    from mrl.loop.resources import actor_resources, check_resources, needs, settle_sync

    steps = config.training.max_steps if config.training.max_steps > 0 else None
    if config.trl.mode == "simple":
        from mrl.simple.run import SimpleRun, prepare_simple

        simple = prepare_simple(config)
        if steps is None and simple.spec.online:
            steps = total_steps(config, len(simple.tasks))
        return {SimpleRun.trains: actor_resources(config)}, steps, simple.notices
    if elsewhere(config) is not None:  # data and rewards are checked there, before any other worker starts
        settle_sync(config)
        check_resources(config, *needs(config).values())
        if steps is None:
            steps = total_steps(config, len(load_train_tasks(config)[0]))
        return needs(config), steps, []
    prepared = prepare(config)
    return needs(config), total_steps(config, len(prepared.tasks)), prepared.notices


def _planned(name: str, needs: Resources, price: float | None) -> PlannedWorker:
    return PlannedWorker(name, needs.gpu, needs.gpus, needs.cpus, needs.memory_mb, price)


def _steps_done(run_dir: Path) -> int:
    """Steps in the checkpoint that a resumed run goes on from."""
    from mrl.loop.resume import find_resume_point

    point = find_resume_point(run_dir)
    return 0 if point is None else int(point.state["step"])


def _step_seconds(given: float | None, like: str | None) -> tuple[float | None, str | None]:
    """Seconds of a step, and the run they are of. Raises ConfigError."""
    if like is None:
        if given is not None and not (math.isfinite(given) and given > 0):
            raise ConfigError(f"step_seconds: {given:g} is no duration; give seconds above 0, e.g. --step-seconds 42")
        return given, None
    if given is not None:
        raise ConfigError("step_seconds: --step-seconds and --like both say how long a step takes: give only one")
    from mrl.loop.resume import existing_run
    from mrl.store.read import RunReader

    run = existing_run(like)
    with RunReader(run) as reader:
        measured = [seconds for _, seconds in reader.series("time/step")]
    if not measured:
        raise ConfigError(f"like: run {like!r} has no finished step to measure; name another, or use --step-seconds")
    return fmean(measured), like


def _dollars(value: float) -> str:
    return f"${value:.2f}" if value >= 0.1 or not value else f"${value:.2g}"
