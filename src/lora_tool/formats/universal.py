"""DeepSpeed's universal checkpoints: float32 masters with a folder for every parameter, next to the model's rank files.

`ds_to_universal.py` makes ``TAG_universal/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt`` of a tag's optimizer files
and copies its model files (DeepSpeed 0.19.8, `checkpoint/ds_to_universal.py`). A master of stages 1 and 2 has its shape
and lies in a dictionary as ``param``; one of stage 3 is flat, and only the model files have its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, Defect, Problem
from lora_tool.formats.files import require_inside
from lora_tool.formats.torch_objects import LazyTensor

if TYPE_CHECKING:
    from lora_tool.formats.torch_zip import TorchFile

FOLDER = "zero"
FILE = "fp32.pt"
_STEP = "step.pt"


class Master(Struct, frozen=True, kw_only=True):
    """One parameter's float32 values, and how many steps its optimizer took, which stage 3 does not write."""

    file: TorchFile
    tensor: LazyTensor
    step: float | None


def is_universal(folder: Path, names: Sequence[str]) -> bool:
    """Return whether the masters of the tag `folder`, which holds `names`, lie in folders of parameters."""
    return (
        FOLDER in names and (folder / FOLDER).is_dir() and not any(name.endswith("_optim_states.pt") for name in names)
    )


def read_masters(folder: Path, problems: list[Problem]) -> dict[str, Master]:
    """Return name → master of every parameter with a folder in the tag; unreadable files go into `problems`."""
    found = {}
    for path in sorted(_folders(folder / FOLDER, problems)):
        try:
            if (path / FILE).is_file():
                require_inside(folder, path / FILE)
                found[path.name] = _master(path)
        except CorruptFile as error:
            problems.append(error.problem)
    return found


def _folders(zero: Path, problems: list[Problem]) -> Iterator[Path]:
    try:
        yield from (path for path in zero.iterdir() if path.is_dir())
    except OSError as error:
        message = f"cannot be listed: {error.strerror}"
        problems.append(Problem(defect=Defect.NOT_A_FILE, path=str(zero), message=message))


def _master(folder: Path) -> Master:
    from lora_tool.formats.torch_zip import read_torch_file  # not to judge an adapter

    file = read_torch_file(folder / FILE)
    tensor = file.value.get("param") if isinstance(file.value, dict) else file.value
    if not isinstance(tensor, LazyTensor) or not tensor.dtype.is_float:
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, "holds no float tensor: not written by ds_to_universal.py")
    return Master(file=file, tensor=tensor, step=_step(folder / _STEP))


def _step(path: Path) -> float | None:
    from lora_tool.formats.torch_zip import read_scalar, read_torch_file

    if not path.is_file():
        return None
    file = read_torch_file(path)
    if isinstance(file.value, LazyTensor):
        return read_scalar(file, file.value)
    return float(file.value) if type(file.value) in (int, float) else None
