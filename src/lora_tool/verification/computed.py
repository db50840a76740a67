"""Whether a computed adapter is what its inputs give: its ΔW by other formulas, what was copied byte by byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from lora_tool.adapters.experts import experts_of
from lora_tool.adapters.fused_experts import FusedExperts, fused_experts
from lora_tool.adapters.gguf import GgufLayout, is_gguf
from lora_tool.adapters.mlx import is_mlx
from lora_tool.adapters.view import AdapterView, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.choices import assert_never
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import DType, TensorAction
from lora_tool.formats.adapter_config import FILE_NAME
from lora_tool.formats.files import read_object
from lora_tool.formats.manifest import Manifest
from lora_tool.models.gguf_names import ALPHA
from lora_tool.plans.algebra.factor_steps import bias_steps, padded_steps
from lora_tool.plans.algebra.gguf_form import gguf_factors
from lora_tool.plans.algebra.plan_stack import plan_stack
from lora_tool.plans.algebra.provenance import ExtractInputs, SumInputs
from lora_tool.plans.algebra.served import Idle, beside_which, served_factors
from lora_tool.plans.algebra.terms import Factors, factors_of_sum, unscaled
from lora_tool.plans.algebra.whole_plan import magnitude_steps, whole_tensors
from lora_tool.plans.computed import ComputedInputs, ConvertInputs, SeqClsInputs
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence, Verdict
from lora_tool.rules.serving.forms import form_of
from lora_tool.rules.serving.named import known_servers
from lora_tool.verification.checking import check_steps
from lora_tool.verification.converted import check_converted, is_news
from lora_tool.verification.from_base import check_computed, check_extracted, computed_modules, copied_steps
from lora_tool.verification.levels import Level
from lora_tool.verification.products import check_products


def evidence_of_computed(
    inputs: ComputedInputs, *, level: Level, jobs: int | None, progress: Progress
) -> dict[str, TensorEvidence]:
    """Return the evidence of every tensor that was copied, and of ΔW of every module, named by its lora_B.

    Raises as `factors_of_sum` and `whole_tensors` do for inputs that do not add up; `OSError`, `SourceChanged`.
    """
    return _of_values(inputs, level, jobs, progress) | check_config(inputs.made, inputs.manifest)


def _of_values(inputs: ComputedInputs, level: Level, jobs: int | None, progress: Progress) -> dict[str, TensorEvidence]:
    match inputs:
        case SumInputs() if inputs.manifest.raw.get("stack") is True:
            return _of_stack(inputs, level, jobs, progress)
        case SumInputs():
            return _of_sum(inputs, level, jobs, progress)
        case ExtractInputs():
            return _of_difference(inputs, level, jobs, progress)
        case ConvertInputs():
            return check_converted(inputs, level=level, jobs=jobs, progress=progress)
        case SeqClsInputs():
            plan = inputs.plan()
            return check_steps(
                plan.steps, inputs.made.tensors, level=level, precision=plan.precision, jobs=jobs, progress=progress
            )
        case _:
            return assert_never(inputs)


def _of_sum(inputs: SumInputs, level: Level, jobs: int | None, progress: Progress) -> dict[str, TensorEvidence]:
    views, made = tuple(map(view_of, inputs.adapters)), _made(inputs)
    sums = factors_of_sum(views, inputs.weights)
    stored = tuple(unscaled(each, inputs.scale) for each in sums)
    chosen = None if inputs.head_of is None else views[inputs.head_of]
    weights = inputs.weights if inputs.average else None
    # a server has the frozen weights from its base, and they were not written
    planned = inputs.manifest.tensors or {}
    names = inputs.names
    fused = fused_experts(views[0]) if len(views) == 1 else {}
    whole = (*whole_tensors(views, head_of=chosen, weights=weights).steps, *magnitude_steps(views[0]))
    of_experts = (step for each in stored if each.module in fused for step in _of_experts(each, fused, inputs))
    steps = names.steps((*whole, *of_experts, *(step for each in stored for step in bias_steps(each))))
    steps = tuple(step for step in steps if step.out.name in planned)
    written = tuple(replace(each, module=names.back(each.module)) for each in factors_of_sum((made,), (1.0,)))
    if inputs.base is not None:
        inputs = replace(inputs, base=names.base(inputs.base))
    computed = computed_modules(inputs, views[0])
    apart = {*computed, *fused}
    zeros = _of_idle(sums, written, inputs.manifest)
    evidence = check_steps(
        (*steps, *zeros), inputs.made.tensors, level=level, precision=Precision.FLOAT64, jobs=jobs, progress=progress
    )
    others = [each for each in sums if each.module not in apart]
    if is_gguf(inputs.made.folder):
        evidence |= _of_gguf(inputs, [each for each in sums if each.module not in computed], level, jobs)
        others = [each for each in others if experts_of(each.module) is None]  # of which a stack has many
    evidence |= check_products(others, written, least=inputs.keep, exact=inputs.exact, progress=progress)
    if inputs.exact and not is_mlx(inputs.made.folder) and not is_gguf(inputs.made.folder):
        beside = (each for each in stored if each.module not in apart)
        exact = names.steps(step for each in beside for step in _put_beside(each, written, inputs.manifest))
        told = check_steps(
            exact, inputs.made.tensors, level=level, precision=Precision.FLOAT64, jobs=jobs, progress=lambda _: None
        )
        evidence |= {name: each for name, each in told.items() if is_news(each, evidence)}
    evidence |= check_computed(
        inputs, views[0], tuple(each for each in written if each.module in computed), progress=progress
    )
    return evidence


def _of_stack(inputs: SumInputs, level: Level, jobs: int | None, progress: Progress) -> dict[str, TensorEvidence]:
    """Return the evidence of the stacked heads, and that what was written has the ΔW of every adapter."""
    plan = plan_stack(inputs.adapters, base=inputs.base, ignore=("LT",))
    evidence = check_steps(
        plan.steps, inputs.made.tensors, level=level, precision=plan.precision, jobs=jobs, progress=progress
    )
    written = factors_of_sum((_made(inputs),), (1.0,))
    for adapter in inputs.adapters:
        sums = factors_of_sum((view_of(adapter),), (1.0,))
        told = check_products(sums, written, least=None, exact=True, progress=lambda _: None)
        evidence |= {name: each for name, each in told.items() if is_news(each, evidence)}
    return evidence


def _of_gguf(inputs: SumInputs, sums: Sequence[Factors], level: Level, jobs: int | None) -> dict[str, TensorEvidence]:
    """Return the evidence of the tensors of a GGUF file, as they follow from the adapter's; none where ranks were lowered."""
    if not inputs.exact:
        return {}
    (view,), manifest = map(view_of, inputs.adapters), inputs.manifest
    form = form_of(manifest.raw["for"])
    served = served_factors(view, form, sums, max_rank=None, approximate=False)
    layout = GgufLayout.of_json(manifest.raw.get("gguf"), inputs.made.root)
    metadata = inputs.stored.files[0].metadata
    factors = replace(gguf_factors(served, layout, DType(manifest.raw["dtype"])), alpha=float(metadata[ALPHA]))
    return check_steps(
        factors.shard.steps,
        inputs.stored.tensors,
        level=level,
        precision=Precision.FLOAT64,
        jobs=jobs,
        progress=lambda _: None,
    )


def _made(inputs: SumInputs | ExtractInputs) -> AdapterView:
    """Return the adapter that was written; half a pair is left out where a factor is missing, which a rule tells of."""
    view = view_of(inputs.made)
    if inputs.made.tensors.keys() >= (inputs.manifest.tensors or {}).keys():
        return view
    return replace(view, layers=tuple(layer for layer in view.layers if layer.pair))


def _put_beside(factors: Factors, written: Sequence[Factors], manifest: Manifest) -> Iterator[Step]:
    """Yield how a module's factors follow from its inputs', where they only stand beside one another."""
    rank = next((each.rank for each in written if each.module == factors.module), 0)
    if rank >= factors.rank:
        yield from padded_steps(factors, DType(manifest.raw["dtype"]), None, rank)


def _of_idle(sums: Sequence[Factors], written: Sequence[Factors], manifest: Manifest) -> Iterator[Step]:
    """Yield that ΔW is zero of modules that no input changes, which were written for a server."""
    server = str(manifest.raw.get("for")).partition("@")[0]
    reads = form_of(server).together if server in known_servers() else None
    beside = beside_which(sums, [each.module for each in written], reads) if reads else {}
    for each in written:
        if each.module in beside:
            idle = Idle(module=each.module, out=each.out, width=each.width, beside=beside[each.module])
            yield from idle.steps(DType(manifest.raw["dtype"]), each.rank)


def _of_experts(factors: Factors, fused: Mapping[str, FusedExperts], inputs: SumInputs) -> Iterator[Step]:
    """Yield how the factors of fused experts follow from the input's: they are no factors of one product."""
    stack = fused[factors.module]
    rank = inputs.manifest.raw.get("served_rank")
    dtype = DType(inputs.manifest.raw["dtype"])
    yield from padded_steps(factors, dtype, None, rank if isinstance(rank, int) else stack.rank, experts=stack.count)


def _of_difference(
    inputs: ExtractInputs, level: Level, jobs: int | None, progress: Progress
) -> dict[str, TensorEvidence]:
    steps = tuple(copied_steps(inputs))
    evidence = check_steps(
        steps, inputs.made.tensors, level=level, precision=Precision.FLOAT32, jobs=jobs, progress=progress
    )
    evidence |= check_extracted(inputs, factors_of_sum((_made(inputs),), (1.0,)), progress=progress)
    return evidence


# Whether the config of a computed adapter still says what was written, in all by which PEFT finds and scales its factors.


_MAY_DIFFER = frozenset({"base_model_name_or_path", "inference_mode", "lora_dropout", "peft_version", "revision"})
"""Fields that say nothing of ΔW: a base may be moved, and PEFT writes its version."""
_NAMES = (
    "alpha_pattern bias exclude_modules fan_in_fan_out layers_pattern layers_to_transform lora_bias modules_to_save "
    "rank_pattern target_parameters trainable_token_indices"
)
_WHERE = frozenset(_NAMES.split())
"""Fields that change what is loaded even if none was written."""


def check_config(made: AdapterDir | ModelDir, manifest: Manifest) -> dict[str, TensorEvidence]:
    """Return the evidence of the config if a field has another value than was written; nothing of one that is right.

    A manifest of an earlier release says nothing of it.
    """
    written = next((file.get("config") for file in _side_files(manifest) if file.get("name") == FILE_NAME), None)
    if not isinstance(written, dict) or not (made.root / FILE_NAME).is_file():
        return {}
    found = read_object(made.root / FILE_NAME)
    names = sorted((written.keys() | _WHERE) - _MAY_DIFFER)
    other = [name for name in names if _comparable(found.get(name)) != _comparable(written.get(name))]
    if not other:
        return {}
    name, more = other[0], f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    reason = f"`{name}` is {found.get(name)!r}, but {written.get(name)!r} was written{more}"
    return {
        FILE_NAME: TensorEvidence(
            name=FILE_NAME,
            action=TensorAction.COMPUTED,
            verdict=Verdict.DIFFERENT,
            compared=len(names),
            numel=len(names),
            wrong=len(other),
            reason=reason,
        )
    }


def _side_files(manifest: Manifest) -> list[Mapping[str, Any]]:
    listed = manifest.raw.get("side_files")
    return [file for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []


def _comparable(value: object) -> object:
    """Return a field's value so that none, no and empty are one, and a list of names has no order."""
    return sorted(map(str, value)) if isinstance(value, list) and value else value or None
