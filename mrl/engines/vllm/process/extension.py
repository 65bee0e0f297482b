"""mrl's extension of vLLM's workers: loading weights from a folder (vLLM's weight-transfer interface), and scoring.

vLLM imports this module in each of its worker processes, because the engine sets `WorkerExtension` as
`worker_extension_cls`; the import registers the transfer engine `mrl`. A `vllm serve` started with

    --worker-extension-cls mrl.engines.vllm.process.extension.WorkerExtension
    --weight-transfer-config '{"backend": "mrl"}'

loads weights in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from mrl.weights.checksum import checksum
from mrl.weights.tensors import open_folder

NAME = "mrl"


@dataclass
class FolderInit(WeightTransferInitInfo):
    """No initialisation needed."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """A folder of safetensors with every tensor of the model under its Hugging Face name."""

    path: str
    checksum: str | None = None
    """Of its tensors; a mismatch is refused before the model is changed."""


class FolderTransfer(WeightTransferEngine[FolderInit, FolderUpdate]):
    """Loads safetensors from disk or shared memory into the live model."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate
    held: str | None = None
    """Checksum of the tensors last loaded; None before the first."""
    whole = True
    """False while an update is half done."""
    seconds = 0.0
    """Time vLLM took to load and repack them, without reading them for the checksum."""

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """Nothing: the model is prepared for loading only after the tensors have passed the checksum."""

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` does everything."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: FolderUpdate) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with open_folder(update_info.path) as tensors:
            found = checksum(tensors)
            if update_info.checksum is not None and found != update_info.checksum:
                raise ValueError(f"{update_info.path} has checksum {found}, expected {update_info.checksum}")
            self.whole, start = False, perf_counter()
            wanted = {name for name, _ in self.model.named_parameters()}
            initialize_layerwise_reload(self.model)
            loaded = self.model.load_weights(iter(tensors.items()))
            finalize_layerwise_reload(self.model, self.model_config)
            if loaded is not None and (missing := wanted - loaded):  # vLLM would only warn and keep the old ones
                raise ValueError(f"{update_info.path} has no weights for {', '.join(sorted(missing)[:8])}")
            _repack_tied_heads(self.model)
            self.seconds = perf_counter() - start
        self.held, self.whole = found, True

    def shutdown(self) -> None:
        """Nothing to close."""


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """On CPU vLLM multiplies by a packed copy of each matrix. A tied head gets its weight through the embedding, which
    leaves its packed copy stale; so pack it again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    embeddings = {id(module.weight) for module in model.modules() if type(module).__name__ == "VocabParallelEmbedding"}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods added to every vLLM worker; called on all of them by `collective_rpc`."""

    def mrl_set_up(self) -> None:
        """Make prompt logprobs use each request's temperature. Calling it twice is allowed."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if hasattr(runner, "prompt_logprobs_worker"):
            _score_at_temperature_v2(runner)
        else:
            _score_at_temperature(runner)

    def mrl_skip_ranks(self) -> None:
        """Skip the rank of each sampled token, which mrl does not use. vLLM compares it with the whole vocabulary, and
        compiles that at the first token, even in eager mode: ten seconds on a CPU."""
        from vllm.v1.sample import sampler

        sampler.batched_count_greater_than = lambda logprobs, drawn: torch.ones_like(drawn[:, 0], dtype=torch.long)

    def mrl_held(self) -> dict[str, Any]:
        """`checksum` of the tensors last loaded into this worker's model (None before the first), whether the update is
        complete (`whole`), and the `seconds` it took."""
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {"checksum": transfer.held, "whole": transfer.whole, "seconds": transfer.seconds}


def _score_at_temperature(runner: Any) -> None:
    """vLLM computes prompt logprobs at temperature 1 whatever the request says; make them follow the request.

    For vLLM's V1 model runner, which CPUs use.
    """
    if "_get_prompt_logprobs_dict" in vars(runner):
        return
    plain = runner._get_prompt_logprobs_dict

    def by_temperature(hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        groups: dict[float, dict[str, int]] = defaultdict(dict)
        for request_id, wanted in runner.num_prompt_logprobs.items():
            groups[runner.requests[request_id].sampling_params.temperature][request_id] = wanted
        if not set(groups) - {1.0}:
            answer: dict[str, Any] = plain(hidden_states, num_scheduled_tokens)
            return answer
        compute, answers, unfinished = runner.sampler.compute_logprobs, {}, {}
        try:
            for temperature, requests in groups.items():
                runner.num_prompt_logprobs = requests
                runner.sampler.compute_logprobs = lambda logits, t=temperature: compute(logits.float() / t)
                answers.update(plain(hidden_states, num_scheduled_tokens))
                unfinished.update(requests)  # vLLM removes the finished ones
        finally:
            del runner.sampler.compute_logprobs  # uncovers the class's own method
            runner.num_prompt_logprobs = unfinished
        return answers

    runner._get_prompt_logprobs_dict = by_temperature


def _score_at_temperature_v2(runner: Any) -> None:
    """The same for vLLM's V2 model runner, the default on GPUs. It scores all requests of a step together, so each
    token's logits are divided by the temperature of its request."""
    scorer = runner.prompt_logprobs_worker  # None if the head is in another process (pipeline parallel)
    if scorer is None or "compute_prompt_logprobs" in vars(scorer):
        return
    plain = scorer.compute_prompt_logprobs

    def by_temperature(logits_of: Any, hidden_NH: Tensor, batch: Any, *rest: Any) -> dict[str, Any]:
        of_requests = torch.from_numpy(runner.sampler.sampling_states.temperature.np[batch.idx_mapping_np])
        of_requests = torch.where(of_requests == 0, 1.0, of_requests)
        if (of_requests == 1).all():
            answer: dict[str, Any] = plain(logits_of, hidden_NH, batch, *rest)
            return answer
        tokens = torch.from_numpy(batch.query_start_loc_np[: len(of_requests) + 1]).diff()
        temperatures_N = of_requests.repeat_interleave(tokens).to(hidden_NH.device)
        done = 0

        def scaled(chunk_CH: Tensor) -> Tensor:  # vLLM calls it for the tokens in order, chunk by chunk
            nonlocal done
            first, done = done, done + len(chunk_CH)
            logits_CV: Tensor = logits_of(chunk_CH)
            return logits_CV.float() / temperatures_N[first:done, None]

        scored: dict[str, Any] = plain(scaled, hidden_NH, batch, *rest)
        return scored

    scorer.compute_prompt_logprobs = by_temperature


if torch.cpu._is_amx_tile_supported():
    # On Linux a process must request AMX. vLLM's bfloat16 kernels do not, and crash with an illegal instruction unless
    # another library has.
    torch.cpu._init_amx()

if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, FolderTransfer)
