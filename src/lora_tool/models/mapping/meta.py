"""A transformers class built without weights: its modules, parameters and what is special about them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from msgspec.structs import replace

from lora_tool.core.errors import MissingDependency, UnsupportedAdapter
from lora_tool.core.tensors import FLOAT_NAMES
from lora_tool.formats.model_config import ModelConfig, model_config_of
from lora_tool.models.mapping.model import LABELS, ModelFacts

try:
    from transformers.core_model_loading import build_glob_alternation
except ImportError as error:  # pragma: no cover - the test environment has it
    raise MissingDependency("transformers>=5.23", extra="merge") from error
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

_WITH_PEFT = "merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()"
_Table = Mapping[str, str | tuple[str, ...]]
_TABLES: Mapping[str, tuple[_Table, ...]] = {
    "AutoModelForCausalLM": (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    ),
    "AutoModelForSequenceClassification": (modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,),
    "AutoModelForTokenClassification": (modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,),
    "AutoModelForQuestionAnswering": (modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,),
    "AutoModelForSeq2SeqLM": (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    ),
    "AutoModel": (modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
}
"""Auto class → the tables of what it loads, and of classes that users name themselves where it knows none."""
_LAYERS = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
_MOST_LAYERS = 4096
DTYPES = {dtype: getattr(torch, name) for dtype, name in FLOAT_NAMES.items()}


def candidates(config: ModelConfig, auto_class: str) -> Iterator[str]:
    """Yield the class names that a model of this config may be loaded as: the config's own first, if it is such."""
    tables = _TABLES[auto_class]
    known = {name for table in tables for found in table.values() for name in _names(found)}
    ending = auto_class.removeprefix("AutoModel") or None
    own = [
        name
        for name in config.architectures
        if (name in known or (ending and name.endswith(ending))) and _is_of_type(name, config)
    ]
    yield from dict.fromkeys([*own, *(name for table in tables for name in _of_type(table, config)[:1])])


def _of_type(table: _Table, config: ModelConfig) -> tuple[str, ...]:
    return _names(table.get(config.model_type or "", ()))


def _names(found: str | tuple[str, ...]) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else tuple(found)


def _is_of_type(class_name: str, config: ModelConfig) -> bool:
    """Return whether the class is for configs of this model type: an auto class would take another one."""
    config_class = getattr(getattr(transformers, class_name, None), "config_class", None)
    return getattr(config_class, "model_type", None) == config.model_type


def belongs(class_name: str, config: ModelConfig) -> bool:
    """Return whether the class is for configs of this model type, or an auto class takes it: some types have another
    type's class.
    """
    tables = (table for tables in _TABLES.values() for table in tables)
    return _is_of_type(class_name, config) or any(class_name in _of_type(table, config) for table in tables)


def text_class(config: ModelConfig, auto_class: str = "AutoModelForCausalLM") -> str | None:
    """Return the class that is the text model alone of this multimodal config, with the head that the auto class gives;
    None where there is none.
    """
    text = config.raw.get("text_config")
    types = (config.model_type, text.get("model_type") if isinstance(text, dict) else None)
    table = _TABLES[auto_class][0]
    found = (name for each in types if isinstance(each, str) for name in _names(table.get(each, ())))
    return next((name for name in found if _reads_text_alone(name, config)), None)


def text_config(config: ModelConfig) -> ModelConfig | None:
    """Return the config that transformers saves with the text model alone of a multimodal one; None where there is
    none.

    Its object names no class: who writes it adds that.
    """
    autos = ("AutoModelForCausalLM", "AutoModelForSequenceClassification")
    classes = tuple(name for each in autos if (name := text_class(config, each)) is not None)
    if not classes:
        return None
    text = _config_class(config).from_dict(_without_code(config)).get_text_config()
    raw = json.loads(text.to_json_string())
    raw.pop("architectures", None)
    if config.dtype is not None:
        raw["dtype"] = FLOAT_NAMES[config.dtype]
    return replace(model_config_of(raw, config.path), architectures=classes[:1])


def _without_code(config: ModelConfig) -> dict[str, Any]:
    return {name: _special(value) for name, value in config.raw.items() if name != "auto_map"}


def _reads_text_alone(class_name: str, config: ModelConfig) -> bool:
    """Return whether the class takes the part of a multimodal config that is the text model's, as the auto classes
    give it.
    """
    text = (getattr(_config_class(config), "sub_configs", None) or {}).get("text_config")
    return text is not None and getattr(getattr(transformers, class_name, None), "config_class", None) is text


def _config_class(config: ModelConfig) -> Any:  # noqa: ANN401 - a class of transformers; None for an unknown type
    known = config.model_type in CONFIG_MAPPING  # whose `get` knows none that was not asked for before
    return CONFIG_MAPPING[config.model_type] if known else None


def build(config: ModelConfig, class_name: str, dtype: torch.dtype, *, any_labels: bool = True) -> PreTrainedModel:
    """Return the model of this class and config on the meta device: names and shapes, no weights.

    `dtype` is the type that it is loaded in: parameters of another one are so on purpose. `any_labels` gives a
    classifier `LABELS` labels, not the config's. Raises `UnsupportedAdapter` where the installed transformers cannot
    build it.
    """
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        raise UnsupportedAdapter(
            f"{config.path}: transformers {transformers.__version__} has no {class_name} of model_type "
            f"{config.model_type}",
            hint="install the transformers release that has it: pip install -U transformers",
        )
    _require_sane_sizes(config)
    try:
        raw = _without_code(config)
        if _reads_text_alone(class_name, config):
            built = _config_class(config).from_dict(raw).get_text_config()
        else:
            built = model_class.config_class.from_dict(raw)
        if any_labels and may_have_labels(class_name):
            built.num_labels = LABELS
        with torch.device("meta"), default_dtype(dtype):
            model: PreTrainedModel = model_class(built)
    except MemoryError:  # says nothing about the config
        raise
    except Exception as error:  # what a config of any kind raises in any of hundreds of classes cannot be listed
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedAdapter(
            f"{config.path}: transformers cannot build {class_name} from it: {reason}", hint=_WITH_PEFT
        ) from error
    return model


def loading_ignores(class_name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the patterns of names that the class may lack, and of those that loading leaves out silently."""
    found = getattr(transformers, class_name)
    names = ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")
    lacking, strange = (tuple(getattr(found, name, None) or ()) for name in names)
    return lacking, strange


def may_have_labels(class_name: str) -> bool:
    """Return whether the config's number of labels may decide shapes of the class."""
    return "Classification" in class_name or "Answering" in class_name or "SemanticSegmentation" in class_name


def _special(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value with the floats that JSON lacks: transformers writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        found = value.get("__float__")
        if len(value) == 1 and isinstance(found, str):
            return float(found)
        return {name: _special(each) for name, each in value.items()}
    return [_special(each) for each in value] if isinstance(value, list) else value


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of `dtype` where no type is given, as `from_pretrained` does while it builds the model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _require_sane_sizes(config: ModelConfig) -> None:
    """Refuse a number of layers that would build for ever; nothing real comes near."""
    for path, value in _integers(config.raw, ""):
        name = path.rpartition(".")[2]
        if value > _MOST_LAYERS and re.search(r"(layers|blocks|depth|num_(local_|routed_)?experts|n_layer)\Z", name):
            raise UnsupportedAdapter(f"{config.path}: {path}: {value} is larger than in any real model")


def _integers(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _integers(value, f"{prefix}{name}.")
        elif type(value) is int:
            yield f"{prefix}{name}", value


def facts_of(model: PreTrainedModel, dtype: torch.dtype) -> ModelFacts:
    """Return what is special about the model, which was built to be loaded in `dtype`."""
    tensors = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in reversed(modules.items())}
    output = model.get_output_embeddings()
    heads = [name for name, shape in shapes.items() if shape[:1] == (LABELS,) and name.endswith(".weight")]
    kept_wide = _kept_wide(model, dtype)
    may_lack, _ = loading_ignores(type(model).__name__)
    return ModelFacts(
        class_name=type(model).__name__,
        shapes=shapes,
        buffers=frozenset(name for name, _ in model.named_buffers()),
        modules=frozenset(modules),
        layers=frozenset(path for path, module in modules.items() if isinstance(module, _LAYERS)),
        conv1d=frozenset(path for path, module in modules.items() if isinstance(module, Conv1D)),
        transposed=frozenset(path for path, module in modules.items() if getattr(module, "is_transposed", False)),
        tied=dict(model.all_tied_weights_keys),
        output=paths.get(id(output)) if output is not None else None,
        tokens_of_both=paths.get(id(model.get_input_embeddings())) if _peft_takes_for_tied(model) else None,
        head=heads[0].removesuffix(".weight") if len(heads) == 1 else None,
        unsaved=frozenset(model._keys_to_ignore_on_save or ()) & shapes.keys(),  # noqa: SLF001
        keep_in_fp32=frozenset(
            name
            for name, tensor in tensors.items()
            if (tensor.dtype is torch.float32 is not dtype) or (kept_wide and kept_wide.search(name))
        ),
        optional=frozenset(name for name in shapes if any(re.search(pattern, name) for pattern in may_lack)),
    )


def _peft_takes_for_tied(model: PreTrainedModel) -> bool:
    """Return whether PEFT trains tokens at both ends: it asks the outermost config (0.21, `set_additional_trainable_modules`)."""
    return bool(model.config.to_dict().get("tie_word_embeddings"))


def _kept_wide(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return what names match that `from_pretrained` keeps in float32 (transformers 5.23, `_get_dtype_plan`)."""
    plan = model._get_dtype_plan(dtype)  # noqa: SLF001 - transformers' own answer
    return build_glob_alternation(list(plan))[0] if plan else None
