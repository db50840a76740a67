"""Attaching the guard to a training that is not ours: to every HF Trainer that a process makes.

`transformers.trainer.DEFAULT_CALLBACKS` is the list of callbacks that each Trainer starts with. It is appended to when
transformers is imported, by a hook on the import, so that processes that train nothing pay nothing.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from lora_tool.train.job import FOLDER_VARIABLE

_TRAINER = "transformers.trainer"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds `transformers.trainer` as the others would, and does one thing when it has been run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the import system's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _attach(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def arm() -> None:
    """Attach a guard to every Trainer of this process, from when transformers is imported."""
    if os.environ.get(FOLDER_VARIABLE):
        sys.meta_path.insert(0, _AfterImport())


def _attach(trainer: Any) -> None:
    from lora_tool.train.attached_guard import AttachedGuard, write_what_was_seen  # noqa: PLC0415 - needs transformers

    trainer.DEFAULT_CALLBACKS.append(AttachedGuard)
    atexit.register(write_what_was_seen, Path(os.environ[FOLDER_VARIABLE]))
