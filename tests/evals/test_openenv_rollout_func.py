"""Episodes as a `rollout_func`: in our trainer and in TRL's own, token by token, with a gradient."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mrl.errors import ConfigError
from mrl.evals import create_openenv_vllm_rollout_func
from mrl.store.run import read_rows
from tests import small_runs
from tests.evals.scored_by_tests import Moves
from tests.rollouts.calling_model import build_calling_model

HERE = Path(__file__).parent / "scored_by_tests.py"
ROWS = [{"prompt": [{"role": "user", "content": f"play {n}"}]} for n in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_calling_model(tmp_path_factory.mktemp("talks") / "model", ["left", "right", "up"], strength=6.0))


def made(**options: Any) -> Any:
    given: dict[str, Any] = {"completion_params": {"max_tokens": 4}, "max_steps": 4} | options
    return create_openenv_vllm_rollout_func(
        Moves, lambda seen, step, history: f"{step}: {seen.text}", lambda text: text, **given
    )


class Noting:
    """A reward function that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.__name__ = "noting"

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        self.calls.append({"completions": completions, **columns})
        return [len(set(str(completion))) / 10 + score for completion, score in zip(
            completions, columns["eval_score"], strict=True)]  # fmt: skip


def test_the_originals_signature() -> None:
    names = list(inspect.signature(create_openenv_vllm_rollout_func).parameters)
    assert names == [
        *("env_factory", "prompt_builder", "action_parser", "vllm_base_url", "vllm_model", "max_steps"),
        *("completion_params", "concurrency", "processor_cls", "processor_kwargs", "env_path", "env_client_cls"),
        *("tasks", "task_var", "miniwob_url", "docker_image", "env_base_url", "request_timeout_s", "default_headers"),
        *("provider", "docker_port", "env_vars", "benchmark", "headless", "viewport_width", "viewport_height"),
        "timeout_ms",
    ]
    with pytest.raises(ConfigError, match="no subclass"):
        made(processor_cls=Moves)


def test_in_our_trainer(model: str, tmp_path: Path) -> None:
    noting = Noting()
    small_runs.run(
        model,
        tmp_path / "run",
        train_dataset=ROWS,
        rollout_func=made(),
        reward_funcs=noting,
        reward_trial=False,
        serve="off",
        max_completion_length=32,
        max_steps=2,
    )
    rows = list(read_rows(tmp_path / "run", "rollouts"))
    assert {row["status"] for row in rows} == {"ok"}
    played = [row for row in rows if 0 in row["samples"][0]["mask"]]
    assert played
    for row in rows:
        (sample,) = row["samples"]
        told = [p for p, mask in zip(sample["logprobs"], sample["mask"], strict=True) if mask]
        assert all(p < 0 for p in told)
        assert row["extra"]["eval_score"] == sum(row["extra"]["step_rewards"])
    metrics = list(read_rows(tmp_path / "run", "metrics"))
    assert all(row["train/grad_norm"] > 0 for row in metrics)


def test_a_failing_episode_fails_its_rollout_only(model: str, tmp_path: Path) -> None:
    class Breaks(Moves):
        def reset(self, seed: int = 0) -> Any:
            self.seed = seed
            return super().reset()

        def step(self, action: str) -> Any:
            if self.seed % 2:
                raise ConnectionError("gone")
            return super().step(action)

    function = create_openenv_vllm_rollout_func(
        Breaks, lambda seen, step, history: seen.text, lambda text: text, completion_params={"max_tokens": 4}
    )
    small_runs.run(
        model,
        tmp_path / "run",
        train_dataset=ROWS,
        rollout_func=function,
        reward_funcs=lambda completions, **_: [float(len(set(text[0]["content"]))) for text in completions],
        reward_trial=False,
        serve="off",
        max_completion_length=32,
        max_steps=2,
        max_failed_fraction=1.0,
        zero_variance_groups="keep",
    )
    rows = list(read_rows(tmp_path / "run", "rollouts"))
    failed = [row for row in rows if row["status"] == "failed"]
    assert 0 < len(failed) < len(rows)
    assert all("gone" in row["extra"]["rollout_error"] for row in failed)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="the peer whose trainer this is for")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("test", [None, f"{HERE}:played"], ids=["rewards", "test"])
def test_in_trls_trainer(model: str, tmp_path: Path, test: str | None) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    noting, outputs = Noting(), []
    function = made() if test is None else create_openenv_vllm_rollout_func(
        None, None, None, env_path=test, completion_params={"max_tokens": 4}, max_steps=4)  # fmt: skip

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        outputs.append((function(prompts, trainer), weights))
        assert trainer.model.training
        return outputs[-1][0]

    args = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=32,
        max_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        temperature=1.0,
        seed=3,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=noting, args=args, train_dataset=Dataset.from_list(ROWS), rollout_func=rollout_func
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms)

    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert any(0 in mask for output, _ in outputs for mask in output["env_mask"])
    for output, weights in outputs:  # each call samples with the weights of then
        module.load_state_dict(weights)
        for row in range(6):
            prompt, completion = output["prompt_ids"][row], output["completion_ids"][row]
            assert tokenizer.decode(prompt).count("play") == 1
            with torch.no_grad():
                logits = module(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]
            for mask, got, wanted in zip(output["env_mask"][row], output["logprobs"][row], expected, strict=True):
                assert not mask or got == pytest.approx(wanted.item(), abs=1e-3)
    for call, (output, _) in zip(noting.calls, outputs, strict=True):
        assert call["eval_score"] == output["eval_score"]
        assert call["step_rewards"] == output["step_rewards"]
        if test is None:
            assert output["eval_score"] == [sum(steps) for steps in output["step_rewards"]]


def test_a_trainer_whose_engine_cannot_be_asked_turn_by_turn() -> None:
    trainer = SimpleNamespace(use_vllm=True, vllm_mode="colocate", args=SimpleNamespace())
    with pytest.raises(ConfigError, match="vllm_mode='server'"):
        made()(["play"], trainer)


def test_the_tests_own_processor_is_taken() -> None:
    with pytest.raises(ConfigError, match="makes its rollouts with SingleTurnRolloutProcessor"):
        create_openenv_vllm_rollout_func(None, None, None, env_path=f"{HERE}:distinct")
