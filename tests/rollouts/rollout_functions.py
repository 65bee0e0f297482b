"""Rollout functions of these tests, as a user's file has them."""

from __future__ import annotations

from typing import Any

import requests

from mrl.rollouts.function import generate_rollout_completions


class Echo:
    """Stands for an environment's client: it pays for different letters, and forgets nothing between two resets."""

    def reset(self) -> None:
        self.steps = 0

    def step(self, message: str) -> float:
        self.steps += 1
        return len(set(message)) / 8


client = Echo()


def with_trainer(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    done = generate_rollout_completions(trainer, prompts)
    client.reset()
    kept = {name: [one[name] for one in done] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return kept | {"env_reward": [client.step(one["text"]) for one in done]}


def over_http(prompts: list[str], args: Any, processing_class: Any) -> dict[str, Any]:
    """As functions for TRL's first documentation are: the completions come from a server."""
    payload = {
        "prompts": prompts,
        "n": args.num_generations,
        "temperature": args.temperature,
        "max_tokens": args.max_completion_length,
    }
    answer = requests.post(f"{args.vllm_server_base_url}/generate/", json=payload, timeout=60)
    answer.raise_for_status()
    result: dict[str, Any] = answer.json()
    client.reset()
    texts = processing_class.batch_decode(result["completion_ids"], skip_special_tokens=True)
    result["env_reward"] = [client.step(text) for text in texts]
    return result


def two_turns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """The environment says something between two completions; only the policy's tokens count."""
    first = generate_rollout_completions(trainer, prompts, generation_overrides={"max_tokens": 3})
    said = trainer.processing_class(" ok ", add_special_tokens=False)["input_ids"]
    so_far = [one["prompt_ids"] + one["completion_ids"] + said for one in first]
    second = generate_rollout_completions(trainer, so_far, generation_overrides={"max_tokens": 3})
    rows = list(zip(first, second, strict=True))
    return {
        "prompt_ids": [a["prompt_ids"] for a, _ in rows],
        "completion_ids": [a["completion_ids"] + said + b["completion_ids"] for a, b in rows],
        "logprobs": [a["logprobs"] + [0.0] * len(said) + b["logprobs"] for a, b in rows],
        "env_mask": [[1] * len(a["logprobs"]) + [0] * len(said) + [1] * len(b["logprobs"]) for a, b in rows],
        "policy_versions": [
            a["policy_versions"] + a["policy_versions"][-1:] * len(said) + b["policy_versions"] for a, b in rows
        ],
        "env_reward": [len(set(a["text"] + b["text"])) / 8 for a, b in rows],
    }


def without_logprobs(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    return with_trainer(prompts, trainer) | {"logprobs": None}


def too_cold(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Samples at another temperature than the run's."""
    done = generate_rollout_completions(trainer, prompts, generation_overrides={"temperature": 0.15})
    kept = {name: [one[name] for one in done] for name in ("prompt_ids", "completion_ids", "logprobs")}
    return kept | {"env_reward": [sum(one["completion_ids"]) / 1000 for one in done]}  # differs in every group


calls = 0


def fails_every_third(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Its third call breaks off."""
    global calls
    calls += 1
    if calls % 3 == 0:
        raise ConnectionError("the game server is gone")
    return with_trainer(prompts, trainer)


def reward_from_env(completions: list[Any], **kwargs: Any) -> list[float]:
    given = kwargs.get("env_reward", [])
    return [float(reward) for reward in given] if given else [0.0] * len(completions)
