"""LoRA on experts, in its two layouts: one pair of factors for each expert's matrix, and PEFT's fused factors.

transformers 5 keeps the matrices of all experts in two parameters: `experts.gate_up_proj` is [experts, 2·inner,
hidden], `experts.down_proj` [experts, hidden, inner]. PEFT's LoRA on such a parameter (`target_parameters`) has A of
[experts·r, in], one expert below the other, and B of [out, r·experts], whose columns are of the experts in turn.
Checkpoints, transformers 4 and vLLM have `experts.0.gate_proj` and so on. Gate and up share A in the fused layout, so
two pairs of rank r become one of rank 2r, A = [A_gate; A_up], B = [B_gate, 0; 0, B_up], and rank r again on the way
back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from lora_tool.adapters.experts import EXPERT, FUSED, PROJECTIONS
from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.checkpoints import ModelDir
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import StoredTensor, TensorAction
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.plans.adapter.combine import layout_of
from lora_tool.plans.algebra.factor_steps import step_of
from lora_tool.plans.core.factor_ops import Beside, Columns
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, Copy, Op
from lora_tool.plans.core.steps import InputRecord, Step

_FUSED = re.compile(r"(?P<experts>.+\.experts)(?P<inner>\.base_layer)?")
_IN_MEMORY = (".block_sparse_moe.", ".mlp.")
"""How transformers 5 calls the block of Mixtral and its relatives, whose checkpoints have the first name."""


class Converted(Struct, frozen=True, kw_only=True):
    """The steps of the layers on experts, in the other layout, and the fields of their config."""

    steps: tuple[Step, ...]
    modules: tuple[str, ...]
    """The modules of the adapter that are in them."""
    targets: tuple[str, ...]
    """The names of the matrices: of an expert, or the fused parameters."""
    forms: Mapping[str, tuple[int, float]]
    """Module or parameter that is written → its rank and its scaling."""
    dropped: tuple[InputRecord, ...] = ()
    """The A's of up projections that equal the gate's: A is written once for both."""


def to_each_expert(view: AdapterView, base: ModelDir) -> Converted:
    """Return the fused layers as one pair for each expert's matrix, by the names in the base's checkpoint.

    Reads the factors on the way. Raises `UnsupportedAdapter` where the base has no such experts, or sizes differ.
    """
    steps: list[Step] = []
    modules, targets = [], set()
    forms: dict[str, tuple[int, float]] = {}
    for layer in view.layers:
        match = _FUSED.fullmatch(layer.module)
        if match is None:
            continue
        a, b = _pair(layer)
        names = _names(match["experts"], base, view.adapter.root)
        sizes = {name: base.tensors[f"{names.experts}.0.{name}.weight"].shape for name in names.projections}
        gate, up, down = names.projections
        if (b.shape[0], a.shape[1]) == (sizes[gate][0] + sizes[up][0], sizes[gate][1]):
            wanted: tuple[str, ...] = (gate, up)
        elif (b.shape[0], a.shape[1]) == tuple(sizes[down]):
            wanted = (down,)
        else:
            raise UnsupportedAdapter(
                f"{b.path}: `{layer.module}` is [{b.shape[0]}, {a.shape[1]}], which fits neither gate and up nor down of "
                f"{base.root}",
                hint="give the model that the adapter was trained on: `base=MODEL`",
            )
        steps += _each_expert(layer, names, wanted, sizes, layout_of(view.config, b))
        modules.append(layer.module)
        targets |= set(wanted)
        parameter = FUSED[len(wanted) == 1]
        forms |= _forms(view.config.scaling(f"{layer.target}.{parameter}"), names, wanted, steps)
    return Converted(steps=tuple(steps), modules=tuple(modules), targets=tuple(sorted(targets)), forms=forms)


class _Names(Struct, frozen=True, kw_only=True):
    """The names of one layer's experts in a checkpoint."""

    experts: str
    """The path that the experts' numbers follow."""
    count: int
    projections: tuple[str, str, str]


def _names(experts: str, base: ModelDir, adapter: Path) -> _Names:
    for path in (experts, experts.replace(_IN_MEMORY[1], _IN_MEMORY[0])):
        for projections in PROJECTIONS:
            if all(f"{path}.0.{name}.weight" in base.tensors for name in projections):
                count = 0
                while f"{path}.{count}.{projections[0]}.weight" in base.tensors:
                    count += 1
                return _Names(experts=path, count=count, projections=projections)
    raise UnsupportedAdapter(
        f"{base.root} has no `{experts}.0`: its checkpoint does not store its experts one by one",
        hint=f"merge it instead: lora-tool merge {shlex.quote(str(adapter))}",
    )


def _pair(layer: LoraLayer) -> tuple[StoredTensor, StoredTensor]:
    if layer.a is None or layer.b is None or layer.magnitude is not None or layer.bias is not None or layer.strays:
        raise UnsupportedAdapter(f"{layer.any_tensor.path}: `{layer.module}` is not a pair of lora_A and lora_B")
    return layer.a, layer.b


def _each_expert(
    layer: LoraLayer,
    names: _Names,
    wanted: Sequence[str],
    sizes: Mapping[str, Sequence[int]],
    layout: ExpertLayout,
) -> Iterator[Step]:
    a, b = _pair(layer)
    rank, rest = divmod(a.shape[0], names.count)
    if rest or b.shape[1] != a.shape[0]:
        raise UnsupportedAdapter(
            f"{a.path}: `{a.name}` has {a.shape[0]} rows, which is not a multiple of its {names.count} experts"
        )
    grouped = layout is ExpertLayout.GROUPED_BY_EXPERT
    halves = len(wanted) == 2 and rank % 2 == 0 and not grouped and _is_block_diagonal(b, sizes[wanted[0]][0])  # noqa: PLR2004
    own = rank // 2 if halves else rank
    for expert in range(names.count):
        row = 0
        for at, name in enumerate(wanted):
            part = own * at if halves else 0
            first = expert * rank if grouped else part * names.count + expert
            height = sizes[name][0]
            across = Columns(tensor=rows_of(b, row, height), count=own, first=first, step=1 if grouped else names.count)
            module = f"{PREFIX}{names.experts}.{expert}.{name}"
            yield step_of(
                f"{module}.lora_A.weight",
                a.dtype,
                (own, a.shape[1]),
                Copy(source=rows_of(a, expert * rank + part, own)),
            )
            yield step_of(f"{module}.lora_B.weight", b.dtype, (height, own), Beside(parts=(across,)))
            row += height


def _forms(
    scaling: float, names: _Names, wanted: Sequence[str], steps: Sequence[Step]
) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield rank and scaling of the factors that were written last."""
    rank = steps[-1].out.shape[1]
    for expert in range(names.count):
        for name in wanted:
            yield f"{names.experts}.{expert}.{name}", (rank, scaling)


def _is_block_diagonal(b: StoredTensor, height: int) -> bool:
    """Return whether the gate's rows have zeros in the second half of the columns, and the other rows in the first."""
    from lora_tool.formats.stored_numbers import numbers  # numpy, only where values are read

    half = b.shape[1] // 2
    gate, up = numbers(rows_of(b, 0, height)), numbers(rows_of(b, height, b.shape[0] - height))
    return not gate[:, half:].any() and not up[:, :half].any() and bool(gate.any() or up.any())


def to_fused(view: AdapterView) -> Converted:
    """Return the layers of single experts as PEFT's fused layers, by the names that transformers 5 has.

    Raises `UnsupportedAdapter` where experts are missing, or differ in rank, scaling or type.
    """
    layers: dict[str, dict[tuple[int, str], LoraLayer]] = {}
    for layer in view.layers:
        match = EXPERT.fullmatch(layer.module)
        if match is not None:
            layers.setdefault(match["experts"], {})[int(match["number"]), match["projection"]] = layer
    steps: list[Step] = []
    targets: set[str] = set()
    dropped: list[InputRecord] = []
    forms: dict[str, tuple[int, float]] = {}
    for experts, held in layers.items():
        count = 1 + max(number for number, _ in held)
        found = {name for _, name in held}
        gate, up, down = next((each for each in PROJECTIONS if found <= set(each)), ("", "", ""))
        if not gate or len(held) != count * len(found) or (gate in found) != (up in found):
            raise UnsupportedAdapter(
                f"{view.adapter.root}: `{experts}` has LoRA on {len(held)} matrices of {count} experts ({', '.join(sorted(found))}), "
                "but a fused layer needs all of them",
                hint=f"merge it instead: lora-tool merge {shlex.quote(str(view.adapter.root))}",
            )
        module = experts.replace(*_IN_MEMORY)
        nested = ".base_layer" if down in found and gate in found else ""
        if gate in found:
            rank, scaling = _common_form([held[at, name] for at in range(count) for name in (gate, up)], view)
            pairs = [(_pair(held[at, gate]), _pair(held[at, up])) for at in range(count)]
            shared = all(same_values(one[0], other[0]) for one, other in pairs)
            steps += _gate_and_up(module + nested, pairs, shared=shared)
            dropped += [_same(up[0], gate[0]) for gate, up in pairs if shared]
            targets.add(_target(module, "gate_up_proj"))
            forms[f"{module}.gate_up_proj"] = (rank if shared else 2 * rank, scaling)
        if down in found:
            rank, scaling = _common_form([held[at, down] for at in range(count)], view)
            downs = [_pair(held[at, down]) for at in range(count)]
            steps += _fused(module, [a for a, _ in downs], [[b for _, b in downs]], rank)
            targets.add(_target(module, "down_proj"))
            forms[f"{module}.down_proj"] = (rank, scaling)
    return Converted(
        steps=tuple(steps),
        modules=tuple(layer.module for held in layers.values() for layer in held.values()),
        targets=tuple(sorted(targets)),
        forms=forms,
        dropped=tuple(dropped),
    )


def _target(module: str, parameter: str) -> str:
    """Return what `target_parameters` calls the parameter of a layer's experts."""
    return f"mlp.experts.{parameter}" if ".mlp." in module else f"experts.{parameter}"


def _same(tensor: StoredTensor, first: StoredTensor) -> InputRecord:
    reason = f"the same values as {first.name}, which both have in the fused layer"
    return InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)


def _common_form(held: Sequence[LoraLayer], view: AdapterView) -> tuple[int, float]:
    """Return rank and scaling of the layers that one fused layer is made of."""
    kinds = {(a.shape[0], a.dtype, b.dtype, layer.scaling or 0.0) for layer in held for a, b in [_pair(layer)]}
    if len(kinds) > 1:
        raise UnsupportedAdapter(
            f"{view.adapter.root}: the experts differ in rank, scaling or type, but a fused layer has one of each",
            hint=f"lora-tool prepare {shlex.quote(str(view.adapter.root))} --for peft -o OUT gives all modules one scaling",
        )
    (rank, _, _, scaling), *_ = kinds
    return rank, scaling


_Pair = tuple[StoredTensor, StoredTensor]


def _gate_and_up(module: str, pairs: Sequence[tuple[_Pair, _Pair]], *, shared: bool) -> Iterator[Step]:
    """Yield the steps of a fused gate and up: at the rank of each where they share A, else at twice that."""
    rank = pairs[0][0][0].shape[0]
    gates, ups = [gate[1] for gate, _ in pairs], [up[1] for _, up in pairs]
    below = [a for gate, up in pairs for a in ([gate[0]] if shared else [gate[0], up[0]])]
    yield from _fused(module, below, [gates, ups], rank, apart=not shared)


def _fused(
    module: str,
    below: Sequence[StoredTensor],
    rows: Sequence[Sequence[StoredTensor]],
    rank: int,
    *,
    apart: bool = False,
) -> Iterator[Step]:
    """Yield the steps of a fused layer: A of the factors one below the other, B of rows whose columns are in turn."""
    count = len(rows[0])
    height = sum(each.shape[0] for each in below)
    copies = tuple(Copy(source=each) for each in below)
    yield step_of(
        f"{PREFIX}{module}.lora_A.weight", below[0].dtype, (height, below[0].shape[1]), Assemble(parts=copies)
    )
    zeros = rank * count if apart else 0
    parts = tuple(
        Beside(
            parts=tuple(Columns(tensor=each, count=rank) for each in some),
            leading=zeros if at else 0,
            zeros=0 if at else zeros,
            in_turn=True,
        )
        for at, some in enumerate(rows)
    )
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    across: Op = parts[0] if len(parts) == 1 else Assemble(parts=parts)
    yield step_of(f"{PREFIX}{module}.lora_B.weight", rows[0][0].dtype, shape, across)
