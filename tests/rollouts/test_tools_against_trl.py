"""The same environment, tools and reward function in TRL's own trainer and in ours: each is asked for the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import small_runs
from tests.rollouts.calling_model import build_calling_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="the peer whose contract this is"),
    pytest.mark.filterwarnings("ignore"),
]

ROWS = [{"prompt": [{"role": "user", "content": f"round {i}"}], "secret": i} for i in range(4)]
WRONG = [
    '<tool_call>\n{"name": "guess", "arguments": {"number": 9}}\n</tool_call>',
    '<tool_call>\n{"name": "nothing", "arguments": {}}\n</tool_call>',
]
SAYS = [f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {n}}}}}\n</tool_call>' for n in range(2)] + WRONG


class Record:
    """What a trainer asked for."""

    def __init__(self) -> None:
        self.resets: list[dict[str, Any]] = []
        self.results: dict[str, set[str]] = {}
        self.completions: list[list[dict[str, Any]]] = []
        self.prompts: list[Any] = []
        self.arguments: set[str] = set()
        self.rewards: list[tuple[float, float]] = []

    def environment(self) -> type:
        record = self

        class Guess:
            def reset(self, **columns: Any) -> str:
                record.resets.append(columns)
                self.secret, self.found = columns["secret"], False
                return " Guess."

            def guess(self, number: int) -> str:
                """
                Guesses the number.

                Args:
                    number: The guess.

                Returns:
                    Whether it is right.
                """
                if number > 3:
                    raise ValueError("too large")
                self.found = number == self.secret
                return f"right: {self.found}"

            def get_reward(self) -> float:
                return float(self.found)

        return Guess

    def reward(self, prompts: list[Any], completions: list[Any], environments: list[Any], **rest: Any) -> list[float]:
        """Notes what it got."""
        self.prompts += prompts
        self.completions += completions
        self.arguments |= set(rest)
        assert [environment.secret for environment in environments] == rest["secret"]
        for message in (message for completion in completions for message in completion if message["role"] == "tool"):
            self.results.setdefault(message["name"], set()).add(message["content"])
        return [len(completion) / 10 for completion in completions]

    def shape(self) -> set[tuple[str, ...]]:
        """Of the messages: their roles, and what they have."""
        return {
            (m["role"], *sorted(key for key in m if key != "tool_call_id"))
            for completion in self.completions
            for m in completion
        }


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With the template of Qwen2.5, which TRL knows and mrl derives."""
    from transformers import AutoTokenizer

    folder = build_calling_model(tmp_path_factory.mktemp("caller"), SAYS)
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (Path(spec.origin).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    tokenizer.save_pretrained(folder)
    return str(folder)


def by_trl(model: str, folder: Path) -> Record:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    record = Record()
    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=400,
        max_tool_calling_iterations=3,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        seed=1,
    )
    GRPOTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(ROWS),
        reward_funcs=record.reward,
        environment_factory=record.environment(),
    ).train()
    return record


def by_mrl(model: str, folder: Path) -> Record:
    record = Record()
    small_runs.run(
        model,
        folder,
        train_dataset=ROWS,
        reward_funcs=record.reward,
        reward_trial=False,
        environment_factory=record.environment(),
        batch_size=4,
        num_generations=4,
        max_completion_length=400,
        max_tokens=16,
        max_turns=4,
        max_steps=1,
        max_model_len=2048,
    )
    return record


def test_both_ask_for_the_same(caller: str, tmp_path: Path) -> None:
    theirs, ours = by_trl(caller, tmp_path / "trl"), by_mrl(caller, tmp_path / "mrl")
    assert len(theirs.resets) == len(ours.resets) == 16
    by_secret = sorted(ours.resets, key=lambda row: row["secret"])
    assert by_secret == sorted(theirs.resets, key=lambda row: row["secret"])
    assert {str(prompt) for prompt in ours.prompts} == {str(prompt) for prompt in theirs.prompts}
    assert ours.results == theirs.results
    assert "{'error': 'too large'}" in ours.results["guess"]
    assert {"secret", "completion_ids", "trainer_state", "log_extra", "log_metric"} <= ours.arguments & theirs.arguments
    assert ours.shape() == theirs.shape()
