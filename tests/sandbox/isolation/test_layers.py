"""The forbidden acts, in every layer, as this user and as an ordinary one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.errors import SandboxError
from mrl.sandbox.confine import landlock, report, selftest
from mrl.sandbox.confine.names import LAYERS
from mrl.sandbox.engine.client import IsolatedExecutor
from mrl.sandbox.engine.server import COMMON, RARE
from tests.sandbox.asking import Call, execution, seen

ROOT = Path(__file__).parents[3]


def test_some_layer_holds_here() -> None:
    found = report.describe()
    assert found.layer in LAYERS, found.lines()
    assert found.layer == next(result.layer for result in found.results if result.holds)


async def test_the_acts_bite_without_a_layer(tmp_path: Path) -> None:
    """The self-test can fail: with limits only, the same program gets through."""
    canary = tmp_path / "canary"
    canary.write_text("x")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o005)
    facts = {
        "pid": os.getpid(), "folder": str(tmp_path), "file": str(canary), "port": 1, "path": "/none",
        "abstract": "none", "threads": 1, "memory": 1, "descriptors": 1,
        "skip": ["replace the process", "signal every process"],
    }  # fmt: skip
    executor = IsolatedExecutor(slots=1, layer="unsafe", unsafe=True)
    canary.chmod(0o644)
    (one,) = await executor.execute([execution(selftest.PROBE.read_text(), [Call("probe", (facts,))])])
    await executor.close()
    assert seen(one).answers[0].kind == "value", one
    through = set(seen(one).answers[0].value)
    assert {"read /etc/passwd", "fork", "start a program", "listen"} <= through


def test_unsafe_must_be_asked_for() -> None:
    with pytest.raises(SandboxError, match="unsafe=True"):
        IsolatedExecutor(layer="unsafe")
    with pytest.raises(SandboxError, match="unknown"):
        IsolatedExecutor(layer="D")


def test_refusal_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {layer: selftest.LayerResult(layer, False, f"no {layer}") for layer in LAYERS}
    monkeypatch.setattr(selftest, "test_layer", lambda layer, python: failing[layer])
    with pytest.raises(SandboxError, match=r"layer A: no A; layer B: no B; layer C: no C.*unsafe=True"):
        selftest.choose("auto", False)
    assert selftest.choose("auto", True) == "unsafe"
    failing["C"] = selftest.LayerResult("C", True, "")
    assert selftest.choose("auto", True) == "C"
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="Linux only"):
        selftest.choose("auto", False)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_get_a_clear_message(system: str) -> None:
    """In a process in which what is missing there is missing."""
    code = (
        "import asyncio, subprocess, sys, tempfile, logging, concurrent.futures.thread\n"
        f"sys.platform = {system!r}\n"
        "for name in ('resource', 'fcntl', 'ctypes'): sys.modules[name] = None\n"
        "from mrl.errors import SandboxError\n"
        "from mrl.sandbox.confine import report\n"
        "from mrl.sandbox.engine.client import IsolatedExecutor\n"
        "print(report.describe().layer)\n"
        "try: IsolatedExecutor(unsafe=True)\nexcept SandboxError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("None\n"), done.stderr
    assert "Linux only" in done.stdout
    assert "remote sandbox" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="this user is an ordinary one already")
def test_every_layer_holds_for_an_ordinary_user() -> None:
    code = (
        "import os\nfrom mrl.sandbox.confine import selftest\nassert os.geteuid() != 0\n"
        "print([selftest.test_layer(layer) for layer in 'ABC'])"
    )
    for python in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        command = [python, "-c", code]
        if python is None:
            continue
        try:
            done = subprocess.run(
                command, user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=120,
                env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            )  # fmt: skip
        except PermissionError:
            continue
        if done.returncode == 0:
            break
    else:
        pytest.skip("no interpreter and checkout that an ordinary user may read")
    expected = [selftest.test_layer(layer) for layer in LAYERS]
    assert done.stdout.count("holds=True") == sum(result.holds for result in expected), done.stdout


def test_without_user_namespaces_another_layer_is_found() -> None:
    """As in a container that forbids them: inside a user namespace below which no further one can be made."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") if os.geteuid() == 0 else sys.executable
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    code = (
        "from mrl.sandbox.confine import selftest\n"
        "print([(layer, selftest.test_layer(layer).holds) for layer in 'ABC'])"
    )
    command = ["unshare", "-Ur", "--mount-proc", "-pf", "--mount", "sh", "-c", script, str(python), code]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", timeout=120,
        env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]},
        **({"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}),
    )  # fmt: skip
    if done.returncode != 0:
        pytest.skip(f"cannot be set up here: {done.stderr[-200:]}")
    without = [("A", False), *((layer, selftest.test_layer(layer).holds) for layer in "BC")]
    assert done.stdout.strip() == str(without)


async def test_modules_that_solutions_import() -> None:
    """Every module preloaded for layer C can also be imported where less is preloaded, by name."""
    names = [name for name in COMMON + RARE if not name.startswith("_") and name != "imaplib"]
    code = "def f(name):\n    __import__(name)\n    return name"
    for layer in LAYERS:
        if not selftest.test_layer(layer).holds:
            continue
        executor = IsolatedExecutor(slots=1, layer=layer)
        (one,) = await executor.execute([execution(code, [Call("f", (name,)) for name in names])])
        await executor.close()
        missing = {name for name, answer in zip(names, seen(one).answers, strict=True) if answer.kind != "value"}
        assert missing <= {"bz2", "lzma", "ctypes", "symtable", "uuid"}, (layer, missing)


async def test_an_interpreter_below_the_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not str(tmp_path).startswith("/tmp/") or not selftest.test_layer("A").holds:
        pytest.skip("needs layer A, and pytest's folder below /tmp")
    tmp_path.chmod(0o755)
    (tmp_path / "lies_below.py").write_text("x = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        "import lies_below, tempfile\ndef f():\n    open('mine', 'w').close()\n"
        "    return len(open(lies_below.__file__).read()), tempfile.gettempdir()\n"
    )
    executor = IsolatedExecutor(slots=1, layer="A", modules=("lies_below",))
    (one,) = await executor.execute([execution(code, [Call("f")])])
    await executor.close()
    assert seen(one).answers[0].value == (5, "/var/tmp"), one


def test_a_landlock_that_lets_files_be_emptied_is_not_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Versions 1 and 2 do not know truncation, and `open(path, O_RDONLY | O_TRUNC)` asks no right to write."""
    monkeypatch.setattr(landlock.kernel, "landlock_abi", lambda: 2)
    with pytest.raises(OSError, match="emptied"):
        landlock.make_ruleset([str(tmp_path)], [])


@pytest.mark.skipif(landlock.kernel.landlock_abi() == 0, reason="this kernel has no Landlock")
def test_landlock_withholds_a_folder_of_a_readable_one(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "solutions").write_text("x")
    (tmp_path / "module").write_text("x")
    script = """if True:
        import os, sys
        from mrl.sandbox.confine import kernel, landlock, layers
        folder, = sys.argv[1:]
        rules = landlock.make_ruleset([folder], [folder + "/site-packages"])
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        layers.perform([kernel.landlock_restrict(rules)])
        assert open(folder + "/module").read() == "x" and "module" in os.listdir(folder)
        try: print(open(folder + "/site-packages/solutions").read())
        except PermissionError: print("withheld")
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "withheld\n", done.stderr
