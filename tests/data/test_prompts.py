"""Prompts and columns that tasks may have."""

from __future__ import annotations

from typing import Any

import pytest

from mrl.data import check_prompt_lengths, load_tasks, require_columns
from mrl.errors import DataError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "is missing"),
        ("  \n", "is empty"),
        (3, "is of type int"),
        ({"messages": [USER]}, "is of type dict"),
        ([], "empty list of messages"),
        (["hi"], "message 0 is of type str"),
        ([USER, {"role": 3, "content": "x"}], "message 1: 'role' is 3"),
        ([{"content": "x"}], "message 0: 'role' is None"),
        ([{"role": "user"}], "there is no 'content'"),
        ([{"role": "user", "content": 3}], "'content' is of type int"),
        ([USER, {"role": "assistant", "content": "x"}], "ends with an assistant message"),
    ],
)
def test_bad_prompts_name_row_and_column(prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"row 1, column 'prompt'.*{message}"):
        load_tasks([{"prompt": "fine"}, {"prompt": prompt}])


def test_good_prompts() -> None:
    for prompt in ("x", [USER], [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text"}]}]):
        assert load_tasks([{"prompt": prompt}])[0].prompt == prompt


def test_prompt_lengths() -> None:
    tasks = load_tasks([{"prompt": "x" * n, "id": f"t{n}"} for n in (1, 9, 3, 12)])
    check_prompt_lengths(tasks, len, 12)
    with pytest.raises(DataError, match=r"row 1.*'t9'.* 9 tokens .* 8 fit; 2 of 4 rows.* 12 tokens.*max_model_len"):
        check_prompt_lengths(tasks, len, 8)


def test_needed_columns() -> None:
    tasks = load_tasks([{"prompt": "a", "testcases": ["t"]}, {"prompt": "b", "testcases": None}])
    require_columns(tasks[:1], ["testcases"], "the code reward")
    with pytest.raises(DataError, match=r"the code reward needs column 'testcases', but row 1 .* has None"):
        require_columns(tasks, ["testcases"], "the code reward")
    with pytest.raises(DataError, match=r"needs a column 'testcase'.*did you mean 'testcases'"):
        require_columns(tasks, ["testcase"], "the code reward")
