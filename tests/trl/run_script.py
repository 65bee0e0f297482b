"""Runs one of TRL's scripts with the import of the trainer changed, for two steps.

python -m tests.trl.run_script SCRIPT [its arguments …]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import mrl.trl.trainer
from mrl import MRLTrainer
from tests.trl.games import install_clients

SMALL = {"max_steps": 2, "save_steps": 0, "max_completion_length": 60, "max_turns": 4, "learning_rate": 1e-3}
"""Over what the script says, so that a run takes seconds."""


class SmallTrainer(MRLTrainer):
    def __init__(self, **options: Any) -> None:
        options["batch_size"] = min(options["batch_size"], 2)
        super().__init__(**options | SMALL)


def main() -> None:
    script = Path(sys.argv[1])
    text = re.sub(r"^from trl import", "from mrl.trl import", script.read_text(), flags=re.MULTILINE)
    install_clients()
    mrl.trl.trainer.MRLTrainer = SmallTrainer  # type: ignore[misc]
    sys.argv = [str(script), *sys.argv[2:]]
    module = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(text, str(script), "exec"), module)


if __name__ == "__main__":
    main()
