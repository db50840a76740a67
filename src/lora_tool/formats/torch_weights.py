"""Weights in a torch zip file (`pytorch_model.bin`, `adapter_model.bin`): a flat dict of tensors, as a tensor table.

Nothing of the file is run: `torch_zip` reads its pickle with an interpreter that knows tensors and nothing else.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from lora_tool.core.errors import CorruptFile, Defect, Problem
from lora_tool.core.tensors import FileStamp, StoredTensor, is_tensor_name
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.files import open_regular
from lora_tool.formats.safetensors import WeightsFile
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import TorchFile, read_torch_file


def scan_torch_weights(path: Path) -> WeightsFile:
    """Return the tensors of `path` with all that is wrong; a file that cannot be read safely has none.

    A good file has one problem that is not fatal: that it is a pickle, which other tools run. Tensors that share a
    storage, as tied weights do, share their spans. Raises `CorruptFile` only where `path` is not a readable, regular
    file.
    """
    with open_regular(path):
        stamp = FileStamp.of(path)
    try:
        file = read_torch_file(path)
        if not isinstance(file.value, dict):
            message = f"holds a {type(file.value).__name__}, expected a dict of tensors"
            raise CorruptFile.of(path, Defect.BAD_HEADER, message)
    except CorruptFile as error:
        return WeightsFile(stamp=stamp, problems=(error.problem,))
    message = "is a pickle, which can run code when other tools load it; lora-tool read it without running it"
    problems = [Problem(defect=Defect.PICKLE, path=str(path), message=message, fatal=False)]
    tensors: dict[str, StoredTensor] = {}
    for name, item in file.value.items():
        try:
            tensors[name] = _stored(file, name, item)
        except CorruptFile as error:
            problems.append(error.problem)
    return WeightsFile(stamp=stamp, tensors=tensors, problems=tuple(problems))


def _stored(file: TorchFile, name: object, item: object) -> StoredTensor:
    if not isinstance(name, str) or not is_tensor_name(name):
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, f"has the key {name!r:.80}, expected a tensor's name")
    if not isinstance(item, LazyTensor):
        if isinstance(item, DistributedTensor):
            way = f"lora-tool consolidate {shlex.quote(str(file.path.parent))}"
            message = f"is one rank's part of a tensor {list(item.shape)}: put the rank files together first: {way}"
            raise CorruptFile.of(file.path, Defect.BAD_HEADER, message, name)
        kind = "a nested dict" if isinstance(item, dict) else f"a {type(item).__name__}"
        message = f"is {kind}, expected a tensor: this is not the state dict of a model or an adapter"
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, message, name)
    return file.stored(item, name)
