"""Learn to name the colour of an image. Half a minute on two CPU cores: the model is a tiny LLaVA, made here.

python examples/images.py
"""

import argparse
import tempfile

import PIL.Image
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from mrl import MRLTrainer

COLOURS = {"red": (230, 30, 30), "blue": (30, 40, 230)}
TASKS = [
    {"prompt": "Which colour ?", "image": PIL.Image.new("RGB", (28, 28), rgb), "colour": name}
    for name, rgb in COLOURS.items()
]


def names_it(completions, colour, image, **kwargs):
    """1 for the colour's name. `image` is there too, as PIL has it."""
    return [float(said[-1]["content"] == name) for said, name in zip(completions, colour, strict=True)]


def make_model(folder: str) -> None:
    """Any folder or Hub id of a model that takes images will do instead, e.g. llava-hf/llava-1.5-7b-hf."""
    words = ["<unk>", "<end>", "<image>", "<user>", "<model>", "Which", "colour", "?", *COLOURS, "green", "white"]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unk>"}
    marks = {"additional_special_tokens": ["<image>", "<user>", "<model>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **special, **marks)
    template = (
        "{% for m in messages %}{{ '<model>' if m.role == 'assistant' else '<user>' }} "
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ '<image>' if part.type == 'image' else part.text }} {% endfor %}{% endif %}<end>{% endfor %}"
        "{% if add_generation_prompt %}<model>{% endif %}"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=28, patch_size=14),
        text_config=LlamaConfig(**sizes, vocab_size=len(words), eos_token_id=1, pad_token_id=1, bos_token_id=None),
        image_token_index=2,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    pixels = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    expands = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(pixels, tokenizer, **expands, chat_template=template).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=60)
    steps = parser.parse_args().max_steps
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        trainer = MRLTrainer(
            model=folder,
            train_dataset=TASKS,
            reward_funcs=names_it,
            max_steps=steps,
            batch_size=2,
            num_generations=64,
            max_completion_length=1,
            learning_rate=1e-3,
            num_rollout_workers=1,
            weight_sync_method="direct",
        )
        result = trainer.train()
    print(f"reward {result.metrics['reward/mean']:.2f} after {result.steps} steps; see {result.run_dir}/reward.png")
