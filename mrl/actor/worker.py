"""The actor: holds the policy and takes one GRPO-family training step at a time.

A step's samples are split into micro-batches. Each goes through the model as one packed sequence, or where the model
does not support that, as right-padded rows (mrl.modeling.forward). A sampled token's logprob comes from the hidden
state before it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import warnings
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrl.actor.lora import adapts_parameters, add_lora
from mrl.actor.micro_batches import CPU_TOKENS, by_count, by_tokens, gpu_tokens
from mrl.actor.objective import Objective, kl_estimator
from mrl.actor.optimizer import check_offload, make_optimizer, make_scheduler
from mrl.actor.publisher import Publisher
from mrl.actor.residence import Residence
from mrl.actor.snapshot import MISMATCH_PROBE, fits_in_memory_twice, load_snapshot, take_snapshot
from mrl.actor.step_metrics import StepMetrics
from mrl.algorithms.kl import estimate_kl
from mrl.config import AlgorithmConfig, ModelConfig, TrainingConfig
from mrl.errors import SyncError, TrainingError
from mrl.mismatch import Comparison, MismatchEvidence, MismatchProbe
from mrl.modeling.compiled import CompiledLayers, try_compiled
from mrl.modeling.fixed_order import fixed_order
from mrl.modeling.forward import Forward, evaluating
from mrl.modeling.liger import apply_liger, check_liger
from mrl.modeling.precision import narrow_matrices
from mrl.modeling.token_batch import TokenBatch, make_token_batch
from mrl.models import autocast_dtype, load_model, load_processor, load_tokenizer, pick_device
from mrl.store.checkpoints import STATE, write_checkpoint
from mrl.system.environment import computing_environment
from mrl.system.machine import machine_id
from mrl.system.memory import claim, unclaimed
from mrl.system.threads import submit
from mrl.system.transfers import to_device, to_host
from mrl.types import Sample, TrainBatch, WeightRef, derive_seed
from mrl.weights.hub_names import check_round_trip

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SKIPPED_IN_A_ROW = 3


class ActorWorker:
    """Trains the policy. Runs on any backend; all its arguments are plain data.

    `total_steps` shapes the learning-rate schedule. base_name: the base model that adapters in checkpoints name; None =
    where the model was loaded from.
    """

    def __init__(
        self,
        model: dict[str, Any],
        training: dict[str, Any],
        total_steps: int,
        algorithm: dict[str, Any] | None = None,
        base_name: str | None = None,
    ) -> None:
        self.model_config = ModelConfig(**model)
        self.config = TrainingConfig(**training)
        self.algorithm = AlgorithmConfig(**(algorithm or {}))
        self.objective = Objective(self.algorithm, self.config.num_iterations)
        self.total_steps, self.base_name = total_steps, base_name
        self.step = 0
        self.skipped_in_a_row = 0
        self.keep_gradient_norms = False
        self.gradient_norms: dict[str, float] = {}
        """By parameter, before clipping, of the last update; only while `keep_gradient_norms` is set."""
        self.writing: Future[None] | None = None
        self.publisher: Publisher | None = None

    # --- what the orchestrator calls --------------------------------------------------------------------------------

    def initialize(self) -> dict[str, Any]:
        """Load the policy and build its optimizer. Returns facts about it. Raises ModelError."""
        config = self.config
        check_offload(config, pick_device(self.model_config.device))
        check_liger(config, self.model_config, pick_device(self.model_config.device))
        torch.manual_seed(derive_seed(config.seed, "actor"))
        self.tokenizer = load_tokenizer(self.model_config)
        self.processor = load_processor(self.model_config)
        self.device = pick_device(self.model_config.device)
        self.autocast_dtype = autocast_dtype(self.model_config, self.device)
        # Base weights below an adapter are frozen, so they can be stored in the compute dtype.
        frozen = self.autocast_dtype if self.model_config.use_lora else None
        narrow = functools.partial(narrow_matrices, dtype=frozen)
        self.model: PreTrainedModel = load_model(self.model_config, before_moving=narrow)
        self.model.name_or_path = self.base_name or self.model.name_or_path
        check_round_trip(self.model)
        self.device = next(self.model.parameters()).device
        if config.use_liger_kernel:
            apply_liger(self.model)
        self.reference = None
        if self.model_config.use_lora:
            self.model = add_lora(self.model, self.model_config)
        elif self.algorithm.beta > 0:
            # It shares the policy's configuration, and the one of the text model in it, which names the attention
            # function.
            shared = {id(config): config for config in (self.model.config, self.model.config.get_text_config())}
            self.reference = copy.deepcopy(self.model, shared).requires_grad_(False).eval()
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if self.model_config.use_lora:
                self.model.enable_input_require_grads()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, config, self.device)
        self.scheduler = make_scheduler(self.optimizer, config, self.total_steps)
        models = [self.model] if self.reference is None else [self.model, self.reference]
        self.residence = Residence(models, self.optimizer, self.device)
        self.forward = Forward(self.model, self.autocast_dtype, packing=config.packing, processor=self.processor)
        self.mismatch_probe = MismatchProbe(self.forward, self.algorithm.max_logprob_gap)
        self.micro_batch_tokens = config.max_tokens_per_micro_batch or self._default_tokens()
        self.compiled: CompiledLayers | None = None
        notices = self.forward.notices
        if config.torch_compile:
            with fixed_order(self.device):  # as in training, since another mode would recompile
                self.compiled, problem = try_compiled(self.model, self.forward)
            notices = [*notices, problem] if problem else notices
        self.dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self.model.modules())
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in self.parameters),
            "device": str(self.device),
            "forward_dtype": str(self.autocast_dtype or torch.float32).removeprefix("torch."),
            "full_logits": self.forward.head is None,
            "packing": self.forward.packs,
            "compiled": self.compiled is not None,
            "environment": computing_environment(self.device),
            "notices": notices,
        }

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step on `batch`: `num_iterations` updates, or none if it is empty. Returns its metrics.

        Raises TrainingError after three updates in a row whose loss or gradient is not finite.
        """
        self.step += 1
        torch.manual_seed(derive_seed(self.config.seed, "train", self.step))  # dropout
        comparison = self.mismatch_probe.begin(self.model, batch.samples)
        try:
            return self._train_on(batch, comparison) if batch.samples else self._pass_over()
        finally:
            self.mismatch_probe.end()

    def mismatch_evidence(self) -> MismatchEvidence | None:
        """Evidence about the last step's logprob gap; None unless it was above `max_logprob_gap`."""
        return self.mismatch_probe.evidence

    def reference_logprobs(self, samples: list[Sample], temperature: float) -> list[list[float]]:
        """Logprobs of the samples' tokens under the reference model, for `Sample.reference_logprobs`; 0 where the
        policy did not sample. May run while the samples are being scored."""
        if not samples:
            return []
        tokens = make_token_batch(TrainBatch(samples, [0.0] * len(samples), 1, 1, temperature), self.device)
        logprobs_BT = torch.zeros_like(tokens.mask_BT)
        for index in self._micro_batches(samples):
            part_BT = self._reference_logprobs(tokens.take(index))
            logprobs_BT[to_device(self.device, index), : part_BT.shape[1]] = part_BT
        pairs = zip(samples, logprobs_BT.tolist(), strict=True)
        return [values[: len(sample.completion_ids)] for sample, values in pairs]

    def reference_kl(self, samples: list[Sample], temperature: float) -> list[float]:
        """KL to the reference model of each sample, in nats: the sum of the estimates at its sampled tokens."""
        if not samples:
            return []
        tokens = make_token_batch(TrainBatch(samples, [0.0] * len(samples), 1, 1, temperature), self.device)
        kl_B = torch.zeros(len(samples), dtype=torch.float64, device=self.device)
        for index in self._micro_batches(samples):
            part = tokens.take(index)
            reference_BT = self._reference_logprobs(part) if part.ref_logprobs_BT is None else part.ref_logprobs_BT
            kl_BT = estimate_kl(self._logprobs(self.model, part)[0], reference_BT, kl_estimator(self.algorithm))
            kl_B[to_device(self.device, index)] = torch.where(part.mask_BT > 0, kl_BT, 0.0).sum(
                dim=1, dtype=torch.float64
            )
        kl: list[float] = kl_B.tolist()
        return kl

    def machine(self) -> str:
        """The machine it runs on (`machine_id`)."""
        return machine_id()

    def share_module(self, version: int) -> WeightRef:
        """The live module itself, for workers in this process, with any adapter active. Raises SyncError."""
        if adapts_parameters(self.model):
            raise SyncError(
                "weight_sync_method: direct shares the module between threads, and PEFT rebuilds layers of experts in "
                "every pass through their adapter; use weight_sync_method: reload, or lora_target_modules without the "
                "experts' layers"
            )
        self.mismatch_probe.published(self.model, version, shared=True)
        return WeightRef(version, module=self.model)

    def write_weights(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write the policy as files, for rollout workers to load: `Publisher.files`. Raises SyncError."""
        return self._published(self._publisher().files(Path(folder), version, **options))

    def write_memory(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write the policy to shared memory: `Publisher.in_memory`. Raises SyncError."""
        return self._published(self._publisher().in_memory(Path(folder), version, **options))

    def write_model(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write the policy as a model folder: `Publisher.whole_model`. Raises SyncError."""
        return self._published(self._publisher().whole_model(Path(folder), version, **options))

    def write_difference(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write what changed since the previous version: `Publisher.difference`. Raises SyncError."""
        return self._published(self._publisher().difference(Path(folder), version, **options))

    def write_last_whole(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write the last published version again, in full: `Publisher.last_whole`. Raises SyncError."""
        return self._publisher().last_whole(Path(folder), version, **options)

    def save_checkpoint(
        self, path: str, state: dict[str, Any], *, beside: bool = False, served: str | None = None
    ) -> None:
        """Write a checkpoint: a Hugging Face model folder (LoRA: an adapter's) plus the training state.

        state: the orchestrator's part, plain data. beside: write it from a copy on another thread, if memory allows;
        `finish_checkpoint` then waits and raises its error. served: file with the rollout workers' weights, if they
        differ from these. Raises CheckpointError; `path` is complete or absent.
        """
        self.finish_checkpoint()
        copy = beside and served is None and fits_in_memory_twice(self.model, self.optimizer)
        snapshot = take_snapshot(self.model, self._writes(), self.optimizer, self.scheduler, copy=copy)
        snapshot.mismatch_probe = self.mismatch_probe.state()
        full_state = {**state, "actor": {"step": self.step, "skipped_in_a_row": self.skipped_in_a_row}}
        if not copy:
            write_checkpoint(Path(path), lambda folder: snapshot.write(folder, served), full_state)
            return
        write = functools.partial(write_checkpoint, Path(path), snapshot.write, full_state)
        self.writing = submit(write, "mrl-checkpoint", daemon=False)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if that failed."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def load_checkpoint(self, path: str) -> None:
        """Resume from a checkpoint of this configuration. Call after `initialize`. Raises CheckpointError.

        The reference model stays the one that `initialize` loaded: the policy before training.
        """
        actor_state = json.loads((Path(path) / STATE).read_text())["actor"]
        # The schedule also advances in steps without an update.
        updates = actor_state["step"] * self.config.num_iterations
        load_snapshot(Path(path), self.model, self.optimizer, self.scheduler, updates=updates)
        self.step, self.skipped_in_a_row = actor_state["step"], actor_state["skipped_in_a_row"]
        if (probe := Path(path) / MISMATCH_PROBE).exists():  # older checkpoints have none
            self.mismatch_probe.load_state(json.loads(probe.read_text()))

    def leave_device(self) -> None:
        """Offload weights and optimizer state to host memory: another process uses the device until `return_to_device`.
        Until then checkpoints can be saved, but nothing computed."""
        self.residence.leave()

    def return_to_device(self) -> None:
        """Undo `leave_device`. Raises TrainingError if the device has no room."""
        self.residence.come_back()

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        if self.writing is not None:
            wait([self.writing])
        if self.publisher is not None:
            self.publisher.close()

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publisher(self) -> Publisher:
        if self.publisher is None:
            self.publisher = Publisher(self.model, self._writes())
        return self.publisher

    def _writes(self) -> Any:
        """What goes into a model's folder besides the model: the tokenizer, alone or with what makes pixels."""
        return self.tokenizer if self.processor is None else self.processor

    def _published(self, ref: WeightRef) -> WeightRef:
        self.mismatch_probe.published(self.model, ref.version)
        return ref

    # --- one update -------------------------------------------------------------------------------------------------

    def _train_on(self, batch: TrainBatch, comparison: Comparison) -> dict[str, float]:
        tokens = make_token_batch(batch, self.device, comparison.version)
        micro_batches = self._micro_batches(batch.samples)
        entropy_BT = None
        if self.objective.needs_entropies or self.dropout:
            tokens.old_logprobs_BT, entropy_BT = self._old_policy(tokens, micro_batches)
        self.objective.prepare(tokens, batch, entropy_BT)
        parts = [tokens.take(index) for index in micro_batches]
        for part in parts:
            if self.objective.kl_in_loss and part.ref_logprobs_BT is None:
                part.ref_logprobs_BT = self._reference_logprobs(part)
        metrics = StepMetrics(comparison.moved)
        for _ in range(self.config.num_iterations):
            self._update(parts, metrics)
        return metrics.summary() | {"train/learning_rate": float(self.scheduler.get_last_lr()[0])}

    def _update(self, parts: list[TokenBatch], metrics: StepMetrics) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device)
        with fixed_order(self.device), self.compiled.active() if self.compiled else contextlib.nullcontext():
            for part in parts:
                part_loss = self.objective.part_loss(part, *self._forward(self.model, part), metrics)
                part_loss.backward()
                loss += part_loss.detach()
        for part in parts:  # the first update's own forward pass gave the old policy's logprobs
            if part.old_logprobs_BT is None:
                part.old_logprobs_BT = part.new_logprobs_BT
        if self.keep_gradient_norms:
            named = ((name, p.grad) for name, p in self.model.named_parameters())
            norms = {name: grad.norm() for name, grad in named if grad is not None}
            values = (value.item() for value in to_host(*norms.values()))
            self.gradient_norms = dict(zip(norms, values, strict=True))
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        total, grad_norm = metrics.update(loss, norm)
        self.mismatch_probe.examine(self.model, parts, metrics.unexplained_gap())
        self.model.eval()
        finite = math.isfinite(total) and math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
            claim(self, self.device, 0)  # from now on the optimizer state is allocated
        self._advance_schedule()
        self.optimizer.zero_grad(set_to_none=True)
        metrics.skipped += not finite
        self._watch_for_divergence(finite, total, grad_norm)

    def _pass_over(self) -> dict[str, float]:
        """A step without samples: no update, but the schedule advances."""
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

    def _forward(self, model: Any, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the tokens the policy sampled, at the sampler's temperature; B×T, 0 elsewhere."""
        logprobs_BT, entropy_BT = self.forward.logprobs(model, tokens, entropy_grad=self.objective.entropy_grad)
        tokens.new_logprobs_BT = logprobs_BT.detach()
        return logprobs_BT, entropy_BT

    @torch.no_grad()
    def _logprobs(self, model: Any, tokens: TokenBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        with evaluating(model):
            return self.forward.logprobs(model, tokens, entropy=entropy)

    def _old_policy(self, tokens: TokenBatch, micro_batches: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the whole batch before its first update; B×T each."""
        logprobs_BT, entropy_BT = torch.zeros_like(tokens.mask_BT), torch.zeros_like(tokens.mask_BT)
        for index in micro_batches:
            part = tokens.take(index)
            place = (to_device(self.device, index), slice(part.mask_BT.shape[1]))
            logprobs_BT[place], entropy_BT[place] = self._logprobs(self.model, part, entropy=True)
        return logprobs_BT, entropy_BT

    def _reference_logprobs(self, tokens: TokenBatch) -> Tensor:
        if self.reference is not None:
            return self._logprobs(self.reference, tokens)[0]
        with self.model.disable_adapter():  # type: ignore[operator]
            return self._logprobs(self.model, tokens)[0]

    def _default_tokens(self) -> int:
        """Tokens of a micro-batch that fit the device's memory, once gradients and optimizer state are allocated."""
        free = unclaimed(self.device)
        if free is None:
            return CPU_TOKENS
        trained = sum(p.numel() * p.element_size() for p in self.parameters)
        claim(self, self.device, 0 if self.config.offload_optimizer else 2 * trained)
        later = trained if self.config.offload_optimizer else 3 * trained
        return gpu_tokens(
            self.model.config.get_text_config(),
            max(0, free - later),
            narrow=self.autocast_dtype is not None,
            checkpointing=self.config.gradient_checkpointing,
        )

    def _micro_batches(self, samples: list[Sample]) -> list[list[int]]:
        if self.config.gradient_accumulation_steps > 1:
            return by_count(samples, self.config.gradient_accumulation_steps)
        return by_tokens(samples, self.micro_batch_tokens, shared_prompts=self.forward.packs)
