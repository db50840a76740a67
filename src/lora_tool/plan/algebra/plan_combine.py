"""Planning a sum of adapters, and a smaller one of one adapter: from the factors, without ever forming ΔW."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lora_tool.actions import TensorAction
from lora_tool.adapter.view import view_of
from lora_tool.checkpoint import ADAPTER_WEIGHTS, AdapterDir
from lora_tool.choices import positive
from lora_tool.cores import available_cores
from lora_tool.display import counted
from lora_tool.errors import UnsupportedAdapter, WrongValue
from lora_tool.formats import tokenizer
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.plan.algebra.factor_steps import exact_type, factor_steps
from lora_tool.plan.algebra.fit import require_one_base, require_sums
from lora_tool.plan.algebra.peft_config import config_of_sum
from lora_tool.plan.algebra.ranks import ModuleRank, enough, rank_lines, rank_warnings
from lora_tool.plan.algebra.terms import Factors, factors_of_sum
from lora_tool.plan.algebra.whole import whole_tensors
from lora_tool.plan.core.factor_ops import SmallMatrix
from lora_tool.plan.core.manifest import describe_input, input_name
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import InputRecord, Shard, SideFile, Step
from lora_tool.progress import told
from lora_tool.rules.merging import MergeJudge
from lora_tool.sources import Reference, opened_adapter, opened_model, source_of
from lora_tool.tensors import DType, FileStamp, float_type
from lora_tool.weighted import all_weighted, weighted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which rank a module gets: a number, or the least that keeps a share of ‖ΔW‖²; all of it where neither is asked.

    Raises `WrongValue`.
    """

    rank: int | None = None
    keep: float | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.keep is not None:
            raise WrongValue("rank, keep: one of the two says which rank a module gets, not both")
        if self.rank is not None:
            positive(self.rank)
        if self.keep is not None and not 0 < self.keep <= 1:
            raise WrongValue(f"keep: expected a share of ‖ΔW‖² above 0 and up to 1, found {self.keep!r}")

    @property
    def exact(self) -> bool:
        """Whether nothing is left out."""
        return self.rank is None and self.keep is None


def plan_combine(
    adapters: Reference | Sequence[Reference],
    *,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    keep: float | None = None,
    head_of: Reference | None = None,
    base: Reference | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan of the adapter whose ΔW is Σ weight·ΔW of `adapters`. The rules judge them first.

    `weights` are theirs, by default what stands behind the names ("A=0.7"), or 1. Without `rank` and `keep` the sum is
    exact: factors stand beside one another, and their ranks add up. `rank` is the largest rank that a module gets,
    `keep` the share of ‖ΔW‖² that each module keeps at least, at the lowest rank that does; both give the best
    approximation that there is at that rank. The scalings of all adapters are in the new B. Heads and other whole
    tensors that differ are those of `head_of`, one of the adapters. `base` is the model that all of them belong to, by
    default the one that their configs name; given, the rules compare them with it. `dtype` None is float32, and the
    adapters' own type where nothing is rounded. `ignore` are codes of rules. With `rank` or `keep` all factors are read
    once. Raises `FindingsFound`, `UnsupportedAdapter` for what does not add up, `IncompatibleBase`, `WrongValue`.
    """
    names, given = all_weighted(adapters, weights)
    chosen = None if head_of is None else weighted(head_of)[0]
    at = None if chosen is None else _place(chosen, names)
    asked = Ranks(rank=rank, keep=keep)
    kind = None if dtype is None else float_type(dtype)
    opened = tuple(map(opened_adapter, names))
    return _planned("combine", opened, given, asked, kind, head_of=at, base=base, ignore=ignore)


def plan_resize(
    adapter: Reference,
    *,
    rank: int | None = None,
    keep: float | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan of an adapter with lower ranks: the best approximation of `adapter`'s ΔW that there is.

    `rank` is the largest rank that a module gets, `keep` the share of ‖ΔW‖² that each module keeps at least, at the
    lowest rank that does: one of the two is needed. `dtype` None is float32; `ignore` are codes of rules. All factors
    are read once. Raises as `plan_combine`.
    """
    asked = Ranks(rank=rank, keep=keep)
    if asked.exact:
        raise WrongValue("rank, keep: one of the two says which rank a module gets", hint="rank=16, or keep=0.99")
    kind = None if dtype is None else float_type(dtype)
    return _planned("resize", (opened_adapter(adapter),), (1.0,), asked, kind, head_of=None, base=None, ignore=ignore)


def _place(chosen: Reference, names: Sequence[Reference]) -> int:
    for at, name in enumerate(names):
        if str(name).rstrip("/") == str(chosen).rstrip("/"):
            return at
    raise WrongValue(f"head_of: {chosen} is none of the adapters: {', '.join(map(str, names))}")


def _planned(
    operation: str,
    adapters: tuple[AdapterDir, ...],
    weights: tuple[float, ...],
    asked: Ranks,
    dtype: DType | None,
    *,
    head_of: int | None,
    base: Reference | None,
    ignore: Iterable[str],
) -> Plan:
    model = None if base is None else opened_model(base)
    judge = MergeJudge(ignore=tuple(ignore))
    report = judge.as_stored(adapters, model, beside=_without_other_heads(adapters, head_of))
    views = tuple(map(view_of, adapters))
    for view in views:
        require_sums(view)
    if model is None:
        require_one_base(views)
    sums = factors_of_sum(views, weights)
    turned, ranks = _compressed(sums, asked)
    out = dtype or (exact_type(sums) if not turned else _float32_or_more(sums))
    chosen = None if head_of is None else views[head_of]
    whole = whole_tensors(views, head_of=chosen)
    written = {each.module: turned[each.module][0].columns if each.module in turned else each.rank for each in sums}
    steps = (*(step for each in sums for step in factor_steps(each, out, turned.get(each.module))), *whole.steps)
    targets = {layer.module: layer.target for view in views for layer in view.layers}
    config = config_of_sum(
        views, {targets[module]: rank for module, rank in written.items()}, base=model.root if model else None
    )
    side_files = (config, *_tokenizer_files(adapters))
    leftovers = (*whole.dropped, *_consumed(adapters, steps))
    _require_all(adapters, leftovers)
    inputs = {input_name(number): each for number, each in enumerate(adapters, start=1)}
    return Plan(
        shards=(Shard(filename=ADAPTER_WEIGHTS, steps=steps),),
        side_files=side_files,
        leftovers=leftovers,
        inputs=_stamps(adapters, side_files),
        precision=Precision.FLOAT64,
        findings=report.findings,
        input_names={each.root: name for name, each in inputs.items()} if len(inputs) > 1 else {},
        warnings=tuple(rank_warnings(ranks)),
        notes=tuple(_notes(operation, adapters, weights, sums, ranks, whole.steps)),
        manifest={
            "operation": operation,
            "rank": asked.rank,
            "keep": asked.keep,
            "dtype": out.value,
            "head_of": None if head_of is None else input_name(head_of + 1),
            "merged_adapters": [],
            "inputs": {
                name: {**_described(each), "weight": weight}
                for (name, each), weight in zip(inputs.items(), weights, strict=True)
            },
            "modules": [each.as_json() for each in ranks],
        },
    )


def _compressed(
    sums: Sequence[Factors], asked: Ranks
) -> tuple[dict[str, tuple[SmallMatrix, SmallMatrix]], tuple[ModuleRank, ...]]:
    """Return the matrices of the modules that lose rank, and figures on all; nothing where nothing is left out."""
    if asked.exact:
        return {}, ()
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - numpy, only where values are read

    from lora_tool.plan.algebra.spectrum import Compressed, compressed  # noqa: PLC0415

    told(f"computing the singular values of {counted(len(sums), 'module')}")

    def one(factors: Factors) -> Compressed:
        return compressed(factors, rank=asked.rank, keep=asked.keep or 1.0)

    turned, ranks = {}, []
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(available_cores()) as workers:
        for factors, found in zip(sums, workers.map(one, sums), strict=True):
            if found.rank < factors.rank:
                turned[factors.module] = (found.left, found.right)
            values = found.singular_values
            ranks.append(
                ModuleRank(
                    module=factors.module,
                    before=factors.rank,
                    after=min(found.rank, factors.rank),
                    energy=found.energy,
                    discarded=found.discarded,
                    largest=float(values[0]) if len(values) else 0.0,
                    enough=found.rank_for(enough()),
                )
            )
    return turned, tuple(ranks)


def _float32_or_more(sums: Sequence[Factors]) -> DType:
    wide = any(DType.F64 in (term.a.dtype, term.b.dtype) for each in sums for term in each.terms)
    return DType.F64 if wide else DType.F32


def _without_other_heads(adapters: Sequence[AdapterDir], head_of: int | None) -> tuple[AdapterDir, ...]:
    """Return the adapters as they are judged together: without the whole tensors that `head_of` has, too."""
    if head_of is None:
        return tuple(adapters)
    chosen = view_of(adapters[head_of]).saved.keys()

    def lighter(at: int, adapter: AdapterDir) -> AdapterDir:
        if at == head_of:
            return adapter
        gone = {tensor.name for name, tensor in view_of(adapter).saved.items() if name in chosen}
        left = {name: tensor for name, tensor in adapter.tensors.items() if name not in gone}
        known = {name: key for name, key in adapter.keys.items() if name not in gone}
        return replace(adapter, weights=replace(adapter.weights, tensors=left), keys=known)

    return tuple(lighter(at, adapter) for at, adapter in enumerate(adapters))


def _notes(
    operation: str,
    adapters: Sequence[AdapterDir],
    weights: Sequence[float],
    sums: Sequence[Factors],
    ranks: Sequence[ModuleRank],
    whole: Sequence[Step],
) -> Iterator[str]:
    sources = " + ".join(
        str(each.root) if weight == 1 else f"{weight:g}·{each.root}"
        for each, weight in zip(adapters, weights, strict=True)
    )
    verb = "resizing" if operation == "resize" else "combining"
    yield f"{verb} {sources}: {counted(len(sums), 'module')}"
    if ranks:
        yield from rank_lines(ranks)
    else:
        largest = max(sums, key=lambda each: each.rank)
        yield f"exact: rank {largest.rank} = {' + '.join(str(term.rank) for term in largest.terms)}, nothing is left out"
    scaled = any(weight != 1 for weight in weights)
    if whole and scaled:
        yield f"weights scale ΔW alone: {counted(len(whole), 'whole tensor')}, such as {whole[0].out.name}, stay as they are"


def _described(adapter: AdapterDir) -> dict[str, Any]:
    return describe_input(source_of(adapter.root), adapter.weights, fingerprint(adapter.weights))


def _tokenizer_files(adapters: Sequence[AdapterDir]) -> Iterator[SideFile]:
    """Yield the tokenizer's files of the first adapter that has some."""
    for adapter in adapters:
        names = [name for name in adapter.folder.files if name in tokenizer.FILE_NAMES]
        if names:
            for name in names:
                yield SideFile(filename=name, source=adapter.root / name, reason=f"copied from {adapter.root}")
            return


def _consumed(adapters: Sequence[AdapterDir], steps: Sequence[Step]) -> Iterator[InputRecord]:
    """Yield every tensor of the adapters that is in an output of another name or value."""
    places = {(tensor.path, tensor.name): step.out.name for step in steps for tensor in step.op.inputs}
    for adapter in adapters:
        for name, tensor in adapter.tensors.items():
            place = places.get((tensor.path, name))
            if place is not None:
                yield InputRecord(path=tensor.path, name=name, action=TensorAction.CONSUMED, reason=f"in {place}")


def _require_all(adapters: Sequence[AdapterDir], leftovers: Sequence[InputRecord]) -> None:
    """Raise unless every tensor of every adapter is in a step, or left out by name."""
    known = {(item.path, item.name) for item in leftovers}
    for adapter in adapters:
        for name, tensor in adapter.tensors.items():
            if (tensor.path, name) not in known:
                raise UnsupportedAdapter(
                    f"{tensor.path}: `{name}` has no place in the new adapter",
                    hint=f"lora-tool validate {adapter.root}",
                )


def _stamps(adapters: Sequence[AdapterDir], side_files: Sequence[SideFile]) -> tuple[FileStamp, ...]:
    stamps = {stamp.path: stamp for adapter in adapters for stamp in adapter.weights.stamps}
    copied = {file.source: FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **copied}.values())
