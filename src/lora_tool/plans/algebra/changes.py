"""An adapter's change of each module as a product of low rank: its factors, or computed together with its base."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from msgspec import Struct, field

from lora_tool.adapters.view import AdapterView, LoraLayer
from lora_tool.checkpoints import ModelDir
from lora_tool.core.display import named
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.core.tensors import FileStamp, StoredTensor, TensorAction
from lora_tool.formats.adapter_config import INITS_RECOMPUTED
from lora_tool.models import architecture_of
from lora_tool.models.ends import is_end, is_tied
from lora_tool.plans.algebra.from_base import (
    ChangedRows,
    base_weight,
    factors_of_rows,
    nearest_to_dora,
    rows_that_differ,
    without_init,
)
from lora_tool.plans.algebra.ranks import ModuleRank
from lora_tool.plans.algebra.spool import OpenSpool, Spool
from lora_tool.plans.algebra.terms import Factors, factors_of_sum
from lora_tool.plans.core.steps import InputRecord
from lora_tool.rules.serving.forms import ServingForm
from lora_tool.rules.serving.obstacles import refused_ends


class Changes(Struct, frozen=True, kw_only=True):
    """The products, and which of the adapter's tensors are in them besides the factors of LoRA."""

    sums: tuple[Factors, ...]
    ranks: tuple[ModuleRank, ...] = ()
    """Figures on the modules with DoRA, whose change is approximated by a product."""
    records: tuple[InputRecord, ...] = ()
    """Tensors that are in a product, or left out because the server's base has the same."""
    spooled: tuple[FileStamp, ...] = ()
    """The stamps of the files with computed factors."""
    from_base: bool = False
    """Whether the base's values are in it."""


class _Computing(Struct):
    """The base whose weights are read, and the spool for what comes of them: opened when it is needed."""

    base: ModelDir | None
    open_spool: OpenSpool | None
    opened: list[Spool] = field(default_factory=list)

    def spool(self) -> Spool:
        if not self.opened:
            if self.open_spool is None:
                raise UnsupportedAdapter(
                    "factors computed from the base are kept in a file beside the output, but this plan has no output folder",
                    hint="`prepare(adapter, server, out=…)` gives it one",
                )
            self.opened.append(self.open_spool())
        return self.opened[0]

    def model(self) -> ModelDir:
        if self.base is None:
            raise AssertionError("what needs the base was refused without one")
        return self.base


def changes_of(
    view: AdapterView,
    form: ServingForm,
    base: ModelDir | None,
    open_spool: OpenSpool | None,
    *,
    max_rank: int | None = None,
    as_dora: bool = False,
) -> Changes:
    """Return the adapter's change of each module, for a server of the `form` that can express all of it.

    With `as_dora` DoRA stays DoRA, and its s·B·A is returned. Reads whole weights of `base` where the
    adapter's change needs them, one after the other. Raises `UnsupportedAdapter` and `IncompatibleBase` where that gives
    no product of low rank.
    """
    _require_own_ends(view, form, base)
    computing = _Computing(base=base, open_spool=open_spool)
    sums = list(factors_of_sum((view,), (1.0,)))
    ranks: list[ModuleRank] = []
    records: list[InputRecord] = []
    layers = {layer.module: layer for layer in view.layers}
    if view.config.init_lora_weights in INITS_RECOMPUTED:
        sums = [_without_init(each, layers[each.module], view, computing) for each in sums]
    for at, each in enumerate(sums):
        layer = layers[each.module]
        if layer.magnitude is not None and not as_dora:
            weight = base_weight(computing.model(), layer.target)
            rank = each.rank if max_rank is None else max_rank
            sums[at], figures = nearest_to_dora(each, layer.magnitude, weight, computing.spool(), rank=rank)
            ranks.append(figures)
            records += (_consumed(tensor, each.module) for tensor in layer.parts.values())
    rows = () if form.whole or base is None else tuple(rows_that_differ(view, base))
    changed = [each for each in rows if each.places]
    if base is not None and changed and is_tied(base):
        _require_both_ends(changed[0], view, form, base)
    if base is not None and (refused := refused_ends([each.module for each in changed], form, base)):
        raise UnsupportedAdapter(
            f"the values of {named(refused)} differ from {base.root}'s, and {form.name} takes no LoRA on that of such a model",
            hint=f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}",
        )
    sums += [factors_of_rows(each, computing.spool()) for each in changed]
    return Changes(
        sums=tuple(sums),
        ranks=tuple(ranks),
        records=(*records, *map(_record, rows), *([] if form.whole else _frozen(view))),
        spooled=tuple(stamp for spool in computing.opened for stamp in spool.stamps()),
        from_base=bool(computing.opened),
    )


def _require_both_ends(rows: ChangedRows, view: AdapterView, form: ServingForm, base: ModelDir) -> None:
    """Raise `UnsupportedAdapter` where the rows of tied ends change in one of them for PEFT, in both for the server, or the reverse.

    PEFT ties trained tokens to the output layer, but a module that was saved whole only under `ensure_weight_tying`.
    """
    both = rows.module in view.tokens or view.config.ensure_weight_tying
    if form.mlx and both:
        return
    change = "both" if form.mlx else "only one of the two"
    found = "" if both else ", and PEFT trained one of them apart"
    raise UnsupportedAdapter(
        f"{base.root} uses `{rows.module}` as its output layer, too{found}, and {form.name} would change {change}",
        hint=f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}",
    )


def _require_own_ends(view: AdapterView, form: ServingForm, base: ModelDir | None) -> None:
    ends = [layer.target for layer in view.layers if is_end(layer.target)]
    if form.one_end and ends and base is not None and is_tied(base):
        raise UnsupportedAdapter(
            f"{base.root} uses its embedding as its output layer, too, and {form.name} has one matrix for both: it cannot have "
            f"LoRA on `{ends[0]}` alone",
            hint=f"merge it into a model with two matrices: lora-tool merge --untie {shlex.quote(str(view.adapter.root))}",
        )


def _without_init(factors: Factors, layer: LoraLayer, view: AdapterView, computing: _Computing) -> Factors:
    init = view.config.init_lora_weights
    if factors.embedding:
        raise UnsupportedAdapter(f"{view.config.path}: `init_lora_weights` {init} on `{factors.module}`, an embedding")
    base = computing.model()
    weight = base_weight(base, layer.target)
    arch = architecture_of(base.whole_config.model_type or "")
    transposed = arch is not None and layer.target.rpartition(".")[2] in arch.conv1d
    return without_init(factors, weight, init, computing.spool(), transposed=transposed)


def _record(rows: ChangedRows) -> InputRecord:
    """Return what becomes of the tensor that holds the rows."""
    tensor = rows.tensor
    if not rows.places:
        reason = "the base has the same values"
        return InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)
    return _consumed(tensor, rows.module)


def _consumed(tensor: StoredTensor, module: str) -> InputRecord:
    reason = f"in the LoRA on {module}"
    return InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.CONSUMED, reason=reason)


def _frozen(view: AdapterView) -> Iterator[InputRecord]:
    """Yield the frozen weights under LoRA and trained tokens, which a server has from its base."""
    saved = {tensor.name for tensor in view.saved.values()}
    for item in view.parts(Part.BASE_LAYER, Part.TOKENS_BASE):
        if item.tensor.name not in saved:
            reason = "the frozen weight under LoRA, which the server's base has"
            yield InputRecord(path=item.tensor.path, name=item.tensor.name, action=TensorAction.DROPPED, reason=reason)
