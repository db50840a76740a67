"""Planning one adapter of several that differ only in their heads: their ΔW once, and the rows of all heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView, view_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.checkpoints.sources import Reference, opened_model
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter, WrongValue
from lora_tool.core.keys import parse
from lora_tool.core.tensors import DType, StoredTensor, TensorAction, TensorSpec
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import is_last_layer
from lora_tool.plans.adapter.config_file import config_file
from lora_tool.plans.algebra.peft_config import require_one_base, require_sums
from lora_tool.plans.algebra.terms import Factors, factors_of_sum
from lora_tool.plans.algebra.whole_plan import adapter_plan
from lora_tool.plans.core.ops import Assemble, Copy, copied_as
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Step
from lora_tool.rules.judging import MergeJudge

_HINT = "one trunk cannot hold both: merge each into a model of its own"


def plan_stack(adapters: Sequence[AdapterDir], *, base: Reference | None = None, ignore: Iterable[str] = ()) -> Plan:
    """Return the plan of the first adapter with the rows of all heads, in the order of the adapters.

    All have the same ΔW, whatever their factors and scalings. Reads the factors. The rules judge each adapter first.
    Raises `FindingsFound`, `IncompatibleBase` and `UnsupportedAdapter` by the name of what differs, `WrongValue`.
    """
    if len(adapters) == 1:
        raise WrongValue("stack: expected several adapters, each with a head", hint="A B C")
    model = None if base is None else opened_model(base)
    report = MergeJudge(ignore=tuple(ignore)).as_stored(adapters, model, beside=adapters[:1])
    views = tuple(map(view_of, adapters))
    for view in views:
        require_sums(view)
    if model is None:
        require_one_base(views)
    heads = [dict(_heads(view)) for view in views]
    for view, own in zip(views[1:], heads[1:], strict=True):
        _require_heads(views[0], heads[0], view, own)
        _require_same_trunk(views[0], view)
    steps = tuple(_steps(views[0], heads))
    names = _label_names(adapters, heads)
    loading = f"AutoModelForSequenceClassification.from_pretrained(BASE, num_labels={len(names)})"
    return adapter_plan(
        adapters,
        (1.0,) * len(adapters),
        steps,
        config_file(views[0].config, {}),
        dropped=tuple(_same(adapters, heads)),
        findings=report.findings,
        notes=(
            f"stacking the heads of {' + '.join(str(each.root) for each in adapters)}: {', '.join(names)}",
            f"PEFT loads it into a base with num_labels={len(names)}: {loading}",
        ),
        ranks=(),
        manifest={"operation": "combine", "stack": True, "head": [{"label": name} for name in names]},
    )


def _heads(view: AdapterView) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of an adapter with a row for each label, by the names that PEFT gives them."""
    for name, tensor in view.adapter.tensors.items():
        if is_last_layer(parse(name).module) and name not in view.repeats and tensor in view.saved.values():
            yield view.adapter.keys[name].canonical, tensor


def _label_names(adapters: Sequence[AdapterDir], heads: Sequence[dict[str, StoredTensor]]) -> list[str]:
    """Return the names of the rows: those of the adapters' folders, with numbers where a head has several rows."""
    names = []
    for adapter, own in zip(adapters, heads, strict=True):
        rows = next(iter(own.values())).shape[0]
        names += [adapter.root.name if rows == 1 else f"{adapter.root.name} {row}" for row in range(rows)]
    return names if len({*names}) == len(names) else [f"LABEL_{at}" for at in range(len(names))]


def _require_heads(
    first: AdapterView, heads: dict[str, StoredTensor], view: AdapterView, own: dict[str, StoredTensor]
) -> None:
    """Raise unless both adapters have heads of one width, and nothing else that was saved whole differs."""
    root, other = first.adapter.root, view.adapter.root
    shapes = [{name: tensor.shape[1:] for name, tensor in each.items()} for each in (heads, own)]
    if not heads or shapes[0] != shapes[1]:
        found = [", ".join(f"`{name}` {list(shape)}" for name, shape in each.items()) or "none" for each in shapes]
        raise IncompatibleBase(
            f"the head of {root} is {found[0]}, that of {other} {found[1]}: their rows do not fit", hint=_HINT
        )
    for tables in ((first.saved, view.saved), (first.frozen, view.frozen)):
        mine, theirs = ({n: t for n, t in each.items() if t not in (*heads.values(), *own.values())} for each in tables)
        for name in sorted(mine.keys() | theirs.keys()):
            if name not in mine or name not in theirs or not same_values(mine[name], theirs[name]):
                raise IncompatibleBase(f"`{name}` differs in {root} and {other}, and not only their heads", hint=_HINT)
    if first.tokens or view.tokens:
        raise UnsupportedAdapter(
            f"{root} or {other} has trained tokens, which a stack of heads does not compare", hint=_HINT
        )


def _require_same_trunk(first: AdapterView, view: AdapterView) -> None:
    """Raise `IncompatibleBase`, naming a module, unless ΔW is the same in all modules."""
    root, other = first.adapter.root, view.adapter.root
    alone = {layer.module for layer in first.layers} ^ {layer.module for layer in view.layers}
    if alone:
        raise IncompatibleBase(f"only one of {root} and {other} has LoRA on `{min(alone)}`", hint=_HINT)
    for each in factors_of_sum((first, view), (1.0, -1.0)):
        apart, room = _apart(each)
        if not apart <= room:
            raise IncompatibleBase(
                f"`{each.module}` has another ΔW in {other} than in {root}: {apart:.3g} apart, expected at most {room:.3g}",
                hint=_HINT,
            )
        if any(term.bias is not None for term in each.terms):
            raise UnsupportedAdapter(f"`{each.module}` has a bias of LoRA in {root} or {other}", hint=_HINT)


_ROUNDING = {DType.BF16: 2.0**-9, DType.F16: 2.0**-12, DType.F32: 2.0**-25, DType.F64: 2.0**-50}
"""The part of a factor's norm that storing it in another scaling may take."""


def _apart(factors: Factors) -> tuple[float, float]:
    """Return ‖ΔW - ΔW'‖ of two adapters, and how much of that rounding explains, by the triangles of their factors."""
    import numpy as np

    from lora_tool.plans.algebra.spectrum import Reader  # numpy, only where values are read

    with OpenFiles(opened_regular) as files:
        reader = Reader(files=files)
        left, right = reader.triangle(factors.b_parts, below=False), reader.triangle(factors.a_parts, below=True)
    scales = np.repeat([term.scale for term in factors.terms], [term.rank for term in factors.terms])
    own = slice(0, factors.terms[0].rank)
    size = float(np.linalg.norm(left[:, own] * scales[own]) * np.linalg.norm(right[:, own]))
    part = 2 * max(_ROUNDING[each.dtype] for term in factors.terms for each in (term.a, term.b))
    return float(np.linalg.norm((left * scales) @ right.T)), part * size


def _steps(first: AdapterView, heads: Sequence[dict[str, StoredTensor]]) -> Iterator[Step]:
    for name, key in first.adapter.keys.items():
        tensor = first.adapter.tensors[name]
        if tensor not in heads[0].values():
            out = replace(tensor.spec, name=name)
            reason = f"copied from {first.adapter.root}"
            yield Step(out=out, op=Copy(source=tensor), action=TensorAction.COPIED, reason=reason)
            continue
        rows = [own[key.canonical] for own in heads]
        dtype = rows[0].dtype if len({each.dtype for each in rows}) == 1 else DType.F32
        spec = TensorSpec(name=name, dtype=dtype, shape=(sum(each.shape[0] for each in rows), *tensor.shape[1:]))
        op = Assemble(parts=tuple(copied_as(dtype, each) for each in rows))
        yield Step(out=spec, op=op, action=TensorAction.COMPUTED, reason="the rows of all heads")


def _same(adapters: Sequence[AdapterDir], heads: Sequence[dict[str, StoredTensor]]) -> Iterator[InputRecord]:
    """Yield the tensors of the other adapters, which are in the first too."""
    reason = f"{adapters[0].root} has the same ΔW"
    for adapter, own in zip(adapters[1:], heads[1:], strict=True):
        for name, tensor in adapter.tensors.items():
            if tensor not in own.values():
                yield InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=reason)
