"""What workers' processes have imported when they are forked. Nothing here computes, or starts a thread."""

import peft  # noqa: F401
import torch  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import tests.process_backend  # noqa: F401
