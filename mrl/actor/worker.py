"""The actor: holds the policy and takes one GRPO-family training step at a time.

A step's samples are split into micro-batches. Each goes through the model as one packed sequence, or where the model
does not support that, as right-padded rows (mrl.modeling.forward). A sampled token's logprob comes from the hidden
state before it.

    passes.py     micro-batches through the policy or the reference model
    updates.py    a step's updates
    publisher.py  the weights, for samplers
    snapshot.py   what a checkpoint holds
    parallel/     several ranks
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mrl.actor.lora import adapts_parameters, add_lora
from mrl.actor.micro_batches import CPU_TOKENS, gpu_tokens
from mrl.actor.objective import Objective
from mrl.actor.optimizer import check_offload, make_optimizer, make_scheduler
from mrl.actor.parallel.sharding import make_mesh, shard
from mrl.actor.parallel.shards import write_shards
from mrl.actor.parallel.tensors import ModelTensors, lead_with
from mrl.actor.parallel.world import Ranks, World, join, together, wanted_size
from mrl.actor.passes import Passes
from mrl.actor.publisher import Publisher
from mrl.actor.residence import Residence
from mrl.actor.snapshot import MISMATCH_PROBE, fits_in_memory_twice, load_snapshot, take_snapshot
from mrl.actor.updates import Updates
from mrl.config import AlgorithmConfig, ModelConfig, TrainingConfig
from mrl.config.ranks import check_ranks
from mrl.config.section import changed_options
from mrl.errors import ConfigError, SyncError, TrainingError
from mrl.mismatch import MismatchEvidence, MismatchProbe
from mrl.modeling.compiled import CompiledLayers, try_compiled
from mrl.modeling.fixed_order import fixed_order
from mrl.modeling.forward import Forward
from mrl.modeling.liger import apply_liger, check_liger
from mrl.modeling.precision import narrow_matrices
from mrl.models import autocast_dtype, load_model, load_processor, load_tokenizer, pick_device
from mrl.store.checkpoints import STATE, write_checkpoint
from mrl.system.environment import computing_environment
from mrl.system.machine import free_port, machine_id, own_address
from mrl.system.memory import claim, unclaimed
from mrl.system.threads import submit
from mrl.types import Sample, TrainBatch, WeightRef, derive_seed
from mrl.weights.checksum import checksum
from mrl.weights.hub_names import check_round_trip
from mrl.weights.sharded import is_sharded, local

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        self.total_steps, self.base_name = total_steps, base_name
        self.step = 0
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
        self.arrange()
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
        comparison = self.mismatch_probe.begin(self.model, batch.samples)
        try:
            return self.updates.train(batch, comparison) if batch.samples else self.updates.pass_over()
        finally:
            self.mismatch_probe.end()

    def learn(self, batch: TrainBatch) -> tuple[dict[str, float], list[list[float]]]:
        """`train_step`, with `trained_logprobs` in its answer: another call to another machine would take its time."""
        return self.train_step(batch), self.trained_logprobs()

    def trained_logprobs(self) -> list[list[float]]:
        """Of the last step's samples, in their order: the policy's logprobs before the step's updates, 0 where the
        policy did not sample; [] for a step without samples."""
        return self.updates.old_logprobs

    def mismatch_evidence(self) -> MismatchEvidence | None:
        """Evidence about the last step's logprob gap; None unless it was above `max_logprob_gap`."""
        return self.mismatch_probe.evidence

    @together
    def reference_logprobs(self, samples: list[Sample], temperature: float) -> list[list[float]]:
        """Logprobs of the samples' tokens under the reference model, for `Sample.reference_logprobs`; 0 where the
        policy did not sample. May run while the samples are being scored."""
        return self.passes.reference_logprobs(samples, temperature) if samples else []

    @together
    def reference_kl(self, samples: list[Sample], temperature: float) -> list[float]:
        """KL to the reference model of each sample, in nats: the sum of the estimates at its sampled tokens."""
        return self.passes.reference_kl(samples, temperature) if samples else []

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
        full_state = {**state, "actor": {"step": self.step, "skipped_in_a_row": self.updates.skipped_in_a_row}}
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
        self.step, self.updates.skipped_in_a_row = actor_state["step"], actor_state["skipped_in_a_row"]
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

    # --- parts ------------------------------------------------------------------------------------------------------

    def arrange(self) -> None:
        """Make what computes, of the parts that are loaded and the configuration."""
        objective = Objective(self.algorithm, self.config.num_iterations)
        self.passes = Passes(
            self.forward,
            self.model,
            self.reference,
            objective,
            world=self.world,
            device=self.device,
            micro_batch_tokens=self.micro_batch_tokens,
            into=self.config.gradient_accumulation_steps,
        )
        self.updates = Updates(
            self.config,
            objective,
            self.passes,
            self.optimizer,
            self.scheduler,
            parameters=self.parameters,
            probe=self.mismatch_probe,
            compiled=self.compiled,
        )

    def _default_tokens(self) -> int:
        """Tokens of a micro-batch that fit the device's memory, once gradients and optimizer state are allocated."""
        free = unclaimed(self.device)
        if free is None:
            return CPU_TOKENS
        trained = sum(p.numel() * p.element_size() for p in map(local, self.parameters))
        claim(self.optimizer, self.device, 0 if self.config.offload_optimizer else 2 * trained)
        later = trained if self.config.offload_optimizer else 3 * trained
        return gpu_tokens(
            self.model.config.get_text_config(),
            max(0, free - later),
            narrow=self.autocast_dtype is not None,
            checkpointing=self.config.gradient_checkpointing,
        )

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
