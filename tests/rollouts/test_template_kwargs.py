"""`chat_template_kwargs` reach the template in every source, not in single turns alone."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import pytest

from mrl.rollouts import SourceSetup
from mrl.rollouts.function.source import FunctionSource
from mrl.rollouts.openenv.source import OpenEnvSource
from mrl.rollouts.prompts import PromptEncoder
from mrl.rollouts.runner import Runner
from mrl.rollouts.tools.source import ToolSource
from mrl.types import Message, Task
from tests.rollouts import scripted
from tests.rollouts.letters import Letters
from tests.rollouts.openenv.duck_games import Guess

ASK: list[Message] = [{"role": "user", "content": "go"}]


def quiet() -> SourceSetup:
    """Of a template that writes what it is given as `mood` before everything."""
    made = scripted.setup(max_tokens=8)
    tokenizer = copy.deepcopy(made.tokenizer)
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    return replace(made, tokenizer=tokenizer, encoder=PromptEncoder(tokenizer, template_kwargs={"mood": "quietly"}))


@pytest.mark.parametrize(("kind", "options"), [(ToolSource, {"tools": []}), (OpenEnvSource, {"env_class": Guess})])
def test_conversations(kind: Any, options: dict[str, Any]) -> None:
    setup = quiet()
    prompt = kind.create(setup, **options).chat.render(ASK, [])
    assert setup.tokenizer.decode(prompt).startswith("quietly")
    assert prompt == setup.encoder.encode(ASK)


def test_texts_for_rollout_functions() -> None:
    seen = []

    def function(prompts: list[str], args: Any, processing_class: Any) -> dict[str, Any]:
        seen.extend(prompts)
        return {"prompt_ids": [[1]], "completion_ids": [[3]], "logprobs": [[-0.1]]}

    asyncio.run(
        Runner(FunctionSource.create(quiet(), rollout_func=function), Letters()).run([Task("a", ASK)], 1, seed=0)
    )
    assert seen[0].startswith("quietly")
