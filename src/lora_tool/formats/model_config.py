"""`config.json` of transformers: the fields that decide how a model is merged and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.core.errors import Problem
from lora_tool.core.tensors import FLOAT_NAMES, DType
from lora_tool.formats.fields import Fields, is_object, shown
from lora_tool.formats.files import read_object

FILE_NAME = "config.json"

TRANSFORMERS_LABELS = 2
"""What transformers assumes where the config names no labels."""


_NO_TORCH_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "fp16": "float16",
    "fp32": "float32",
    **{f"torch.{name}": name for name in FLOAT_NAMES.values()},
}
"""Dtype names that torch lacks → torch's: transformers looks the name up in torch, and cannot read such a config."""

_BY_NAME = {name: dtype for dtype, name in FLOAT_NAMES.items()}

DTYPES = frozenset(
    """
    bfloat16 bool cdouble cfloat chalf complex128 complex32 complex64 double float float16 float32 float64 float8_e4m3fn
    float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 half int int16 int32 int64 int8 long short
    uint16 uint32 uint64 uint8
    """.split()  # noqa: SIM905 - a table
)
"""torch's names of dtypes, but for those that no weight has."""

NUMBERS = frozenset(
    [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "initializer_range",
        "attention_dropout",
        "n_head",
        "n_embd",
        "d_model",
        "num_heads",
        "d_ff",
        "ffn_dim",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "sliding_window",
    ]
)
"""Fields that no class of transformers takes as a string."""
NOT_NULL = frozenset({"max_position_embeddings", "d_ff", "ffn_dim", "n_embd", "n_head", "num_heads"})
"""Those of them that no class takes as null either."""


class ModelConfig(Struct, frozen=True, kw_only=True):
    """What `config.json` says; `raw` is the whole object, for writing a changed copy."""

    path: Path
    raw: Mapping[str, Any]
    model_type: str | None = None
    architectures: tuple[str, ...] = ()
    num_labels: int | None = None
    """From `num_labels`, which transformers lets win, else `id2label`; None where neither is there."""
    pad_token_id: int | None = None
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    tie_word_embeddings: bool | None = None
    quantization: str | None = None
    """`quant_method` of the quantization config, also of one inside (`text_config`), or "unknown"; None for plain weights."""
    custom_code: bool = False
    """Whether `auto_map` asks for Python code from the checkpoint."""
    edited: bool = False
    """Whether `raw` differs from the file."""
    problems: tuple[Problem, ...] = ()

    @property
    def dtype(self) -> DType | None:
        """The type of the weights that it names, None where it names none that we know."""
        named = self.raw.get("dtype", self.raw.get("torch_dtype"))
        return _BY_NAME.get(named.removeprefix("torch.")) if isinstance(named, str) else None


def read_model_config(path: Path) -> ModelConfig:
    """Return the config in the file `path`; wrong fields are in `problems`. Raises `CorruptFile`, `BadConfig`."""
    return model_config_of(read_object(path), path)


def model_config_of(raw: Mapping[str, Any], path: Path) -> ModelConfig:
    """Return the config that the object `raw`, of the file `path`, is; wrong fields are in `problems`."""
    fields = Fields(raw, path)
    if raw.get("model_type") is None:
        fields.note("model_type", "expected a string, found nothing: transformers cannot tell what model it is")
    text = fields.inner("text_config") if raw.get("text_config") else fields
    for name in ("dtype", "torch_dtype"):
        meant = _NO_TORCH_NAMES.get(str(raw.get(name)))
        if meant is not None:
            fields.expected(name, f"torch's name, {shown(meant)}", raw[name])
    name = "dtype" if raw.get("dtype") is not None else "torch_dtype"  # transformers' choice
    if not isinstance(raw.get(name), dict | None) and str(raw[name]) not in DTYPES | _NO_TORCH_NAMES.keys():
        fields.expected(name, "the name of a dtype of torch", raw[name])
    if not raw.get("auto_map"):
        _note_numbers(fields)
    return ModelConfig(
        path=path,
        raw=raw,
        model_type=fields.text("model_type"),
        architectures=fields.names("architectures") or (),
        num_labels=_num_labels(fields),
        pad_token_id=_pad_token_id(fields, text),
        vocab_size=text.optional_integer("vocab_size"),
        num_hidden_layers=_layers(text),
        tie_word_embeddings=fields.optional_boolean("tie_word_embeddings"),
        quantization=_quantization(fields),
        custom_code=bool(raw.get("auto_map")),
        problems=tuple(fields.problems),  # the last: every getter may add one
    )


def _num_labels(fields: Fields) -> int | None:
    labels = fields.typed("id2label", "object of labels", is_object)
    # transformers makes the key a number and the label a key
    if labels is not None and not all(
        key.isdecimal() and key.isascii() and isinstance(label, str | int) for key, label in labels.items()
    ):
        fields.expected("id2label", "object of numbers to labels", labels)
        labels = None
    explicit = fields.optional_integer("num_labels")
    if explicit is None and "num_labels" in fields.table:
        fields.expected("num_labels", "int", fields.table["num_labels"])
    return len(labels) if labels is not None and explicit is None else explicit


def _note_numbers(fields: Fields) -> None:
    for name, value in fields.table.items():
        if (name in NUMBERS and isinstance(value, str)) or (name in NOT_NULL and value is None):
            fields.expected(name, "number", value)
        elif name.endswith("_config") and isinstance(value, dict):
            _note_numbers(fields.inner(name))


def _pad_token_id(fields: Fields, text: Fields) -> int | None:
    """Return the text model's, where the config has one: transformers' scores of padded texts go by that one."""
    whole = fields.optional_integer("pad_token_id")
    return whole if text is fields else text.optional_integer("pad_token_id")


def _layers(text: Fields) -> int | None:
    # GPT-2 and its like write n_layer, Bloom writes n_layer too; MPT n_layers
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        # LXMERT has a number for each of its stacks
        if name in text.table and not isinstance(text.table[name], dict):
            return text.optional_integer(name)
    return None


def _quantization(fields: Fields) -> str | None:
    inner = (each.get("quantization_config") for each in fields.table.values() if isinstance(each, dict))
    value = fields.table.get("quantization_config") or next(filter(None, inner), None)
    if not value:
        return "mlx" if isinstance(fields.table.get("quantization"), dict) else None
    method = value.get("quant_method") if isinstance(value, dict) else None
    return method if isinstance(method, str) else "unknown"
