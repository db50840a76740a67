"""An adapter as MLX-LM reads it: factors transposed, one rank, one scale, and its own `adapter_config.json`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from lora_tool.adapters.experts import EXPERT
from lora_tool.adapters.mlx import EXPERTS
from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.core.display import named
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import split_layer
from lora_tool.core.tensors import DType
from lora_tool.formats.adapter_config import FILE_NAME
from lora_tool.formats.files import json_bytes
from lora_tool.formats.stored import transposed
from lora_tool.plans.algebra.factor_steps import padded, padded_steps, step_of, zero_rows
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.algebra.whole_plan import SAME, Beginnings
from lora_tool.plans.core.factor_ops import Beside, Columns, Mix, SmallMatrix
from lora_tool.plans.core.ops import Assemble, Op, RowOp, copied_as, row_ops
from lora_tool.plans.core.steps import SideFile, Step
from lora_tool.rules.serving.forms import USUAL_LAYERS, layers_of

_ALL_LAYERS = -1
"""MLX-LM puts LoRA on so many layers, counted from the last; a module without factors in the file stays as it is."""


def mlx_steps(
    factors: Factors, dtype: DType, lowering: tuple[SmallMatrix, SmallMatrix] | None, rank: int
) -> Iterator[Step]:
    """Yield the steps that write lora_a, [in, rank], and lora_b, [rank, out], of zeros beyond the factors' rank."""
    missing = rank - (lowering[0].columns if lowering else factors.rank)
    a, b = (tuple(map(transposed, parts)) for parts in (factors.a_parts, factors.b_parts))
    if lowering:
        down: Op = Mix(parts=a, matrix=padded(lowering[1], missing))
        up: tuple[RowOp, ...] = (Mix(parts=b, matrix=lowering[0], below=True),)
    else:
        single = len(a) == 1 and not missing
        columns = tuple(Columns(tensor=part, count=part.shape[1]) for part in a)
        down = copied_as(dtype, a[0]) if single else Beside(parts=columns, zeros=missing)
        up = tuple(
            copied_as(dtype, part)
            if term.scale == 1
            else Beside(parts=(Columns(tensor=part, count=factors.out, scale=term.scale),))
            for part, term in zip(b, factors.terms, strict=True)
        )
    rows = (*up, *zero_rows(b[0], missing))
    yield step_of(f"{factors.module}.lora_a", dtype, (factors.width, rank), down)
    yield step_of(
        f"{factors.module}.lora_b", dtype, (rank, factors.out), rows[0] if len(rows) == 1 else Assemble(parts=rows)
    )


def stacked_steps(
    sums: Sequence[Factors], dtype: DType, matrices: Mapping[str, tuple[SmallMatrix, SmallMatrix]], rank: int
) -> Iterator[Step]:
    """Yield the steps of LoRA on experts, whose factors MLX-LM has in one stack: [experts, rank, in], [experts, out, rank].

    Raises `UnsupportedAdapter` where experts are missing, or have other names than gate, up and down.
    """
    groups: dict[str, dict[int, Factors]] = {}
    for each in sums:
        match = EXPERT.fullmatch(each.module)
        if match is not None:
            groups.setdefault(_stacked_name(match, each.module), {})[int(match["number"])] = each
    for name, held in groups.items():
        if sorted(held) != list(range(len(held))):
            raise UnsupportedAdapter(
                f"`{name}`: LoRA on only {len(held)} of the experts, but MLX-LM stacks all of them"
            )
        pairs = [tuple(padded_steps(held[at], dtype, matrices.get(held[at].module), rank)) for at in range(len(held))]
        for part, end in enumerate(("lora_a", "lora_b")):
            parts = tuple(op for pair in pairs for op in row_ops(pair[part].op))
            yield step_of(f"{name}.{end}", dtype, (len(held), *pairs[0][part].out.shape), Assemble(parts=parts))


def is_of_expert(module: str) -> bool:
    """Return whether a module is a matrix of a single expert."""
    return EXPERT.fullmatch(module) is not None


def _stacked_name(match: re.Match[str], module: str) -> str:
    ours = next((known for table in EXPERTS for known, theirs in table.items() if theirs == match["projection"]), None)
    if ours is None:
        raise UnsupportedAdapter(f"`{module}` is an expert's matrix that MLX-LM has no name for")
    return f"{match['experts'].removesuffix('.experts')}.switch_mlp.{ours}"


def mlx_config(sums: Sequence[Factors], rank: int, scale: float) -> SideFile:
    """Return what `mlx_lm.tuner.utils.load_adapters` reads: it puts LoRA on the modules that `keys` names."""
    matches = {each.module: EXPERT.fullmatch(each.module) for each in sums}
    keys = sorted({_in_layer(_stacked_name(match, name) if match else name) for name, match in matches.items()})
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    content = {"fine_tune_type": "lora", "num_layers": _ALL_LAYERS, "lora_parameters": parameters}
    return SideFile(filename=FILE_NAME, content=json_bytes(content, indent=2), reason="written for MLX-LM")


def rope_notes(base: ModelDir | None) -> Iterator[str]:
    """Yield a note where MLX-LM does not find rope_theta, because transformers 5 nests it in `rope_parameters`."""
    raw = base.config.raw if base and base.config else {}
    inner = raw.get("rope_parameters")
    if isinstance(inner, dict) and "rope_theta" in inner and "rope_theta" not in raw:
        yield f'mlx-lm reads "rope_theta" at the top level of config.json; add it there, as {base and base.root} does not have it'


def _in_layer(module: str) -> str:
    """Return a module's path inside its layer, which MLX-LM knows it by; outside of layers its whole path."""
    number, _ = split_layer(module)
    return module if number is None else module.partition(f".{number}.")[2]


# MLX-LM's names of an adapter's modules: it has only classes with an output layer, some with names of their own.


_MULTIMODAL = (
    "gemma3 gemma4 kimi_k25 kimi_vl lfm2_vl lfm2-vl llama4 llava mistral3 pixtral qwen2_vl qwen2_5_vl qwen3_5 qwen3_5_moe "
    "qwen3_vl qwen3_vl_moe"
)
_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "gpt2": "model.h",
        "gpt_neox": "model.h",
        "gptj": "model.h",
        "nemotron_h": "backbone.layers",
        "gemma3n": "model.language_model.layers",
        **dict.fromkeys(_MULTIMODAL.split(), "language_model.model.layers"),
    }
)
"""Where the classes of `mlx_lm/models/` have their layers, by model type, if that is not where transformers has them."""


def mlx_beginnings(view: AdapterView, base: ModelDir | None) -> Beginnings:
    """Return how module paths begin in the class that the adapter was trained on, and in MLX-LM's.

    Raises `UnsupportedAdapter` where this takes the base, and for modules that MLX-LM does not have.
    """
    modules = [layer.target for layer in view.layers]
    found = sorted({layers_of(module) for module in modules if split_layer(module)[0] is not None})
    if len(found) > 1:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: LoRA on {named(found, 3)}, but MLX-LM has the layers of the text model alone",
            hint=f"merge it instead: lora-tool merge {shlex.quote(str(view.adapter.root))}",
        )
    if not found:
        return SAME
    (own,) = found
    theirs = own if base is None and own in USUAL_LAYERS else _theirs(own, base)
    if theirs is None:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: `{own}` is where some models have their layers, but MLX-LM's classes have an output layer and "
            "other paths, which only the base tells",
            hint=f"lora-tool prepare {shlex.quote(str(view.adapter.root))} --for mlx --base MODEL -o OUT",
        )
    (before, _, last), (new, _, name) = own.rpartition("."), theirs.rpartition(".")
    if last == name:
        return Beginnings(text=_dotted(before), whole=_dotted(new))
    outside = [module for module in modules if split_layer(module)[0] is None]
    if outside:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: LoRA on {named(outside, 3)}, which MLX-LM's model calls otherwise",
            hint=f"merge it instead: lora-tool merge {shlex.quote(str(view.adapter.root))}",
        )
    return Beginnings(text=_dotted(own), whole=_dotted(theirs))


def _theirs(own: str, base: ModelDir | None) -> str | None:
    """Return where MLX-LM has the layers; None without the base."""
    if base is None or base.config is None:
        return None
    known = _LAYERS.get(base.config.model_type or "")
    if known is not None:
        return known
    # model types outside the table keep the names of checkpoints with an output layer
    stored = {layers_of(name) for name in base.tensors if split_layer(name)[0] is not None}
    fitting = {each for each in stored if each.endswith(f".{own}")}
    return own if "." in own else fitting.pop() if len(fitting) == 1 else f"model.{own}"


def _dotted(path: str) -> str:
    return f"{path}." if path else ""
