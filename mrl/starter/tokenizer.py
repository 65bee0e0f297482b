"""The starter policy's tokenizer: a small byte-level BPE that can write any text, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TURN, START_OF_TURN, PADDING = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
SPECIAL_TOKENS = [PADDING, START_OF_TURN, END_OF_TURN]

WORDS_AND_DIGITS = r"```\w*\n?|\n +\p{L}*| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
"""Digits stand alone, so that a number is copied digit by digit; an indentation is one piece with its first word."""

CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n' }}"
    "{%- if messages and messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- 'Tools, one JSON schema a line:\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}"
    '{{- \'Call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n\' }}'
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- set call = call.function if call.function is defined else call %}"
    "{{- '<tool_call>{\"name\": ' + call.name | tojson + ', \"arguments\": ' }}"
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{- '}</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML. Append-only: what a history renders to is a prefix of what the longer history renders to."""


def train_tokenizer(texts: Iterable[str], vocabulary: int, pieces: str = WORDS_AND_DIGITS) -> Tokenizer:
    """Byte-level BPE over `texts`. All 256 bytes are tokens, so any text can be written and read back unchanged.

    pieces: what is cut out of a text, so that no token reaches beyond it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Two files: `tokenizer.json` and `tokenizer_config.json` (with the chat template inside)."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        # The generic class keeps our pre-tokenizer. This is why the policy is a Llama: for model type qwen2,
        # transformers 5 takes Qwen2Tokenizer whatever is said here, and that brings its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "bos_token": None,
        "model_max_length": max_length,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [START_OF_TURN],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
