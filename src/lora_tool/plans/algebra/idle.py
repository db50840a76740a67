"""LoRA of zeros on modules that an adapter leaves alone, for a server that reads LoRA on some modules only together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from lora_tool.adapters.experts import experts_of
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import DType
from lora_tool.plans.algebra.expert_ranks import missing_experts
from lora_tool.plans.algebra.factor_steps import step_of
from lora_tool.plans.algebra.serving_steps import zero_rows
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, copied_as
from lora_tool.plans.core.steps import Step
from lora_tool.rules.serving.together import ReadTogether, lacking, weight_beside


class Idle(Struct, frozen=True, kw_only=True):
    """A module whose weight, [out, in], stays as it is."""

    module: str
    out: int
    width: int
    beside: Factors
    """LoRA on the module that is read only together with this one."""

    def steps(self, dtype: DType, rank: int) -> Iterator[Step]:
        """Yield the steps that write a lora_A like the other module's, and a lora_B of zeros, as before training."""
        a, b = self.beside.a_parts[0], self.beside.b_parts[0]
        kept = min(rank, a.shape[0]) if a.shape[1] == self.width else 0
        copied = (copied_as(dtype, rows_of(a, 0, kept)),) if kept else ()
        above = Assemble(parts=(*copied, *zero_rows(a, rank - kept, self.width)))
        across = Assemble(parts=tuple(zero_rows(b, self.out, rank)))
        yield step_of(f"{PREFIX}{self.module}.lora_A.weight", dtype, (rank, self.width), above)
        yield step_of(f"{PREFIX}{self.module}.lora_B.weight", dtype, (self.out, rank), across)


def idle_modules(sums: Sequence[Factors], base: ModelDir, reads: ReadTogether) -> Iterator[Idle]:
    """Yield the modules of the base without which LoRA on others is not read."""
    if not reads.is_of(base.whole_config.model_type):
        return
    known = [name.removesuffix(".weight") for name in as_matrices(base).tensors]
    for module, beside in beside_which(sums, known, reads).items():
        weight = weight_beside(base, module, beside.width)
        if weight is not None:
            yield Idle(module=module, out=weight.shape[0], width=weight.shape[1], beside=beside)


def beside_which(sums: Sequence[Factors], known: Iterable[str], reads: ReadTogether) -> Mapping[str, Factors]:
    """Return the modules without LoRA, among those that are `known`, that others are read only together with, and one of
    those, with as many columns if there is one.
    """
    by_module = {each.module: each for each in sums}
    if not reads.stacks:
        return {module: by_module[held] for module, held in lacking(by_module, reads).items()}
    layers = {experts: each for each in sums if (experts := experts_of(each.module))}
    in_layers = {module: layers[experts] for module in known if (experts := experts_of(module)) in layers}
    missing = missing_experts(by_module, in_layers)
    return {module: by_module[like] if like else in_layers[module] for module, like in missing}
