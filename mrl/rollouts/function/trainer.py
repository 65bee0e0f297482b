"""What a rollout function gets as `trainer` or `args`: what those of TRL are used for in rollout functions, no more.

An attribute there is not raises AttributeError with those there are, so that nothing is read that means nothing here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from typing import Any, TypeVar

from mrl.rollouts.base import SourceSetup
from mrl.rollouts.function.sampling import GenerateBody, RefusedRequest, Sampled, Sampler, parsed
from mrl.types import Message, SamplingParams

T = TypeVar("T")


def generate_rollout_completions(
    trainer: Any,
    prompts: list[Any],
    *,
    generation_overrides: dict[str, Any] | None = None,
    as_chat: bool | None = None,
) -> list[dict[str, Any]]:
    """One completion of each prompt, sampled as the run samples, as TRL's helper of this name gives them.

    prompts: text, which is tokenised as it is; messages, which go through the chat template; or token ids.
    generation_overrides: any of temperature, top_p, top_k, min_p, max_tokens, stop, seed. as_chat: whether prompts are
    messages, where they have to be. Returns for each `prompt_ids`, `completion_ids`, `logprobs`, `text` and
    `policy_versions`, the policy version that sampled each token.
    """
    if not isinstance(trainer, RolloutTrainer):
        raise TypeError(f"trainer: give the one that the rollout function gets, not {type(trainer).__name__}")
    return trainer.rollout_completions(prompts, generation_overrides or {}, as_chat)


class Facade:
    """An object with these attributes and no others. name: what it stands for."""

    def __init__(self, name: str, **attributes: Any) -> None:
        self.__dict__.update(attributes)
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        who, there = self.__dict__.get("_name"), sorted(known for known in self.__dict__ if not known.startswith("_"))
        raise AttributeError(f"{who} has no {name!r} in a rollout function; it has {', '.join(there)}")


class Call:
    """One call of the function: who samples for it, on which event loop, and whether it is still waited for.

    version: the policy's when the call began.
    """

    def __init__(self, sampler: Sampler, version: int) -> None:
        self.sampler, self.version = sampler, version
        self.loop = asyncio.get_running_loop()
        self.over = False
        self._pending: set[concurrent.futures.Future[Any]] = set()

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """On the function's thread: what `work` returns or raises on the event loop."""
        if self.over:
            work.close()
            raise RuntimeError("this call of the rollout function is over: nobody waits for its rollouts any more")
        pending = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._pending.add(pending)
        try:
            return pending.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError("the run no longer waits for this call of the rollout function") from None
        finally:
            self._pending.discard(pending)

    def end(self) -> None:
        """Whatever it still asks for is refused."""
        self.over = True
        for pending in list(self._pending):
            pending.cancel()


class RolloutTrainer(Facade):
    """`trainer` of one call."""

    def __init__(self, call: Call, setup: SourceSetup, args: Facade, state: Any) -> None:
        sampling = setup.sampling
        client = VllmClient(call)
        super().__init__(
            "the trainer",
            args=args,
            processing_class=setup.tokenizer,
            tokenizer=setup.tokenizer,
            state=state,
            accelerator=Facade("trainer.accelerator", is_main_process=True, process_index=0, num_processes=1),
            num_generations=args.num_generations,
            num_generations_eval=args.num_generations,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=1.0,
            max_completion_length=sampling.max_tokens,
            chat_template_kwargs={},
            use_vllm=True,
            vllm_mode="server",
            vllm_client=client,
            vllm_generation=Facade("trainer.vllm_generation", vllm_client=client, mode="server"),
        )
        self.__dict__["_call"], self.__dict__["_setup"] = call, setup

    def rollout_completions(
        self, prompts: list[Any], overrides: dict[str, Any], as_chat: bool | None
    ) -> list[dict[str, Any]]:
        """See `generate_rollout_completions`."""
        call: Call = self._call
        for prompt in prompts:
            if not isinstance(prompt, str | list | tuple):
                raise RefusedRequest(f"prompts: one is {_kind(prompt)}; give text, messages or token ids")
            if as_chat is not None and as_chat != (_kind(prompt) == "messages"):
                raise RefusedRequest(f"as_chat: {as_chat} does not go with a prompt that is {_kind(prompt)}")
        sampling, seed = self._sampling(overrides)
        ids = [call.sampler.encode(prompt) for prompt in prompts]
        done: list[Sampled] = call.wait_for(call.sampler.complete(ids, 1, sampling, seed))
        return [
            {
                "prompt_ids": one.prompt_ids,
                "completion_ids": one.completion_ids,
                "logprobs": one.logprobs,
                "text": self.processing_class.decode(one.completion_ids, skip_special_tokens=True),
                "policy_versions": one.versions,
            }
            for one in done
        ]

    def _sampling(self, overrides: dict[str, Any]) -> tuple[SamplingParams, int | None]:
        run: SamplingParams = self._setup.sampling
        own = {name: overrides[name] for name in ("stop", "seed") if name in overrides}
        fields = {
            "temperature": run.temperature,
            "top_p": run.top_p,
            "top_k": run.top_k,
            "min_p": run.min_p,
            "max_tokens": run.max_tokens,
            "generation_kwargs": own or None,
        }
        body = parsed({"prompts": []} | fields | {k: v for k, v in overrides.items() if k not in own and v is not None})
        if body.n != 1:
            raise RefusedRequest("n: one completion of each prompt; give a prompt as often as you want it completed")
        return body.sampling(run.stop), body.seed


class VllmClient:
    """`trainer.vllm_client`, and `trainer.vllm_generation.vllm_client`: TRL's client of a vLLM server, answered by the
    run's own policy."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def generate(self, prompts: list[str] | list[list[int]], **fields: Any) -> dict[str, Any]:
        """As `POST /generate/`: see `GenerateBody` for the fields and `Sampler.answer` for the answer."""
        return self._call.wait_for(self._call.sampler.answer(parsed({"prompts": prompts} | _without_none(fields))))

    def chat(self, messages: list[list[Message]], **fields: Any) -> dict[str, Any]:
        """The same for conversations, rendered by the chat template."""
        ids = [list(self._call.sampler.encode(one)) for one in messages]
        body: GenerateBody = parsed({"prompts": ids} | _without_none(fields))
        return self._call.wait_for(self._call.sampler.answer(body))


def call_args(setup: SourceSetup, n: int, url: str | None) -> Facade:
    """`args`: the run's sampling options by TRL's names. n: rollouts of each prompt in this call. url: of the route."""
    sampling = setup.sampling
    host, _, port = (url or "").removeprefix("http://").rpartition(":")
    served: dict[str, Any] = (
        {}
        if url is None
        else {
            "vllm_server_base_url": url,
            "vllm_server_host": host,
            "vllm_server_port": int(port),
        }
    )
    return Facade(
        "args",
        num_generations=n,
        num_generations_eval=n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=1.0,
        max_completion_length=sampling.max_tokens,
        generation_kwargs=None,
        chat_template_kwargs={},
        use_vllm=True,
        vllm_mode="server",
        vllm_enable_sleep_mode=False,
        report_to=[],
        **served,
    )


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _kind(prompt: Any) -> str:
    if isinstance(prompt, str):
        return "text"
    messages = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    return "messages" if messages else f"a {type(prompt).__name__}"
