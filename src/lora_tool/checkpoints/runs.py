"""The output folders of training runs, full of `checkpoint-N`."""

from __future__ import annotations

from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import Claim, Kind, RunDir


def _recognise(folder: Folder) -> Claim | None:
    return Claim.INSIDE if folder.checkpoints else None


def _open(folder: Folder) -> RunDir:
    return RunDir(kind=RUN, folder=folder, problems=folder.problems)


RUN = Kind(name="run folder", sign="checkpoint-N", command="ls", recognise=_recognise, open=_open)
