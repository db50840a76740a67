"""Commands for hints: what to type, with the paths of this very folder."""

from __future__ import annotations

import shlex

from lora_tool.rules.engine.subjects import RunSubject, Subject


def an_earlier_checkpoint(subject: Subject, otherwise: str) -> str:
    """Return how to find a checkpoint of the same run that is whole, then what to do `otherwise`."""
    folder = subject.checkpoint.folder
    if isinstance(subject, RunSubject) or folder.trainer is None or not folder.is_numbered:
        return f"use an earlier checkpoint; {otherwise}"
    command = shlex.join(["lora-tool", "validate", str(folder.root.parent)])
    return f"find the last checkpoint that is whole: {command}; {otherwise}"
