"""Planning an adapter's tensors as MLX-LM reads them, every value as it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.plans.algebra.plan_prepare import plan_prepare
from lora_tool.plans.algebra.spool import Spool
from lora_tool.plans.core.ops import row_ops
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.engine.subjects import Server


def plan_to_mlx(adapter: AdapterDir, base: ModelDir | None, *, ignore: Iterable[str] = ()) -> Plan:
    """Return the plan that writes an adapter as MLX-LM reads it, with every value as it is: for one rank and one scaling.

    Raises `UnsupportedAdapter` where modules have several, and as `plan_prepare`.
    """
    root = shlex.quote(str(adapter.root))

    def no_spool() -> Spool:
        raise UnsupportedAdapter(
            f"{adapter.root}: its ΔW cannot be computed without the base, and its factors would get other values",
            hint=f"to write the same ΔW: lora-tool prepare {root} --for mlx --base BASE -o OUT",
        )

    plan = plan_prepare(adapter, Server.MLX, base=base, ignore=ignore, spool=no_spool)
    changed = [
        step for shard in plan.shards for step in shard.steps if not all(part.keeps_values for part in row_ops(step.op))
    ]
    if changed:
        raise UnsupportedAdapter(
            f"{adapter.root}: its modules have several ranks or scalings, but MLX-LM has one of each: "
            f"`{changed[0].out.name}` would have other values, {changed[0].reason}",
            hint=f"to write the same ΔW with one rank and one scaling: lora-tool prepare {root} --for mlx -o OUT",
        )
    return replace(plan, manifest={**plan.manifest, "operation": "convert", "to": "mlx"})
