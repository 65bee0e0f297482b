"""Decoding by the `transformers` engine against `model.generate`: tokens per second, same model, same requests.

    python benchmarks/decode.py                         # some four minutes on two cores
    python benchmarks/decode.py --only 1M --repeats 9   # the small model alone

Both sample at temperature 1 over the whole vocabulary, stop at the same ids and lengths, and take turns; the engine
also returns the logprob of every token, which `generate` is not asked for. A ratio is that of the medians.

The models have random weights. One column of the embedding is the same for every word but the end-of-sequence token's,
which makes that token as likely at every place as the wanted mean length asks for: lengths then have the long tail of
a geometric distribution.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.transformers.model import StepKind
from mrl.system.threads import release_openmp_threads
from mrl.types import GenerateRequest, SamplingParams

EOS = 1
ROWS = 64
GENERATIONS = 8
BEGINNING = 32
"""Tokens all prompts begin with, as those with one system prompt do."""
OWN = range(16, 48, 4)
"""Tokens of each prompt of its own."""
SHAPES = {
    "1M": Qwen2Config(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "30M": Qwen2Config(
        vocab_size=151_936,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
}


@dataclass(frozen=True)
class Case:
    """How many requests, and when they end."""

    model: str
    name: str
    max_tokens: int
    mean_tokens: int | None = None
    """Where the end-of-sequence token is to come on average; None = it never does."""
    requests: int = ROWS
    ragged: bool = True
    """Prompts of different lengths, as real ones have; else of one length, which spares `generate` its padding."""


CASES = [
    Case("1M", "fixed length 128", 128),
    Case("1M", "fixed length 128, equal prompts", 128, ragged=False),
    Case("1M", "to EOS, mean 48", 256, 48),
    Case("1M", "to EOS, mean 48, a queue", 256, 48, requests=4 * ROWS),
    Case("30M", "fixed length 32", 32),
    Case("30M", "to EOS, mean 16", 64, 16),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SHAPES), help="one of the models")
    parser.add_argument(
        "--repeats", type=int, help="runs of each side (default: 7 for the small model, 3 for the large)"
    )
    parser.add_argument("--case", default="", help="only cases whose name has this in it")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--decode-step", choices=("auto", "eager", "static"), default="auto", help="the engine's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    on_gpu = options.device.startswith("cuda")
    where = torch.cuda.get_device_name(options.device) if on_gpu else f"CPU, {options.threads} thread(s)"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, {where}")
    print(f"{ROWS} rows at once, {GENERATIONS} generations per prompt\n")
    print("| model | case | tokens | mrl, tokens/s | `generate`, tokens/s | ratio |")
    print("|---|---|---:|---:|---:|---:|")
    for case in CASES:
        if options.only in (None, case.model) and options.case in case.name:
            report(case, options.repeats or (7 if case.model == "1M" else 3), options)


def report(case: Case, repeats: int, options: argparse.Namespace) -> None:
    """Run both sides by turns and print the table's row."""
    model = build(SHAPES[case.model], case.mean_tokens).to(options.device)
    ours, theirs, tokens = [], [], []
    mrl, generate = with_engine(model, case, options.decode_step), with_generate(model, case)
    release_openmp_threads()
    mrl(0), generate(0)
    for repeat in range(1, repeats + 1):
        for run, speeds in ((mrl, ours), (generate, theirs)):
            release_openmp_threads()  # `generate` runs on this thread; its team would slow the engine's
            start = time.perf_counter()
            count = run(repeat)
            speeds.append(count / (time.perf_counter() - start))
            tokens.append(count)
    a, b = statistics.median(ours), statistics.median(theirs)
    size = f"{model.num_parameters() / 1e6:.1f} M, {model.config.vocab_size:,} words"
    print(
        f"| {size} | {case.name} | {statistics.median(tokens):,.0f} | {a:,.0f} | {b:,.0f} | {a / b:.2f} |", flush=True
    )


def build(shape: Qwen2Config, mean_tokens: int | None) -> PreTrainedModel:
    """A model with random weights and tied head whose end-of-sequence token comes after `mean_tokens` on average."""
    torch.manual_seed(0)
    shape = Qwen2Config(**{**shape.to_dict(), "max_position_embeddings": 1024, "tie_word_embeddings": True})
    shape.bos_token_id, shape.pad_token_id, shape.eos_token_id = None, 0, EOS if mean_tokens else None
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = shape.eos_token_id
    if mean_tokens is not None:
        embedding = model.get_input_embeddings().weight.data
        embedding[:, 0] = 1.0
        ids = torch.randint(2, shape.vocab_size, (8, 32))
        for _ in range(3):
            with torch.no_grad():
                hidden = model.model(input_ids=ids).last_hidden_state[:, -1]
                logits = model.lm_head(hidden)
            others = torch.cat([logits[:, :EOS], logits[:, EOS + 1 :]], dim=1).logsumexp(dim=1)
            wanted = others - torch.tensor(mean_tokens - 1.0).log()
            embedding[EOS, 0] += ((wanted - logits[:, EOS]) / hidden[:, 0]).mean()
    return model


def prompts(vocab_size: int, count: int, ragged: bool) -> list[tuple[int, ...]]:
    """`count` prompts that share a beginning; ragged: and have lengths of their own."""
    generator = torch.Generator().manual_seed(1)

    def words(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocab_size, (n,), generator=generator).tolist())

    beginning = words(BEGINNING)
    return [beginning + words(OWN[number % len(OWN) if ragged else 0]) for number in range(count)]


def with_engine(model: PreTrainedModel, case: Case, decode_step: StepKind) -> Callable[[int], int]:
    """Runs the case by the engine; returns the tokens sampled."""
    engine = TransformersEngine(model, None, max_model_len=1024, max_rows=ROWS, decode_step=decode_step)
    sampling = SamplingParams(max_tokens=case.max_tokens)
    different = prompts(model.config.vocab_size, case.requests // GENERATIONS, case.ragged)

    def run(repeat: int) -> int:
        requests = [
            GenerateRequest(f"{p}.{g}", prompt, sampling, (repeat * 1000 + p) * GENERATIONS + g)
            for p, prompt in enumerate(different)
            for g in range(GENERATIONS)
        ]
        return sum(len(completion.token_ids) for completion in asyncio.run(engine.generate(requests)))

    return run


def with_generate(model: PreTrainedModel, case: Case) -> Callable[[int], int]:
    """Runs the case by `model.generate`, a batch of rows after the other; returns the tokens sampled."""
    different = prompts(model.config.vocab_size, case.requests // GENERATIONS, case.ragged)
    rows = [prompt for prompt in different for _ in range(GENERATIONS)]

    def run(repeat: int) -> int:
        torch.manual_seed(repeat)
        tokens = 0
        for first in range(0, len(rows), ROWS):
            batch = rows[first : first + ROWS]
            longest = max(map(len, batch))
            ids = torch.tensor([(0,) * (longest - len(p)) + p for p in batch], device=model.device)
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=model.device)
            with torch.no_grad():
                output = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=case.max_tokens,
                )
            ended = output[:, longest:] == EOS if case.mean_tokens else torch.zeros_like(output[:, longest:])
            after = ended.cumsum(dim=1) - ended.long() > 0
            tokens += int((~after).sum())
        return tokens

    return run


if __name__ == "__main__":
    main()
