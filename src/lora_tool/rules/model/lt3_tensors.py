"""LT317 to LT319, LT321 to LT323: the tensors of a model folder against its class, its config and one another."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping

from lora_tool.checkpoints import ADAPTER_PICKLE, ADAPTER_WEIGHTS, UNMERGED
from lora_tool.checkpoints.quantised import quantisation_table, quantised_weights, sign_of
from lora_tool.core.keys import split_layer, unwrapped
from lora_tool.core.report import Severity
from lora_tool.core.report.text import grouped
from lora_tool.formats import adapter_config
from lora_tool.formats.fields import shown
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.quantised.names import READ_METHODS, is_compressed
from lora_tool.formats.quantised.parts import LayoutError
from lora_tool.models.ends import MATRIX, head_of
from lora_tool.models.layers import fused_sets, of_further_tokens
from lora_tool.models.model_tensors import ModelTensors, differs
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, doubted, rule
from lora_tool.rules.engine.subjects import ModelSubject
from lora_tool.rules.model.lt3_model_ends import embedding_rows, vocabulary_without_rows

_CLASS = frozenset({Need.WEIGHTS, Need.CONFIG, Need.CLASS})
_SCORE = "score.weight"
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")
"""What configs call the width of the hidden states, which is that of the embeddings."""
_COPY = "copy config.json from where the weights are from"
_SUB_BYTE = 8
_DISTRIBUTED = "module."
"""What DistributedDataParallel puts before every name."""


@rule("LT317", Severity.ERROR, on=ModelSubject, needs=_CLASS)
def other_shape_than_the_class(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor's shape does not match the config.

    What it does: Computes each tensor's shape from `config.json` (sizes, heads, vocabulary), for model types that have
    the same tensors on disk and in memory, and compares. For other types it checks the width of the embeddings and of a
    `score` head, and looks for a tensor whose shape in one layer differs from that in otherwise similar layers. Before
    it reports an error, it asks transformers, if that is installed. Where it is not, and the built-in table was not
    made with such a config, the finding is a warning. A size that the config leaves out is a warning.
    Why it matters: transformers refuses to load the model: size mismatch. With `ignore_mismatched_sizes` it
    re-initialises the tensor at random.
    Example: `score.weight` is [1, 24], but `hidden_size` is 16: the head was trained on another model. Or a merge wrote
    GPT-2's Conv1D weights, which are [in, out], as [out, in].
    What to do: Merge again with the base that the adapter was trained on, or copy config and weights from one place.
    """
    if (wrong := subject.contradiction) is not None:
        yield Fault(subject=wrong.subject, message=wrong.message, path=wrong.path)
        return
    known = subject.class_tensors
    yield from _left_out(subject, known.left_out if known is not None else ())
    guessed: list[Fault] = []
    if known is None:
        guessed = [*_of_other_shapes(subject, _of_hidden_states(subject)), *_odd_shapes(subject)]
        known = subject.asked if guessed else None
    if known is None:
        yield from guessed
    else:
        yield from (doubted(fault, known.doubt) for fault in _of_other_shapes(subject, known.shapes))


def _of_other_shapes(subject: ModelSubject, shapes: Mapping[str, tuple[int | None, ...]]) -> Iterator[Fault]:
    """Compare the tensors with shapes that are known, except for those that another rule reports."""
    tensors = subject.matrices
    vocabulary = vocabulary_without_rows(subject) is not None
    for name, wanted in shapes.items():
        tensor = tensors[name]
        if not differs(wanted, tensor.shape) or tensor.dtype.bits < _SUB_BYTE or _said_by_the_ledger(subject, name):
            continue
        differ = [a for a, b in zip(wanted, tensor.shape, strict=False) if a is not None and a != b]
        size = subject.checkpoint.config.vocab_size if subject.checkpoint.config else None
        if vocabulary and differ == [size] and len(wanted) == len(tensor.shape):
            continue  # LT310 reports a vocabulary of another size
        shown = ", ".join("?" if each is None else str(each) for each in wanted)
        message = f"is {list(tensor.shape)}, but the config implies [{shown}]"
        yield Fault(subject=name, message=message, path=tensor.path)


def _odd_shapes(subject: ModelSubject) -> Iterator[Fault]:
    tensors = subject.matrices
    for name, shape, other in subject.odd_tensors:
        if name in tensors and name not in (subject.expected or {}):
            tensor = tensors[name]
            message = f"is {list(tensor.shape)}, but {list(shape)} in layer {other}"
            yield Fault(subject=name, message=message, path=tensor.path)


def _left_out(subject: ModelSubject, fields: Iterable[str]) -> Iterator[Fault]:
    """Say which sizes the config leaves open: transformers loads the model with its own, or not at all."""
    config = subject.checkpoint.whole_config
    for name in fields:
        if name in config.raw:
            message = f"expected int, found {shown(config.raw[name])}: transformers does not load the model"
            yield Fault(subject=name, message=message, path=config.path, hint=_COPY)
        else:
            message = (
                f"is missing: transformers assumes its default for a {config.model_type}, which may not fit the weights"
            )
            yield Fault(subject=name, message=message, path=config.path, severity=Severity.WARNING, hint=_COPY)


def _of_hidden_states(subject: ModelSubject) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes that the hidden size determines: of the embeddings, if none has that width, and of the score
    head that transformers gives every decoder.
    """
    config = subject.plain.config
    if config is None or config.custom_code or config.quantization or subject.is_unsure:
        return {}
    inputs = embedding_rows(subject.matrices) if config.vocab_size is not None else {}  # else of numbers over time
    text = config.raw.get("text_config")
    table = text if isinstance(text, dict) else config.raw
    width = next((table[name] for name in _WIDTHS if type(table.get(name)) is int), None)
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures)
    heads = {_SCORE} & subject.matrices.keys() if classifies else set()
    own = {value for name, value in table.items() if "embed" in name and type(value) is int}
    lost = [] if any(subject.matrices[name].shape[1] in {width, *own} for name in inputs) else [*inputs]
    return {} if width is None else dict.fromkeys((*lost, *heads), (None, width))


def _said_by_the_ledger(subject: ModelSubject, name: str) -> bool:
    """Whether the folder's ledger, or the plan of its merge, has another shape for the tensor, which LT604 reports."""
    spec = (subject.expected or {}).get(name)
    return spec is not None and spec.shape != subject.matrices[name].shape


@rule("LT318", Severity.ERROR, on=ModelSubject, needs=_CLASS)
def lost_tensor(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor that the model's class has is missing.

    What it does: Compares the names in the weights with those of the class in `config.json`, for model types that have
    the same tensors on disk and in memory: tensors that every config has, and tensors that come together, such as the
    biases of one attention. A tied output layer may be absent. For other types it looks for tensors that one layer
    lacks and otherwise similar layers have, for embeddings, an output layer and the last norm, and for a projection
    that is missing in every layer beside its companions. transformers is asked as for LT317. It also looks for names
    that are all those of a wrapper.
    Why it matters: transformers re-initialises missing tensors at random on every load, with only a log line.
    Example: A merge script skipped `model.norm.weight`; `lm_head.weight` is absent and `tie_word_embeddings` is false.
    What to do: Merge or copy again; with safetensors, save the whole `state_dict`.
    """
    known = subject.class_tensors
    if any("lora_" in name or ".base_layer." in name for name in subject.tensors):
        return  # LT601 reports an adapter among the weights
    if known is None:
        guessed = _wrapped(subject) or [*_lost_of_an_unknown_class(subject)]
        known = subject.asked if guessed and not all(map(is_wrapped, subject.tensors)) else None
        if known is None:
            yield from guessed
            return
    said = {*(subject.expected or {}), *_head_of_the_class(subject, known)}
    what = known.class_name or "every class of this model type"
    for name, more in _by_layer(name for name in known.missing if name not in said):
        message = f"is not in the weights{more}, but {what} has it: transformers would initialise it at random"
        yield doubted(Fault(subject=name, message=message), known.doubt)


_SAVE_UNWRAPPED = "save the unwrapped model: accelerator.unwrap_model(model).save_pretrained(FOLDER)"


def _wrapped(subject: ModelSubject) -> list[Fault]:
    """Return the fault of weights that are all called as a wrapper around the model calls them."""
    names = [*subject.tensors]
    if not names or not all(map(is_wrapped, names)):
        return []
    message = (
        f"has the name that a wrapper gives it (torch.compile, FSDP or DistributedDataParallel), as have {len(names) - 1} "
        f"more: transformers looks for `{_unwrapped(names[0])}` and would initialise all of them at random"
    )
    return [Fault(subject=names[0], message=message, hint=_SAVE_UNWRAPPED)]


def is_wrapped(name: str) -> bool:
    """Return whether torch.compile, FSDP or DistributedDataParallel put a part into the name."""
    return _unwrapped(name) != name


def _unwrapped(name: str) -> str:
    return unwrapped(name.removeprefix(_DISTRIBUTED))


def _lost_of_an_unknown_class(subject: ModelSubject) -> Iterator[Fault]:
    expected = subject.expected or {}
    for name, _, other in subject.odd_tensors:
        if name not in subject.matrices and name not in expected:
            yield Fault(
                subject=name,
                message=f"is not in the weights, but layer {other} has it: transformers would initialise it at random",
            )
    for message in (*([subject.lost_end] if subject.lost_end else []), *subject.lost_everywhere):
        yield Fault(message=message)


def _head_of_the_class(subject: ModelSubject, known: ModelTensors) -> frozenset[str]:
    """Return the tensors of a sequence classifier's head where all are missing, which LT307 reports."""
    if not (known.class_name or "").endswith("ForSequenceClassification"):
        return frozenset()
    heads = [name for name in (*subject.matrices, *known.missing) if head_of(name.rpartition(".")[0])]
    return frozenset() if any(name in subject.matrices for name in heads) else frozenset(heads)


def _by_layer(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield one name for all layers, with how many more layers are meant."""
    for first, *others in grouped(names, lambda name: split_layer(name)[1]).values():
        yield first, f", nor in {len(others)} other layers" if others else ""


@rule("LT319", Severity.WARNING, on=ModelSubject, needs=_CLASS)
def tensor_without_place(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor that the model's class does not have.

    What it does: Compares the names in the weights with those that the class in `config.json` may have, for model types
    that have the same tensors on disk and in memory. A tensor of another class of the type, such as an `lm_head`, is
    reported as info.
    Why it matters: transformers ignores it on loading, with only a log line, and its training is lost.
    Example: `v_head.summary.weight` of a PPO trainer; or layers 24 to 27, although `num_hidden_layers` is 24.
    What to do: Set `architectures` and the other fields of `config.json` to those of the trained model, or remove the
    tensor. Layers for multi-token prediction that the config counts are no finding: servers use them.
    """
    known = subject.class_tensors
    if known is None:
        return
    expected, config = subject.expected, subject.checkpoint.whole_config
    for severity, names in ((Severity.WARNING, known.unexpected), (Severity.INFO, known.of_other_classes)):
        mine = [n for n in names if (expected is None or n in expected) and "lora_" not in n and "base_layer" not in n]
        mine = [name for name in mine if not of_further_tokens(config, name)]
        for name, more in _by_layer(mine):
            message = f"is not a tensor of {known.class_name}{more}: transformers ignores it"
            fault = Fault(subject=name, message=message, path=subject.matrices[name].path, severity=severity)
            yield doubted(fault, known.doubt) if names is known.unexpected else fault


_ELSEWHERE = "hf_quant_config.json"
"""Where modelopt says what others say in config.json."""
_EVERY_LINEAR = frozenset({"awq", "bitsandbytes", "fbgemm_fp8", "fp8", "gptq", "mxfp4", "mxfp8"})
"""Methods whose config means that weights are quantised, whatever else it says."""
_REFUSED_IN_PART = frozenset({"compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp8"})
"""Methods of which vLLM loads layers that it fuses only where all of them are quantised, or none."""


@rule("LT322", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG, Need.WEIGHTS}))
def quantised_otherwise(subject: ModelSubject) -> Iterator[Fault | Unchecked]:
    """Quantised weights that loaders misread.

    What it does: Checks that every quantised weight has its scales, in the shapes that format and config give, and that
    the config declares weights quantised exactly if they are.
    Why it matters: transformers ignores scales that the config does not announce and computes with the raw codes. It
    initialises weights at random if they have the names of another format. A grid of another tile size scales the wrong
    values. None of these raises an error.
    Example: `save_pretrained` after PEFT's merge into an FP8 base leaves `weight_scale_inv` and drops
    `quantization_config`; after one into GPT-OSS it stores bfloat16 under the names `…_blocks`.
    What to do: Copy or merge the model again: `lora-tool merge ADAPTER --base QUANTISED` writes unquantised weights and
    a matching config.
    """
    model = subject.checkpoint
    config = model.config
    if config is None or (config.custom_code and not config.quantization):
        return
    if config.quantization not in READ_METHODS or config.custom_code:
        yield Unchecked(reason=f"lora-tool does not read weights quantised by {config.quantization}")
        return
    sign, table = sign_of(model), quantisation_table(config)
    if sign is None and not table and config.quantization is None:
        return
    if sign is not None and not table and _ELSEWHERE not in model.folder.files:
        message = (
            f"is stored as a quantised weight ({sign.dtype}), but config.json does not say so: loaders would "
            "not decode it"
        )
        yield Fault(subject=sign.name, message=message, path=sign.path)
        return
    try:
        found = quantised_weights(model)
    except LayoutError as error:
        of_file = Fault(subject=error.tensor, message=error.why, path=error.path)
        yield of_file if error.is_fault else Unchecked(reason=f"`{error.tensor}`: {error.why}")
        return
    if not found.weights and (config.quantization in _EVERY_LINEAR or is_compressed(table)):
        message = f"says that the weights are quantised ({config.quantization}), but none is"
        yield Fault(subject="quantization_config", message=message, path=config.path)


@rule("LT323", Severity.WARNING, on=ModelSubject, needs=frozenset({Need.CONFIG, Need.WEIGHTS}))
def fused_layers_of_two_kinds(subject: ModelSubject) -> Iterator[Fault]:
    """Layers that servers fuse, some quantised and some not.

    What it does: Looks at the weights that a server puts into one: q, k and v of an attention, gate and up of an MLP,
    the experts of a layer. In FP8, compressed-tensors and modelopt's formats all of them are quantised, or none is.
    Why it matters: transformers loads such a model. vLLM refuses it: "Detected some but not all shards of qkv_proj are
    quantized".
    Example: A merge wrote `q_proj` in bfloat16, because the adapter changes it, and left `k_proj` and `v_proj` in FP8.
    What to do: Merge again: `lora-tool merge ADAPTER --base QUANTISED --store touched-16bit` writes whole sets.
    """
    method = subject.checkpoint.config.quantization if subject.checkpoint.config else None
    if method not in _REFUSED_IN_PART:
        return
    kinds: dict[str, dict[bool, str]] = {}
    for name, tensor in subject.matrices.items():
        if name.endswith(".weight") and len(tensor.shape) == MATRIX:
            for key in fused_sets(name):
                kinds.setdefault(key, {}).setdefault(encoding_of(tensor) is not None, name)
    for found in kinds.values():
        if len(found) > 1:
            message = f"is not quantised, and `{found[True]}` is: servers fuse the two, and vLLM refuses the model"
            yield Fault(subject=found[False], message=message, path=subject.matrices[found[False]].path)


@rule("LT321", Severity.WARNING, on=ModelSubject)
def unmerged(subject: ModelSubject) -> Iterator[Fault]:
    """The model's adapter lies beside it, unmerged.

    What it does: Looks for an adapter in `lora_adapter`, where verl's `model_merger` puts it, in a model's folder.
    Why it matters: verl's "merged" folder is the base with the adapter beside it: loading or serving the folder gives
    the base, without the training.
    Example: After `python -m verl.model_merger merge`, `OUT/model.safetensors` holds the weights that the run began
    with.
    What to do: Merge it: `lora-tool merge OUT/lora_adapter`, which uses the folder around it as the base.
    """
    folder = subject.checkpoint.folder
    names = folder.names_in(UNMERGED) if UNMERGED in folder.folders else ()
    if adapter_config.FILE_NAME in names and {ADAPTER_WEIGHTS, ADAPTER_PICKLE} & {*names}:
        adapter = folder.root / UNMERGED
        message = "is an adapter that was not merged into the model in this folder, which is only the base"
        yield Fault(message=message, path=adapter, hint=f"lora-tool merge {shlex.quote(str(adapter))}")
