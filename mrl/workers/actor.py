"""The actor: it holds the policy that is trained, and takes one GRPO-family step at a time.

A step's samples are laid out as right-padded rows. Causal models never look to the right, so no attention mask is
needed, and every sampled token's logprob comes from the hidden state before it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrl.algorithms.kl import estimate_kl
from mrl.algorithms.logprobs import logprobs_from_logits, token_logprobs
from mrl.config import AlgorithmConfig, ModelConfig, TrainingConfig
from mrl.errors import TrainingError
from mrl.models import autocast_dtype, load_model, load_tokenizer
from mrl.store.checkpoints import STATE, write_checkpoint
from mrl.types import Sample, TrainBatch, WeightRef, derive_seed
from mrl.workers.lora import add_lora, merged_state_dict
from mrl.workers.objective import Objective, kl_estimator
from mrl.workers.rows import Rows, make_rows
from mrl.workers.snapshot import fits_in_memory_twice, load_snapshot, take_snapshot
from mrl.workers.step_metrics import StepMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SKIPPED_IN_A_ROW = 3


class ActorWorker:
    """Trains the policy. Lives on any backend; everything it is given is plain data.

    `total_steps` shapes the learning-rate schedule.
    """

    def __init__(
        self,
        model: dict[str, Any],
        training: dict[str, Any],
        total_steps: int,
        algorithm: dict[str, Any] | None = None,
    ) -> None:
        self.model_config = ModelConfig(**model)
        self.config = TrainingConfig(**training)
        self.algorithm = AlgorithmConfig(**(algorithm or {}))
        self.objective = Objective(self.algorithm, self.config.num_iterations)
        self.total_steps = total_steps
        self.step = 0
        self.skipped_in_a_row = 0
        self.keep_gradient_norms = False
        self.gradient_norms: dict[str, float] = {}
        """Of each parameter, before clipping, in the last update; only while `keep_gradient_norms` is set."""
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mrl-checkpoint")
        self.writing: Future[None] | None = None

    # --- what the orchestrator calls --------------------------------------------------------------------------------

    def initialize(self) -> dict[str, Any]:
        """Load the policy and build its optimizer. Returns facts about it. Raises ModelError."""
        config = self.config
        torch.manual_seed(derive_seed(config.seed, "actor"))
        self.tokenizer = load_tokenizer(self.model_config)
        self.model: PreTrainedModel = load_model(self.model_config)
        self.device = next(self.model.parameters()).device
        self.autocast_dtype = autocast_dtype(self.model_config, self.device)
        self.reference = None
        if self.model_config.use_lora:
            self.model = add_lora(self.model, self.model_config)
        elif self.algorithm.beta > 0:
            self.reference = copy.deepcopy(self.model).requires_grad_(False).eval()
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.model_config.use_lora:
                self.model.enable_input_require_grads()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self._make_optimizer()
        self.scheduler = self._make_scheduler()
        self.chunked_head = self._chunked_head_agrees()
        self.dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self.model.modules())
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in self.parameters),
            "device": str(self.device),
            "forward_dtype": str(self.autocast_dtype or torch.float32).removeprefix("torch."),
            "chunked_logprobs": self.chunked_head,
        }

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step on `batch`: `num_iterations` updates, none when it is empty. Returns its metrics.

        Raises TrainingError after three updates in a row whose loss or gradient is not finite.
        """
        self.step += 1
        torch.manual_seed(derive_seed(self.config.seed, "train", self.step))  # dropout
        if not batch.samples:
            return self._pass_over()
        rows = make_rows(batch, self.device)
        entropy_BT = None
        if self.config.num_iterations > 1 or self.dropout or self.objective.needs_entropies:
            rows.old_logprobs_BT, entropy_BT = self._logprobs(self.model, rows)
        if self.objective.kl_in_loss:
            rows.ref_logprobs_BT = self._reference_logprobs(rows)
        self.objective.prepare(rows, batch, entropy_BT)
        metrics = StepMetrics()
        for _ in range(self.config.num_iterations):
            self._update(rows, metrics)
        return metrics.summary() | {"train/learning_rate": float(self.scheduler.get_last_lr()[0])}

    def reference_kl(self, samples: list[Sample], temperature: float) -> list[float]:
        """KL to the reference model of each sample, in nats: the sum of the estimates at its sampled tokens."""
        if not samples:
            return []
        rows = make_rows(TrainBatch(samples, [0.0] * len(samples), len(samples), 0, temperature), self.device)
        logprobs_BT, _ = self._logprobs(self.model, rows)
        kl_BT = estimate_kl(logprobs_BT, self._reference_logprobs(rows), kl_estimator(self.algorithm))
        return torch.where(rows.mask_BT > 0, kl_BT, 0.0).sum(dim=1, dtype=torch.float64).tolist()

    def get_weights(self) -> dict[str, Tensor]:
        """The policy's tensors under their Hugging Face names, adapters merged; detached, not copied where possible."""
        return merged_state_dict(self.model)

    def share_module(self, version: int) -> WeightRef:
        """The live module itself, for workers in this process. An adapter stays active in it."""
        return WeightRef(version, module=self.model)

    def write_weights(self, folder: str, version: int) -> WeightRef:
        """Write the policy's tensors for rollout workers to load. Raises SyncError."""
        from mrl.sync.files import publish

        return publish(self.get_weights(), Path(folder), version)

    def save_checkpoint(
        self, path: str, state: dict[str, Any], *, beside: bool = False, served: str | None = None
    ) -> None:
        """Write a checkpoint: a Hugging Face model folder (LoRA: an adapter's) with what training goes on from.

        state: the orchestrator's part, plain data. beside: write it on a thread of its own from a copy, where memory
        allows; `finish_checkpoint` then waits and says how it went. served: file with the rollout workers' weights,
        where they are not these. Raises CheckpointError; `path` is whole or absent.
        """
        self.finish_checkpoint()
        copy = beside and served is None and fits_in_memory_twice(self.model, self.optimizer)
        snapshot = take_snapshot(self.model, self.tokenizer, self.optimizer, self.scheduler, copy=copy)
        full_state = {**state, "actor": {"step": self.step, "skipped_in_a_row": self.skipped_in_a_row}}
        if not copy:
            write_checkpoint(Path(path), lambda folder: snapshot.write(folder, served), full_state)
            return
        self.writing = self.writer.submit(write_checkpoint, Path(path), snapshot.write, full_state)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError when it could not be."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(self, path: str) -> None:
        """Go on from a checkpoint of this configuration. Call after `initialize`. Raises CheckpointError.

        The reference model stays the one that `initialize` loaded: the policy before training.
        """
        load_snapshot(Path(path), self.model, self.optimizer, self.scheduler)
        actor_state = json.loads((Path(path) / STATE).read_text())["actor"]
        self.step, self.skipped_in_a_row = actor_state["step"], actor_state["skipped_in_a_row"]

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        self.writer.shutdown(wait=True)

    # --- one update -------------------------------------------------------------------------------------------------

    def _update(self, rows: Rows, metrics: StepMetrics) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for part in rows.split(self.config.gradient_accumulation_steps):
            part_loss = self.objective.part_loss(part, *self._forward(self.model, part), metrics)
            part_loss.backward()
            loss += part_loss.item()
        if self.keep_gradient_norms:
            named = ((name, p.grad) for name, p in self.model.named_parameters())
            self.gradient_norms = {name: grad.norm().item() for name, grad in named if grad is not None}
        grad_norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm).item()
        self.model.eval()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
        self._advance_schedule()
        self.optimizer.zero_grad(set_to_none=True)
        metrics.update(loss, grad_norm, skipped=not finite)
        self._watch_for_divergence(finite, loss, grad_norm)

    def _pass_over(self) -> dict[str, float]:
        """A step that teaches nothing: no update, but the schedule goes on."""
        for _ in range(self.config.num_iterations):
            self._advance_schedule()
        rate = float(self.scheduler.get_last_lr()[0])
        return {"train/tokens": 0.0, "train/updates_skipped": 0.0, "train/learning_rate": rate}

    def _advance_schedule(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when the first update was skipped
            self.scheduler.step()

    def _watch_for_divergence(self, finite: bool, loss: float, grad_norm: float) -> None:
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(
                f"{self.skipped_in_a_row} updates in a row had no finite loss or gradient (loss {loss}, gradient norm "
                f"{grad_norm}). Lower learning_rate (now {self.config.learning_rate}) or max_grad_norm (now "
                f"{self.config.max_grad_norm}), and look at train/ratio_max and train/logprob_gap_max before it."
            )

    # --- forward passes ---------------------------------------------------------------------------------------------

    def _forward(self, model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the completions' tokens at the sampler's temperature; B×T, zero where padded."""
        row_N, slot_N = rows.valid_BT.nonzero(as_tuple=True)
        source_N = rows.prompt_lengths_B[row_N] + slot_N - 1
        targets_N = rows.completion_BT[row_N, slot_N]
        causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
        with self._autocast():
            if self.chunked_head and not self.objective.entropy_grad:
                hidden_BLH = causal_lm.get_decoder()(input_ids=rows.ids_BL, use_cache=False).last_hidden_state
                hidden_NH, head = hidden_BLH[row_N, source_N], causal_lm.get_output_embeddings()
                logprobs_N, entropy_N = token_logprobs(
                    hidden_NH, head.weight, head.bias, targets_N, rows.temperature, compute_dtype=self.autocast_dtype
                )
            else:
                logits_NV = causal_lm(input_ids=rows.ids_BL, use_cache=False).logits[row_N, source_N]
                logprobs_N, entropy_N = logprobs_from_logits(
                    logits_NV, targets_N, rows.temperature, entropy_grad=self.objective.entropy_grad
                )
        empty_BT = torch.zeros(rows.mask_BT.shape, device=self.device)
        return empty_BT.index_put((row_N, slot_N), logprobs_N), empty_BT.index_put((row_N, slot_N), entropy_N)

    @torch.no_grad()
    def _logprobs(self, model: Any, rows: Rows) -> tuple[Tensor, Tensor]:
        """Of the whole batch, without a gradient: logprobs and entropies, B×T each."""
        model.eval()
        parts = rows.split(self.config.gradient_accumulation_steps)
        logprobs_BT = torch.zeros(rows.mask_BT.shape, device=self.device)
        entropy_BT = torch.zeros_like(logprobs_BT)
        for part in parts:
            place = (part.index_B, slice(part.mask_BT.shape[1]))
            logprobs_BT[place], entropy_BT[place] = self._forward(model, part)
        return logprobs_BT, entropy_BT

    def _reference_logprobs(self, rows: Rows) -> Tensor:
        if self.reference is not None:
            return self._logprobs(self.reference, rows)[0]
        with self.model.disable_adapter():  # type: ignore[operator]
            return self._logprobs(self.model, rows)[0]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)

    @torch.no_grad()
    def _chunked_head_agrees(self) -> bool:
        """Whether logits are just head(hidden), so that they need never exist at once.

        Tried rather than looked up: models scale or cap their logits, and adapters wrap their heads, in many ways.
        """
        causal_lm = self.model.get_base_model() if self.model_config.use_lora else self.model  # type: ignore[operator]
        head = causal_lm.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            return False
        probe_BL = torch.arange(8, device=self.device)[None] % causal_lm.config.get_text_config().vocab_size
        try:
            hidden_BLH = causal_lm.get_decoder()(input_ids=probe_BL, use_cache=False).last_hidden_state
        except (AttributeError, TypeError):
            return False
        logits_BLV = causal_lm(input_ids=probe_BL, use_cache=False).logits
        return torch.allclose(head(hidden_BLH), logits_BLV, rtol=1e-4, atol=1e-4)

    # --- set-up -----------------------------------------------------------------------------------------------------

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        matrices = [p for p in self.parameters if p.dim() >= 2]
        others = [p for p in self.parameters if p.dim() < 2]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            fused=self.device.type in ("cpu", "cuda"),
        )

    def _make_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        from transformers import get_scheduler

        return get_scheduler(
            "constant_with_warmup" if self.config.lr_scheduler_type == "constant" else self.config.lr_scheduler_type,
            self.optimizer,
            num_warmup_steps=self.config.warmup_steps * self.config.num_iterations,
            num_training_steps=self.total_steps * self.config.num_iterations,
        )
