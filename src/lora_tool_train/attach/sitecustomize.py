"""Python runs this at its start when `lora-tool guard` put the folder first on PYTHONPATH: it attaches the guard.

`transformers.trainer.DEFAULT_CALLBACKS` is the list of callbacks that each Trainer starts with. It is appended to when
transformers is imported, by a hook on the import, so that processes that train nothing pay nothing; an environment's
own sitecustomize is run first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class _Finder(PathFinder):
    """Finds modules as Python does, and attaches the guard to `transformers.trainer` when that has been run."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname == "transformers.trainer" else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _attach(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(trainer: Any) -> None:
    try:
        from lora_tool_train.guard import attach
    except ImportError as error:
        sys.stderr.write(
            f"lora-tool guard: {sys.executable} cannot import lora-tool, so its processes are not guarded: {error}\n"
        )
    else:
        attach(trainer)


def _run_next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = Path(__file__).resolve().parent
    others = [place for place in sys.path if Path(place or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what ends the process, unless the waiting command reports it: a stop, or a launcher's word for one."""
    try:
        from lora_tool_train.job import FOLDER_VARIABLE, TrainingStatus, read_outcomes
        from lora_tool_train.logbook import this_process
    except ImportError:
        reported = False
    else:
        if kind.__name__ in ("CalledProcessError", "ChildFailedError"):
            outcomes = read_outcomes(Path(os.environ[FOLDER_VARIABLE]))
            reported = any(outcome.status is not TrainingStatus.DONE for outcome in outcomes)
        else:
            reported = this_process().ended_by(error)
    if not reported:
        _print_error(kind, error, trace)


_run_next()
_print_error = sys.excepthook
sys.excepthook = _quietly
sys.meta_path.insert(0, _Finder)
