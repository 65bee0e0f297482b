"""The same rollout function in TRL's own trainer and in ours: it gets the same, and so do reward functions.

TRL 1.16's docstring says that prompts come once each; its code hands them over repeated, and this shows it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import small_runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="the peer whose contract this is"),
    pytest.mark.filterwarnings("ignore"),
]

CHATS = [{"prompt": [{"role": "user", "content": f"round {i}"}], "secret": i} for i in range(2)]
TEXTS = [{"prompt": f"round {i}", "secret": i} for i in range(2)]


class Record:
    """What a function was given, in training."""

    def __init__(self) -> None:
        self.prompts: list[Any] = []
        self.sizes: list[Any] = []
        self.rewards: dict[str, Any] = {}

    def rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Makes its tokens up."""
        if not self.prompts:
            self.prompts = prompts
            self.sizes = [trainer.num_generations, trainer.args.num_generations, trainer.args.max_completion_length]
            self.sizes += [trainer.temperature, trainer.args.temperature, trainer.state.max_steps]
        count = len(prompts)
        return {
            "prompt_ids": [[10, 11]] * count,
            "completion_ids": [[20 + row, 21, 22] for row in range(count)],
            "logprobs": [[-5.5] * 3] * count,
            "env_mask": [[1, 0, 1]] * count,
            "env_reward": [row / 10 for row in range(count)],
            "level": "easy",
        }

    def reward(self, prompts: list[Any], completions: list[Any], **rest: Any) -> list[float]:
        """Notes what it got."""
        if not self.rewards:
            named = ("env_reward", "level", "secret", "completion_ids")
            self.rewards = {name: rest[name] for name in named} | {"prompts": prompts, "completions": completions}
            assert "env_mask" not in rest
        return [float(value) for value in rest["env_reward"]]


def in_trl(model: str, rows: list[dict[str, Any]], folder: Path) -> Record:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    record = Record()
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=6,
        num_generations=3,
        max_completion_length=6,
        max_steps=1,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=record.reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        rollout_func=record.rollout,
    )
    trainer.train()
    return record


def in_mrl(model: str, rows: list[dict[str, Any]], folder: Path, **changes: Any) -> Record:
    record = Record()
    small_runs.run(
        model,
        folder,
        train_dataset=rows,
        rollout_func=record.rollout,
        reward_funcs=record.reward,
        reward_trial=False,
        max_steps=1,
        shuffle=False,
        **{"serve": "off", "max_logprob_gap": None} | changes,
    )
    return record


@pytest.mark.parametrize("rows", [CHATS, TEXTS], ids=["messages", "text"])
def test_both_trainers_give_the_same(rows: list[dict[str, Any]], tiny_model: str, tmp_path: Path) -> None:
    theirs, ours = in_trl(tiny_model, rows, tmp_path / "trl"), in_mrl(tiny_model, rows, tmp_path / "mrl")
    assert theirs.prompts == [row["prompt"] for row in rows for _ in range(3)]
    assert ours.prompts == theirs.prompts
    assert ours.sizes == theirs.sizes
    assert ours.rewards == theirs.rewards


def test_simple_mode_hands_the_function_to_trl(tiny_model: str, tmp_path: Path) -> None:
    from mrl.store.run import read_rows

    simple = {"mode": "simple", "serve": None, "max_logprob_gap": small_runs_default("max_logprob_gap")}
    record = in_mrl(tiny_model, CHATS, tmp_path / "r", **simple)
    assert record.prompts == [row["prompt"] for row in CHATS for _ in range(3)]
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert [row["reward"] for row in rows] == [row["extra"]["env_reward"] for row in rows]
    assert {tuple(row["samples"][0]["mask"]) for row in rows} == {(1, 0, 1)}


def test_simple_mode_refuses_what_trl_does_not_call(tiny_model: str, tmp_path: Path) -> None:
    from mrl.errors import ConfigError

    def older(prompts: Any, args: Any, processing_class: Any) -> Any: ...

    simple = {"mode": "simple", "rollout_func": older}
    with pytest.raises(ConfigError, match=r"older .* TRL 1.16.* calls it with \(prompts, trainer\)"):
        small_runs.run(tiny_model, tmp_path / "r", **simple)
    with pytest.raises(ConfigError, match=r"rollout_func.*only GRPO takes one"):
        small_runs.run(tiny_model, tmp_path / "r", **simple | {"algorithm": "rloo"})


def small_runs_default(name: str) -> Any:
    from mrl.config import flat_fields

    return flat_fields()[name][1].get_default(call_default_factory=True)
