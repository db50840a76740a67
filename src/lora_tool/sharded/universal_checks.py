"""What can be wrong with the folders of a universal checkpoint's parameters.

Two parameters of one shape whose folders were swapped have nothing in them that tells: a file says neither its
parameter's name nor its rank. Under stages 1 and 2 the weights that were saved beside them do (LT414).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from lora_tool.formats.stored import read_part
from lora_tool.formats.universal import FILE, FOLDER, Master
from lora_tool.formats.zero import ZeroTag
from lora_tool.formats.zero_files import ModelStates
from lora_tool.report import Finding
from lora_tool.sharded.faults import COPY, another_save, fault, odd_ones_out, repeated_files
from lora_tool.tensors import StoredTensor

_BEGINNING = 4096


def master_faults(tag: ZeroTag, first: ModelStates, masters: Mapping[str, Master]) -> Iterator[Finding]:
    """Yield what is wrong with the folders of parameters, reading few values: LT401, LT405, LT406, LT407, LT408."""
    zero = tag.folder / FOLDER
    shapes = first.trained_shapes
    broken = {problem.path for problem in tag.problems}
    for name, shape in shapes.items():
        master = masters.get(name)
        if master is None:
            if not any(path.startswith(f"{zero / name}/") for path in broken):
                yield fault("LT401", zero / name / FILE, "is missing, but the parameter was trained", hint=COPY)
        elif master.tensor.numel != math.prod(shape):
            message = f"has {master.tensor.numel:,} elements, but {list(shape)} needs {math.prod(shape):,}"
            hint = f"it is another parameter's, or from another run: copy it again, or {another_save(tag.folder)}"
            yield fault("LT408", master.file.path, message, subject=name, hint=hint)
    known = {*first.module, *shapes, *first.shared, *(first.frozen_shapes or {})}
    for name in masters.keys() - known:
        hint = "it is from another run: remove its folder, and copy this run's again"
        yield fault("LT407", zero / name, "belongs to no parameter of the module", hint=hint)
    steps = {master.file.path.parent: master.step for master in masters.values() if master.step is not None}
    for path, step, usual in odd_ones_out(steps):
        message = f"was saved after {step:g} optimizer steps, but the other parameters after {usual:g}"
        yield fault("LT406", path, message, hint=f"the checkpoint mixes two saves; {another_save(tag.folder)}")
    yield from repeated_files(
        (master.file.path, (master.tensor.shape, master.file.record(master.tensor).crc))
        for master in masters.values()
        if _varies(master.file.stored(master.tensor, FILE))
    )


def _varies(tensor: StoredTensor) -> bool:
    """Return whether the first elements differ from each other: parameters may well hold the same constant."""
    data, size = read_part(tensor, 0, min(tensor.nbytes, _BEGINNING)), tensor.dtype.bits // 8
    return data[size:] != data[:-size]
