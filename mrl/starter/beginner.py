"""Beginners: policies of a tenth of a million parameters that know how a task with tools is played, and play it badly.

Made as the starter policy was, by a short supervised phase on demonstrations most of which are no good; they are
conversations with calls of tools here, and made in half a minute, so that a beginner is built where it is needed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import get_json_schema, logging

from mrl.starter.supervised import Marked, Schedule, fit, new_policy
from mrl.starter.tokenizer import END_OF_TURN, SPECIAL_TOKENS, START_OF_TURN, save_tokenizer, train_tokenizer
from mrl.types import Message

Move = tuple[str, dict[str, Any]] | str
"""A tool's name with its arguments, or what is said at the end."""

PIECES = r"[^\n\p{N}\p{Lu}]*\n|\p{Lu}\p{L}*|\p{N}+"
"""What has a token of its own: a line, a word with a capital, a number. All between them becomes one where it recurs,
so that a call of a tool takes a handful of tokens."""
VOCABULARY = 1024
_ANSWER = f"{START_OF_TURN}assistant\n"
_SPECIAL = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))


def demonstrate(
    environment: Any, prompt: str, columns: dict[str, Any], move: Callable[[], Move], most_turns: int
) -> list[Message]:
    """A conversation in which `move` says what the assistant does, and the environment answers."""
    said = environment.reset(**columns)
    messages: list[Message] = [{"role": "user", "content": prompt + (said or "")}]
    for _ in range(most_turns):
        made = move()
        if isinstance(made, str):
            return [*messages, {"role": "assistant", "content": made}]
        name, arguments = made
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": name, "content": str(getattr(environment, name)(**arguments))})
    return messages


def build_beginner(
    folder: Path,
    demonstrations: Sequence[list[Message]],
    tools: Sequence[Callable[..., Any]],
    *,
    seed: int = 0,
    steps: int = 300,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Path:
    """A model folder with a policy that imitates the conversations. tools: what they call. Returns the folder."""
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    texts = _rendered(demonstrations, [get_json_schema(tool) for tool in tools], folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    lessons = [_marked(text, tokenizer) for text in texts]
    rng = random.Random(f"{seed}/beginner")
    # Weights as large as their width asks for: with the usual 0.02 it takes thousands of steps to learn to copy a word.
    model = new_policy(tokenizer, seed, hidden_size=64, layers=2, initializer_range=0.125)
    schedule = Schedule(steps, batch_size=32, learning_rate=5e-3, warmup=40)
    fit(model, lambda: rng.choices(lessons, k=schedule.batch_size), tokenizer.pad_token_id, schedule, report)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    return folder


def _rendered(demonstrations: Sequence[list[Message]], tools: list[Any], folder: Path) -> list[str]:
    """The conversations by the chat template, and in the folder a tokenizer made of their text."""
    save_tokenizer(train_tokenizer([], 0), folder, max_length=2048)  # for its template, which needs no words
    plain: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    texts = [str(plain.apply_chat_template(one, tools=tools, tokenize=False)) for one in demonstrations]
    written = [part for text in texts for part in _SPECIAL.split(text)]
    save_tokenizer(train_tokenizer(written, VOCABULARY, PIECES), folder, max_length=2048)
    return texts


def _marked(text: str, tokenizer: PreTrainedTokenizerBase) -> Marked:
    """Tokenised turn by turn, as a conversation is sampled; what the assistant says, with the turn's end, is marked."""
    before, *turns = text.split(_ANSWER)
    parts = [(before + _ANSWER, False)]
    for turn in turns:
        said, _, after = turn.partition(END_OF_TURN)
        parts += [(said + END_OF_TURN, True), (after + _ANSWER, False)]
    parts.pop()  # after the last turn
    written = tokenizer([part for part, _ in parts], add_special_tokens=False)["input_ids"]
    ids = [token for part in written for token in part]
    return ids, [learned for part, (_, learned) in zip(written, parts, strict=True) for _ in part]
