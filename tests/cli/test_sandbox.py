"""`mrl sandbox`, as it is typed."""

import json

import pytest

from mrl.cli.main import main
from mrl.sandbox.confine import selftest

pytestmark = pytest.mark.skipif(
    bool(selftest.unsupported()) or not any(selftest.test_layer(layer).holds for layer in "ABC"),
    reason="no layer of isolation works here",
)


def mrl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sandbox", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def files(tmp_path):
    def write(code: str, tests: object) -> list[str]:
        (tmp_path / "program.py").write_text(code)
        (tmp_path / "tests.json").write_text(tests if isinstance(tests, str) else json.dumps(tests))
        return ["run", str(tmp_path / "program.py"), "--tests", str(tmp_path / "tests.json")]

    return write


def test_check_names_the_layer(capsys):
    assert mrl("check") == 0
    assert capsys.readouterr().out.startswith("layer: ")
    assert mrl("check", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layers"][report["layer"]]["holds"] is True


def test_a_program_is_graded(files, capsys):
    arguments = files("print('hello')\ndef f(x): return x", ["assert f(1) == 1", "assert f(1) == 2"])
    assert mrl(*arguments) == 1
    out = capsys.readouterr().out
    assert out.startswith("failed: 1 of 2 tests passed\ntest 1: f(1) == 2: false; got 1\n  test 0: passed")
    assert "--- stdout\nhello" in out
    assert mrl(*arguments, "--json", "--timeout", "5") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["status"] == "failed"
    assert [test["passed"] for test in verdict["tests"]] == [True, False]
    assert verdict["stdout"] == "hello\n"
    assert mrl(*files("print(int(input()) * 2)", [{"input": "2", "output": "4"}])) == 0
    assert "passed: 1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize("options", [["modules=[numpy]", "slots=1"], ['{"modules": ["numpy"]}']])
def test_third_party_modules_can_be_allowed(files, capsys, options):
    arguments = files("import numpy\ndef f(n): return int(numpy.arange(n).sum())", ["assert f(5) == 10"])
    assert mrl(*arguments) == 1
    assert "No module named 'numpy'" in capsys.readouterr().out
    assert mrl(*arguments, "--sandbox-options", *options) == 0


def test_the_timeout_counts(files, capsys):
    assert mrl(*files("while True: pass", ["assert f(1)"]), "--timeout", "0.5") == 1
    assert "timeout: 0 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tests", "options", "message"),
    [
        ("[", [], "is not JSON"),
        ("[]", [], "the list is empty"),
        (["x = 1"], [], "asserts nothing"),
        (["assert f"], ["--timeout", "-1"], "timeout"),
        (["assert f"], ["--memory-mb", "1"], "memory_mb"),
        (["assert f"], ["--sandbox", "docker"], "'docker' is not available"),
        (["assert f"], ["--sandbox-options", "slot=1"], "it has slots, layer, unsafe, modules"),
        (["assert f"], ["--sandbox-options", "slots"], "not of the form key=value"),
        (["assert f"], ["--sandbox-options", "modules=[none_such]"], "'none_such' is not installed"),
    ],
)
def test_what_can_be_mended_ends_with_2(files, capsys, tests, options, message):
    assert mrl(*files("def f(): pass", tests), *options) == 2
    assert message in capsys.readouterr().err


def test_missing_files_and_commands(files, capsys):
    arguments = files("x = 1", ["assert x"])
    assert mrl("run", "/nowhere/program.py", "--tests", arguments[3]) == 2
    assert "cannot read '/nowhere/program.py'" in capsys.readouterr().err
    assert mrl("walk") == 2
    assert mrl() == 0
    assert "usage: mrl sandbox" in capsys.readouterr().out
