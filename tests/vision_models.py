"""Tiny models that take images, with processor and tokenizer, made here: a LLaVA with plain positions, and a
Qwen2.5-VL, whose image tokens have positions in two dimensions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

SIDE = 28
"""Pixels: an image is 4 tokens of LLaVA's; one of 28 x 56 is 2 of Qwen's."""
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 230), "white": (240, 240, 240)}
WORDS = tuple(COLOURS)
"""Tokens of their own."""

LLAVA_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_TEMPLATE = LLAVA_TEMPLATE.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")


def image(colour: str = "red", size: tuple[int, int] = (SIDE, SIDE)) -> Any:
    """size: width and height."""
    import PIL.Image

    return PIL.Image.new("RGB", size, COLOURS[colour])


def png(colour: str = "red", size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    encoded = io.BytesIO()
    image(colour, size).save(encoded, "PNG")
    return encoded.getvalue()


def build_llava(folder: Path, *, says: tuple[str, ...] = WORDS, **changes: Any) -> Path:
    """About 60,000 parameters: a CLIP of one layer and a Llama of two."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = _tokenizer(("<image>",), says)
    tokenizer.chat_template = LLAVA_TEMPLATE
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=14,
        projection_dim=32,
    )
    text = LlamaConfig(**(_text_shape(tokenizer) | changes))
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    model = LlavaForConditionalGeneration(config)
    crop = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=crop)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def build_calling_llava(folder: Path, says: tuple[str, ...], *, strength: float = 3.0, context: int = 1024) -> Path:
    """A LLaVA that mostly says one of these texts, as in tests/rollouts/calling_model.py."""
    import torch

    from mrl.config import ModelConfig
    from mrl.models import load_model, load_tokenizer

    config = ModelConfig(model=str(build_llava(folder, says=says, max_position_embeddings=context)), device="cpu")
    model, tokenizer = load_model(config), load_tokenizer(config)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        model.get_input_embeddings().weight[:, 0], head[:, 0] = 10.0, -strength / 2
        head[[*tokenizer.convert_tokens_to_ids(list(says)), tokenizer.eos_token_id], 0] = strength / 2
    model.save_pretrained(folder)
    return folder


def build_qwen(folder: Path, *, says: tuple[str, ...] = WORDS, **changes: Any) -> Path:
    """About 100,000 parameters: three rotary sections, and windows in the vision tower."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from mrl.models import _processor_class

    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = _tokenizer(marks, says)
    tokenizer.chat_template = QWEN_TEMPLATE
    start, end, image_pad, video_pad = tokenizer.convert_tokens_to_ids(list(marks))
    torch.manual_seed(0)
    text = _text_shape(tokenizer) | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    config = Qwen2_5_VLConfig(
        text_config=text | changes,
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=image_pad,
        video_token_id=video_pad,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 84)
    kind = _processor_class(config)
    assert kind is not None
    processor: Any = kind(image_processor=images, tokenizer=tokenizer, chat_template=QWEN_TEMPLATE)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _text_shape(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }


def _tokenizer(marks: tuple[str, ...], says: tuple[str, ...]) -> Any:
    """Bytes, the words, and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", *marks],
    )
    tokenizer.add_tokens(list(says))
    return tokenizer
