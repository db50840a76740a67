"""The features of an adapter's config that a merge refuses by name, each with its way out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from lora_tool.adapters.view import AdapterView, LoraLayer, view_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.core.errors import OnlyInMemory, UnsupportedAdapter
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import INITS_RECOMPUTED, INITS_THAT_KEEP_THE_BASE
from lora_tool.models.ends import MATRIX

ALLOW_IN_MEMORY = "`allow_in_memory=True` merges it with PEFT, with the whole model in memory"
AS_PLAIN_LORA = (
    "save it again where it was trained, as plain LoRA: "
    'save_pretrained(folder, path_initial_model_for_weight_conversion="the adapter before training")'
)
WITH_PEFT = "merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()"
OTHER_BASE = "give the model that the adapter was trained on: --base MODEL"
BIAS_WITHOUT_PLACE = "`lora_bias` on a layer that has no bias: the merged model would have no place for it, and PEFT cannot merge it either"
UNMERGED = "serve the adapter unmerged: PeftModel.from_pretrained(model, adapter)"


class Refusal(Struct, frozen=True, kw_only=True):
    """A feature in the way, in words, and the way out. `in_memory`: PEFT's own merge of it is right."""

    text: str
    hint: str
    in_memory: bool = False


def _only_peft(text: str) -> Refusal:
    return Refusal(text=text, hint=ALLOW_IN_MEMORY, in_memory=True)


_REFUSED_FIELDS = {
    "megatron_config": Refusal(text="layers split by Megatron", hint="gather them first, with Megatron's own tools"),
    "velora_config": _only_peft("VeLoRA"),
    "alora_invocation_tokens": Refusal(
        text="activated LoRA (aLoRA), which acts on some tokens only and cannot be merged", hint=UNMERGED
    ),
    "use_qalora": Refusal(
        text="QALoRA, whose ΔW belongs to a quantised base; PEFT cannot merge it either", hint=UNMERGED
    ),
    "monteclora_config": _only_peft("MonteCLoRA"),
    "layer_replication": Refusal(
        text="layer replication: the adapted model has layers that the base lacks, and PEFT merges them wrongly",
        hint="give a base that has the replicated layers, and an adapter trained on it",
    ),
    "use_bdlora": _only_peft("block-diagonal LoRA"),
    "arrow_config": Refusal(text="Arrow routing, which picks experts per token and cannot be merged", hint=UNMERGED),
    "kasa_config": _only_peft("KaSA, which truncates the base weights first"),
}

_MERGE_AWARE = "nvfp4_merge_aware"
_PROMPTS = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE")
_AT_RUN_TIME = frozenset({*_PROMPTS, "ADAPTION_PROMPT", "XLORA", "POLY"})
"""PEFT's methods that prepend something to the text, or choose per token: peft 0.21 cannot merge them either."""


WeightOf = Callable[[str], StoredTensor | None]
"""The base's weight of a module."""


def refusals(view: AdapterView, weight_of: WeightOf = lambda _: None) -> Iterator[Refusal]:
    """Yield every feature of the adapter that cannot be merged exactly here, nor, where a base tells, by PEFT."""
    yield from refusals_of_config(view)
    kernel = next(view.found(lambda layer: [each for each in layer.factors if len(each.shape) > MATRIX]), None)
    grouped = next((found for layer in view.layers if (found := _grouped(layer, weight_of))), None)
    if grouped is not None:
        yield grouped
    elif kernel is not None:
        yield _only_peft(f"LoRA on convolutions: `{kernel.name}` has shape {list(kernel.shape)}")
    modules = {layer.module for layer in view.layers}
    whole = next((each for each in modules if f"{each}.base_layer.out_proj" in modules), None)
    if whole is not None:
        yield _only_peft(f"LoRA on `{whole}`, an nn.MultiheadAttention as a whole, whose out_proj PEFT changes by 2·ΔW")


def groups_of(a: StoredTensor, weight: StoredTensor) -> int:
    """Return how many groups the channels of a convolution are in; 0 where the lora_A is of another one."""
    if not len(a.shape) == len(weight.shape) > MATRIX:
        return 0
    groups, rest = divmod(a.shape[1], weight.shape[1] or 1)
    return 0 if rest else groups


def _grouped(layer: LoraLayer, weight_of: WeightOf) -> Refusal | None:
    """Return the refusal of LoRA on a convolution whose channels are in groups."""
    weight = weight_of(layer.target) if layer.a is not None and len(layer.a.shape) > MATRIX else None
    groups = groups_of(layer.a, weight) if layer.a is not None and weight is not None else 0
    if weight is None or groups < 2:  # noqa: PLR2004
        return None
    text = (
        f"LoRA on a convolution in {groups} groups, `{layer.target}`: ΔW mixes them, and the base's {list(weight.shape)} "
        "has no place for that; PEFT cannot merge it either"
    )
    name = layer.target.rpartition(".")[2]
    return Refusal(text=text, hint=f'serve the adapter unmerged, or train it again with exclude_modules=["{name}"]')


def refusals_of_config(view: AdapterView) -> Iterator[Refusal]:
    """Yield the features in the config for which ΔW is not scaling · B·A; no computation with factors can use them."""
    config = view.config
    if config.peft_type in _AT_RUN_TIME:
        text = f"peft_type {config.peft_type}, which acts while the model runs and has no ΔW to merge"
        yield Refusal(text=text, hint=UNMERGED)
    elif not config.has_known_type and (config.peft_type or "").upper() == "LORA":
        yield Refusal(
            text=f"peft_type {config.peft_type}", hint='write "peft_type": "LORA", the spelling that PEFT knows'
        )
    elif not config.has_known_type:
        yield _only_peft(f"peft_type {config.peft_type}, which is not LoRA")
    for name in config.refused:
        field = _REFUSED_FIELDS[name]
        yield Refusal(text=f"`{name}`: {field.text}", hint=field.hint, in_memory=field.in_memory)
    if _MERGE_AWARE in config.unknown:
        text = f"`{_MERGE_AWARE}`: axolotl trained the adapter for W + ΔW rounded to NVFP4, not for W + ΔW"
        yield Refusal(text=text, hint="merge it with the version of axolotl that trained it: axolotl merge-lora")
    init = config.init_lora_weights
    if init not in INITS_THAT_KEEP_THE_BASE | INITS_RECOMPUTED:
        yield _init(init)
    elif init in INITS_RECOMPUTED and (config.use_dora or config.target_parameters):
        dora = "DoRA, whose norms belong to the base that the init changed"
        what = dora if config.use_dora else "`target_parameters`, for which only PEFT computes the init again"
        yield _only_peft(f"`init_lora_weights` {init} with {what}")
    if config.target_parameters and (config.use_dora or config.lora_bias or config.fan_in_fan_out):
        yield Refusal(
            text="`target_parameters` with DoRA, `lora_bias` or `fan_in_fan_out`, which PEFT does not support together",
            hint="remove the field from adapter_config.json if training did not use it",
        )


def _init(init: str) -> Refusal:
    why = "PEFT changes the base weights when it builds the layers, so ΔW does not belong to the base on disk"
    if init in ("loftq", "mica"):
        return _only_peft(f"`init_lora_weights` {init}: {why}")
    if init.startswith("pissa_niter"):
        why = "its randomised SVD changes the base differently on every load, so the base that was trained on cannot be computed again"
    elif init == "lora_ga":
        why = (
            "it changed the base by gradients that are not in the adapter; PEFT would merge it into the unchanged base"
        )
    elif init == "corda":
        why = "it changed the base by covariances that are not in the adapter; PEFT cannot load it either"
    else:
        why = "no PEFT up to 0.21 has this init, so lora-tool does not know whether it changes the base"
        hint = WITH_PEFT.replace("with PEFT", "with the PEFT that trained it")
        return Refusal(text=f"`init_lora_weights` {init}: {why}", hint=hint)
    return Refusal(text=f"`init_lora_weights` {init}: {why}", hint=AS_PLAIN_LORA)


def require_mergeable(view: AdapterView, weight_of: WeightOf = lambda _: None) -> None:
    """Return if a merge can be exact. Raises `UnsupportedAdapter` naming every feature in the way.

    That is `OnlyInMemory` where PEFT's own merge is right for all of them.
    """
    found = tuple(refusals(view, weight_of))
    if found:
        fatal = [refusal for refusal in found if not refusal.in_memory]
        error = UnsupportedAdapter if fatal else OnlyInMemory
        message = f"{view.config.path}: cannot be merged exactly: " + "; ".join(refusal.text for refusal in found)
        raise error(message, hint=(fatal or found)[0].hint)


def require_lora(adapters: Iterable[AdapterDir]) -> None:
    """Return if all are LoRA. Raises `OnlyInMemory` for another of PEFT's methods, `UnsupportedAdapter` for one that has
    no ΔW.
    """
    for adapter in adapters:
        if adapter.config is not None and adapter.config.is_of_another_kind:
            require_mergeable(view_of(adapter))


def require_weightable(adapters: Sequence[AdapterDir], weights: Sequence[float]) -> None:
    """Return if every adapter can be merged with its weight. Raises `UnsupportedAdapter`."""
    for adapter, weight in zip(adapters, weights, strict=True):
        config = adapter.config
        if weight == 1 or config is None:
            continue
        why = None
        if config.use_dora:
            why = "DoRA rescales the rows of W + ΔW, so weighting ΔW does not weight its change"
        elif config.init_lora_weights in INITS_RECOMPUTED:
            why = f"`init_lora_weights` {config.init_lora_weights} subtracts the untrained factors from the base in full, whatever the weight"
        if why is not None:
            raise UnsupportedAdapter(
                f"{config.path}: cannot be merged with weight {weight:g}: {why}",
                hint="merge it with weight 1",
            )
