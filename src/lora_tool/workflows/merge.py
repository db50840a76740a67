"""Merging: the inputs found, judged and planned, the plan carried out, the result read back."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, structs

from lora_tool.adapters.support import require_lora
from lora_tool.adapters.weighted import all_weighted
from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    NamedAdapters,
    RunDir,
    ShardedDir,
    base_around,
    open_checkpoint,
    open_model,
    require_whole,
    saves_in,
    trained_among,
)
from lora_tool.checkpoints.sources import (
    Reference,
    Source,
    Wanted,
    beside,
    located,
    moved_to,
    open_adapter_at,
    opened_adapter,
    opened_model,
    resolve,
    source_of,
)
from lora_tool.core.display import size
from lora_tool.core.engines import Spread
from lora_tool.core.errors import (
    CheckpointError,
    IncompatibleBase,
    NotACheckpoint,
    OnlyInMemory,
    UnsupportedAdapter,
    WrongValue,
)
from lora_tool.core.hub_names import hub_id_of
from lora_tool.core.progress import decided
from lora_tool.formats.files import expanded
from lora_tool.formats.manifest import FILE_NAME
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.options import MergeArguments, MergeOptions
from lora_tool.plans.merge.plan_merge import plan_merge
from lora_tool.rules.judging import MergeJudge
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, require_apart, require_output, require_part
from lora_tool.workflows.written import Planned

_Options = TypeVar("_Options", bound=MergeOptions)


class FoundInputs(Struct, frozen=True, kw_only=True):
    """The adapters that are merged, in the order of their sum, their base, and where all of them come from."""

    adapters: tuple[AdapterDir, ...]
    sources: tuple[Source, ...]
    base: ModelDir
    base_source: Source
    weights: tuple[float, ...] = ()
    """Those of the adapters in their sum, 1 each without."""

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*(source.path for source in self.sources), self.base_source.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was found elsewhere than it was named: an adapter one folder down."""
        found = zip(self.sources, self.adapters, strict=True)
        return tuple(
            f"merging the adapter in {adapter.root}" for source, adapter in found if adapter.root != source.path
        )

    @property
    def default_output(self) -> Path:
        return beside(self.sources[0], "merged")


def merge_inputs(
    adapters: Reference | Sequence[Reference],
    base: Reference | None,
    near: Path | None = None,
    *,
    weights: Sequence[float] | None = None,
    open_base: Callable[[Path], ModelDir] = opened_model,
) -> FoundInputs:
    """Return the inputs of a merge, downloaded and opened; `base` None takes the one that the adapters name.

    A relative path of the base is looked for in the working directory and in `near`, by default the adapter's folder.
    `weights` are by default those in the names. `open_base` opens the found folder, for several merges once, say. Raises
    `CheckpointError` for inputs that cannot be found or read, `FindingsFound` for a broken config that names no base,
    `IncompatibleBase` where the adapters name two bases.
    """
    listed, weights = all_weighted(adapters, weights)
    sources = tuple(located(each, Wanted.ADAPTER, only=True) for each in listed)
    try:
        opened = tuple(
            open_adapter_at(found.path) if isinstance(each, str | os.PathLike) else opened_adapter(each)
            for each, found in zip(listed, sources, strict=True)
        )
        found = _common_base(opened, near) if base is None else located(base, Wanted.MODEL, near, only=True)
        if base is not None:
            decided(f"base: {found.path}, as given")
        model = open_base(found.path) if base is None or isinstance(base, str | os.PathLike) else opened_model(base)
    except NotACheckpoint as error:
        error.hint = meant_instead(listed, base) or _best_of_run(sources) or error.hint
        raise
    return FoundInputs(adapters=opened, sources=sources, base=model, base_source=found, weights=weights)


def with_opened_base(options: _Options, near: Path | None = None) -> _Options:
    """Return the options of several merges with the base that they name opened, once for all of them.

    A relative path is looked for in the working directory and in `near`. Raises `CheckpointError` for what cannot be found or read.
    """
    return options if options.base is None else replace(options, base=opened_model(options.base, near=near))


def meant_instead(adapters: Sequence[Reference], base: Reference | None) -> str | None:
    """Return the command that merges the same folders, one of them as the base; None where it is not plain which."""
    named = [each for each in (*adapters, base) if isinstance(each, str | os.PathLike)]
    kinds: dict[type[Checkpoint], list[str]] = {}
    with contextlib.suppress(CheckpointError):
        for each in named:
            if (path := expanded(each)).is_dir():
                kinds.setdefault(type(open_checkpoint(path)), []).append(shlex.quote(str(each)))
    models, parts = kinds.get(ModelDir, []), kinds.get(AdapterDir, [])
    if len(models) != 1 or not parts or (base is not None and shlex.quote(str(base)) == models[0]):
        return None
    return f"lora-tool merge {' '.join(parts)} --base {models[0]}" + (" -o OUT" if len(parts) > 1 else "")


def _better_than(finished: AdapterDir) -> str | None:
    """Return that a checkpoint of the run is better than its `finished` weights, and the command that merges it.

    None where none is, and for any other adapter.
    """
    if not saves_in(finished.folder):
        return None
    from lora_tool.rules.training.saves import better_checkpoint  # only for a run
    from lora_tool.verification.validating import validate

    (table,) = validate(finished, checkpoints=True).runs
    best = better_checkpoint(finished, table)
    if best is None:
        return None
    which = f"the best checkpoint is {best.name} ({table.why_best}): lora-tool merge {shlex.quote(str(best))}"
    return f"{finished.root} holds the run's finished weights, which are merged; {which}"


def _best_of_run(sources: Sequence[Source]) -> str | None:
    """Return the command that merges the best checkpoint of the one run that was given; None where there is none."""
    if len(sources) != 1:
        return None
    try:
        opened = open_checkpoint(sources[0].path)
    except CheckpointError:  # the caller's error says why nothing opens
        return None
    if not isinstance(opened, RunDir):
        return None
    from lora_tool.verification.validating import validate  # only for a run, which a merge refuses

    (table,) = validate(opened).runs
    if table.best is None:
        return None
    best = open_checkpoint(table.best)
    taken = trained_among(best)[0] if isinstance(best, NamedAdapters) else best
    command = "consolidate" if isinstance(taken, ShardedDir) else "merge"
    return f"the best of its checkpoints ({table.why_best}): lora-tool {command} {shlex.quote(str(taken.root))}"


def _common_base(adapters: Sequence[AdapterDir], near: Path | None) -> Source:
    found = [_named_base(adapter, near or adapter.root) for adapter in adapters]
    for adapter, source in zip(adapters[1:], found[1:], strict=True):
        if not source.path.samefile(found[0].path):
            raise IncompatibleBase(
                f"{adapters[0].root} was trained on {found[0].reference}, but {adapter.root} on {source.reference}: "
                "ΔW of different bases cannot be added",
                hint="if the two are the same model, name the one to use: `base=MODEL`",
            )
    return found[0]


def _named_base(adapter: AdapterDir, near: Path) -> Source:
    """Return the base that the adapter's config names, downloaded. Raises `NotACheckpoint` where there is none,
    `FindingsFound` where it names none because it is broken.
    """
    config, hint = adapter.config, f"lora-tool merge {shlex.quote(str(adapter.root))} --base MODEL"
    if config is None or (config.problems and not config.base_model):
        MergeJudge().as_stored((adapter,), None)
        require_whole(adapter)
    around = base_around(adapter)
    if config is not None and not config.base_model and around is not None:
        return source_of(around, str(around))
    if config is None or not config.base_model:
        raise NotACheckpoint(f"{adapter.root}: adapter_config.json names no base model", hint=hint)
    try:
        found = resolve(config.base_model, near=near, revision=config.revision, download=True)
    except NotACheckpoint as error:
        moved = moved_to(config.base_model, near)
        meant = f"{error.hint} {hint}" if error.hint else hint  # a question, "did you mean …?"
        error.hint = hint.replace("MODEL", shlex.quote(str(moved))) if moved else meant
        raise
    decided(f"base: {found.path}, named in {config.path}")
    return found


@contextlib.contextmanager
def begun(inputs: FoundInputs, spread: Spread) -> Iterator[None]:
    """Begin, beside the planning of what is written next, what only the writing needs, where this machine writes it.

    The adapters are hashed by a core that has nothing else to do; with numpy loaded their values are looked at in less
    than half the time.
    """
    if spread.cluster is not None:
        yield
        return
    from lora_tool.execution.local_engine import hashed_meanwhile  # no dry run uses it

    with hashed_meanwhile(file.path for adapter in inputs.adapters for file in adapter.weights.files):
        import numpy as np

        del np
        yield


@contextlib.contextmanager
def planned(
    inputs: FoundInputs,
    options: MergeOptions,
    out: Path,
    *,
    dry_run: bool = False,
    alone: bool = True,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Plan | None]:
    """Yield the plan of the merge that is to be written to `out`. Raises as `plan_merge` does.

    What only PEFT can merge is merged by it, where `options` allow that: into a folder beside `out` that lasts as long
    as the context, after a `note` on the memory it takes; in a `dry_run` the plan is None then. It is refused unless
    one machine is `alone` with the work.
    """
    try:
        if options.allow_in_memory:
            require_lora(inputs.adapters)
        plan = plan_merge(inputs.base, inputs.adapters, replace(options, weights=inputs.weights or None))
    except OnlyInMemory as why:
        if not options.allow_in_memory or options.text_only or options.base_as:
            raise
        if not alone or options.spread.cluster is not None:
            raise UnsupportedAdapter(
                f"{why}; PEFT merges it in the memory of one machine, and that machine writes the whole output",
                hint='merge it on one machine: `engine="local"`, without a part',
            ) from why
        if options.average or any(weight != 1 for weight in inputs.weights):
            raise UnsupportedAdapter(f"{why}, and PEFT merges adapters in memory without weights in the sum") from why
        from lora_tool.plans.merge.in_memory import ask_in_memory, plan_in_memory  # only for such adapters

        asked = ask_in_memory(inputs.base, inputs.adapters, options)
        note(f"PEFT merges the adapter in memory, which takes about {size(asked.needed_bytes)}: {why}")
        reason = str(why)
    else:
        yield _hashing_base(plan, inputs, options)
        return
    from lora_tool.execution.folder import staging_folder  # torch is loaded for this alone
    from lora_tool.execution.in_memory import merge_with_peft, require_memory

    require_memory(asked)
    if dry_run:
        yield None
        return
    with staging_folder(out) as folder:
        merge_with_peft(asked, folder)
        yield _hashing_base(plan_in_memory(asked, open_model(folder), options, why=reason), inputs, options)


def _hashing_base(plan: Plan, inputs: FoundInputs, options: MergeOptions) -> Plan:
    base = tuple(file.path for file in inputs.base.weights.files) if options.hash_base else ()
    return structs.replace(plan, hashed=(*plan.hashed, *base))


def merge(
    adapters: Reference | Sequence[Reference],
    options: MergeArguments,
    caller: Caller = LIBRARY,
    *,
    open_base: Callable[[Path], ModelDir] = opened_model,
) -> Done:
    """Merge `adapters`, one or the sum of several, into their base.

    An adapter is a path, a Hub id or an opened checkpoint; `"A=0.7"` gives it a weight in the sum. The adapters are
    validated first, and the result is read back. `open_base` is that of `merge_inputs`. Raises `FindingsFound`, `CheckpointError`, `PlanError`,
    `ExecutionError` and `VerificationFailed`, and `WrongValue` for an argument.
    """
    spread, (listed, weights) = options.spread, all_weighted(adapters, options.weights)
    spread.require()
    require_part(caller, options, spread)
    _require_named_output(listed, weights, options)
    early = Path(options.out) if options.out else _default_output_of(listed[0])
    if early is not None and (options.base is not None or (early / FILE_NAME).is_file()):
        # a folder that is not ours may be the base that the adapter names: that is found once the adapter is open
        require_output(early, options, *listed, *(() if options.base is None else (options.base,)))
    inputs = merge_inputs(adapters, options.base, weights=options.weights, open_base=open_base)
    for note in (*inputs.notes, *filter(None, map(_better_than, inputs.adapters))):
        caller.note(note)
    out = Path(options.out) if options.out else inputs.default_output
    require_apart(out, options, *inputs.paths)
    ahead = begun(inputs, spread) if caller.part is None and not caller.dry_run else contextlib.nullcontext()
    planning = planned(inputs, options, out, dry_run=caller.dry_run, alone=caller.part is None, note=caller.note)
    with ahead, planning as plan:
        if plan is not None:
            return carry_out(plan, out, options, caller, spread)
    done = Planned(path=out)
    caller.done(done)
    return done


def _require_named_output(adapters: Sequence[Reference], weights: Sequence[float], options: MergeArguments) -> None:
    """Return unless several adapters are merged without a name for the result. Raises `WrongValue`."""
    if len(adapters) > 1 and options.out is None:
        meant = meant_instead(adapters, options.base)
        if meant is not None:
            raise WrongValue("one of the folders is a model, which is given as the base: `base=MODEL`", hint=meant)
        match (*adapters, *weights):
            case [adapter, str(last), 1, 1] if hub_id_of(last) is None and not expanded(last).exists():
                hint = f"lora-tool merge {shlex.quote(str(adapter))} -o {shlex.quote(last)}"
                raise WrongValue(f"{last}: no such adapter; if it is the output, name it with `out=DIR`", hint=hint)
        raise WrongValue("several adapters are merged into a folder that has to be named", hint="`out=OUT`")


def _default_output_of(adapter: Reference) -> Path | None:
    """Return the default output of an adapter that is on this disk, None for one that is named on the Hub."""
    path = adapter.root if not isinstance(adapter, str | os.PathLike) else expanded(adapter)
    return beside(source_of(path), "merged") if path.exists() else None
