"""The parts of `scripts/gpu_check.py`, by subject."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # vs_trl.py: random models, and TRL's side
