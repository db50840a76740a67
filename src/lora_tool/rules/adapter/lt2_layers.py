"""LT2xx, the tensors of an adapter: pairs, ranks, shapes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps

from lora_tool.adapters.targeting import ranks_of
from lora_tool.adapters.view import LAYER_PARTS, LoraLayer
from lora_tool.checkpoints import ADAPTER_PICKLE, ADAPTER_WEIGHTS
from lora_tool.checkpoints.nearby import consolidate_command, training_state_near
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.weights import read_single
from lora_tool.models.ends import MATRIX
from lora_tool.rules.engine.registry import Fault, Need, alike_as_one, as_one, rule
from lora_tool.rules.engine.subjects import AdapterSubject, LoraSubject

_OF_LORA = frozenset({Need.WEIGHTS, Need.LORA})
_CONFIGURED = frozenset({Need.WEIGHTS, Need.CONFIG})
_OfLayer = Callable[[AdapterConfig, LoraLayer], Iterator[Fault]]


def _of_layers(code: str, needs: frozenset[Need]) -> Callable[[_OfLayer], _OfLayer]:
    """Register a generator of the faults of one layer, by its headers and the config, as a rule about all layers."""

    def register(check: _OfLayer) -> _OfLayer:
        @rule(code, Severity.ERROR, on=AdapterSubject, needs=needs, unmergeable=True)
        @wraps(check)
        def check_all(subject: AdapterSubject) -> Iterator[Fault]:
            return alike_as_one(subject.view.found(partial(check, subject.config)))

        return check

    return register


@rule("LT201", Severity.ERROR, on=LoraSubject, needs=_OF_LORA, unmergeable=True)
def unpaired(subject: LoraSubject) -> Iterator[Fault]:
    """A LoRA pair with only one half.

    What it does: Looks for a `lora_A` without its `lora_B`, or a `lora_B` without its `lora_A`, in an adapter and in
    rank files.
    Why it matters: PEFT initialises the missing half, with only a warning: B is then zero and the module does nothing,
    or A is random and the module adds noise.
    Example: `layers.3.self_attn.q_proj.lora_A.weight` is in the file, but `…lora_B.weight` is not.
    What to do: Only the training state has the missing half: put its rank files together (`lora-tool consolidate
    CHECKPOINT`), or save the adapter again.
    """
    halves = subject.half_pairs()
    yield from alike_as_one(Fault(subject=half.name, message=half.message, hint=half.hint) for half in halves)


@_of_layers("LT202", _OF_LORA)
def ranks_disagree(config: AdapterConfig, layer: LoraLayer) -> Iterator[Fault]:
    """A pair whose factors do not fit together.

    What it does: Compares the rank of `lora_A` (its rows) with that of `lora_B` (its columns), and the rows of `lora_B`
    with the length of DoRA's magnitude and of its own bias. Looks for factors that are not matrices.
    Why it matters: B·A cannot be computed, so loading fails. The factors come from two runs, or FSDP or DeepSpeed
    flattened them.
    Example: `lora_A` is [4, 4096] and `lora_B` is [4096, 8].
    What to do: Save the adapter again from one training state.
    """
    a, b = layer.a, layer.b
    swapped = _swapped_rank(config, layer) is not None  # LT204 reports these
    if layer.pair is not None and layer.rank is not None:
        yield from () if swapped else _of_other_length(layer, layer.pair[1])
    elif a is None or b is None or not (a.spec.numel and b.spec.numel):
        return
    elif len(a.shape) != len(b.shape) or len(a.shape) < MATRIX:
        shapes = f"lora_A has shape {list(a.shape)} and lora_B has shape {list(b.shape)}: expected two matrices"
        yield Fault(subject=a.name, message=shapes)
    elif not swapped:
        ranks = f"lora_A has rank {a.shape[0]} (shape {list(a.shape)}), but lora_B has rank {b.shape[1]} (shape {list(b.shape)})"
        yield Fault(subject=a.name, message=ranks)


def _of_other_length(layer: LoraLayer, b: StoredTensor) -> Iterator[Fault]:
    """Check the magnitude and the bias, which have one value for each row of lora_B."""
    rows = b.shape[0]
    for tensor in (layer.magnitude, layer.bias):
        if tensor is None or not tensor.spec.numel:
            continue
        if not (tensor.shape == (rows,) if len(b.shape) == MATRIX else tensor.spec.numel == rows):
            yield Fault(subject=tensor.name, message=f"has shape {list(tensor.shape)}, but its lora_B has {rows} rows")


@_of_layers("LT203", _CONFIGURED)
def rank_not_as_configured(config: AdapterConfig, layer: LoraLayer) -> Iterator[Fault]:
    """The rank differs from the config's.

    What it does: Compares each layer's rank with `r`, or with the first `rank_pattern` that matches its module.
    Why it matters: Loading fails with a size mismatch. Also, the scaling alpha/r is computed from the config, so with
    the wrong r every delta is too large or too small.
    Example: `adapter_config.json` says `"r": 16`, but every `lora_A` has 8 rows.
    What to do: Put the trained rank into `adapter_config.json`, or use the `adapter_config.json` of the same run.
    """
    expected, found = ranks_of(config, layer), layer.rank
    if found is None or found in expected or _swapped_rank(config, layer) is not None:
        return
    if _is_stacked(config, layer) and any(found % rank == 0 for rank in expected):
        return
    name = layer.a.name if layer.a else layer.module
    message = f"has rank {found}, but the config gives this module rank {' or '.join(map(str, sorted(expected)))}"
    yield Fault(subject=name, message=message)


def _is_stacked(config: AdapterConfig, layer: LoraLayer) -> bool:
    """LoRA on a parameter of fused experts stacks the experts: A is (r·E, in)."""
    return bool(config.target_parameters) and not config.targets(layer.target)


@_of_layers("LT204", _CONFIGURED)
def factors_swapped(config: AdapterConfig, layer: LoraLayer) -> Iterator[Fault]:
    """A and B are swapped.

    What it does: Looks for pairs whose `lora_A` has r columns and whose `lora_B` has r rows.
    Why it matters: A converter from another framework wrote each factor under the other's name, or transposed both.
    Loading fails with a size mismatch.
    Example: r is 4, `lora_A` is [4096, 4] and `lora_B` is [4, 4096].
    What to do: Convert the adapter again. PEFT expects `lora_A` as (r, in) and `lora_B` as (out, r).
    """
    rank = _swapped_rank(config, layer)
    if rank is not None and layer.a and layer.b:
        shapes = f"lora_A is {list(layer.a.shape)} and lora_B {list(layer.b.shape)}"
        message = f"{shapes}: with rank {rank} they should be [{rank}, in] and [out, {rank}]"
        yield Fault(subject=layer.a.name, message=message)


def _swapped_rank(config: AdapterConfig, layer: LoraLayer) -> int | None:
    """Return the layer's rank where each factor has it in the other's place, None where they are not swapped.

    Those of a square weight fit together either way: then the smaller of the two sizes is the rank.
    """
    pair = layer.pair
    if pair is None or len(pair[0].shape) != MATRIX or pair[0].shape[1] != pair[1].shape[0]:
        return None
    a, b = pair
    rank = min(ranks_of(config, layer))
    return rank if a.shape[1] == rank and not a.shape[0] == b.shape[1] <= rank else None


@rule("LT206", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS}, unmergeable=True)
def zero_size(subject: AdapterSubject) -> Iterator[Fault]:
    """Tensors without values, saved under DeepSpeed ZeRO-3.

    What it does: Looks for tensors with a size of 0 in their shape.
    Why it matters: Under ZeRO-3 each process holds a part of every parameter; saving without a gather writes empty
    tensors. The trained values are not in this file. Loading it fails, or with `ignore_mismatched_sizes` uses random
    numbers.
    Example: `…q_proj.lora_A.weight` has shape [0].
    What to do: Take the values from the training checkpoint, which holds `global_stepN/`: `lora-tool consolidate
    CHECKPOINT`. Or save again with `"stage3_gather_16bit_weights_on_model_save": true` in the DeepSpeed config.

    (transformers before 5.0 wrote such files for adapters: huggingface/transformers#41416.)
    """
    empty = [each for each in subject.tensors.values() if each.spec.numel == 0]
    if not empty:
        return
    of_no_tokens = {tokens.rows.name for tokens in subject.view.tokens.values() if tokens.of_none}
    empty = [each for each in empty if each.name not in of_no_tokens]  # LT226 reports these
    hint = _where_values_are(subject, {tensor.name for tensor in empty}) if empty else None
    why = "it was saved under ZeRO-3 without a gather, so its values are not in this file"
    yield from as_one(
        Fault(subject=tensor.name, message=f"has shape {list(tensor.shape)}: {why}", hint=hint) for tensor in empty
    )


def _where_values_are(subject: AdapterSubject, empty: set[str]) -> str | None:
    """Return where the values still are: in a training checkpoint, or in a pickle in the same folder."""
    state = training_state_near(subject.checkpoint.root)
    if state:
        return f"the values are in {state}: {consolidate_command(subject.checkpoint.root)}"
    pickle = subject.checkpoint.root / ADAPTER_PICKLE
    if subject.checkpoint.weights.files and subject.checkpoint.weights.files[0].path == pickle:
        return None
    held = read_single(pickle).tensors
    # OpenRLHF gathers the adapter into a .bin, and PEFT loads the empty .safetensors before it
    if all(name in held and held[name].spec.numel for name in empty):
        return (
            f"{ADAPTER_PICKLE} beside it has all values: move {ADAPTER_WEIGHTS} away, and PEFT loads {ADAPTER_PICKLE}"
        )
    return None


@rule("LT212", Severity.ERROR, on=AdapterSubject, needs=_OF_LORA, unmergeable=True)
def not_floats(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA tensors with a non-float dtype.

    What it does: Checks that LoRA tensors and the weights of modules saved whole are F32, BF16, F16 or F64.
    Why it matters: Integers are quantised weights or a broken save. PEFT silently casts them to floats without applying
    their quantisation scale, so the delta is nonsense.
    Example: `…lora_A.weight` is I8.
    What to do: Save the adapter in its training dtype: float32 or bfloat16.
    """
    yield from as_one(_of_wrong_type(subject))


def _of_wrong_type(subject: AdapterSubject) -> Iterator[Fault]:
    for name, tensor in subject.tensors.items():
        if tensor.dtype.is_float:
            continue
        key = subject.checkpoint.keys[name]
        of_layer = key.part in LAYER_PARTS and name not in subject.view.repeats
        if of_layer or (key.part is Part.PLAIN and key.leaf in ("weight", "bias")):
            yield Fault(subject=tensor.name, message=f"is {tensor.dtype}: expected F32, BF16, F16 or F64")


@_of_layers("LT218", _CONFIGURED)
def flags_disagree(config: AdapterConfig, layer: LoraLayer) -> Iterator[Fault]:
    """`use_dora` or `lora_bias` contradict the tensors.

    What it does: Compares `use_dora` with the `lora_magnitude_vector`s, and `lora_bias` with the biases of `lora_B`.
    Why it matters: PEFT silently drops tensors whose flag is false, and initialises tensors whose flag is true but
    which are missing. Either way the model computes something that was never trained.
    Example: The file has a `lora_magnitude_vector` for each module, but the config says `"use_dora": false`.
    What to do: Set the flag in `adapter_config.json` to match the tensors.
    """
    if layer.a is None or layer.b is None:
        return
    checks = (
        ("use_dora", config.use_dora, layer.magnitude, "lora_magnitude_vector"),
        ("lora_bias", config.lora_bias, layer.bias, "lora_B.bias"),
    )
    for flag, wanted, tensor, part in checks:
        if flag == "lora_bias" and layer.embedding:
            continue
        if tensor is not None and not wanted:
            message = f"is in the file, but `{flag}` is false: PEFT would silently drop it"
            yield Fault(subject=tensor.name, message=message)
        elif tensor is None and wanted and not _is_stacked(config, layer):
            yield Fault(subject=layer.b.name, message=f"has no {part}, but `{flag}` is true")
