"""What mrl adds to vLLM's workers: weights from a folder, through vLLM's weight-transfer interface, and scoring.

vLLM imports this module in each of its worker processes, because the engine names `WorkerExtension` as the workers'
`worker_extension_cls`; importing it registers the transfer engine under the name `mrl`. A `vllm serve` started with

    --worker-extension-cls mrl.engines.vllm.process.extension.WorkerExtension
    --weight-transfer-config '{"backend": "mrl"}'

takes weights in the same way.
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
    """Nothing has to be agreed on beforehand."""


@dataclass
class FolderUpdate(WeightTransferUpdateInfo):
    """A folder of safetensors with every tensor of the model under its Hugging Face name."""

    path: str
    checksum: str | None = None
    """Of its tensors; another one in the file is refused before the model is touched."""


class FolderTransfer(WeightTransferEngine[FolderInit, FolderUpdate]):
    """Loads safetensors from disk or shared memory into the live model, in one go."""

    init_info_cls = FolderInit
    update_info_cls = FolderUpdate
    held: str | None = None
    """Checksum of the tensors given to the model last; None before any were."""
    whole = True
    """False from the first tensor that was changed to the last."""
    seconds = 0.0
    """vLLM itself took to load and re-pack them: reading them for the checksum not counted."""

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        """Nothing to open."""

    def start_weight_update(self) -> None:
        """The model is opened for loading only once the tensors were found to be whole."""

    def finish_weight_update(self) -> None:
        """Everything was done when the weights came."""

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
            if loaded is not None and (missing := wanted - loaded):  # vLLM would only warn, and keep the old ones
                raise ValueError(f"{update_info.path} has no weights for {', '.join(sorted(missing)[:8])}")
            _repack_tied_heads(self.model)
            self.seconds = perf_counter() - start
        self.held, self.whole = found, True

    def shutdown(self) -> None:
        """Nothing to close."""


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """On CPU vLLM multiplies by a packed copy of each matrix. A head tied to the embedding gets its weight by way of
    the embedding, and its packed copy is then left as it was."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    embeddings = {id(module.weight) for module in model.modules() if type(module).__name__ == "VocabParallelEmbedding"}
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings:
            module.quant_method.process_weights_after_loading(module)


class WorkerExtension:
    """Methods that every vLLM worker gets; called on all of them by `collective_rpc`."""

    def mrl_set_up(self) -> None:
        """Let prompt logprobs be taken at each request's temperature. Calling it twice is allowed."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if hasattr(runner, "prompt_logprobs_worker"):
            _score_at_temperature_v2(runner)
        else:
            _score_at_temperature(runner)

    def mrl_skip_ranks(self) -> None:
        """Do not count the tokens that are likelier than the one drawn, which no answer of ours has: vLLM goes through
        the vocabulary for it at each token, and compiles that, eager or not, at the first: ten seconds on a CPU."""
        from vllm.v1.sample import sampler

        sampler.batched_count_greater_than = lambda logprobs, drawn: torch.ones_like(drawn[:, 0], dtype=torch.long)

    def mrl_held(self) -> dict[str, Any]:
        """`checksum` of the tensors that this worker's model was given last (None before any), whether it has all
        of them (`whole`), and the `seconds` they took to load."""
        transfer = self.weight_transfer_engine  # type: ignore[attr-defined]
        return {"checksum": transfer.held, "whole": transfer.whole, "seconds": transfer.seconds}


def _score_at_temperature(runner: Any) -> None:
    """vLLM takes prompt logprobs at temperature 1 whatever the request says; here they follow the request.

    For vLLM's first model runner, which CPUs have.
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
                unfinished.update(requests)  # vLLM takes the finished ones out
        finally:
            del runner.sampler.compute_logprobs  # the class's own shows again
            runner.num_prompt_logprobs = unfinished
        return answers

    runner._get_prompt_logprobs_dict = by_temperature


def _score_at_temperature_v2(runner: Any) -> None:
    """The same for its second model runner, the default on GPUs: all requests of a step are scored together, so each
    token's logits are divided by the temperature of its own request."""
    scorer = runner.prompt_logprobs_worker  # None where the model's head is in another process (pipeline parallel)
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

        def scaled(chunk_CH: Tensor) -> Tensor:  # vLLM asks for the tokens in order, some at a time
            nonlocal done
            first, done = done, done + len(chunk_CH)
            logits_CV: Tensor = logits_of(chunk_CH)
            return logits_CV.float() / temperatures_N[first:done, None]

        scored: dict[str, Any] = plain(scaled, hidden_NH, batch, *rest)
        return scored

    scorer.compute_prompt_logprobs = by_temperature


if torch.cpu._is_amx_tile_supported():
    # Linux gives a process the matrix units only when it asks. vLLM's own bfloat16 kernels do not ask, and die of an
    # illegal instruction unless another library happened to.
    torch.cpu._init_amx()

if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, FolderTransfer)
