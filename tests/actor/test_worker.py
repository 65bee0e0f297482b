"""The actor's step on tiny models: right numbers, whatever the split; LoRA, reference, reuse, and divergence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.actor.lora import public_state_dict
from mrl.actor.worker import ActorWorker
from mrl.algorithms.base import LossSettings, LossTerms, token_weights
from mrl.algorithms.grpo import GRPO
from mrl.errors import ConfigError, TrainingError
from tests.actor.actors import LR, logprobs_of, make_actor, make_batch, parameters
from tests.soak import but


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", but(("dapo",), ["grpo", "dapo", "dr_grpo", "cispo", "sapo"]))
def test_the_update_does_not_depend_on_the_split(tiny_model: str, loss_type: str) -> None:
    """By count or by tokens, packed or padded, with prompts shared or not, and in whatever order the samples come."""
    batch = make_batch(tiny_model)
    for sample in batch.samples[3:]:
        sample.prompt_ids = batch.samples[3].prompt_ids  # a group
    splits: list[dict[str, object]] = [{"gradient_accumulation_steps": parts} for parts in (1, 2, 3, 7, 50)]
    splits += [{"max_tokens_per_micro_batch": tokens} for tokens in (1, 20, 40, 1000)]
    splits += [{**split, "packing": False} for split in splits]
    gradients, metrics = [], []
    for number, split in enumerate(splits):
        order = torch.randperm(len(batch.samples), generator=torch.Generator().manual_seed(number)).tolist()
        shuffled = copy.copy(batch)
        shuffled.samples = [batch.samples[i] for i in order]
        shuffled.advantages = [batch.advantages[i] for i in order]
        actor = make_actor(tiny_model, loss_type=loss_type, max_grad_norm=1e9, **split)
        metrics.append(actor.train_step(shuffled))
        gradients.append([10 * state["exp_avg"] for state in actor.optimizer.state.values()])
    for split, other, numbers in zip(splits[1:], gradients[1:], metrics[1:], strict=True):
        for mine, first in zip(other, gradients[0], strict=True):
            torch.testing.assert_close(mine, first, atol=1e-6, rtol=1e-4, msg=str(split))
        for name, value in metrics[0].items():
            assert numbers[name] == pytest.approx(value, abs=1e-4, rel=1e-3), (name, split)


@pytest.mark.parametrize("fixture", ["tiny_model", "untied_model"])
def test_loss_and_gradient_are_those_of_the_plain_way(fixture: str, request: pytest.FixtureRequest) -> None:
    """One sequence at a time, all logits at once, no padding: the same loss, gradient and step."""
    model = request.getfixturevalue(fixture)
    batch = make_batch(model)
    actor = make_actor(model, loss_type="grpo", max_grad_norm=1e9)
    plain = AutoModelForCausalLM.from_pretrained(model)
    total = torch.zeros(())
    for sample, advantage in zip(batch.samples, batch.advantages, strict=True):
        logprobs = logprobs_of(plain, sample.prompt_ids, sample.completion_ids, batch.temperature)[None]
        mask = torch.tensor([sample.mask])
        terms = LossTerms(logprobs, logprobs.detach(), torch.tensor([[advantage]]).expand_as(logprobs), mask)
        weights = token_weights(
            mask, "sequences", max_completion_length=1024, num_sequences=len(batch.samples), num_tokens=0
        )
        total = total + (GRPO.per_token(terms, LossSettings()).loss_BT * weights).sum()
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    metrics = actor.train_step(batch)
    assert metrics["train/loss"] == pytest.approx(total.item(), abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["train/logprob_gap_max"] < 1e-5
    assert metrics["train/ratio"] == pytest.approx(1.0)
    assert metrics["train/importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/tokens"] == sum(sum(s.mask) for s in batch.samples)


def test_the_step_raises_what_was_good_and_lowers_what_was_bad(tiny_model: str) -> None:
    batch = make_batch(tiny_model, rows=2)
    batch.advantages = [1.0, -1.0]
    actor = make_actor(tiny_model)
    actor.train_step(batch)
    for sample, sign in zip(batch.samples, (1, -1), strict=True):
        with torch.no_grad():
            after = logprobs_of(actor.model, sample.prompt_ids, sample.completion_ids, batch.temperature)
        changed = (after - torch.tensor(sample.logprobs)) * torch.tensor(sample.mask)
        assert sign * changed.sum() > 0


def test_padding_and_tokens_of_the_environment_have_no_influence(tiny_model: str) -> None:
    """The logprob recorded for a masked token is not looked at, be it even NaN."""
    batch = make_batch(tiny_model)
    poisoned = copy.deepcopy(batch)
    poisoned.samples[1].logprobs[0] = float("nan")
    first, second = make_actor(tiny_model), make_actor(tiny_model)
    first.train_step(batch)
    metrics = second.train_step(poisoned)
    assert metrics["train/updates_skipped"] == 0
    for name, value in parameters(first).items():
        assert torch.equal(parameters(second)[name], value), name


def test_a_logprob_gap_is_reported_and_weighed(tiny_model: str) -> None:
    batch = make_batch(tiny_model)
    for sample in batch.samples:
        sample.logprobs = [value - 0.5 for value in sample.logprobs]  # the sampler thought them less likely
    metrics = make_actor(tiny_model).train_step(batch)
    assert metrics["train/logprob_gap"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["train/importance_weight"] == pytest.approx(torch.e**0.5, rel=1e-3)
    capped = make_actor(tiny_model, importance_sampling_cap=1.2).train_step(batch)
    assert capped["train/importance_weight"] == pytest.approx(1.2, rel=1e-3)
    ignored = make_actor(tiny_model, importance_sampling="none").train_step(batch)
    assert ignored["train/importance_weight"] == 1.0


@pytest.mark.parametrize("lora", [False, True])
def test_kl_is_to_the_reference_and_starts_at_zero(tiny_model: str, lora: bool) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model, lora=lora, beta=0.1, learning_rate=1e-2)
    kls = [actor.train_step(batch)["train/kl"] for _ in range(4)]
    assert kls[0] == pytest.approx(0.0, abs=1e-6)
    assert kls[-1] > 1e-4  # against the old policy instead it would stay at zero
    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    rows = batch.samples[0]
    with torch.no_grad():
        reference = logprobs_of(before, rows.prompt_ids, rows.completion_ids, 1.0)
        if lora:
            with actor.model.disable_adapter():
                held = logprobs_of(actor.model, rows.prompt_ids, rows.completion_ids, 1.0)
        else:
            held = logprobs_of(actor.reference, rows.prompt_ids, rows.completion_ids, 1.0)
    torch.testing.assert_close(held, reference)


def test_what_is_known_is_not_computed_again(tiny_model: str) -> None:
    """The first update's own pass tells the old policy's logprobs; reference logprobs may come with the samples."""
    batch = make_batch(tiny_model)
    passes = []
    for reference_known in (False, True):
        actor = make_actor(tiny_model, num_iterations=3, beta=0.1, learning_rate=1e-2)
        if reference_known:
            known = actor.reference_logprobs(batch.samples, batch.temperature)
            for sample, logprobs in zip(batch.samples, known, strict=True):
                sample.reference_logprobs = logprobs
        counted = []
        for model in (actor.model, actor.reference):
            assert model is not None
            model.get_decoder().register_forward_hook(lambda *_, count=counted: count.append(1))
        metrics = actor.train_step(batch)
        passes.append((len(counted), metrics))
    assert [count for count, _ in passes] == [4, 3]
    assert passes[0][1] == passes[1][1]
    assert passes[0][1]["train/ratio_max"] > 1.01


def test_old_logprobs_are_those_of_a_pass_before_the_update(tiny_model: str) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model, num_iterations=2, gradient_accumulation_steps=2, learning_rate=1e-2)
    before = copy.deepcopy(actor.model)
    seen = []
    update = actor.updates.update
    actor.updates.update = lambda parts, *rest: (update(parts, *rest), seen.append(parts))  # type: ignore[method-assign]
    actor.train_step(batch)
    for part in seen[-1]:
        for row, sample in enumerate(part.samples):
            with torch.no_grad():
                expected = logprobs_of(before, sample.prompt_ids, sample.completion_ids, batch.temperature)
            got = part.old_logprobs_BT[row, : len(expected)]
            torch.testing.assert_close(got, expected * torch.tensor(sample.mask), atol=1e-5, rtol=1e-5)
            assert (part.new_logprobs_BT[row, : len(expected)] - got).abs().max() > 1e-4


COMPILED = {
    "checkpointed": pytest.param({"gradient_checkpointing": True, "num_iterations": 2}, marks=pytest.mark.slow),
    "plain": pytest.param({}, marks=pytest.mark.soak),
    "padded": pytest.param({"packing": False}, marks=pytest.mark.soak),
}


@pytest.mark.timeout(900)  # a C++ compiler runs for each kind of layer
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compiled_layers_train_the_same_and_resume_bit_for_bit(
    tiny_model: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Also with activation checkpointing and packing; sampling meanwhile is not compiled."""
    batch = make_batch(tiny_model)
    plain = make_actor(tiny_model, **options)
    actor = make_actor(tiny_model, torch_compile=True, **options)
    assert actor.compiled is not None
    expected, got = plain.train_step(batch), actor.train_step(batch)
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, abs=1e-4, rel=1e-3), name
    assert all(layer._compiled_call_impl is None for layer, _ in actor.compiled.layers)
    path = str(tmp_path / "step")
    actor.save_checkpoint(path, {})
    AutoModelForCausalLM.from_pretrained(path)
    resumed = make_actor(tiny_model, torch_compile=True, **options)
    resumed.load_checkpoint(path)
    assert resumed.train_step(batch) == actor.train_step(batch)
    for name, value in parameters(actor).items():
        assert torch.equal(parameters(resumed)[name], value), name


def test_compiling_that_fails_is_said_and_done_without(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", broken)
    actor = ActorWorker({"model": tiny_model, "device": "cpu"}, {"torch_compile": True}, total_steps=1)
    facts = actor.initialize()
    assert facts["compiled"] is False
    assert any("torch_compile" in notice and "no C++ compiler" in notice for notice in facts["notices"])
    assert actor.train_step(make_batch(tiny_model))["train/updates_skipped"] == 0


def test_the_reference_agrees_where_rows_share_a_prompt(tiny_model: str) -> None:
    """Rows of one prompt share a packed sequence: the copy of the model has to attend over it as the policy does."""
    batch = make_batch(tiny_model)
    for sample in batch.samples:
        sample.prompt_ids = [1, 2, 3]
    actor = make_actor(tiny_model, beta=0.1)
    assert max(map(abs, actor.reference_kl(batch.samples, 1.0))) < 1e-5
    assert actor.train_step(batch)["train/kl"] == pytest.approx(0.0, abs=1e-6)


def test_reuse_takes_its_ratios_against_the_policy_before_the_first_update(tiny_model: str) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model, num_iterations=3, learning_rate=1e-2)
    metrics = actor.train_step(batch)
    assert metrics["train/ratio_max"] > 1.01
    assert metrics["train/clipped_high_fraction"] + metrics["train/clipped_low_fraction"] > 0
    assert metrics["train/logprob_gap_max"] < 1e-5  # sampler against old policy, not against the moved one
    once = make_actor(tiny_model, num_iterations=1, learning_rate=1e-2)
    once.train_step(batch)
    assert any(
        not torch.equal(a, b) for a, b in zip(parameters(once).values(), parameters(actor).values(), strict=True)
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_only_the_adapter_and_its_merged_weights_say_the_same(tiny_model: str, checkpointing: bool) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model, lora=True, gradient_checkpointing=checkpointing, learning_rate=1e-2)
    before = parameters(actor)
    for _ in range(3):
        actor.train_step(batch)
    changed = {name for name, value in parameters(actor).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    merged = AutoModelForCausalLM.from_pretrained(tiny_model)
    merged.load_state_dict(public_state_dict(actor.model), strict=True)
    sample = batch.samples[0]
    with torch.no_grad():
        expected = logprobs_of(actor.model, sample.prompt_ids, sample.completion_ids, 1.0)
        base = logprobs_of(
            AutoModelForCausalLM.from_pretrained(tiny_model), sample.prompt_ids, sample.completion_ids, 1.0
        )
        got = logprobs_of(merged, sample.prompt_ids, sample.completion_ids, 1.0)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (got - base).abs().max() > 1e-4


def test_gradient_checkpointing_changes_nothing(tiny_model: str) -> None:
    batch = make_batch(tiny_model)
    plain, checkpointed = make_actor(tiny_model), make_actor(tiny_model, gradient_checkpointing=True)
    plain.train_step(batch)
    checkpointed.train_step(batch)
    for name, value in parameters(plain).items():
        torch.testing.assert_close(parameters(checkpointed)[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_dropout_leaves_the_gap_to_the_sampler_exact(tiny_model: str) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model, lora=True, dropout=0.5, learning_rate=1e-2)
    actor.train_step(batch)
    with torch.no_grad():
        for sample in batch.samples:
            sample.logprobs = logprobs_of(actor.model, sample.prompt_ids, sample.completion_ids, 0.8).tolist()
    metrics = actor.train_step(batch)
    assert metrics["train/logprob_gap_max"] < 1e-5
    assert metrics["train/ratio"] == pytest.approx(1.0)


def test_an_update_that_is_not_finite_is_skipped_and_three_stop_the_run(tiny_model: str) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model)
    before = parameters(actor)
    bad = copy.deepcopy(batch)
    bad.advantages[0] = float("inf")
    for _ in range(2):
        metrics = actor.train_step(bad)
        assert metrics["train/updates_skipped"] == 1
        assert metrics["train/loss"] in (float("inf"), float("-inf")) or metrics["train/loss"] != metrics["train/loss"]
    for name, value in parameters(actor).items():
        assert torch.equal(value, before[name]), name
    assert actor.train_step(batch)["train/updates_skipped"] == 0  # a good one starts the count anew
    actor.train_step(bad)
    actor.train_step(bad)
    with pytest.raises(TrainingError, match=r"3 updates in a row.*learning_rate"):
        actor.train_step(bad)


def test_schedule_warms_up_and_decays(tiny_model: str) -> None:
    batch = make_batch(tiny_model, rows=2)
    actor = make_actor(tiny_model, lr_scheduler_type="linear", warmup_steps=2)
    rates = [actor.optimizer.param_groups[0]["lr"]]
    for _ in range(10):
        rates.append(actor.train_step(batch)["train/learning_rate"])
    assert rates[0] == 0
    assert rates[2] == pytest.approx(LR)
    assert rates[10] == pytest.approx(0)


def test_lora_target_modules_there_are_not(tiny_model: str) -> None:
    actor = ActorWorker(
        {"model": tiny_model, "use_lora": True, "lora_target_modules": ["nowhere"], "device": "cpu"}, {}, 1
    )
    with pytest.raises(ConfigError, match=r"lora_target_modules.*q_proj"):
        actor.initialize()


@pytest.mark.parametrize("fixture", ["tiny_model", "untied_model"])
def test_the_frozen_base_of_an_adapter_is_held_in_bfloat16(
    fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the numbers that autocast makes of a float32 base, and what is published is base + adapter in float32."""
    model = request.getfixturevalue(fixture)
    batch = make_batch(model)
    narrow = make_actor(model, lora=True, dtype="bfloat16")
    wide = make_actor(model, lora=True, dtype="bfloat16")
    for (_, mine), (_, other) in zip(narrow.model.named_parameters(), wide.model.named_parameters(), strict=True):
        other.data = mine.detach().float().clone()
    for actor in (narrow, wide):
        actor.optimizer.param_groups[0]["lr"] = 0.05
    first = narrow.train_step(batch)
    assert first == wide.train_step(batch)
    assert narrow.train_step(batch) == wide.train_step(batch)
    base = [m for m in narrow.model.modules() if type(m) is torch.nn.Linear and not m.weight.requires_grad]
    assert {m.weight.dtype for m in base} >= {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in narrow.parameters)
    mine, theirs = public_state_dict(narrow.model), public_state_dict(wide.model)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name].float(), tensor), name
    narrow.save_checkpoint(str(tmp_path / "c"), {})
    resumed = make_actor(model, lora=True, dtype="bfloat16")
    resumed.load_checkpoint(str(tmp_path / "c"))
    assert resumed.train_step(batch) == narrow.train_step(batch)
