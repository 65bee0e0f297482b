"""Scores at a request's temperature from vLLM's second model runner, which only GPUs have: its own scoring code, with
the two kernels that it calls written in torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.vllm

HIDDEN, WORDS = 6, 11


def runner_of(temperatures: list[float]) -> Any:
    """As much of a model runner as scoring looks at; requests are in the places 2, 1, 0 of its tables."""
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

    worker = PromptLogprobsWorker(len(temperatures), torch.device("cpu"), "processed_logprobs")
    table = np.array(temperatures[::-1], dtype=np.float32)
    states = SimpleNamespace(temperature=SimpleNamespace(np=table))
    return SimpleNamespace(prompt_logprobs_worker=worker, sampler=SimpleNamespace(sampling_states=states))


@pytest.mark.parametrize("temperatures", [[1.0, 1.0, 1.0], [0.5, 1.0, 2.0], [0.7, 0.0, 1.3]])
def test_each_request_is_scored_at_its_own_temperature(
    temperatures: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.gpu.sample import prompt_logprob

    from mrl.engines.vllm.process.extension import WorkerExtension

    lengths = [5, 3, 7]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    ids_N = torch.randint(0, WORDS, (int(starts[-1]),), generator=torch.Generator().manual_seed(0))

    def scores(logits_NV: Tensor, count: int, ids_N: Tensor, *, logits_mode: bool) -> Any:
        assert not logits_mode
        own_N1 = logits_NV.log_softmax(-1).gather(-1, ids_N[:, None])
        return SimpleNamespace(
            logprob_token_ids=ids_N[:, None], logprobs=own_N1, selected_token_ranks=torch.ones_like(ids_N)
        )

    monkeypatch.setattr(prompt_logprob, "get_prompt_logprobs_token_ids", lambda *_: ids_N.roll(-1))
    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", scores)
    monkeypatch.setattr(prompt_logprob, "CHUNK_SIZE", 4)  # chunks end within requests
    runner = runner_of(temperatures)
    for number, place in enumerate((2, 1, 0)):
        asked = SimpleNamespace(prompt_logprobs=0, prompt_logprob_token_ids=None)
        runner.prompt_logprobs_worker.add_request(f"r{number}", place, asked)
    extension = WorkerExtension()
    extension.model_runner = runner  # type: ignore[attr-defined]
    extension.mrl_set_up()
    extension.mrl_set_up()  # is allowed

    head = torch.randn(WORDS, HIDDEN, generator=torch.Generator().manual_seed(1))
    hidden_NH = torch.randn(len(ids_N), HIDDEN, generator=torch.Generator().manual_seed(2))
    batch = SimpleNamespace(
        req_ids=["r0", "r1", "r2"],
        idx_mapping_np=np.array([2, 1, 0]),
        idx_mapping=None,
        num_tokens=len(ids_N),
        num_computed_prefill_tokens_np=np.zeros(3, dtype=np.int32),
        prefill_len_np=np.array(lengths),
        num_scheduled_tokens=np.array(lengths),
        query_start_loc_np=starts,
        query_start_loc=None,
    )
    in_tables = np.array(lengths[::-1])
    found = runner.prompt_logprobs_worker.compute_prompt_logprobs(
        lambda h: h @ head.T, hidden_NH, batch, None, None, in_tables
    )
    for number, temperature in enumerate(temperatures):
        first, last = starts[number], starts[number + 1] - 1  # nothing follows a prompt's last token
        logits_NV = hidden_NH[first:last] @ head.T / (temperature or 1.0)
        expected = logits_NV.log_softmax(-1).gather(-1, ids_N[first + 1 : last + 1, None])
        torch.testing.assert_close(found[f"r{number}"].logprobs, expected)


def test_a_process_without_the_head_scores_nothing() -> None:
    from mrl.engines.vllm.process.extension import WorkerExtension

    extension = WorkerExtension()
    extension.model_runner = SimpleNamespace(prompt_logprobs_worker=None)  # type: ignore[attr-defined]
    extension.mrl_set_up()
