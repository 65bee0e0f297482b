"""Options of the update."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from mrl.config.section import Section, refuse_changed


class TrainingConfig(Section):
    """The update: how much of what is learned from how many rollouts."""

    learning_rate: float = Field(5e-6, gt=0)
    """Peak learning rate of AdamW. About 1e-6 to 1e-5 for full weights, ten times that for LoRA."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up: constant, or down to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay (matrices only: not biases, not norms)."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW: decay of the gradient's mean."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """AdamW: decay of the squared gradient's mean."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are scaled down to this norm when theirs is larger."""
    max_steps: int = -1
    """Steps to run; -1 = as many as `num_epochs` takes."""
    num_epochs: int = Field(5, ge=1)
    """Passes over the tasks, unless `max_steps` says otherwise."""
    batch_size: int = Field(8, ge=1)
    """Prompts per step; a step trains on batch_size × num_generations rollouts."""
    num_generations: int = Field(4, ge=2)
    """Rollouts per prompt (G): the group whose mean is the baseline."""
    num_iterations: int = Field(1, ge=1)
    """Optimizer steps on the same rollouts (μ in GRPO); clipping starts to matter at 2."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Above 1: split each step's samples into this many micro-batches instead of by `max_tokens_per_micro_batch`. The
    update is the same for any number."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Split each step's samples into micro-batches of at most so many tokens (a longer sample is one by itself), which
    bounds memory whatever the lengths; None = 2,048 on CPUs, on GPUs by the memory that is free and the
    model's size. The update is the same for any number."""
    packing: bool = True
    """Where the model allows it (it is tried at the start): train on rows without padding, and on the prompt of a group
    once. The same numbers in less time; false = padded rows."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    torch_compile: bool = False
    """Compile the model's layers with `torch.compile` for training: a minute at the start, faster steps on GPUs. Where
    compiling fails the run says so and goes on without."""
    use_liger_kernel: bool = False
    """Run norms, rotary positions and gated MLPs on Liger's kernels (CUDA; `pip install 'mrl[liger]'`), never its loss.
    Refused where there are none."""
    offload_optimizer: bool = False
    """Keep AdamW's state, and do its arithmetic, in host memory: 8 bytes per trained parameter less on the GPU, for a
    slower update."""
    actor_parallelism: Literal["fsdp", "ddp"] = "fsdp"
    """How an actor on several GPUs divides its work; each takes a share of every step's samples. `fsdp`: each keeps a
    part of weights, gradients and optimizer state (PyTorch's FSDP2); `ddp`: each keeps all of them, with less to send.
    The update is the same."""
    ddp_timeout: float = Field(600.0, gt=0)
    """Seconds that an actor's processes wait for each other before one counts as dead."""
    save_steps: int = Field(100, ge=0)
    """Write a checkpoint every so many steps, and always at the end; 0 = only at the end."""
    save_total_limit: int | None = Field(None, ge=1)
    """Keep only the latest so many checkpoints, and the best one; None = all."""
    best_metric: str | None = None
    """Metric whose best checkpoint is kept and can be named RUN@best, e.g. `eval/pass_rate` or `reward/mean`; larger is
    better, or with a minus sign in front smaller."""
    checkpoint_errors: Literal["continue", "stop"] = "continue"
    """When a checkpoint cannot be written (a full disk): say so and go on with the last good one, or stop the run. The
    last checkpoint of a run has to be written in any case."""
    eval_steps: int = Field(0, ge=0)
    """Attempt the held-out tasks every so many steps too; 0 = only before the first and after the last."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """Stop when more than this share of a step's rollouts could not be generated or scored."""
    seed: int = Field(42, ge=0, lt=2**31)
    """Everything random derives from it."""

    @field_validator("max_steps")
    @classmethod
    def _max_steps_is_a_count(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("use -1 (as many as num_epochs takes) or a positive number")
        return value

    @model_validator(mode="after")
    def _one_way_to_cut(self) -> Self:
        if self.max_tokens_per_micro_batch is not None:
            refuse_changed(self, ("gradient_accumulation_steps",), "max_tokens_per_micro_batch left out")
        return self
