"""The options of a merge that decide what is written, parsed."""

from __future__ import annotations

from msgspec import Struct

from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.merge.storages import Storage
from lora_tool.tensors import DType


class Asked(Struct, frozen=True, kw_only=True):
    """The options of `plan_merge`, which says what each means; None leaves the choice to the inputs."""

    task: Task
    num_labels: int | None
    dtype: DType | None
    precision: Precision
    untie: bool
    text_only: bool
    head_alone: bool
    expert_layout: ExpertLayout | None
    base_as: TrainedAs | None
    store: Storage | None
    allow_loss: bool

    def recorded(self) -> dict[str, object]:
        """Return what the manifest records of the options, in its order; the plan itself says the rest."""
        if_given = {
            "text_only": self.text_only,
            "head_alone": self.head_alone,
            "base_as": self.base_as.value if self.base_as else None,
        }
        return {
            "untie": self.untie,
            "expert_layout": self.expert_layout.value if self.expert_layout else None,
            **{name: value for name, value in if_given.items() if value},
        }
