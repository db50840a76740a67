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

from msgspec import Struct

from lora_tool.adapters.experts import FUSED, LISTED, is_single
from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import in_full_precision
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.keys import PREFIX, without_numbers
from lora_tool.core.tensors import StoredTensor, TensorAction
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.plans.adapter.combine import layout_of
from lora_tool.plans.algebra.factor_steps import step_of
from lora_tool.plans.convert.expert_stacks import ExpertStack, stacks_of
from lora_tool.plans.core.factor_ops import Beside, Columns
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, Copy, Op
from lora_tool.plans.core.steps import InputRecord, Step

_FUSED = re.compile(r"(?P<experts>.+\.experts)(?P<inner>\.base_layer)?")
_GIVE_BASE = "give the model that the adapter was trained on: `base=MODEL`"


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
    needs_base: bool = True
    """Whether the adapter's names alone would not tell the parameters."""


def to_each_expert(view: AdapterView, base: ModelDir) -> Converted:
    """Return the fused layers as one pair for each expert's matrix, by the names in the base's checkpoint.

    Reads the factors on the way. Raises `UnsupportedAdapter` where the base has no such experts, or sizes differ.
    """
    steps: list[Step] = []
    modules, targets = [], set()
    forms: dict[str, tuple[int, float]] = {}
    fused = {layer.module: match["experts"] for layer in view.layers if (match := _FUSED.fullmatch(layer.module))}
    stacks = stacks_of(base, view.adapter, set(fused.values()))
    for layer in view.layers:
        if layer.module not in fused:
            continue
        experts = fused[layer.module]
        own = {leaf: stack for leaf in FUSED if (stack := stacks.get(f"{experts}.{leaf}"))}
        if not own:
            raise UnsupportedAdapter(
                f"{base.root}: its checkpoint does not store the experts of `{experts}` one by one",
                hint=f"merge it instead: {_merging(view, base)}",
            )
        parameter, sizes = _matrices(layer, own, base)
        matrices = own[parameter].matrices
        steps += _each_expert(layer, matrices, sizes, layout_of(view.config, _pair(layer)[1]))
        modules.append(layer.module)
        targets |= {module.rpartition(".")[2] for module in matrices[0]}
        form = steps[-1].out.shape[1], view.config.scaling(f"{layer.target}.{parameter}")
        forms |= dict.fromkeys((module for each in matrices for module in each), form)
    return Converted(steps=tuple(steps), modules=tuple(modules), targets=tuple(sorted(targets)), forms=forms)


def _merging(view: AdapterView, base: ModelDir | None) -> str:
    """Return the command that merges the adapter."""
    command = f"lora-tool merge {shlex.quote(str(view.adapter.root))}"
    return command if base is None else f"{command} --base {shlex.quote(str(base.root))}"


def _matrices(layer: LoraLayer, stacks: Mapping[str, ExpertStack], base: ModelDir) -> tuple[str, tuple[int, ...]]:
    """Return which of the parameters a fused layer is for, by the config's names or the sizes, and the rows of each of an
    expert's matrices in it.
    """
    a, b = _pair(layer)
    fitting: dict[str, tuple[int, ...]] = {}
    for parameter, stack in stacks.items():
        shapes = [base.tensors[f"{module}.weight"].shape for module in stack.matrices[0]]
        if (b.shape[0], a.shape[1]) == (sum(rows for rows, _ in shapes), shapes[0][1]):
            fitting[parameter] = tuple(rows for rows, _ in shapes)
    if not fitting:
        raise UnsupportedAdapter(
            f"{b.path}: `{layer.module}` is [{b.shape[0]}, {a.shape[1]}], which fits none of "
            f"{', '.join(f'`{name}`' for name in stacks)} of {base.root}",
            hint=_GIVE_BASE,
        )
    return min(fitting.items(), key=lambda item: not layer.path.endswith(f".{item[0]}"))


def _pair(layer: LoraLayer) -> tuple[StoredTensor, StoredTensor]:
    if layer.a is None or layer.b is None or layer.magnitude is not None or layer.bias is not None or layer.strays:
        raise UnsupportedAdapter(f"{layer.any_tensor.path}: `{layer.module}` is not a pair of lora_A and lora_B")
    return layer.a, layer.b


def _each_expert(
    layer: LoraLayer, matrices: Sequence[Sequence[str]], heights: Sequence[int], layout: ExpertLayout
) -> Iterator[Step]:
    a, b = _pair(layer)
    count = len(matrices)
    rank, rest = divmod(a.shape[0], count)
    if rest or b.shape[1] != a.shape[0]:
        raise UnsupportedAdapter(
            f"{a.path}: `{a.name}` has {a.shape[0]} rows, which is not a multiple of its {count} experts"
        )
    grouped = layout is ExpertLayout.GROUPED_BY_EXPERT
    halves = len(heights) == 2 and rank % 2 == 0 and not grouped and _is_block_diagonal(b, heights[0])  # noqa: PLR2004
    own = rank // 2 if halves else rank
    for expert, modules in enumerate(matrices):
        row = 0
        for at, (module, height) in enumerate(zip(modules, heights, strict=True)):
            part = own * at if halves else 0
            first = expert * rank if grouped else part * count + expert
            across = Columns(tensor=rows_of(b, row, height), count=own, first=first, step=1 if grouped else count)
            yield step_of(
                f"{PREFIX}{module}.lora_A.weight",
                a.dtype,
                (own, a.shape[1]),
                Copy(source=rows_of(a, expert * rank + part, own)),
            )
            yield step_of(f"{PREFIX}{module}.lora_B.weight", b.dtype, (height, own), Beside(parts=(across,)))
            row += height


def _is_block_diagonal(b: StoredTensor, height: int) -> bool:
    """Return whether the gate's rows have zeros in the second half of the columns, and the other rows in the first."""
    from lora_tool.formats.stored_numbers import numbers  # numpy, only where values are read

    half = b.shape[1] // 2
    gate, up = numbers(rows_of(b, 0, height)), numbers(rows_of(b, height, b.shape[0] - height))
    return not gate[:, half:].any() and not up[:, :half].any() and bool(gate.any() or up.any())


def to_fused(view: AdapterView, base: ModelDir | None) -> Converted:
    """Return the layers of single experts as PEFT's fused layers, by the names that transformers 5 has.

    `base` tells them where the names of the matrices do not. Raises `UnsupportedAdapter` where experts are missing, or
    differ in rank, scaling or type.
    """
    layers = {layer.module: layer for layer in view.layers}
    single = list(filter(is_single, layers))
    found = {
        parameter: stack
        for parameter, stack in stacks_of(base, view.adapter, single).items()
        if not layers.keys().isdisjoint(module for each in stack.matrices for module in each)
    }
    stacks: dict[str, list[ExpertStack]] = {}
    for parameter, stack in found.items():
        stacks.setdefault(parameter.rpartition(".")[0], []).append(stack)
    whole = {module for some in stacks.values() for stack in some for each in stack.matrices for module in each}
    for module in (*single, *whole):
        if module not in whole or module not in layers:
            raise _in_part(module, view, base, named=module in whole)
    steps: list[Step] = []
    targets: set[str] = set()
    dropped: list[InputRecord] = []
    forms: dict[str, tuple[int, float]] = {}
    for module, own in stacks.items():
        own.sort(key=lambda stack: FUSED.index(stack.parameter.rpartition(".")[2]))
        for at, stack in enumerate(own):
            leaf = stack.parameter.rpartition(".")[2]
            held = [[layers[name] for name in each] for each in stack.matrices]
            rank, scaling = _common_form([layer for each in held for layer in each], view)
            pairs = [[_pair(layer) for layer in each] for each in held]
            if base is not None and LISTED.fullmatch(stack.matrices[0][0]):
                _require_in(base, stack.parameter, (len(pairs), pairs[0][0][1].shape[0], pairs[0][0][0].shape[1]))
            shared = all(same_values(each[0][0], a) for each in pairs for a, _ in each[1:])
            nested = module + ".base_layer" * (len(own) - 1 - at)
            below = [a for each in pairs for a, _ in (each[:1] if shared else each)]
            rows = [[b for _, b in matrix] for matrix in zip(*pairs, strict=True)]
            steps += _fused(nested, below, rows, rank, apart=not shared)
            dropped += [_same(a, each[0][0]) for each in pairs if shared for a, _ in each[1:]]
            targets.add(_target(module, leaf))
            forms[stack.parameter] = (rank if shared else len(rows) * rank, scaling)
    return Converted(
        steps=tuple(steps),
        modules=tuple(single),
        targets=tuple(sorted(targets)),
        forms=forms,
        dropped=tuple(dropped),
        needs_base=found != stacks_of(None, view.adapter, single),
    )


def _require_in(base: ModelDir, parameter: str, shape: tuple[int, ...]) -> None:
    """Return if the base has the parameter in this shape, or with its matrices transposed. Raises `IncompatibleBase`."""
    weight = in_full_precision(base).tensors.get(parameter)
    if weight is None or weight.shape not in (shape, (shape[0], *shape[:0:-1])):
        found = "no such parameter" if weight is None else str(list(weight.shape))
        raise IncompatibleBase(
            f"{base.root}: the adapter changes `{parameter}` as {list(shape)}, found {found}",
            hint=_GIVE_BASE,
        )


def _in_part(module: str, view: AdapterView, base: ModelDir | None, *, named: bool) -> UnsupportedAdapter:
    """Return the error of single experts of which no parameter is made, or not with all of its matrices.

    `named` says whether it is known which.
    """
    experts = module[: module.index(".experts.") + len(".experts")]
    held = [layer.module for layer in view.layers if layer.module.startswith(f"{experts}.")]
    names = sorted({without_numbers(each.removeprefix(f"{experts}.")) for each in held})
    known = named or base is not None
    if LISTED.fullmatch(module):  # no base has these names
        hint = "save the adapter again where it was trained, with all of its experts"
    else:
        hint = f"merge it instead: {_merging(view, base)}" if known else _GIVE_BASE
    return UnsupportedAdapter(
        f"{view.adapter.root}: `{experts}` has LoRA on {len(held)} matrices of its experts ({', '.join(names)}), "
        f"but {'a fused layer needs all of them' if known else 'only the base has the names of their parameters'}",
        hint=hint,
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
