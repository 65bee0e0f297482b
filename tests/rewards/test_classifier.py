"""Sequence classifiers as rewards: the model's numbers by hand and by TRL, and inputs and models that will not do."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from mrl.errors import ConfigError, ModelError, RewardError
from mrl.rewards import resolve_rewards
from mrl.rewards.base import RewardRequest, Scores
from mrl.rewards.classifier import Classifier
from mrl.weights.checksum import checksum
from mrl.workers.reward import RewardWorker

TEXTS = [("say ", "a"), ("say ", "a much longer answer, of many words"), ("", "b"), ("what? ", "é🙂" * 5)]
CHATS = [
    ([{"role": "user", "content": "2+2?"}], [{"role": "assistant", "content": "4"}]),
    (
        [{"role": "system", "content": "brief"}, {"role": "user", "content": "2+2?"}],
        [{"role": "assistant", "content": "four, I should think"}],
    ),
]


def build(folder: Path, tokenizer: Any, **changes: Any) -> str:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = Qwen2Config(vocab_size=len(tokenizer), **({"num_labels": 1} | sizes | heads | changes))
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: str) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def scorer(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("models") / "tiny-rm", tokenizer)


def requests(pairs: list[Any]) -> list[RewardRequest]:
    return [RewardRequest(str(k), prompt, completion, [], {}, str(k)) for k, (prompt, completion) in enumerate(pairs)]


def score(reward: Any, pairs: list[Any]) -> Scores:
    return asyncio.run(reward.score(requests(pairs), trainer_state=None))


def by_hand(folder: str, text: str) -> torch.Tensor:
    """One text alone, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return model.model(ids).last_hidden_state[0, -1] @ model.score.weight.T


def test_it_is_the_logit_at_the_last_token(scorer: str, tokenizer: Any) -> None:
    (reward,) = resolve_rewards(scorer)
    assert reward.name == "tiny-rm"
    scores = score(reward, TEXTS)
    assert not scores.errors
    expected = [float(by_hand(scorer, prompt + said)) for prompt, said in TEXTS]
    assert scores.values == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) == 4
    said = [tokenizer.apply_chat_template(prompt + answer, tokenize=False) for prompt, answer in CHATS]
    assert score(reward, CHATS).values == pytest.approx([float(by_hand(scorer, text)) for text in said], abs=1e-6)


@pytest.mark.slow  # it imports TRL's trainer
@pytest.mark.parametrize("pairs", [TEXTS, CHATS], ids=["text", "chat"])
def test_it_agrees_with_trl(scorer: str, pairs: list[Any]) -> None:
    """With its `_calculate_rewards`, on a trainer that has only what that reads."""
    from trl import GRPOTrainer

    model = AutoModelForSequenceClassification.from_pretrained(scorer, num_labels=1).eval()
    own = AutoTokenizer.from_pretrained(scorer)
    model.config.pad_token_id = own.pad_token_id
    trainer = object.__new__(GRPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"), is_main_process=True)
    trainer.args = SimpleNamespace(report_to=[])
    trainer.reward_funcs, trainer.reward_processing_classes, trainer.reward_func_names = [model], [own], ["m"]
    trainer.chat_template_kwargs, trainer.environments = {}, None
    trainer.state = SimpleNamespace(global_step=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.Trainer._prepare_inputs", lambda self, inputs: inputs)
        patch.setattr("trl.trainer.grpo_trainer.gather", lambda tensor: tensor)
        prompts, completions = [prompt for prompt, _ in pairs], [said for _, said in pairs]
        inputs = [{"prompt": prompt} for prompt in prompts]
        theirs = trainer._calculate_rewards(inputs, prompts, completions, [[0]] * len(pairs))
    assert score(Classifier(scorer), pairs).values == pytest.approx(theirs[:, 0].tolist(), abs=1e-6)


def test_batches_change_nothing(scorer: str) -> None:
    alone = [score(Classifier(scorer, batch_tokens=1), [pair]).values[0] for pair in TEXTS]
    for tokens in (1, 20, 100):
        assert score(Classifier(scorer, batch_tokens=tokens), TEXTS).values == pytest.approx(alone, abs=1e-6)


def test_mixed_with_functions_and_under_weights(scorer: str) -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    worker = RewardWorker([length, scorer], [0.5, 2.0])
    worker.open(None)
    report = asyncio.run(worker.score(requests(TEXTS)))
    for (prompt, said), result in zip(TEXTS, report.results, strict=True):
        logit = float(by_hand(scorer, prompt + said))
        assert result.rewards == {"length": len(said), "tiny-rm": pytest.approx(logit, abs=1e-6)}
        assert result.reward == pytest.approx(0.5 * len(said) + 2 * logit, abs=1e-5)


def test_a_loaded_model_with_a_tokenizer_of_its_own(scorer: str, tokenizer: Any, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(scorer).train()
    before = checksum(model.state_dict())
    other = AutoTokenizer.from_pretrained(scorer)
    other.chat_template = "{% for m in messages %}{{ m['content'] }}|{% endfor %}"
    rewards = resolve_rewards([lambda completions: [0.0], model, model], processing_classes=[None, other, None])
    assert [reward.name for reward in rewards] == ["lambda", "tiny-rm", "tiny-rm_2"]
    values = score(rewards[1], CHATS).values
    assert values == pytest.approx([float(by_hand(scorer, t)) for t in ("2+2?|4|", "brief|2+2?|four, I should think|")])
    assert score(rewards[2], CHATS).values == score(Classifier(scorer), CHATS).values != values
    assert checksum(model.state_dict()) == before
    assert not model.training
    assert rewards[1].recorded() == "<Qwen2ForSequenceClassification tiny-rm>"
    travelled = pickle.loads(pickle.dumps(rewards[1]))
    assert score(travelled, CHATS).values == values
    with pytest.raises(RewardError, match="reward_processing_classes: 1 for 2 reward_funcs"):
        resolve_rewards([scorer, scorer], processing_classes=tokenizer)


def test_several_labels_need_a_choice(tokenizer: Any, tmp_path: Path) -> None:
    folder = build(tmp_path / "mood", tokenizer, num_labels=3, id2label={0: "BAD", 1: "GOOD", 2: "ODD"})
    with pytest.raises(ConfigError, match=r"classifier: label: the model has 3 outputs \(BAD, GOOD, ODD\)"):
        resolve_rewards(folder)
    with pytest.raises(ConfigError, match="'FINE' is none of"):
        resolve_rewards({"classifier": {"model": folder, "label": "FINE"}})
    expected = [float(by_hand(folder, p + c).softmax(-1)[1]) for p, c in TEXTS]
    for label in ("GOOD", 1):
        (reward,) = resolve_rewards({"classifier": {"model": folder, "label": label, "name": "mood"}})
        assert score(reward, TEXTS).values == pytest.approx(expected, abs=1e-6)
        assert reward.recorded() == {"classifier": {"model": folder, "name": "mood", "label": label}}


def test_what_is_too_long_fails_or_is_cut(scorer: str, tokenizer: Any) -> None:
    pairs = [("say ", "a"), ("", "a b c d " * 40), ("", "")]
    scores = score(Classifier(scorer), pairs)
    assert scores.values[1:] == [None, None]
    assert scores.values[0] is not None
    assert "tokens, it takes 64 (truncate: left or right cuts)" in scores.errors[1]
    assert "are empty" in scores.errors[2]
    ids = tokenizer("a b c d " * 40, add_special_tokens=False)["input_ids"]
    model = AutoModelForSequenceClassification.from_pretrained(scorer).eval()
    for side, kept in (("left", ids[-10:]), ("right", ids[:10])):
        with torch.inference_mode():
            expected = float(model.score(model.model(torch.tensor([kept])).last_hidden_state[0, -1]))
        cut: Any = side
        value = score(Classifier(scorer, max_length=10, truncate=cut), pairs).values[1]
        assert value == pytest.approx(expected, abs=1e-6)


def test_nan_is_no_reward(scorer: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    torch.nn.init.constant_(model.score.weight, float("nan"))
    report = asyncio.run(RewardWorker(model).score(requests(TEXTS[:1])))
    assert report.results[0].reward is None
    assert report.results[0].error == "tiny-rm gave nan, not a finite number"


def test_a_template_that_refuses_is_the_rows_failure(scorer: str) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(scorer)
    strict = AutoTokenizer.from_pretrained(scorer)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    scores = score(Classifier(model, strict), CHATS)
    assert scores.values[0] is not None
    assert "its chat template refuses the messages (no system)" in scores.errors[1]


def test_models_that_will_not_do(tiny_model: str, scorer: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no sequence classifier \(its config\.json names Qwen2ForCausalLM"):
        resolve_rewards(tiny_model)
    for name in ("nobody/has-this-one", str(tmp_path / "nowhere"), "./nowhere"):
        with pytest.raises(ModelError, match="reward_funcs: classifier: "):
            resolve_rewards(name)
    headless = tmp_path / "headless"
    shutil.copytree(tiny_model, headless)
    config = json.loads((headless / "config.json").read_text())
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "x"}}
    (headless / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"lack score\.weight, which would be random"):
        Classifier(str(headless)).open(None)
    with pytest.raises(RewardError, match=r"could not be made: .*'modle'"):
        resolve_rewards({"classifier": {"modle": scorer}})
    for changes, said in (({"dtype": "int8"}, "dtype"), ({"truncate": "up"}, "truncate"), ({"label": 0}, "one output")):
        with pytest.raises(ConfigError, match=said):
            resolve_rewards({"classifier": {"model": scorer, **changes}})
