"""Planning the adapter that is the difference of two models: low rank as LoRA, other changes whole or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from lora_tool.checkpoints import ADAPTER_WEIGHTS, ModelDir
from lora_tool.checkpoints.sources import Reference, opened_model, source_of
from lora_tool.core.display import counted
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.core.machine import available_cores
from lora_tool.core.progress import told
from lora_tool.core.tensors import DType, StoredTensor, TensorAction, TensorSpec, float_type
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig
from lora_tool.formats.files import json_bytes
from lora_tool.models import architecture_of
from lora_tool.models.ends import head_of
from lora_tool.models.model_tensors import module_names
from lora_tool.plans.algebra.differing import Differing, differing
from lora_tool.plans.algebra.factor_steps import zero_rows
from lora_tool.plans.algebra.peft_config import PLAIN, rank_fields
from lora_tool.plans.algebra.ranks import Ranks, equal_for_experts, keeping_little, least_kept, total_kept
from lora_tool.plans.algebra.spool import Spool
from lora_tool.plans.algebra.whole_plan import described, stamps_of, tokenizer_files, weights_of
from lora_tool.plans.base.task import auto_class_for
from lora_tool.plans.core.factor_ops import Beside, Columns
from lora_tool.plans.core.ops import Assemble, Copy, Op, Precision, copied_as, row_ops
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step
from lora_tool.rules.judging import MergeJudge

_LARGEST = (32, 128, 512)
"""Ranks that are tried, one after the other, where the user gives a share and no rank."""
_MEMORY = 128 << 20
"""Of the modules that are worked on at a time: two of Llama 8B's widest at rank 64, in 200 MB for the whole process."""
_LITTLE = 0.5
"""A module that keeps less than this share is hardly of low rank."""


class Extracted(Struct, frozen=True, kw_only=True):
    """One module's difference as LoRA, in figures."""

    module: str
    rank: int
    norm: float
    residual: float
    noise: float
    largest: float
    kept: float

    @property
    def energy(self) -> float:
        """‖D‖² beyond the rounding noise, of which `kept` is the share."""
        return max(self.norm**2 - self.noise**2, 0.0)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "module": self.module,
            "rank": self.rank,
            "kept": self.kept,
            "norm": self.norm,
            "residual": self.residual,
            "rounding_noise": self.noise,
            "largest_singular_value": self.largest,
        }


_Made = tuple[Extracted, tuple[StoredTensor, StoredTensor]]
"""A module's figures, and its A and B."""


def plan_extract(
    model: Reference,
    base: Reference,
    spool: Spool,
    *,
    rank: int | None = None,
    keep: float | None = None,
    save: Iterable[str] = (),
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan of the adapter that makes `base` the fine-tuned `model`, as near as its ranks allow.

    Matrices that differ become LoRA: `rank` is what each gets at most, `keep` the share of ‖D‖² beyond rounding noise
    that each keeps at least, at the lowest rank that does. Norms, embeddings, heads, and the modules of `save` are
    saved whole; what is the same is left out. Factors are computed here, in four passes over both models, and lie in
    `spool`. A classifier of a causal base gives a reward adapter. `dtype` None is float32. The rules but those of
    `ignore` judge the files of both. Raises `FindingsFound`, `UnsupportedAdapter` for what an adapter has no place for,
    and where `keep` needs more than rank 512; `WrongValue`, and as `open_model`.
    """
    requested = Ranks(rank=rank, keep=keep)
    kind = DType.F32 if dtype is None else float_type(dtype)
    tuned, first = opened_model(model), opened_model(base)
    report = MergeJudge(ignore=tuple(ignore)).of_models((tuned, first))
    found = differing(tuned, first, frozenset(save))
    if not found.low_rank:
        what = "nothing differs"
        if found.whole:
            what = f"only {', '.join(found.saved_modules[:4])} differ, and none of it is a matrix that LoRA can change"
        raise UnsupportedAdapter(
            f"{tuned.root} against {first.root}: {what}: there is no adapter to write",
            hint="give the model that was trained, and the base that it was trained from",
        )
    _require_names(first, found)
    told(f"comparing {len(found.low_rank)} changed matrices with the base's, in four passes")
    made = [*_factors(tuned, first, found, requested, spool)]
    made += _unchanged(made, first, found, spool)
    modules = [each for each, _ in made]
    ranks = equal_for_experts({each.module: each.rank for each in modules})
    steps = [step for each, factors in made for step in _steps(each, factors, kind, ranks[each.module])]
    whole = [*_whole_steps(tuned, found)]
    side_files = (_config(first, found, ranks), *tokenizer_files((tuned,)))
    return Plan(
        shards=(Shard(filename=ADAPTER_WEIGHTS, steps=(*steps, *whole)),),
        side_files=side_files,
        leftovers=tuple(
            InputRecord(
                path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason="the base has the same values"
            )
            for tensor in found.left
        ),
        inputs=(*stamps_of((tuned, first), side_files), *spool.stamps()),
        precision=Precision.FLOAT32,
        input_names={tuned.root: "model", first.root: "base"},
        hashed=weights_of((tuned, first)),
        findings=report.findings,
        notes=tuple(_notes(tuned, first, modules, whole)),
        warnings=tuple(_warnings(modules)),
        manifest={
            "operation": "extract",
            "rank": rank,
            "keep": keep,
            "save": sorted(save),
            "dtype": kind.value,
            "merged_adapters": [each for each in _merged(tuned) if each not in _merged(first)],
            "inputs": {name: described(each) for name, each in (("model", tuned), ("base", first))},
            "kept": total_kept(modules),
            "modules": [each.as_json() for each in modules],
        },
    )


def _merged(model: ModelDir) -> tuple[str, ...]:
    """Return the adapters whose ΔW is in the model, by its manifest."""
    return model.manifest.merged_adapters if model.manifest else ()


def _require_names(base: ModelDir, found: Differing) -> None:
    """Check that PEFT finds the modules by their names on disk, as far as tables or transformers know them.

    Raises `UnsupportedAdapter` where transformers has another name for one in memory.
    """
    config = base.config
    if config is None or config.custom_code:
        return
    trained = AdapterConfig(path=base.root / FILE_NAME, task_type=found.task_type)
    known = module_names(config, base.modules, trained)
    if known is None and all(map(find_spec, ("torch", "transformers"))):
        from lora_tool.models.mapping.modules import built_modules

        known = built_modules(
            base.whole_config, base.tensors, next(iter(config.architectures), None), auto_class_for(found.task_type)
        )
    names = frozenset() if known is None else known.headed if found.task_type else known.headed | known.bare
    tabled = found.tied if architecture_of(config.model_type or "") else ()  # such a name is not on disk
    others = (module for module in found.saved_modules if head_of(module) is None and f"{module}.weight" not in tabled)
    strange = [module for module in (*found.low_rank, *others) if module not in names]
    if names and strange:
        raise UnsupportedAdapter(
            f"{base.root}: transformers has another name for `{strange[0]}` in memory, where PEFT looks for it, and extract "
            "writes the names of the checkpoint",
            hint="keep the model itself, or publish it: lora-tool push",
        )


def _factors(tuned: ModelDir, base: ModelDir, found: Differing, requested: Ranks, spool: Spool) -> Iterator[_Made]:
    """Yield each module's figures and factors, computed by one worker per core, as far as memory goes."""
    from threadpoolctl import threadpool_limits  # numpy, only where values are read

    from lora_tool.plans.algebra.krylov import memory_of, nearest

    def one(module: str) -> _Made:
        ours, theirs = tuned.tensors[f"{module}.weight"], base.tensors[f"{module}.weight"]
        ranks = _LARGEST if requested.rank is None else (requested.rank,)
        for largest in ranks:
            near = nearest(ours, theirs, rank=largest, keep=requested.keep)
            if requested.keep is None or near.kept >= requested.keep * (1 - 1e-9):
                break
        else:
            raise UnsupportedAdapter(
                f"{ours.path}: `{ours.name}` is not of low rank: rank {near.rank} keeps {near.kept:.1%} of what changed, "
                f"{requested.keep:.1%} was requested",
                hint=f"`save={module}` writes it whole, `rank={near.rank}` writes the best of that rank",
            )
        figures = Extracted(
            module=module,
            rank=near.rank,
            norm=near.norm,
            residual=near.residual,
            noise=near.noise,
            largest=near.largest,
            kept=near.kept,
        )
        a, b = (near.b.T, near.a.T) if module in found.transposed else (near.a, near.b)
        return figures, (spool.add(f"{module}.lora_A", a), spool.add(f"{module}.lora_B", b))

    largest = max(
        memory_of(tuned.tensors[f"{each}.weight"].shape, requested.rank or _LARGEST[1]) for each in found.low_rank
    )
    count = min(available_cores(), max(1, _MEMORY // largest))
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(count) as workers:
        yield from workers.map(one, found.low_rank)


def _unchanged(made: Sequence[_Made], base: ModelDir, found: Differing, spool: Spool) -> Iterator[_Made]:
    """Yield the experts that did not change, but that PEFT stacks with those that did: B is zero, A another expert's, if any."""
    if not found.stacked:
        return
    import numpy as np  # the factors of the others were computed with it

    held: dict[str | int, StoredTensor] = {each.module: a for each, (a, _) in made}
    for module, like in found.stacked.items():
        height, width = base.tensors[f"{module}.weight"].shape
        key = like or width
        if key not in held:  # only down changed, or only gate and up
            held[key] = spool.add(f"{module}.lora_A", np.full((1, width), width**-0.5, np.float32))
        a = held[key]
        zeros = spool.add(f"{module}.lora_B", np.zeros((height, a.shape[0]), np.float32))
        figures = Extracted(module=module, rank=a.shape[0], norm=0.0, residual=0.0, noise=0.0, largest=0.0, kept=1.0)
        yield figures, (a, zeros)


def _steps(each: Extracted, factors: tuple[StoredTensor, StoredTensor], dtype: DType, rank: int) -> Iterator[Step]:
    """Yield the steps that write both factors, with zeros up to the `rank`."""
    reason = (
        f"rank {each.rank} of what changed, {each.residual / each.norm if each.norm else 0:.2%} of its norm left out"
    )
    (a, b), missing = factors, rank - each.rank
    above: Op = copied_as(dtype, a)
    across: Op = copied_as(dtype, b)
    if missing:
        above = Assemble(parts=(*row_ops(above), *zero_rows(a, missing)))
        across = Beside(parts=(Columns(tensor=b, count=each.rank),), zeros=missing)
    for part, op, shape in (("lora_A", above, (rank, a.shape[1])), ("lora_B", across, (b.shape[0], rank))):
        out = TensorSpec(name=f"{PREFIX}{each.module}.{part}.weight", dtype=dtype, shape=shape)
        yield Step(out=out, op=op, action=TensorAction.COMPUTED, reason=reason)


def _whole_steps(tuned: ModelDir, found: Differing) -> Iterator[Step]:
    from lora_tool.plans.algebra.krylov import require_finite  # numpy, where values are read

    tied = ((name, saved_as) for saved_as, name in found.tied.items())
    for name, saved_as in (*found.whole.items(), *tied):
        tensor = tuned.tensors[name]
        require_finite(tensor)
        out = TensorSpec(name=f"{PREFIX}{saved_as}", dtype=tensor.dtype, shape=tensor.shape)
        yield Step(out=out, op=Copy(source=tensor), action=TensorAction.COPIED, reason=f"copied from {tuned.root}")


def _config(base: ModelDir, found: Differing, ranks: Mapping[str, int]) -> SideFile:
    raw: dict[str, Any] = {
        **PLAIN,
        **(rank_fields(ranks) if ranks else {"r": 1, "lora_alpha": 1, "rank_pattern": {}, "alpha_pattern": {}}),
        "peft_type": "LORA",
        "task_type": found.task_type,
        "base_model_name_or_path": str(base.root.resolve()),
        "target_modules": list(found.targets),
        "modules_to_save": list(found.saved_modules) or None,
        "bias": "all" if found.biases else "none",
        "fan_in_fan_out": bool(found.transposed),
        "lora_dropout": 0.0,
    }
    hub_id = source_of(base.root).hub_id
    if hub_id is not None:
        raw["base_model_name_or_path"] = hub_id
    return SideFile(
        filename=FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason="written for the adapter"
    )


def _notes(tuned: ModelDir, base: ModelDir, modules: Sequence[Extracted], whole: Sequence[Step]) -> Iterator[str]:
    yield f"extracting {tuned.root} from {base.root}: {counted(len(modules), 'module')} as LoRA, {counted(len(whole), 'tensor')} whole"
    if modules:
        yield f"kept {total_kept(modules):.4%} of the change beyond rounding; the least in {least_kept(modules)}"
        most = max(modules, key=lambda each: each.residual / each.norm if each.norm else 0.0)
        if most.norm:
            yield (
                f"left out: at most {most.residual / most.norm:.2%} of ‖W₁ - W₀‖, in {most.module}; rounding its weights to "
                f"their type explains {most.noise / most.norm:.2%}"
            )


def _warnings(modules: Sequence[Extracted]) -> Iterator[str]:
    if (lost := keeping_little(modules, _LITTLE, "what changed")) is not None:
        yield f"{lost}: the change of a full fine-tune may have a high rank; raise --rank, or write a module whole with --save MODULE"
