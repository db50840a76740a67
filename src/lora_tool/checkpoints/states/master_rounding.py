"""Float32 masters against the weights that were saved together with them, which must be these, rounded.

Stages 1 and 2 save both in one checkpoint; under stage 3 the HF Trainer writes gathered weights next to it. A sample of
every rank's part is compared: it proves order, step and run of the ranks, which names and counters cannot.

ZenFlow updates the weights whose gradients are the largest without their masters, which are behind then
(`runtime/zenflow/zenflow_stage_1_and_2.py`, `ops/adam/zenflow_torch_adam.py` in DeepSpeed 0.19.8).
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.checkpoints.states.file_values import NotRounded, ValueFact
from lora_tool.core import keys
from lora_tool.core.errors import CheckpointError, UnsupportedCheckpoint
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import DType, StoredTensor, TensorTable
from lora_tool.formats.stored import read_part
from lora_tool.formats.zero import ZeroTag
from lora_tool.formats.zero_files import ZeroStage

_SAMPLE = 1 << 14
"""Elements that are compared at the beginning of each rank's part of a tensor."""


class MasterRounding(Struct, frozen=True, kw_only=True):
    """Compares masters with their copies, by the masters' names: a `ValueReader`."""

    masters: TensorTable
    copies: TensorTable
    """Of some of them, of the same shape, each in one piece."""
    same_step: bool
    """Whether masters and copies are known to be of one save."""
    by_zenflow: bool = False
    """Whether masters may be behind their copies."""

    name: str = "the comparison of the optimizer's masters with the weights"
    nbytes: int = 0

    def run(self, _: Progress) -> list[ValueFact]:
        """Return the trained tensors whose masters do not round to the weights saved with them."""
        found: list[ValueFact] = []
        for name, copy in self.copies.items():
            master, at = self.masters[name], 0
            for span in master.spans:
                count, size = min(_SAMPLE, span.nbytes // 4), copy.dtype.bits // 8
                held = read_part(copy, at * size, count * size)
                if not rounds_to(read_part(master, at * 4, count * 4), held, copy.dtype):
                    fact = NotRounded(
                        path=span.path,
                        name=name,
                        copy=copy.path,
                        dtype=copy.dtype,
                        same_step=self.same_step,
                        by_zenflow=self.by_zenflow,
                    )
                    found.append(fact)
                    break
                at += span.nbytes // 4
        return found


def rounds_to(masters: bytes, held: bytes, dtype: DType) -> bool:
    """Return whether `held`, values of `dtype`, are the float32 values `masters`, rounded to nearest even."""
    import numpy as np  # only where masters have copies

    master = np.frombuffer(masters, "<f4")
    whole, bits = master.view(np.uint32), np.frombuffer(held, f"<u{dtype.bits // 8}")
    with np.errstate(all="ignore"):
        bfloat16 = ((whole + (0x7FFF + ((whole >> 16) & 1))) >> 16).astype(np.uint16)
        float16 = master.astype(np.float16)
    if dtype is DType.F32:
        # also 16-bit weights that were widened when they were saved
        widened = (bfloat16.astype(np.uint32) << 16, float16.astype(np.float32).view(np.uint32))
        return any(np.array_equal(each, bits) for each in (whole, *widened))
    if dtype is DType.BF16:
        return np.array_equal(bfloat16, bits)
    if dtype is DType.F16:
        return np.array_equal(float16.view(np.uint16), bits)
    return True  # no type that weights are trained in: nothing is proven


def master_rounding(root: Path, tag: ZeroTag, trained: TensorTable) -> MasterRounding:
    """Return the check of the float32 masters among `trained` that have copies in the checkpoint or next to it."""
    masters = {name: tensor for name, tensor in trained.items() if tensor.dtype is DType.F32}
    copies: TensorTable = {}
    same_step = True
    if tag.stage in (1, 2) and tag.first is not None:
        held = tag.first.module
        copies = {
            name: tag.first.file.stored(held[name], name)
            for name in masters.keys() & held.keys()
            if held[name].shape == masters[name].shape
        }
    elif tag.stage == ZeroStage.WEIGHTS:
        copies, same_step = _gathered_copies(root, tag, masters)
    return MasterRounding(masters=masters, copies=copies, same_step=same_step, by_zenflow=_is_of_zenflow(tag))


def _is_of_zenflow(tag: ZeroTag) -> bool:
    """Return whether DeepSpeed trained with ZenFlow, by the config in the optimizer's files."""
    configs = (json.loads(states.config or "{}") for states in tag.optim.values())
    sections = (config.get("zero_optimization") for config in configs)
    return any(isinstance(section, dict) and section.get("zenflow") for section in sections)


def _gathered_copies(root: Path, tag: ZeroTag, masters: TensorTable) -> tuple[dict[str, StoredTensor], bool]:
    """Return the masters' names → their copies in the adapter or model in `root`; whether it is of the same step."""
    try:
        exported = open_checkpoint(root)
    except (CheckpointError, UnsupportedCheckpoint):
        return {}, False
    if not isinstance(exported, AdapterDir | ModelDir) or exported.weights.is_broken:
        return {}, False
    held = {keys.parse(name).canonical: tensor for name, tensor in exported.tensors.items()}
    found = {name: held.get(keys.parse(name).canonical) for name in masters}
    trainer, first = exported.folder.trainer, tag.first
    same_step = trainer is not None and first is not None and trainer.global_step == first.global_steps
    return {name: copy for name, copy in found.items() if copy and copy.shape == masters[name].shape}, same_step
