"""The shipped policy is an ordinary, small Hugging Face model folder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from mrl import starter
from mrl.starter.corpus import answer

TOKENIZER = AutoTokenizer.from_pretrained(starter.STARTER_DIR)
MESSAGES = [
    {"role": "system", "content": "Answer with Python."},
    {"role": "user", "content": "Write a function f(n) that returns n plus 3."},
    {"role": "assistant", "content": "```python\ndef f(n):\n    return n + 3\n```"},
    {"role": "tool", "content": "passed"},
    {"role": "user", "content": "Now n plus 4."},
]
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return TOKENIZER


def render(messages: list[dict], **options) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


def test_the_folder_is_small_and_has_no_strays() -> None:
    files = {path.name: path.stat().st_size for path in starter.STARTER_DIR.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert set(files) == expected
    assert sum(files.values()) <= 4_000_000


def test_the_model_loads_as_it_is_and_writes_a_program() -> None:
    model = AutoModelForCausalLM.from_pretrained(starter.STARTER_DIR)
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings >= 1024
    assert model.config.vocab_size == len(TOKENIZER)
    task = starter.load_tasks("heldout")[0]
    inputs = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": task["prompt"]}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=64)[0, inputs["input_ids"].shape[1] :]
    assert ids[-1] == TOKENIZER.eos_token_id
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert text.startswith("```python\ndef f(")
    assert text.endswith("```")


def test_special_tokens_agree_between_the_files(tokenizer: PreTrainedTokenizerBase) -> None:
    generation = GenerationConfig.from_pretrained(starter.STARTER_DIR)
    config = AutoModelForCausalLM.from_pretrained(starter.STARTER_DIR).config
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert generation.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == config.pad_token_id == tokenizer.pad_token_id


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_answers_are_short() -> None:
    lengths = [len(TOKENIZER(answer(task["solution"]))["input_ids"]) for task in starter.load_tasks("train")]
    assert sum(lengths) / len(lengths) < 28
    assert max(lengths) < 60


def test_the_chat_template_is_append_only() -> None:
    for end in range(1, len(MESSAGES)):
        assert render(MESSAGES[: end + 1]).startswith(render(MESSAGES[:end]))
    before_answer = render(MESSAGES[:2], add_generation_prompt=True)
    assert render(MESSAGES[:3]) == before_answer + MESSAGES[2]["content"] + "<|im_end|>\n"


def test_the_chat_template_shows_tools_and_calls() -> None:
    call = {"type": "function", "function": {"name": "run", "arguments": {"x": 1}}}
    messages = [*MESSAGES[:2], {"role": "assistant", "content": "", "tool_calls": [call]}, MESSAGES[3]]
    text = render(messages, tools=[TOOL])
    assert text.count("<|im_start|>system") == 1
    assert "Answer with Python." in text
    assert '"name": "run"' in text
    assert '<tool_call>{"name": "run", "arguments": {"x": 1}}</tool_call><|im_end|>' in text
    assert text.startswith(render(messages[:2], tools=[TOOL]))
