"""Scripts that were written for TRL's GRPOTrainer, run by mrl: `from mrl.trl import GRPOConfig, GRPOTrainer`.

docs/trl-scripts.md says what every option becomes.
"""

from mrl.trl.config import GRPOConfig
from mrl.trl.trainer import GRPOTrainer, RichProgressCallback

__all__ = ["GRPOConfig", "GRPOTrainer", "RichProgressCallback"]
