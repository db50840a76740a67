"""The inputs of a converted adapter, from its manifest, and planning the same conversion again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from msgspec import Struct

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.sources import Reference, opened_model
from lora_tool.core.errors import NotACheckpoint
from lora_tool.formats.manifest import Manifest, fingerprint
from lora_tool.formats.weights import Weights
from lora_tool.plans.algebra.provenance import WrittenAdapter, recorded_input, recorded_model
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.convert.peft_names import Convertible, convertible
from lora_tool.plans.convert.plan_convert import plan_convert
from lora_tool.plans.core.plan import Plan


class ConvertInputs(Struct, frozen=True, kw_only=True):
    """An adapter in another form, and the adapter that it was before."""

    made: AdapterDir
    stored: Weights
    manifest: Manifest
    form: AdapterForm
    before: Convertible
    base: ModelDir | None
    """The model whose modules or experts gave names; None where the adapter's own names were enough."""

    @property
    def sources(self) -> tuple[AdapterDir]:
        """The inputs that a report names."""
        return (self.before.adapter,)

    def fingerprints(self) -> dict[str, str]:
        """Return the inputs' fingerprints by the names that the manifest gives them."""
        own = {"adapter": fingerprint(self.before.adapter.weights)}
        return own if self.base is None else {**own, "base": fingerprint(self.base.weights)}

    def plan(self) -> Plan:
        """Return the plan of the same conversion, made now, without judging its input again. Raises as `plan_convert`."""
        return plan_convert(
            self.before.adapter,
            to=self.form,
            rebuilt=self.before.rebuilt,
            base=self.base,
            reward="value_head" in self.manifest.raw,
            ignore=("LT",),
        )


def convert_inputs(written: WrittenAdapter, adapters: Sequence[Reference], base: Reference | None) -> ConvertInputs:
    """Return the adapter that the manifest says was converted, or the one of `adapters`.

    Raises `NotACheckpoint` for an input that does not exist any more, and as `convertible`.
    """
    made, manifest = written.made, written.manifest
    if len(adapters) > 1:
        raise NotACheckpoint(
            f"{made.root} was converted from one adapter, but {len(adapters)} were given", hint="give one: `adapters=A`"
        )
    form = AdapterForm(str(manifest.raw["to"]))
    model = _base(manifest, made, form) if base is None else opened_model(base)
    entry, again = manifest.input("adapter"), f"lora-tool verify {shlex.quote(str(made.root))} --adapter ADAPTER"
    before = (
        convertible(adapters[0], model)
        if adapters
        else recorded_input(entry, lambda path: convertible(path, model), made.root, "converted", again)
    )
    return ConvertInputs(
        made=made,
        stored=written.stored,
        manifest=manifest,
        form=form,
        before=before,
        base=model,
    )


def _base(manifest: Manifest, made: AdapterDir, form: AdapterForm) -> ModelDir | None:
    """Return the base that the manifest names; PEFT's names may be planned without one that does not exist any more."""
    named = manifest.input("base")
    if not named:
        return None
    try:
        return recorded_model(named, made.root, "converted")
    except NotACheckpoint:
        if form is not AdapterForm.PEFT:
            raise
        return None
