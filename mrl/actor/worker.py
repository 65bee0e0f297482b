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
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mrl.actor.lora import adapts_parameters, add_lora
from mrl.actor.micro_batches import CPU_TOKENS, MicroBatch, by_count, by_tokens, gpu_tokens, of_rank
from mrl.actor.objective import Objective, kl_estimator
from mrl.actor.optimizer import check_offload, make_optimizer, make_scheduler
from mrl.actor.parallel.gradients import clip_gradients, sum_gradients
from mrl.actor.parallel.sharding import make_mesh, shard
from mrl.actor.parallel.shards import write_shards
from mrl.actor.parallel.tensors import ModelTensors, lead_with
from mrl.actor.parallel.world import Ranks, World, join, together, wanted_size
from mrl.actor.publisher import Publisher
from mrl.actor.residence import Residence
from mrl.actor.snapshot import MISMATCH_PROBE, fits_in_memory_twice, load_snapshot, take_snapshot
from mrl.actor.step_metrics import StepMetrics
from mrl.algorithms.kl import estimate_kl
from mrl.config import AlgorithmConfig, ModelConfig, TrainingConfig
from mrl.config.ranks import check_ranks
from mrl.config.section import changed_options
from mrl.errors import ConfigError, SyncError, TrainingError
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
from mrl.system.machine import free_port, machine_id, own_address
from mrl.system.memory import claim, unclaimed
from mrl.system.threads import submit
from mrl.system.transfers import to_device, to_host
from mrl.types import Sample, TrainBatch, WeightRef, derive_seed
from mrl.weights.checksum import checksum
from mrl.weights.hub_names import check_round_trip
from mrl.weights.sharded import is_sharded, local, whole

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
        self.old_logprobs: list[list[float]] = []
        """See `trained_logprobs`."""
        self.writing: Future[None] | None = None
        self.publisher: Publisher | None = None
        self.world = World()

    # --- what the orchestrator calls --------------------------------------------------------------------------------

    @together
    def initialize(self) -> dict[str, Any]:
        """Load the policy and build its optimizer. Returns facts about it. Raises ModelError.

        Where the environment says that this is one of several ranks (`mrl.actor.parallel`), every public method but
        `machine` and `close` has to be called on all of them, with the same arguments.
        """
        config = self.config
        sharded = wanted_size() > 1 and config.actor_parallelism == "fsdp"
        check_ranks(config, self.model_config, wanted_size())
        self.world = join(self.model_config.device, config.ddp_timeout)
        if isinstance(self.world, Ranks):
            # What will be sharded is loaded to host memory: a GPU need not hold it whole.
            device = "cpu" if sharded else str(self.world.device)
            self.model_config = self.model_config.model_copy(update={"device": device})
        check_offload(config, pick_device(self.model_config.device))
        check_liger(config, self.model_config, pick_device(self.model_config.device))
        torch.manual_seed(derive_seed(config.seed, "actor"))
        self.tokenizer = load_tokenizer(self.model_config)
        self.processor = load_processor(self.model_config)
        self.device = self.world.device if isinstance(self.world, Ranks) else pick_device(self.model_config.device)
        self.autocast_dtype = autocast_dtype(self.model_config, self.device)
        # Base weights below an adapter are frozen, so they can be stored in the compute dtype.
        frozen = self.autocast_dtype if self.model_config.use_lora else None
        narrow = functools.partial(narrow_matrices, dtype=frozen)
        self.model: PreTrainedModel = load_model(self.model_config, before_moving=narrow)
        self.model.name_or_path = self.base_name or self.model.name_or_path
        check_round_trip(self.model)
        if not sharded:
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
        self.forward = Forward(self.model, self.autocast_dtype, packing=config.packing, processor=self.processor)
        if self.world.size > 1:
            self.world.check_same("model: the weights", checksum(self.model.state_dict()))
        if isinstance(self.world, Ranks) and sharded:
            self._shard(self.world)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, config, self.device)
        self.scheduler = make_scheduler(self.optimizer, config, self.total_steps)
        models = [self.model] if self.reference is None else [self.model, self.reference]
        self.residence = Residence(models, self.optimizer, self.device)
        self.mismatch_probe = MismatchProbe(self.forward, self.algorithm.max_logprob_gap)
        self.micro_batch_tokens = config.max_tokens_per_micro_batch or self.world.least(self._default_tokens())
        self.compiled: CompiledLayers | None = None
        notices = self.forward.notices
        if config.torch_compile:
            with fixed_order(self.device):  # as in training, since another mode would recompile
                self.compiled, problem = try_compiled(self.model, self.forward)
            notices = [*notices, problem] if problem else notices
        if self.world.size == 1 and (unused := changed_options(config, ("actor_parallelism", "ddp_timeout"))):
            notices = [*notices, f"{' and '.join(unused)}: no effect, the actor is one process (actor_gpu)"]
        self.dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in self.model.modules())
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in self.parameters),
            "device": str(self.device),
            **self._ranks(),
            "forward_dtype": str(self.autocast_dtype or torch.float32).removeprefix("torch."),
            "full_logits": self.forward.head is None,
            "packing": self.forward.packs,
            "compiled": self.compiled is not None,
            "environment": computing_environment(self.device),
            "notices": notices,
        }

    @together
    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """One step on `batch`: `num_iterations` updates, or none if it is empty. Returns its metrics.

        Raises TrainingError after three updates in a row whose loss or gradient is not finite.
        """
        self.step += 1
        rank = [self.world.rank] if self.world.rank else []  # rank 0 draws as one process does
        torch.manual_seed(derive_seed(self.config.seed, "train", self.step, *rank))  # dropout
        self.old_logprobs = []
        comparison = self.mismatch_probe.begin(self.model, batch.samples)
        try:
            return self._train_on(batch, comparison) if batch.samples else self._pass_over()
        finally:
            self.mismatch_probe.end()

    def learn(self, batch: TrainBatch) -> tuple[dict[str, float], list[list[float]]]:
        """`train_step`, with `trained_logprobs` in its answer: another call to another machine would take its time."""
        return self.train_step(batch), self.trained_logprobs()

    def trained_logprobs(self) -> list[list[float]]:
        """Of the last step's samples, in their order: the policy's logprobs before the step's updates, 0 where the
        policy did not sample; [] for a step without samples."""
        return self.old_logprobs

    def mismatch_evidence(self) -> MismatchEvidence | None:
        """Evidence about the last step's logprob gap; None unless it was above `max_logprob_gap`."""
        return self.mismatch_probe.evidence

    @together
    def reference_logprobs(self, samples: list[Sample], temperature: float) -> list[list[float]]:
        """Logprobs of the samples' tokens under the reference model, for `Sample.reference_logprobs`; 0 where the
        policy did not sample. May run while the samples are being scored."""
        if not samples:
            return []
        tokens = make_token_batch(TrainBatch(samples, [0.0] * len(samples), 1, 1, temperature), self.device)
        logprobs_BT = torch.zeros_like(tokens.mask_BT)
        for part in self._micro_batches(samples):
            part_BT = self._reference_logprobs(tokens.take(part.index))
            if part.counts:
                logprobs_BT[to_device(self.device, part.index), : part_BT.shape[1]] = part_BT
        pairs = zip(samples, self.world.total(logprobs_BT).tolist(), strict=True)
        return [values[: len(sample.completion_ids)] for sample, values in pairs]

    @together
    def reference_kl(self, samples: list[Sample], temperature: float) -> list[float]:
        """KL to the reference model of each sample, in nats: the sum of the estimates at its sampled tokens."""
        if not samples:
            return []
        tokens = make_token_batch(TrainBatch(samples, [0.0] * len(samples), 1, 1, temperature), self.device)
        kl_B = torch.zeros(len(samples), dtype=torch.float64, device=self.device)
        for micro_batch in self._micro_batches(samples):
            part = tokens.take(micro_batch.index)
            reference_BT = self._reference_logprobs(part) if part.ref_logprobs_BT is None else part.ref_logprobs_BT
            kl_BT = estimate_kl(self._logprobs(self.model, part)[0], reference_BT, kl_estimator(self.algorithm))
            if micro_batch.counts:
                kl_B[to_device(self.device, micro_batch.index)] = torch.where(part.mask_BT > 0, kl_BT, 0.0).sum(
                    dim=1, dtype=torch.float64
                )
        kl: list[float] = self.world.total(kl_B).tolist()
        return kl

    def meeting_point(self) -> tuple[str, int]:
        """Address and port where the actor's processes can meet: this one's machine."""
        return own_address(), free_port()

    def meet(self, address: str, port: int) -> None:
        """Meet the actor's other processes there, in `initialize`."""
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def machine(self) -> str:
        """The machine it runs on (`machine_id`)."""
        return machine_id()

    def share_module(self, version: int) -> WeightRef:
        """The live module itself, for workers in this process, with any adapter active. Raises SyncError."""
        if self.world.size > 1:
            raise SyncError(
                "weight_sync_method: direct cannot share the module of an actor on several GPUs with workers in its "
                "process; use workers in processes of their own, or weight_sync_method: reload"
            )
        if adapts_parameters(self.model):
            raise SyncError(
                "weight_sync_method: direct shares the module between threads, and PEFT rebuilds layers of experts in "
                "every pass through their adapter; use weight_sync_method: reload, or lora_target_modules without the "
                "experts' layers"
            )
        self.mismatch_probe.published(self.model, version, shared=True)
        return WeightRef(version, module=self.model)

    @together
    def write_weights(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write the policy as files, for rollout workers to load: `Publisher.files`. Raises SyncError."""
        return self._published(lambda to: to.files(Path(folder), version, **options))

    @together
    def write_memory(self, version: int, **options: Any) -> WeightRef:
        """Write the policy to shared memory: `Publisher.in_memory`. Raises SyncError."""
        return self._published(lambda to: to.in_memory(version, **options))

    @together
    def write_objects(self, version: int, **options: Any) -> WeightRef:
        """Write the policy to Ray's object store: `Publisher.in_object_store`. Raises SyncError."""
        return self._published(lambda to: to.in_object_store(version, **options))

    @together
    def write_model(self, folder: str, version: int, **options: Any) -> WeightRef:
        """Write the policy as a model folder: `Publisher.whole_model`. Raises SyncError."""
        return self._published(lambda to: to.whole_model(Path(folder), version, **options))

    @together
    def write_difference(self, folder: str | None, version: int, **options: Any) -> WeightRef:
        """Write what changed since the previous version: `Publisher.difference`. folder: None = to shared memory.
        Raises SyncError."""
        return self._published(lambda to: to.difference(Path(folder or to.memory_folder()), version, **options))

    @together
    def write_last_whole(self, folder: str | None, version: int, **options: Any) -> WeightRef:
        """Write the last published version again, in full: `Publisher.last_whole`. folder: None = to shared memory.
        Raises SyncError."""
        return self._publish(lambda to: to.last_whole(Path(folder or to.memory_folder()) / "whole", version, **options))

    @together
    def save_checkpoint(
        self, path: str, state: dict[str, Any], *, beside: bool = False, served: str | None = None
    ) -> None:
        """Write a checkpoint: a Hugging Face model folder (LoRA: an adapter's) plus the training state.

        state: the orchestrator's part, plain data. beside: write it from a copy on another thread, if memory allows;
        `finish_checkpoint` then waits and raises its error. served: file with the rollout workers' weights, if they
        differ from these. Raises CheckpointError; `path` is complete or absent.
        """
        self.world.lead(self.finish_checkpoint)
        sharded, snapshots = is_sharded(self.model), []
        # Of a sharded model rank 0 gets copies in any case.
        copy = beside and served is None and (sharded or fits_in_memory_twice(self.model, self.optimizer))
        shards = Path(path).with_name(Path(path).name + ".shards.partial") if sharded else None
        if shards is not None:
            write_shards(self.world, shards, self.model, self.optimizer)

        def take(tensors: ModelTensors) -> None:
            optimizer = None if sharded else self.optimizer
            found = take_snapshot(
                self.model, tensors.saved(), self._writes(), optimizer, self.scheduler, copy=copy and not sharded
            )
            found.mismatch_probe, found.shards = self.mismatch_probe.state(), shards
            snapshots.append(found)

        lead_with(self.world, self.model, take)
        if not self.world.first:
            return
        full_state = {**state, "actor": {"step": self.step, "skipped_in_a_row": self.skipped_in_a_row}}
        if not copy:
            write_checkpoint(Path(path), lambda folder: snapshots[0].write(folder, served), full_state)
            return
        write = functools.partial(write_checkpoint, Path(path), snapshots[0].write, full_state)
        self.writing = submit(write, "mrl-checkpoint", daemon=False)

    def finish_checkpoint(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if that failed."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    @together
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
        Until then checkpoints can be saved, but nothing computed. Raises TrainingError for a sharded actor."""
        if is_sharded(self.model):
            raise TrainingError("colocate: needs actor_parallelism: ddp, or an actor on one GPU")
        self.residence.leave()

    def return_to_device(self) -> None:
        """Undo `leave_device`. Raises TrainingError if the device has no room."""
        self.residence.come_back()

    def close(self) -> None:
        """Wait for a checkpoint that is being written, and leave the other ranks."""
        if self.writing is not None:
            wait([self.writing])
        if self.publisher is not None:
            self.publisher.close()
        self.world.close()

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publisher(self) -> Publisher:
        if self.publisher is None:
            self.publisher = Publisher(self.model, self._writes())
        return self.publisher

    def _writes(self) -> Any:
        """What goes into a model's folder besides the model: the tokenizer, alone or with what makes pixels."""
        return self.tokenizer if self.processor is None else self.processor

    def _publish(self, write: Callable[[Publisher], WeightRef]) -> WeightRef:
        """Have rank 0 publish. Only its reference says where: one to an object store cannot be told to other ranks."""
        refs: list[WeightRef] = []

        def work(tensors: ModelTensors) -> int:
            publisher = self._publisher()
            publisher.source = tensors
            refs.append(write(publisher))
            return refs[0].version

        version = lead_with(self.world, self.model, work)
        return refs[0] if refs else WeightRef(version)

    def _published(self, write: Callable[[Publisher], WeightRef]) -> WeightRef:
        ref = self._publish(write)
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
        parts = [tokens.take(part.index) if part.counts else tokens.take(part.index).silent() for part in micro_batches]
        for part in parts:
            if self.objective.kl_in_loss and part.ref_logprobs_BT is None:
                part.ref_logprobs_BT = self._reference_logprobs(part)
        metrics = StepMetrics(comparison.moved, self.world)
        all_parts = functools.partial(self._all_parts, tokens, micro_batches, parts)
        for _ in range(self.config.num_iterations):
            self._update(parts, metrics, all_parts)
        self.old_logprobs = self._old_logprobs(batch.samples, micro_batches, all_parts())
        return metrics.summary() | {"train/learning_rate": float(self.scheduler.get_last_lr()[0])}

    def _update(self, parts: list[TokenBatch], metrics: StepMetrics, all_parts: Callable[[], list[TokenBatch]]) -> None:
        """parts: this rank's micro-batches. all_parts: gives every rank's."""
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
        if not is_sharded(self.model):
            sum_gradients(self.world, self.parameters)
        if self.keep_gradient_norms:
            named = ((name, p.grad) for name, p in self.model.named_parameters())
            norms = {name: whole(grad.norm()) for name, grad in named if grad is not None}
            values = (value.item() for value in to_host(*norms.values()))
            self.gradient_norms = dict(zip(norms, values, strict=True))
        norm = clip_gradients(self.parameters, self.config.max_grad_norm)
        total, grad_norm = metrics.update(loss, norm)
        self.mismatch_probe.examine(self.model, all_parts, metrics.unexplained_gap())
        self.model.eval()
        finite = math.isfinite(total) and math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
            claim(self, self.device, 0)  # from now on the optimizer state is allocated
        self._advance_schedule()
        self.optimizer.zero_grad(set_to_none=True)
        metrics.skipped += not finite
        self._watch_for_divergence(finite, total, grad_norm)

    def _all_parts(
        self, tokens: TokenBatch, micro_batches: list[MicroBatch], parts: list[TokenBatch]
    ) -> list[TokenBatch]:
        """Every rank's micro-batches, with the old policy's logprobs."""
        if self.world.size == 1:
            return parts
        old_BT = torch.zeros_like(tokens.mask_BT)
        for micro_batch, part in zip(micro_batches, parts, strict=True):
            if micro_batch.counts and part.old_logprobs_BT is not None:
                place = (to_device(self.device, micro_batch.index), slice(part.mask_BT.shape[1]))
                old_BT[place] = part.old_logprobs_BT
        return [replace(tokens, old_logprobs_BT=self.world.total(old_BT), layout=None)]

    def _old_logprobs(
        self, samples: list[Sample], micro_batches: list[MicroBatch], parts: list[TokenBatch]
    ) -> list[list[float]]:
        """Sample by sample, on the host. parts: every rank's, with the old policy's logprobs."""
        rows = [part.index for part in micro_batches] if self.world.size == 1 else [list(range(len(samples)))]
        found: list[list[float]] = [[] for _ in samples]
        masked = []
        for part in parts:
            assert part.old_logprobs_BT is not None
            masked.append(torch.where(part.mask_BT > 0, part.old_logprobs_BT, 0.0).float())
        for index, values_BT in zip(rows, to_host(*masked), strict=True):
            for at, values in zip(index, values_BT.tolist(), strict=True):
                found[at] = values[: len(samples[at].completion_ids)]
        return found

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

    def _old_policy(self, tokens: TokenBatch, micro_batches: list[MicroBatch]) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the whole batch before its first update; B×T each."""
        logprobs_BT, entropy_BT = torch.zeros_like(tokens.mask_BT), torch.zeros_like(tokens.mask_BT)
        for micro_batch in micro_batches:
            part = tokens.take(micro_batch.index)
            place = (to_device(self.device, micro_batch.index), slice(part.mask_BT.shape[1]))
            found = self._logprobs(self.model, part, entropy=True)
            if micro_batch.counts:
                logprobs_BT[place], entropy_BT[place] = found
        return self.world.total(logprobs_BT), self.world.total(entropy_BT)

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
        trained = sum(p.numel() * p.element_size() for p in map(local, self.parameters))
        claim(self, self.device, 0 if self.config.offload_optimizer else 2 * trained)
        later = trained if self.config.offload_optimizer else 3 * trained
        return gpu_tokens(
            self.model.config.get_text_config(),
            max(0, free - later),
            narrow=self.autocast_dtype is not None,
            checkpointing=self.config.gradient_checkpointing,
        )

    def _micro_batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """This rank's, as many as every rank's."""
        packs = self.forward.packs

        def split(own: Sequence[Sample]) -> list[list[int]]:
            if self.config.gradient_accumulation_steps > 1:
                return by_count(own, self.config.gradient_accumulation_steps)
            return by_tokens(own, self.micro_batch_tokens, shared_prompts=packs)

        return of_rank(samples, self.world.rank, self.world.size, split, shared_prompts=packs)

    # --- several ranks ----------------------------------------------------------------------------------------------

    def _shard(self, ranks: Ranks) -> None:
        """Keep only this rank's part of the models."""
        if self.forward.images is not None:
            raise ConfigError(
                "actor_parallelism: fsdp does not train models that take images, whose parts not every sample needs; "
                "use ddp"
            )
        mesh = make_mesh(ranks)
        if self.reference is not None:
            shard(self.reference, mesh, self.autocast_dtype)
        shard(self.model, mesh, self.autocast_dtype)
        self.forward.device = self.device
        # Experts in one tensor are gathered in one precision, and compute in no other.
        experts = any(parameter.dim() > 2 for parameter in self.model.parameters())
        self.forward.other_precision = self.autocast_dtype is None or not experts

    def _ranks(self) -> dict[str, Any]:
        """Facts about the ranks; none of a world of one."""
        if self.world.size == 1:
            return {}
        return {"ranks": self.world.size, "parallelism": self.config.actor_parallelism}
