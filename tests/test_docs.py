"""What the documentation names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mrl import MRLTrainer
from mrl.cli.main import COMMANDS
from mrl.config import flat_fields
from mrl.experience.metric_names import metric_names
from mrl.rewards import resolve_rewards
from mrl.simple.metrics import metric_names as simple_names
from mrl.simple.trainers import TRAINERS
from mrl.store.read import RunReader

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    from mrl.cli.flags import ALIASES

    own = {"json", "num-samples", "by", "confidence", "output", "merged", "which", "step", "gradients", "format"}
    own |= {
        "simple-mode",
        "yes",
        "failed",
        "limit",
        "task",
        "dry-run",
        "help",
        "help-all",
        "tests",
        "timeout",
        "run",
        "rows",
        "count",
        "port",
        "max-sessions",
        "live",
        "host",
        "rollouts",
        "step-seconds",
        "like",
    }
    known = {name.replace("_", "-") for name in flat_fields()} | own
    known |= {alias.removeprefix("--") for aliases in ALIASES.values() for alias in aliases}
    for command, rest in re.findall(r"^ {4}mrl ([a-z]+)(.*)$", page.read_text(), re.MULTILINE):
        assert command in COMMANDS, command
        for flag in re.findall(r"(?<!\S)--([a-z-]+)", rest.partition("#")[0]):
            assert flag in known, f"mrl {command} --{flag}"


METRIC = r"(?:reward|eval|rollout|train|sync|sandbox|time)/(?:\w+/)*\w+"


def undocumented(names: set[str]) -> set[str]:
    """Names that the first column of the table of metrics lacks, where NAME stands for any function's."""
    rows = re.findall(r"^\|([^|]+)\|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    known = {name for row in rows for name in re.findall(rf"`({METRIC})`", row)}
    pattern = re.compile("|".join(name.replace("NAME", r"\w+") for name in known))
    return {name for name in names if not pattern.fullmatch(name)}


def test_metrics_named_in_the_code_are_documented() -> None:
    texts = [path.read_text() for path in (ROOT / "mrl").rglob("*.py")]
    names = {name for text in texts for name in re.findall(rf"""["']({METRIC})["']""", text)}
    assert len(names) > 30
    assert undocumented(names) == set()


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1, "soft_punish_cache": 2, "length_penalty": 0.1, "zero_variance_groups": "resample"},
        {"beta": 0.1, "kl_in": "reward", "top_entropy_quantile": 0.5, "async_mode": "queue"},
        pytest.param({"mode": "simple", "algorithm": "grpo"}, marks=pytest.mark.slow),
    ],
    ids=["shaped", "queue", "simple"],
)
def test_metrics_of_real_runs_are_documented(options: dict[str, Any], tiny_model: str, tmp_path: Path) -> None:
    def distinct(completions: list[str], **_: Any) -> list[float]:
        return [len(set(text)) / 8 for text in completions]

    tasks = [{"prompt": f"say {i}", "testcases": ["assert f(1) == 1"]} for i in range(4)]
    sizes: dict[str, Any] = {"max_steps": 2, "batch_size": 2, "num_generations": 4, "max_completion_length": 8}
    trainer = MRLTrainer(
        model=tiny_model,
        device="cpu",
        train_dataset=tasks,
        eval_dataset=tasks[:2],
        reward_funcs=[distinct, "sandbox"],
        sandbox="process",
        run_dir=str(tmp_path / "r"),
        report_to=[],
        **sizes,
        **options,
    )
    trainer.train()
    with RunReader(tmp_path / "r") as reader:
        names = {*reader.metric_names(), *reader.metric_names("eval")}
    assert {"reward/distinct/mean", "sandbox/passed", "eval/failed_fraction", "time/eval", "train/loss"} <= names
    assert {name for name in undocumented(names) if not name.startswith("trl/")} == set()
    rewards = resolve_rewards([distinct, "sandbox"])
    if options.get("mode") == "simple":
        known = simple_names(TRAINERS.get(options["algorithm"]), rewards, evaluates=True)
    else:
        known = metric_names(trainer.config, rewards, evaluates=True)
    assert {name for name in names - known if not name.startswith("trl/")} == set(), "best_metric would refuse them"
    assert undocumented(known - {"trl/"}) == set()
