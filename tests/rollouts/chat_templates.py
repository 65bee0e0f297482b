"""Chat templates in the styles there are, each with a tiny tokenizer that has its special tokens.

They are our own, in the shape of the model families that they are named after, so that conversations can be tried
without any model's files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_HERMES_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>"
)
_HERMES_END = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_HERMES_RESULTS = """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
_HERMES_CALLS = """
{%- for call in message.tool_calls or [] %}
{%- set call = call.function %}
{%- if (loop.first and content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""

CHATML = (
    """
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else 'You help.') + '\\n\\n' }}
{{- """
    + repr(_HERMES_TOOLS)
    + """ }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- """
    + repr(_HERMES_END)
    + """ + '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'system' and loop.first and tools %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + content }}"""
    + _HERMES_CALLS
    + """{{- '<|im_end|>\\n' }}"""
    + _HERMES_RESULTS
    + """
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""Qwen2.5: a system message of its own, calls as Hermes writes them."""

THINKING = (
    """
{%- if tools %}
{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- """
    + repr(_HERMES_TOOLS)
    + """ }}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- """
    + repr(_HERMES_END)
    + """ + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set seen.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content or '' %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' %}
{%- if not message.reasoning_content and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.last and (loop.last or thought) %}
{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}"""
    + _HERMES_CALLS
    + """{{- '<|im_end|>\\n' }}"""
    + _HERMES_RESULTS
    + """
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
)
"""Qwen3: what was thought before the last user message is removed."""

LLAMA = """
{{- bos_token }}
{%- set ask = messages[0].content | trim if messages[0].role == 'system' else '' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\n\\n' }}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson + '\\n\\n' }}{%- endfor %}{%- endif %}
{{- ask + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only single tool calls') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""Llama 3: headers, contents trimmed, one call at a time and nothing around it."""

MISTRAL = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set ask = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set ask = '' %}{%- set rest = messages %}{%- endif %}
{%- set seen = namespace(last=-1, turn=0) %}
{%- for message in rest %}
{%- if message.role == 'user' %}{%- set seen.last = loop.index0 %}{%- endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (seen.turn % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set seen.turn = seen.turn + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == seen.last %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + (ask + '\\n\\n' if ask and loop.index0 == seen.last else '') + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
{%- endfor %}
{{- ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant, tool, and a system message at the start') }}
{%- endif %}
{%- endfor %}
"""
"""Mistral: roles alternate, no prompt for the assistant, tools and system message before the last user message."""

GEMMA = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set ask = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set ask = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- (ask if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
"""Gemma: the system message is part of the first user's, and there are no tools."""

DEEPSEEK = """
{{- bos_token }}
{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}{%- endif %}{%- endfor %}
{%- if tools %}{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}
{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- ('' if loop.first else '\\n') + '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + eos_token }}
{%- elif message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}
"""
"""DeepSeek R1: thinking is opened by the prompt and removed from the history; all system messages come first."""

PHI = """
{%- for message in messages %}
{%- if message.role == 'system' and tools %}
{{- '<|system|>' + message.content + '<|tool|>' + tools | tojson + '<|/tool|><|end|>' }}
{%- else %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
"""Phi 4 mini: a token per role, no line ends, calls never shown."""

PLAIN = """
{%- for message in messages %}{{- message.role | capitalize + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}
"""
"""No special tokens at all, and no end of a turn but a line's."""

SPACED = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- ' ' + message.content + ' </s>' }}
{%- else %}{{- ('<s>' if message.role == 'user' else '') + '[INST] ' + message.content + ' [/INST]' }}
{%- endif %}
{%- endfor %}
"""
"""Llama 2: a space before the end of a turn; its tokenizer puts one before whatever comes first."""


@dataclass(frozen=True)
class Style:
    """A template, with its special tokens."""

    template: str
    eos: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    """Tokens that are no special ones: `<tool_call>` …"""
    tools: bool = True
    systems: str = "anywhere"
    """Where system messages may stand: anywhere, first, or nowhere."""
    alternates: bool = False
    thinks: bool = False
    spaced: bool = False
    calls: tuple[str, str, str] = ("<tool_call>\n", '{"name": "%s", "arguments": %s}', "\n</tool_call>")
    """How a call is written: what stands before it, name and arguments, what stands behind."""


_CHATML_TOKENS = ("<|im_start|>", "<|endoftext|>")
_HERMES_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", special=_CHATML_TOKENS, words=_HERMES_WORDS),
    "thinking": Style(THINKING, "<|im_end|>", special=_CHATML_TOKENS, words=_HERMES_WORDS, thinks=True),
    "llama": Style(
        LLAMA,
        "<|eot_id|>",
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eom_id|>"),
        calls=("", '{"name": "%s", "parameters": %s}', ""),
    ),
    "mistral": Style(
        MISTRAL,
        "</s>",
        "<s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
        systems="first",
        alternates=True,
        calls=("[TOOL_CALLS] [", '{"name": "%s", "arguments": %s, "id": "call00000"}', "]"),
    ),
    "gemma": Style(
        GEMMA, "<end_of_turn>", "<bos>", ("<start_of_turn>", "<eos>"), tools=False, systems="first", alternates=True
    ),
    "deepseek": Style(
        DEEPSEEK,
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
         "<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<think>", "</think>"),
        systems="first",
        thinks=True,
        calls=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "%s\n```json\n%s\n```",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ),
    "phi": Style(
        PHI, "<|end|>", special=("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>", "<|endoftext|>"),
        tools=False,
    ),
    "plain": Style(PLAIN, "<eos>", tools=False),
    "spaced": Style(SPACED, "</s>", "<s>", tools=False, spaced=True),
}  # fmt: skip

_TEXTS = [
    "the tide is the rise and fall of the sea\n\nassistant\nuser\nsystem\n",
    '{"name": "look_up", "arguments": {"word": "tide"}}\n',
    "naïve café – 日本語 \U0001f9ea ﷽ e\u0301\r\n\t   spaces",
] * 20
"""What the tokenizers are trained on: enough for tokens of several bytes, so that text has several tokenisations."""


@cache
def tokenizer_of(style: str) -> PreTrainedTokenizerFast:
    """A tokenizer of some 400 words with the style's tokens and template."""
    made = STYLES[style]
    raw = Tokenizer(models.BPE())
    if made.spaced:
        raw.normalizer = normalizers.Prepend(" ")
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(_TEXTS, trainers.BpeTrainer(vocab_size=380, initial_alphabet=alphabet, show_progress=False))
    raw.add_tokens([AddedToken(word, normalized=False) for word in made.words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token=made.eos,
        pad_token="<pad>",
        additional_special_tokens=list(made.special),
        **({"bos_token": made.bos} if made.bos else {}),
    )
    tokenizer.chat_template = made.template
    return tokenizer
