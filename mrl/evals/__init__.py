"""Measuring a model without training it; and evaluation tests, which measure and train.

from mrl.evals import EvaluateResult, EvaluationRow, evaluation_test
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrl.evals.bridge.openenv import create_openenv_vllm_rollout_func
    from mrl.evals.report import TestReport
    from mrl.evals.running import run_test
    from mrl.evaltests.loaders import (
        DataLoaderResult,
        DynamicDataLoader,
        EvaluationDataLoader,
        EvaluationRowJsonlDataLoader,
        InlineDataLoader,
        default_dataset_adapter,
    )
    from mrl.evaltests.messages import Message
    from mrl.evaltests.results import EvaluateResult, EvaluationThreshold, MetricResult, StepOutput
    from mrl.evaltests.rows import EvalMetadata, EvaluationRow, ExecutionMetadata, InputMetadata
    from mrl.evaltests.status import Status
    from mrl.evaltests.test import EvaluationTest, evaluation_test
    from mrl.processors.agent import AgentRolloutProcessor
    from mrl.processors.base import RolloutProcessor, RolloutProcessorConfig
    from mrl.processors.openenv import OpenEnvRolloutProcessor
    from mrl.processors.remote import RemoteRolloutProcessor
    from mrl.processors.retries import BackoffConfig, ExceptionHandlerConfig
    from mrl.processors.single_turn import NoOpRolloutProcessor, SingleTurnRolloutProcessor

_WHERE = {
    "mrl.evals.bridge.openenv": ("create_openenv_vllm_rollout_func",),
    "mrl.evals.report": ("TestReport",),
    "mrl.evals.running": ("run_test",),
    "mrl.evaltests.loaders": (
        *("DataLoaderResult", "DynamicDataLoader", "EvaluationDataLoader", "EvaluationRowJsonlDataLoader"),
        *("InlineDataLoader", "default_dataset_adapter"),
    ),
    "mrl.evaltests.messages": ("Message",),
    "mrl.evaltests.results": ("EvaluateResult", "EvaluationThreshold", "MetricResult", "StepOutput"),
    "mrl.evaltests.rows": ("EvalMetadata", "EvaluationRow", "ExecutionMetadata", "InputMetadata"),
    "mrl.evaltests.status": ("Status",),
    "mrl.evaltests.test": ("EvaluationTest", "evaluation_test"),
    "mrl.processors.agent": ("AgentRolloutProcessor",),
    "mrl.processors.base": ("RolloutProcessor", "RolloutProcessorConfig"),
    "mrl.processors.openenv": ("OpenEnvRolloutProcessor",),
    "mrl.processors.remote": ("RemoteRolloutProcessor",),
    "mrl.processors.retries": ("BackoffConfig", "ExceptionHandlerConfig"),
    "mrl.processors.single_turn": ("NoOpRolloutProcessor", "SingleTurnRolloutProcessor"),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}

__all__ = [
    "AgentRolloutProcessor",
    "BackoffConfig",
    "DataLoaderResult",
    "DynamicDataLoader",
    "EvalMetadata",
    "EvaluateResult",
    "EvaluationDataLoader",
    "EvaluationRow",
    "EvaluationRowJsonlDataLoader",
    "EvaluationTest",
    "EvaluationThreshold",
    "ExceptionHandlerConfig",
    "ExecutionMetadata",
    "InlineDataLoader",
    "InputMetadata",
    "Message",
    "MetricResult",
    "NoOpRolloutProcessor",
    "OpenEnvRolloutProcessor",
    "RemoteRolloutProcessor",
    "RolloutProcessor",
    "RolloutProcessorConfig",
    "SingleTurnRolloutProcessor",
    "Status",
    "StepOutput",
    "TestReport",
    "create_openenv_vllm_rollout_func",
    "default_dataset_adapter",
    "evaluation_test",
    "run_test",
]


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    """Import on first use: a test's module needs no torch to be imported."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
