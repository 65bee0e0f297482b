"""Whole runs with images: one gap for sampler and trainer, turns with images, resume, evaluation, replay, learning."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.main import main
from mrl.errors import ConfigError, DataError, StoreError
from mrl.loop.replay import replay
from mrl.store.run import read_rows
from tests import small_runs
from tests.vision_models import COLOURS, WORDS, build_calling_llava, image

SIZES = ((28, 28), (56, 28), (28, 56), (56, 56))
TASKS = [
    {"prompt": "colour?", "image": image(colour, size), "want": colour}
    for colour, size in zip(COLOURS, SIZES, strict=True)
]
NAMED = """
def named(completions, want, **_):
    return [float(word in said[-1]["content"]) for said, word in zip(completions, want)]
"""
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


def distinct(completions: list[Any], image: list[Any], prompts: list[Any], **_: Any) -> list[float]:
    """Looks at the images too, which are PIL's, as with TRL."""
    assert all(one.size in SIZES for one in image)
    assert all(prompt[-1]["content"][0]["image"].size in SIZES for prompt in prompts)
    return [len(set(messages[-1]["content"])) / 8 for messages in completions]


class Lamps:
    """Shows another lamp each time."""

    def reset(self, colour: str, **_: Any) -> list[dict[str, Any]]:
        self.looks = 0
        return [{"type": "text", "text": " Look: "}, {"type": "image", "image": image(colour)}]

    def look(self) -> list[dict[str, Any]]:
        """Look again."""
        self.looks += 1
        shown = image(WORDS[self.looks % 3], SIZES[self.looks % 4])
        return [{"type": "image", "image": shown}, {"type": "text", "text": f"lamp {self.looks}"}]

    def get_reward(self) -> float:
        return float(self.looks)


def run(model: str, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """The run's metrics."""
    defaults = {"train_dataset": TASKS, "reward_funcs": distinct, "max_steps": 2, "max_completion_length": 8}
    assert small_runs.run(model, folder, **(defaults | changes)).status == "finished"
    return list(read_rows(folder, "metrics"))


def mrl(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava_model", "qwen_vl_model"])
@pytest.mark.parametrize("sync", ["reload", "direct"])
def test_sampler_and_trainer_see_the_same(
    name: str, sync: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    model = request.getfixturevalue(name)
    shared = {"weight_sync_method": sync, "beta": 0.1, "packing": sync == "reload"}
    metrics = run(model, tmp_path / "r", **shared, num_rollout_workers=2)
    assert len(metrics) == 2
    assert all(row["train/logprob_gap_max"] <= 1e-5 for row in metrics)
    assert all(row["train/grad_norm"] > 0 for row in metrics)
    assert metrics[1]["train/kl"] > 0
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    seen = {one["sha256"] for row in rows for sample in row["samples"] for one in sample["media"]}
    assert seen == {path.name for path in (tmp_path / "r" / "media").iterdir()}
    (part, _) = rows[0]["messages"][-2]["content"]
    assert part["image"] == {name: rows[0]["samples"][0]["media"][0][name] for name in ("sha256", "bytes")}
    assert replay(tmp_path / "r", 2).verdict == "equal"
    mrl("runs", "rollouts", str(tmp_path / "r"), "--limit", "1")
    shown = re.search(r"\[image (\w{12}), \d+ bytes\] colour\?", capsys.readouterr().out)
    assert shown is not None
    assert shown[1] in {sha256[:12] for sha256 in seen}
    shutil.rmtree(tmp_path / "r" / "media")
    with pytest.raises(StoreError, match="only its hash"):
        replay(tmp_path / "r", 2)


@pytest.mark.slow
def test_an_adapter_learns_from_images(llava_model: str, tmp_path: Path) -> None:
    metrics = run(llava_model, tmp_path / "r", use_lora=True, lora_r=4, weight_sync_method="reload", beta=0.1)
    assert all(row["train/logprob_gap_max"] <= 1e-5 for row in metrics)
    assert metrics[1]["train/kl"] > 0


@pytest.mark.slow
def test_turns_with_images_on_processes(processes: None, tmp_path: Path) -> None:
    """Requests, samples and weights travel; a policy that mostly calls the tool sees an image each time."""
    folder = build_calling_llava(tmp_path / "model", (LOOK,))
    tasks = [{"prompt": [{"role": "user", "content": f"round {n}"}], "colour": c} for n, c in enumerate(COLOURS)]
    turns: dict[str, Any] = {
        "train_dataset": tasks,
        "reward_funcs": None,
        "environment_factory": Lamps,
        "max_turns": 3,
        "max_completion_length": 24,
        "max_model_len": 1024,
        "weight_sync_method": "reload",
        "backend": "processes",
    }
    metrics = run(str(folder), tmp_path / "r", **turns)
    assert all(row["train/logprob_gap_max"] <= 1e-5 for row in metrics)
    assert all(row["rollout/turns_extended"] == pytest.approx(row["rollout/turns"] - 1) for row in metrics)
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert any(len(row["samples"][0]["media"]) > 2 for row in rows)
    for row in rows:
        (sample,) = row["samples"]
        told = [part for m in row["messages"] for part in m["content"] if isinstance(part, dict) and "image" in part]
        assert [part["image"]["sha256"] for part in told][: len(sample["media"])] == [
            one["sha256"] for one in sample["media"]
        ]


@pytest.mark.slow
def test_resumed_and_evaluated(llava_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"weight_sync_method": "direct", "max_steps": 2, "eval_dataset": TASKS[:2], "eval_steps": 1}
    run(llava_model, tmp_path / "whole", **whole)
    run(llava_model, tmp_path / "cut", **(whole | {"max_steps": 1}))
    run(llava_model, tmp_path / "cut", **(whole | {"resume": str(tmp_path / "cut"), "allow_change": ["max_steps"]}))
    assert small_runs.record_of(tmp_path / "cut") == small_runs.record_of(tmp_path / "whole")
    assert small_runs.same_weights(tmp_path / "cut", tmp_path / "whole")
    for number, task in enumerate(TASKS):
        task["image"].save(tmp_path / f"{number}.png")
    data = tmp_path / "tasks.jsonl"
    lines = [{"prompt": "colour?", "image": f"{tmp_path}/{n}.png", "want": t["want"]} for n, t in enumerate(TASKS)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reward = tmp_path / "reward.py"
    reward.write_text(NAMED)
    capsys.readouterr()
    mrl(
        *("eval", str(tmp_path / "whole"), "--dataset", str(data), "--reward-funcs", f"{reward}:named"),
        *("--max-tokens", "4", "--json"),
    )
    assert json.loads(capsys.readouterr().out)["tasks"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["queue", "pipeline"])
def test_images_where_sampling_and_training_overlap(mode: str, llava_model: str, tmp_path: Path) -> None:
    """New weights come in the midst of it, and features of images are of those that sample."""
    options = {"max_completion_length": 2, "batch_size": 4, "save_steps": 0, "weight_sync_method": "reload"}
    metrics = run(llava_model, tmp_path / "r", async_mode=mode, max_steps=3, **options)
    assert [row["step"] for row in metrics] == [1, 2, 3]
    rows = list(read_rows(tmp_path / "r", "rollouts"))
    assert all(row["status"] == "ok" and len(row["samples"][0]["media"]) == 1 for row in rows)
    assert {row["samples"][0]["media"][0]["sha256"] for row in rows} == {
        path.name for path in (tmp_path / "r" / "media").iterdir()
    }


def test_what_cannot_take_images_is_refused_at_once(llava_model: str, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .* takes no images, and 4 of the tasks have some"):
        small_runs.run(tiny_model, tmp_path / "a", train_dataset=TASKS, reward_funcs=distinct)
    remote = {"engine": "vllm-remote", "vllm_urls": ["http://127.0.0.1:9"], "weight_sync_method": "reload"}
    with pytest.raises(ConfigError, match="vllm-remote takes no images"):
        small_runs.run(llava_model, tmp_path / "d", train_dataset=TASKS, reward_funcs=distinct, **remote)
    with pytest.raises(ConfigError, match="simple takes no images"):
        small_runs.run(llava_model, tmp_path / "b", train_dataset=TASKS, reward_funcs=distinct, mode="simple")
    rows = [TASKS[0], {"prompt": "colour?", "image": b"no image", "want": "red"}]
    with pytest.raises(DataError, match="row 1, column 'image' is no image that can be read"):
        small_runs.run(llava_model, tmp_path / "c", train_dataset=rows, reward_funcs=distinct)


@pytest.mark.slow
def test_colours_are_learned(llava_model: str, tmp_path: Path) -> None:
    """From the images alone: the prompts are the same."""

    def named(completions: list[Any], want: list[str], **_: Any) -> list[float]:
        return [float(messages[-1]["content"] == colour) for messages, colour in zip(completions, want, strict=True)]

    tasks = [{"prompt": "colour?", "image": image(colour), "want": colour} for colour in ("red", "blue")]
    metrics = run(
        llava_model,
        tmp_path / "r",
        train_dataset=tasks,
        reward_funcs=named,
        max_steps=60,
        batch_size=2,
        num_generations=64,
        max_completion_length=1,
        learning_rate=1e-3,  # with three times as much one word is said of both
        weight_sync_method="direct",
        save_steps=0,
    )
    assert sum(row["reward/mean"] for row in metrics[:3]) / 3 < 0.2
    assert sum(row["reward/mean"] for row in metrics[-3:]) / 3 > 0.8
