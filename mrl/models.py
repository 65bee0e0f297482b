"""Resolving a model's name, and loading its config, tokenizer and weights.

A model's name may be `starter` (the policy shipped with the package), a run's name or folder (its newest checkpoint), a
model folder, or a Hub id.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config import ModelConfig
from mrl.data.files import reachable
from mrl.errors import ModelError, MRLError
from mrl.starter import STARTER_DIR
from mrl.store.checkpoints import find_checkpoint
from mrl.store.run import find_run

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "spiece*", "tokenization*.py")
"""A folder with a tokenizer has a file that matches at least one of these."""
_LOADING = threading.Lock()
"""`from_pretrained` sets a process-wide default device: two at once would leave tensors without data."""


def resolve_model(name: str) -> str:
    """The folder or Hub id behind a model's name. Raises ModelError or CheckpointError saying what was looked for.

    `RUN@best` and `RUN@40` name a run's best checkpoint (see `best_metric`) and that of a step.
    """
    if name == "starter":
        return str(STARTER_DIR)
    path = Path(name).expanduser()
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return str(path)
    run_name, at, which = name.rpartition("@") if "@" in name else (name, "", "newest")
    run = find_run(run_name)
    if run is not None:
        return str(find_checkpoint(run, which).path)
    if path.is_file():
        raise ModelError(f"{name}: is a file; give the folder of a model")
    if path.is_dir():
        raise ModelError(f"{name}: the folder holds neither a model (config.json) nor a run (config.yaml)")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such folder")
    if at:
        raise ModelError(f"{name}: there is no run {run_name!r}")
    return name


def pin_model(name: str) -> str:
    """The same name, or for a run's name the folder of its checkpoint, since the newest one changes."""
    return name if find_run(name.rpartition("@")[0] or name) is None else resolve_model(name)


def load_config(config: ModelConfig) -> Any:
    """The model's `PreTrainedConfig`, without its weights. Raises ModelError."""
    from transformers import AutoConfig

    source = base_of_adapter(resolve_model(config.model)) or resolve_model(config.model)
    with _explained(config.model):
        return AutoConfig.from_pretrained(
            source,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=not _hub_answers(config.model, source, config.revision),
        )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a padding token. Raises ModelError."""
    tokenizer = _read_tokenizer(config)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"{config.model}: the tokenizer has no end-of-sequence token, so completions could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Too long prompts are refused later, naming their row; the tokenizer's own warning before that would mislead.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def _read_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    source = resolve_model(config.model)
    with _explained(config.model, "its tokenizer"):
        _check_tokenizer_files(Path(source))
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=not _hub_answers(config.model, source, config.revision),
        )
    return tokenizer


def _check_tokenizer_files(folder: Path) -> None:
    """Raise ModelError for a local model without tokenizer files."""
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ModelError(
            f"model {str(folder)!r}: the folder has no tokenizer (tokenizer.json and tokenizer_config.json); copy "
            "these files from the model that it was trained from"
        )


def load_model(
    config: ModelConfig, *, before_moving: Callable[[PreTrainedModel], None] | None = None
) -> PreTrainedModel:
    """The model in float32 on its device, adapters merged. Raises ModelError.

    before_moving: called on the model in host memory, so that the device never holds it unchanged.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # loading has no place in the run's own progress display
    source = resolve_model(config.model)
    base = base_of_adapter(source)
    if _is_classifier(base or source):
        raise ModelError(
            f"model {config.model!r}: it gives a score instead of text (its config.json names a sequence "
            "classifier, as algorithm reward trains); give a language model"
        )
    loader = model_class(load_config(config))
    with _LOADING, _explained(config.model):
        model = loader.from_pretrained(
            base or source,
            revision=config.revision if base is None else None,
            trust_remote_code=config.trust_remote_code,
            dtype=torch.float32,
            local_files_only=not _hub_answers(config.model, base or source, config.revision if base is None else None),
        )
        if base is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, source).merge_and_unload()
    if before_moving is not None:
        before_moving(model)
    model.to(pick_device(config.device))
    return model.eval()


def without_weights(config: ModelConfig) -> PreTrainedModel:
    """The model with tensors on the meta device, to inspect its architecture. Raises ModelError."""
    import torch

    model_config = load_config(config)
    with _LOADING, _explained(config.model), torch.device("meta"):
        model: PreTrainedModel = model_class(model_config).from_config(
            model_config, trust_remote_code=config.trust_remote_code
        )
        return model


def load_processor(config: ModelConfig) -> ProcessorMixin | None:
    """What a model that takes images makes of them, with its tokenizer; None for models of text alone, and, with a
    warning, where it cannot be loaded: then they are trained on text.

    Without torchvision, which transformers wants for videos, it has no part for these.
    """
    made_by = _processor_class(load_config(config))
    source = resolve_model(config.model)
    if made_by is None:
        return None
    if Path(source).is_dir() and not _has_processor(source):
        source = base_of_adapter(source) or source
        if Path(source).is_dir() and not _has_processor(source):
            return None
    try:
        with _explained(config.model, "what it makes of images"):
            processor: Any = made_by.from_pretrained(
                source,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                local_files_only=not _hub_answers(config.model, source, config.revision),
            )
            return processor
    except ModelError as error:
        warnings.warn(f"no images can be given to it: {error}", stacklevel=2)
        return None


def _has_processor(folder: str) -> bool:
    return any((Path(folder) / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))


def image_token_id(processor: Any) -> int:
    """The id that stands for an image in prompts, as often as it has tokens."""
    found: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    return found


def _processor_class(model_config: Any) -> Any:
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    known: Any = PROCESSOR_MAPPING
    if model_class(model_config) is not AutoModelForImageTextToText or type(model_config) not in known:
        return None
    found: type[ProcessorMixin] = known[type(model_config)]
    if "video_processor" not in found.get_attributes() or importlib.util.find_spec("torchvision") is not None:
        return found

    def without_video(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **others: Any
    ) -> None:
        parts = {"image_processor": image_processor, "tokenizer": tokenizer, "video_processor": None}
        found.__init__(self, **parts, chat_template=chat_template, **others)

    return type(found.__name__, (found,), {"__init__": without_video, "__module__": found.__module__})


def model_class(model_config: Any) -> Any:
    """The automatic class that loads it: with images, where it takes any."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    with_images = AutoModelForImageTextToText._model_mapping.get(type(model_config), None)
    alone = AutoModelForCausalLM._model_mapping.get(type(model_config), None)
    has_eyes = getattr(model_config, "vision_config", None) is not None
    both = with_images is not None and has_eyes and alone in (None, with_images)
    return AutoModelForImageTextToText if both else AutoModelForCausalLM


def load_classifier(config: ModelConfig) -> PreTrainedModel:
    """The model in float32 with a single-output classification head instead of its LM head. Raises ModelError."""
    import torch
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = resolve_model(config.model)
    if base_of_adapter(source) is not None:
        raise ModelError(f"model {config.model!r}: is an adapter; `mrl checkpoints RUN export FOLDER --merged` first")
    with _LOADING, _explained(config.model):
        model = AutoModelForSequenceClassification.from_pretrained(
            source,
            num_labels=1,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=torch.float32,
            local_files_only=not _hub_answers(config.model, source, config.revision),
        )
    model.to(pick_device(config.device))
    return model


def load_scorer(config: ModelConfig, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A trained sequence classifier as it was saved, on its device, with its tokenizer. Raises ModelError.

    dtype: of its weights; `auto` = as saved.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = resolve_model(config.model)
    if base_of_adapter(source) is not None:
        raise ModelError(f"model {config.model!r}: is an adapter; `mrl checkpoints RUN export FOLDER --merged` first")
    with _LOADING, _explained(config.model):
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            source,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            local_files_only=not _hub_answers(config.model, source, config.revision),
            output_loading_info=True,
        )
    if missing := sorted(loaded["missing_keys"]):
        raise ModelError(
            f"model {config.model!r}: its files lack {missing[0]}, which would be random numbers; give a model that "
            "was trained to score or classify"
        )
    tokenizer = _read_tokenizer(config)
    return model.to(pick_device(config.device)).eval(), tokenizer


def pick_device(name: str) -> torch.device:
    """The torch device of a config's `device`. Raises ModelError when it is not available."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device: {name!r} does not work here ({_first_line(error)}); use auto or cpu") from None
    return device


def autocast_dtype(config: ModelConfig, device: torch.device) -> torch.dtype | None:
    """The precision of forward passes over float32 master weights; None = float32."""
    import torch

    if config.dtype == "bfloat16":
        return torch.bfloat16
    if config.dtype == "auto" and device.type == "cuda":
        with torch.cuda.device(device):  # is_bf16_supported asks the current device
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else None
    return None


def context_length(model_config: Any, wanted: int) -> int:
    """`max_model_len`, lowered to the positions the model was made for."""
    made_for = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return min(wanted, made_for) if made_for else wanted


@contextmanager
def _explained(name: str, what: str = "it") -> Iterator[None]:
    """Turns any error of loading a model, also of its remote code, into a ModelError that says what to do."""
    try:
        yield
    except MRLError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            advice = "it comes with Python code of its own: set trust_remote_code: true if you trust its authors"
        elif damaged := _damaged_file(name):
            advice = f"{damaged} is damaged or cut short; copy or download it again"
        elif isinstance(error, OSError) and not Path(name).exists():
            advice = f"{_NOT_FOUND}{_offline()}; {_LOOK_AT}"
        else:
            advice = f"{what} could not be loaded"
        raise ModelError(f"model {name!r}: {advice} ({type(error).__name__}: {_first_line(error)})") from error


_NOT_FOUND = "it is no local folder, no run, and the Hub did not give it"
_LOOK_AT = "check the spelling, your connection and access rights, or use a local folder or `starter`"


def _offline() -> str:
    from huggingface_hub import constants

    return " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""


@functools.cache
def _hub_answers(name: str, source: str, revision: str | None) -> bool:
    """Whether the Hub answers for `source` (the user's `name`); if False, it is in the cache.

    Asked once, before libraries request each file with retries. Raises ModelError when it is in neither.
    """
    if Path(source).exists():
        return True
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    problem: Exception | None = None
    try:
        cached = isinstance(try_to_load_from_cache(source, "config.json", revision=revision), str)
        if not constants.HF_HUB_OFFLINE:
            if not reachable(constants.ENDPOINT):
                raise ConnectionError(f"{constants.ENDPOINT} does not answer")
            get_hf_file_metadata(hf_hub_url(source, "config.json", revision=revision))
            return True
    except HFValidationError:
        raise ModelError(f"model {name!r}: it is no local folder, no run, and no Hub id (USER/NAME)") from None
    except EntryNotFoundError:  # an adapter's repository has none
        return True
    except (HfHubHTTPError, OSError) as error:
        problem = error
    if cached:
        return False
    reason = f" ({type(problem).__name__}: {_first_line(problem)})" if problem else ""
    raise ModelError(f"model {name!r}: {_NOT_FOUND}{_offline()}; {_LOOK_AT}{reason}") from problem


def _damaged_file(name: str) -> Path | None:
    """The first safetensors file of a local model that cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        folder = Path(resolve_model(name))
    except MRLError:
        return None
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np"):
                continue
        except (SafetensorError, OSError):
            return path
    return None


def base_of_adapter(source: str) -> str | None:
    """The name of the base model of the adapter in the folder `source`; None = no adapter there. Raises ModelError."""
    path = Path(source) / "adapter_config.json"
    if not path.is_file():
        return None
    base = _read_json(path).get("base_model_name_or_path")
    if not base:
        raise ModelError(f"{path}: names no base model (base_model_name_or_path)")
    return str(base)


def _is_classifier(source: str) -> bool:
    path = Path(source) / "config.json"
    architectures = _read_json(path).get("architectures") if path.is_file() else None
    return any("ForSequenceClassification" in name for name in architectures or [])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({_first_line(error)}); copy or download it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: is not a JSON object; copy or download it again")
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
