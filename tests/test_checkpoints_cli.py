"""`mrl checkpoints` told what it cannot do."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.cli import main
from mrl.config import OrchestratorConfig
from mrl.resume import record_options
from mrl.store.checkpoints import write_checkpoint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verfy"], "'verfy' is none of list, verify, export, push"),
        (["list", "somewhere"], "leave out somewhere"),
        (["verify", "--which", "7"], "leave out --which"),
        (["--merged"], "leave out --merged"),
        (["export"], "say where to"),
        (["export", "a_file"], "a_file: cannot be made a folder"),
        (["export", "a_file/below"], "cannot be made a folder"),
        (["export", "run"], "is not empty"),
        (["export", "new", "--which", "7"], "no checkpoint '7'"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    record_options(tmp_path / "run", OrchestratorConfig())
    write_checkpoint(tmp_path / "run" / "checkpoints" / "step-1", lambda folder: None, {})
    (tmp_path / "a_file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["checkpoints", "run", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
