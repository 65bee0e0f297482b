"""Beginners: conversations become lessons token for token as they are sampled, and a policy that imitates them."""

from __future__ import annotations

import random
from pathlib import Path

from transformers import AutoTokenizer

from mrl.rollouts.chat import chat_format
from mrl.rollouts.conversation import Conversation
from mrl.rollouts.tools.functions import Tool
from mrl.starter.beginner import _marked, _rendered, build_beginner, demonstrate
from mrl.types import Completion
from tests.rollouts.counting_tools import Guess


def demonstrations(count: int) -> list[list[dict]]:
    rng, game = random.Random(0), Guess()

    def move():
        return "done" if game.found else ("guess", {"number": rng.randrange(4)})

    return [demonstrate(game, f"Round {n}.", {"secret": n % 4}, move, 3) for n in range(count)]


def test_a_demonstration_is_a_conversation_with_the_environment() -> None:
    shown = demonstrations(20)
    assert all(len([m for m in one if m["role"] == "tool"]) <= 3 for one in shown)
    right = [one for one in shown if one[-1]["content"] == "done"]
    assert right
    assert all(one[-2]["content"] == "right" for one in right)
    assert shown[0][0] == {"role": "user", "content": "Round 0. Guess a number from 0 to 3."}


def test_lessons_are_tokenised_as_conversations_are_sampled(tmp_path: Path) -> None:
    """Prompts and completions of a `Conversation` are the lesson, and what it samples is what is learned."""
    tool = Tool.of(Guess().guess).spec
    shown = next(one for one in demonstrations(20) if one[-1]["content"] == "done" and len(one) > 4)
    (text,) = _rendered([shown], [tool], tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids, learned = _marked(text, tokenizer)
    talk = Conversation(chat_format(tokenizer), shown[:1], [tool])
    for number, message in enumerate(shown):
        if message["role"] == "assistant":
            prompt = list(talk.next_prompt())
            assert ids[: len(prompt)] == prompt
            end = next(n for n in range(len(prompt), len(ids)) if ids[n] == tokenizer.eos_token_id) + 1
            turn = talk.add_completion(Completion("", ids[len(prompt) : end], [0.0] * (end - len(prompt)), "stop", 0))
            made = [call.name for call in turn.tool_calls]
            assert made == [call["function"]["name"] for call in message.get("tool_calls", [])]
        elif number:
            talk.add(message)
    (sample,) = talk.samples
    assert ids == sample.prompt_ids + sample.completion_ids
    assert learned == [False] * len(sample.prompt_ids) + [bool(on) for on in sample.mask]


def test_a_beginner_learns_the_form_first(tmp_path: Path) -> None:
    losses: list[float] = []
    folder = build_beginner(
        tmp_path / "b", demonstrations(40), [Guess().guess], steps=8, report=lambda step, loss: losses.append(loss)
    )
    assert losses[-1] < 0.8 * losses[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    call = '<tool_call>{"name": "guess", "arguments": {"number": 3}}</tool_call>'
    assert len(tokenizer(call)["input_ids"]) == 3
