"""`rollout_func`: how functions are called, and what is made of what they return."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from asyncio import CancelledError
from typing import Any

import numpy
import pytest
import torch

from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError, DataError, RolloutError, WorkerDied
from mrl.rollouts.function import generate_rollout_completions
from mrl.rollouts.function.source import FunctionSource, form_of
from mrl.rollouts.runner import Runner
from mrl.types import Group, Sample, Task
from mrl.workers.scoring import TrainerState
from tests.rollouts import scripted
from tests.rollouts.letters import LENGTH, Letters

TASKS = [Task("a", "one"), Task("b", "two")]
HERE = "test_rollout_func.py:"


def source(function: Any, **sampling: Any) -> FunctionSource:
    return FunctionSource.create(scripted.setup(**{"max_tokens": 8} | sampling), rollout_func=function)


def collect(function: Any, tasks: list[Task] = TASKS, n: int = 3, policy: Any = None, **sampling: Any) -> list[Group]:
    runner = Runner(source(function, **sampling), policy or Letters())
    return asyncio.run(runner.run(tasks, n, seed=7, state=TrainerState(5, 9, 0.5)))


def samples(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for rollout in group.rollouts for sample in rollout.samples]


def fields(count: int, **changes: Any) -> dict[str, Any]:
    """What a function may return for so many rollouts."""
    rows = {"prompt_ids": [[1, 2]] * count, "completion_ids": [[3, 4, 5]] * count, "logprobs": [[-0.1] * 3] * count}
    return rows | changes


def sampled(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    done = generate_rollout_completions(trainer, prompts)
    return {name: [one[name] for one in done] for name in ("prompt_ids", "completion_ids", "logprobs", "text")}


# --- how it is called -------------------------------------------------------------------------------------------------


def test_prompts_come_as_often_as_they_want_rollouts() -> None:
    seen: dict[str, Any] = {}

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen["prompts"], seen["thread"] = prompts, threading.current_thread()
        seen["args"] = (trainer.args.num_generations, trainer.args.temperature, trainer.args.max_completion_length)
        seen["state"] = trainer.state.global_step, trainer.state.max_steps
        seen["rank"] = trainer.accelerator.is_main_process, trainer.accelerator.num_processes
        return sampled(prompts, trainer) | {"steps": list(range(len(prompts))), "same": "for all"}

    chat = Task("c", [{"role": "user", "content": "three"}])
    groups = collect(function, [TASKS[0], chat], temperature=0.5)
    assert seen["prompts"] == ["one"] * 3 + [[{"role": "user", "content": "three"}]] * 3
    assert seen["thread"] is not threading.main_thread()
    assert seen["args"] == (3, 0.5, 8)
    assert seen["state"] == (5, 9)
    assert seen["rank"] == (True, 1)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.id for rollout in rollouts] == ["a#0", "a#1", "a#2", "c#0", "c#1", "c#2"]
    assert [rollout.extra["steps"] for rollout in rollouts] == list(range(6))
    assert {rollout.extra["same"] for rollout in rollouts} == {"for all"}
    assert rollouts[0].completion == rollouts[0].extra["text"]
    assert rollouts[3].completion == [{"role": "assistant", "content": rollouts[3].extra["text"]}]
    assert len({tuple(sample.completion_ids) for sample in samples(groups)}) > 3  # seeds of their own
    assert all(rollout.status == "ok" and rollout.seconds["generate"] > 0 for rollout in rollouts)
    # A conversation goes through the chat template, text is tokenised as it is.
    tokenizer = scripted.setup().tokenizer
    assert rollouts[0].samples[0].prompt_ids == tokenizer("one")["input_ids"]
    assert tokenizer.decode(rollouts[3].samples[0].prompt_ids).endswith("<|im_start|>assistant\n")


def test_the_older_form_gets_every_prompt_once() -> None:
    seen: dict[str, Any] = {}

    def function(prompts: list[str], args: Any, processing_class: Any) -> dict[str, Any]:
        seen["prompts"], seen["n"] = prompts, args.num_generations
        seen["text"] = processing_class.decode(processing_class("x")["input_ids"])
        return fields(len(prompts) * args.num_generations) | {"prompt_ids": [[1], [2]]}

    chat = Task("c", [{"role": "user", "content": "three"}])
    groups = collect(function, [TASKS[0], chat])
    assert seen["prompts"][0] == "one"
    assert seen["prompts"][1].endswith("<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n")
    assert (seen["n"], seen["text"]) == (3, "x")
    assert [sample.prompt_ids for sample in samples(groups)] == [[1]] * 3 + [[2]] * 3


def test_the_older_form_may_give_a_prompt_for_each_completion() -> None:
    def function(prompts: list[str], args: Any, processing_class: Any) -> dict[str, Any]:
        return fields(6, prompt_ids=[[row + 1] for row in range(6)])

    assert [sample.prompt_ids for sample in samples(collect(function))] == [[row + 1] for row in range(6)]


@pytest.mark.parametrize(
    ("function", "form"),
    [
        (lambda prompts, trainer: None, "trainer"),
        (lambda prompts, trainer, limit=3: None, "trainer"),
        (lambda *everything: None, "trainer"),
        (lambda prompts, args, processing_class: None, "args"),
        (lambda prompts, args, processing_class=None: None, "args"),
        (lambda texts, config, tokenizer: None, "args"),
    ],
)
def test_forms(function: Any, form: str) -> None:
    assert form_of(function) == form


async def asynchronous(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompts: None, HERE),
        (lambda a, b, c, d: None, "takes (a, b, c, d)"),
        (asynchronous, "asynchronous"),
        (7, "type int"),
        ("no_such_file.py:rollout", "does not import"),
        ("mrl.types:Rollot", "does not import: there is no 'Rollot' in mrl.types; did you mean 'Rollout'"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything(function: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="rollout_func") as refused:
        source(function)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [print]}, "tools"),
        ({"environment_factory": dict}, "environment_factory"),
        ({"max_turns": 3}, "max_turns"),
        ({"rollout_source": "tools"}, "takes none"),
    ],
)
def test_options_that_do_not_go_with_it(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrchestratorConfig.from_flat(rollout_func=sampled, **options)


def test_an_attribute_there_is_not_says_what_there_is() -> None:
    said: list[str] = []

    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert not hasattr(trainer, "model")
        for ask in (lambda: trainer.model, lambda: trainer.args.learning_rate, lambda: trainer.accelerator.gather):
            with pytest.raises(AttributeError) as error:
                ask()
            said.append(str(error.value))
        return fields(len(prompts))

    collect(function)
    assert "the trainer has no 'model' in a rollout function; it has accelerator, args" in said[0]
    assert "num_generations" in said[1]
    assert "num_processes" in said[2]


def test_the_run_samples_as_its_client_of_a_vllm_server() -> None:
    """What TRL's own helper of 2026 calls."""

    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        assert trainer.use_vllm
        assert trainer.vllm_mode == "server"
        client = trainer.vllm_generation.vllm_client
        done = client.generate(
            prompts=prompts, n=1, temperature=trainer.temperature, top_k=trainer.top_k, max_tokens=2, min_p=0.0
        )
        chatted = client.chat([[{"role": "user", "content": "hi"}]], n=2, max_tokens=1)
        assert [len(ids) for ids in chatted["completion_ids"]] == [1, 1]
        return done

    policy = Letters()
    assert {len(sample.completion_ids) for sample in samples(collect(function, policy=policy))} == {2}
    assert policy.requests[0].sampling.temperature == 1.0


def test_overrides_of_the_helper() -> None:
    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        first, again = (
            generate_rollout_completions(trainer, prompts, generation_overrides={"seed": 4, "max_tokens": 2})
            for _ in range(2)
        )
        assert first == again
        with pytest.raises(ValueError, match="n: one completion"):
            generate_rollout_completions(trainer, prompts, generation_overrides={"n": 2})
        with pytest.raises(ValueError, match="repetition_penalty"):
            generate_rollout_completions(trainer, prompts, generation_overrides={"repetition_penalty": 1.2})
        with pytest.raises(ValueError, match="as_chat"):
            generate_rollout_completions(trainer, prompts, as_chat=True)
        return {name: [one[name] for one in first] for name in ("prompt_ids", "completion_ids", "logprobs")}

    policy = Letters()
    assert {len(sample.completion_ids) for sample in samples(collect(function, policy=policy))} == {2}
    with pytest.raises(TypeError, match="trainer"):
        generate_rollout_completions(object(), ["x"])


# --- what it returns --------------------------------------------------------------------------------------------------


def test_masked_tokens_are_the_environments() -> None:
    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        lists = fields(count, env_mask=[[1, 0, 1]] * count, policy_versions=[[1, None, 2]] * count)
        lists["logprobs"] = [[-0.1, math.nan, -0.2]] * count
        return {name: tuple(values) for name, values in lists.items()}

    sample, *_ = samples(collect(function))
    assert sample.mask == [1, 0, 1]
    assert sample.logprobs == [-0.1, 0.0, -0.2]
    assert sample.policy_version == [1, 1, 2]
    assert sample.num_sampled == 2


def test_arrays_and_tensors_are_lists() -> None:
    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        count = len(prompts)
        return {
            "prompt_ids": torch.ones(count, 2, dtype=torch.long),
            "completion_ids": [numpy.array([3, 4])] * count,
            "logprobs": [[numpy.float32(-0.5), torch.tensor(-0.5)]] * count,
            "env_mask": [[True, numpy.int64(1)]] * count,
            "score": numpy.arange(count),
        }

    groups = collect(function)
    sample, *_ = samples(groups)
    assert (sample.prompt_ids, sample.completion_ids, sample.logprobs) == ([1, 1], [3, 4], [-0.5, -0.5])
    assert groups[1].rollouts[2].extra == {"score": 5}


def test_without_logprobs_they_are_the_policys_own() -> None:
    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        return fields(len(prompts), logprobs=None, env_mask=[[1, 0, 1]] * len(prompts))

    assert {tuple(sample.logprobs) for sample in samples(collect(function, temperature=0.5))} == {(-0.75, 0.0, -0.75)}


def test_a_version_for_each_token() -> None:
    def with_versions(prompts: list[str], trainer: Any) -> dict[str, Any]:
        done = generate_rollout_completions(trainer, prompts)
        return {name: [one[name] for one in done] for name in (*fields(1), "policy_versions")}

    groups = collect(with_versions, policy=Letters(turns_at=1))
    changed, later, *_ = samples(groups)
    assert changed.policy_version == [3] + [4] * (LENGTH - 1)
    assert later.policy_version in (3, 4)
    assert "policy_versions" not in groups[0].rollouts[0].extra


def test_without_versions_tokens_are_as_old_as_the_call() -> None:
    """Whatever came in between: they are never taken for newer than they are."""
    assert {sample.policy_version for sample in samples(collect(sampled, policy=Letters(turns_at=1)))} == {3}


def test_a_completion_that_reached_the_limit_was_cut() -> None:
    eos = scripted.setup().tokenizer.eos_token_id

    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[3, 4, 5], [3, 4, eos], [3, 4]]
        return fields(3, completion_ids=ids, logprobs=[[-0.1] * len(one) for one in ids])

    groups = collect(function, [TASKS[0]], max_tokens=3)
    assert [rollout.truncated for rollout in groups[0].rollouts] == [True, False, False]
    groups = collect(function, [TASKS[0]], policy=Letters(max_model_len=4), max_tokens=100)
    assert [rollout.truncated for rollout in groups[0].rollouts if rollout.status == "ok"] == [True]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned None, and has to return a dict"),
        ([1], "returned [1], and has to return a dict"),
        ({"prompt_ids": [], "completion_ids": []}, "returned no logprobs; it returned prompt_ids, completion_ids"),
        (fields(2), "returned 2 prompt_ids, expected 6: 3 for each prompt, one after the other for each of 2 prompts"),
        (fields(6, completion_ids=[[1]] * 7), "returned 7 completion_ids, expected 6"),
        (fields(6, logprobs=[[-0.1] * 3] * 5), "returned 5 logprobs, expected 6"),
        (fields(6, env_reward=[1.0] * 3), "returned 3 env_reward, expected 6"),
        (fields(6, completion_ids="text"), "returned 'completion_ids': 'text'; it has to be a list"),
        (fields(6, prompt_ids=None), "returned 'prompt_ids': None; it has to be a list"),
        (fields(6, env_mask=1), "returned 'env_mask': 1; it has to be a list"),
        (fields(6, prompts=["x"] * 6), "returned 'prompts', and reward functions get something else"),
    ],
)
def test_what_concerns_all_rollouts_is_an_error(returned: Any, message: str) -> None:
    def function(prompts: list[str], trainer: Any) -> Any:
        return returned

    with pytest.raises(RolloutError) as error:
        collect(function)
    assert message in str(error.value)
    assert "function (" in str(error.value)
    assert HERE in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("completion_ids", "text", "completion_ids is 'text', not a list of token ids"),
        ("completion_ids", [3, "4", 5], "completion_ids has '4', which is no token id"),
        ("completion_ids", [3, 4.0, 5], "completion_ids has 4.0, which is no token id"),
        ("completion_ids", [3, 100_000, 5], "completion_ids has the id 100000, and the vocabulary ends at"),
        ("completion_ids", [3, -1, 5], "completion_ids has the id -1"),
        ("completion_ids", [], "completion_ids is empty"),
        ("completion_ids", [3] * 600, "tokens of prompt and 600 of completion, and 500 fit the model"),
        ("prompt_ids", [], "prompt_ids is empty"),
        ("prompt_ids", None, "prompt_ids is None"),
        ("logprobs", [-0.1] * 2, "2 logprobs for 3 completion_ids"),
        ("logprobs", [-0.1, math.nan, -0.1], "logprobs has nan, which is no logarithm"),
        ("logprobs", [-0.1, None, -0.1], "logprobs has None"),
        ("logprobs", [-0.1, 0.9, -0.1], "logprobs has 0.9"),
        ("env_mask", [1, 1], "2 env_mask for 3 completion_ids"),
        ("env_mask", [1, 2, 1], "env_mask has 2"),
        ("env_mask", [0, 0, 0], "env_mask is 0 everywhere"),
        ("policy_versions", [1, 1], "2 policy_versions for 3 completion_ids"),
        ("policy_versions", [1, 99, 1], "policy_versions has 99, and there are 0 to 4"),
        ("policy_versions", "new", "policy_versions is 'new', not a list"),
    ],
)
def test_what_is_wrong_with_one_rollout_fails_that_one(name: str, value: Any, message: str) -> None:
    def function(prompts: list[str], trainer: Any) -> Any:
        lists = fields(6, env_mask=[[1] * 3] * 6, policy_versions=[[1] * 3] * 6)
        lists[name] = [*lists[name][:4], value, lists[name][5]]
        return lists | {"score": list(range(6))}

    groups = collect(function)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [rollout for rollout in rollouts if rollout.status == "failed"]
    assert [rollout.id for rollout in failed] == ["b#1"]
    assert failed[0].error is not None
    assert "returned for rollout 4: " in failed[0].error
    assert message in failed[0].error
    assert HERE in failed[0].error
    assert failed[0].extra == {"score": 4}


# --- when it fails, and when nobody waits -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("no game left"), SystemExit(3), KeyError("x"), CancelledError()])
def test_what_it_raises_fails_its_rollouts(error: BaseException) -> None:
    def function(prompts: list[str], trainer: Any) -> Any:
        raise error

    rollouts = [rollout for group in collect(function) for rollout in group.rollouts]
    assert len(rollouts) == 6
    assert {rollout.status for rollout in rollouts} == {"failed"}
    assert str(error) in (rollouts[0].error or "")
    assert "raise error" in (rollouts[0].error or "")


def test_workers_that_are_gone_are_nobodys_rollout() -> None:
    class Gone(Letters):
        async def generate(self, request: Any) -> Any:
            raise WorkerDied("all are gone")

    with pytest.raises(WorkerDied):
        collect(sampled, policy=Gone())


async def test_one_call_at_a_time() -> None:
    """A step that takes the groups that end first asks for each task by itself, all at the same time."""
    at_once: list[int] = []
    inside = 0

    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal inside
        inside += 1
        at_once.append(inside)
        time.sleep(0.01)
        done = sampled(prompts, trainer)
        inside -= 1
        return done

    runner = Runner(source(function), Letters())
    groups = await asyncio.gather(*(runner.run([task], 2, seed=1) for task in TASKS * 2))
    assert at_once == [1] * 4
    assert all(rollout.status == "ok" for (group,) in groups for rollout in group.rollouts)


async def test_a_call_that_nobody_waits_for_any_more_samples_nothing() -> None:
    refused: list[str] = []
    ended = threading.Event()

    def function(prompts: list[str], trainer: Any) -> dict[str, Any]:
        for _ in range(2):
            try:
                sampled(prompts, trainer)
            except RuntimeError as error:
                refused.append(str(error))
        ended.set()
        return fields(len(prompts))

    policy = Letters(seconds=30)
    made = source(function)
    work = asyncio.ensure_future(Runner(made, policy).run(TASKS, 2, seed=1))
    while len(policy.requests) < 4:
        await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await asyncio.to_thread(ended.wait, 10)
    assert policy.cancelled == 4
    assert len(policy.requests) == 4
    assert "no longer waits" in refused[0]
    assert "is over" in refused[1]
    # The next call is not held up.
    policy.seconds = 0
    assert len(samples(await Runner(made, policy).run(TASKS, 1, seed=2))) == 2


def test_the_same_call_gives_the_same_rollouts() -> None:
    first, again, other = (collect(sampled, [task, TASKS[1]]) for task in (TASKS[0], TASKS[0], Task("c", "one")))
    ids = [[sample.completion_ids for sample in samples(groups)] for groups in (first, again, other)]
    assert ids[0] == ids[1]
    assert ids[0] != ids[2]  # another task with the same prompt


def test_a_task_twice_in_a_step_gets_further_attempts() -> None:
    groups = collect(sampled, [TASKS[0], TASKS[0]], n=2)
    assert [rollout.id for group in groups for rollout in group.rollouts] == ["a#0", "a#1", "a#2", "a#3"]


def test_images_are_refused() -> None:
    """Before anything runs where the dataset has them, and where a function asks with one of its own."""
    picture = {"type": "image", "image": "data:image/png;base64,AAAA"}
    prompt = [{"role": "user", "content": [picture, {"type": "text", "text": "what is it?"}]}]
    with pytest.raises(DataError, match="task 'p' has images"):
        source(sampled).check_tasks([Task("p", prompt)])
    rollouts = collect(lambda prompts, trainer: sampled([prompt] * len(prompts), trainer))[0].rollouts
    assert "one has images, and rollout functions take none" in (rollouts[0].error or "")


def test_a_system_prompt_makes_messages_of_text() -> None:
    from mrl.rollouts.prompts import PromptEncoder

    seen: list[Any] = []

    def function(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        seen.extend(prompts)
        return fields(len(prompts))

    made = source(function)
    made.setup.encoder.__init__(made.setup.tokenizer, "auto", "Be brief.")  # type: ignore[misc]
    assert isinstance(made.setup.encoder, PromptEncoder)
    asyncio.run(Runner(made, Letters()).run(TASKS[:1], 1, seed=0))
    assert seen == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]]
