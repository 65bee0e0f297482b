"""Scripts of TRL's, with the import of the trainer changed and nothing else, against servers of the same classes.

Ours of that kind is examples/trl_environment.py. TRL's own are run where MRL_TRL_EXAMPLES names the folder
`examples/scripts/openenv` of a checkout.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.store.run import read_rows
from tests.ports import free_port, wait_for
from tests.rollouts.calling_model import build_calling_model
from tests.vision_models import build_calling_llava

ROOT = Path(__file__).parents[2]
SCRIPTS = os.environ.get("MRL_TRL_EXAMPLES", "")
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("echo", {"message": "Hello World!"}),
    ("guess", {"guess": "[crane]"}),
    ("move", {"direction": "left"}),
    ("stay", {}),
    ("place", {"row": 1, "col": 1, "number": 1}),
    ("click", {"bid": "13"}),
    ("observe", {}),
    ("lane_change", {"direction": "left"}),
]
SHORT = ["--system-prompt-path", "prompt.txt", "--num-generations", "2", "--gradient-accumulation-steps", "4"]
"""Boards are long for a tokenizer of bytes."""
ARGUMENTS = {
    "echo": ["--model", "MODEL", "--env-host", "URL/echo"],
    "catch": ["--model", "MODEL", "--env-mode", "space", "--env-host", "URL/catch", "--dataset-size", "8"],
    "wordle": ["--model", "MODEL", "--env-url", "URL/wordle", "--dataset-size", "8"],
    "multi_env": ["--wordle-url", "URL/wordle", "--catch-url", "URL/catch"],
    "sudoku": ["--model-id", "MODEL", "--env-host", "URL/sudoku", "--dataset-size", "8", *SHORT],
    "browsergym_llm": ["--model-id", "MODEL", "--space-url", "URL/browser", "--dataset-size", "8"],
    "browsergym": ["--model-id", "MODEL", "--space-url", "URL/browser", "--dataset-size", "8"],
    "carla": ["--model", "MODEL", "--env-urls", *["URL/carla"] * 4],
    "carla_vlm": ["--model", "MODEL", "--env-urls", *["URL/carla"] * 4],
    "carla_vlm_gemma": ["--model", "MODEL", "--env-urls", *["URL/carla"] * 4, "--report-to", "none"],
}
NEED_IMAGES = ("browsergym", "carla_vlm", "carla_vlm_gemma")
"""Scripts whose tools answer with images."""


def written(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


SAYS = tuple(written(*call) for call in CALLS)


def test_our_own_script(tmp_path: Path) -> None:
    model = build_calling_model(tmp_path / "m", [written("guess", {"number": number}) for number in (3, 10, 17)])
    script = runpy.run_path(str(ROOT / "examples" / "trl_environment.py"))
    with pytest.warns(UserWarning, match="logging_steps=1") as noted:
        result = script["main"](["--model", str(model), "--output-dir", str(tmp_path / "run"), "--max-steps", "1"])
    assert result.status == "finished"
    assert result.run_dir == tmp_path / "run"
    assert result.checkpoint is not None
    saved, trained = ((folder / "model.safetensors").read_bytes() for folder in (result.run_dir, result.checkpoint))
    assert saved == trained, "as TRL's `save_model` leaves it"
    rows = list(read_rows(tmp_path / "run", "rollouts"))
    assert len(rows) == 8
    assert all(row["status"] == "ok" for row in rows)
    assert any(row["metrics"]["tool_calls"] for row in rows)
    assert all(row["reward"] == pytest.approx(sum(row["rewards"].values())) for row in rows), "TRL adds them up"
    assert [str(one.message) for one in noted if "logging_steps" in str(one.message)] == [
        "logging_steps=1: every step is recorded, with its completions"
    ]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "tests.trl.games", str(port)], cwd=ROOT)
    wait_for(port, server)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_calling_model(tmp_path_factory.mktemp("caller"), SAYS, strength=6.0, context=16384)


@pytest.fixture(scope="module")
def seeing_caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_calling_llava(tmp_path_factory.mktemp("seeing"), SAYS, strength=6.0, context=16384)


@pytest.mark.openenv
@pytest.mark.slow
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_script_of_trls(name: str, url: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    caller = request.getfixturevalue("seeing_caller" if name in NEED_IMAGES else "caller")
    (tmp_path / "Qwen").mkdir()  # which multi_env.py names in its text
    (tmp_path / "Qwen" / "Qwen3-1.7B").symlink_to(caller)
    (tmp_path / "prompt.txt").write_text("You play Sudoku.")
    words = {"MODEL": str(caller)}
    arguments = [words.get(word, word.replace("URL/", f"{url}/")) for word in ARGUMENTS[name]]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MRL_RUNS": str(tmp_path / "runs"),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.trl.run_script", str(Path(SCRIPTS) / f"{name}.py"), *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    (config,) = tmp_path.rglob("config.yaml")
    rows = list(read_rows(config.parent, "rollouts"))
    assert {row["step"] for row in rows} == {1, 2}
    assert [row["error"] for row in rows if row["status"] != "ok"] == []
    said = [message["content"] for row in rows for message in row["messages"] if message["role"] == "tool"]
    answers = [content for content in said if "error" not in str(content)]
    assert answers, "some calls are answered by the environment"
    assert any("image" in str(content) for content in answers) == (name in NEED_IMAGES)
