"""Python runs this at its start when `lora-tool guard` put the folder first on PYTHONPATH: it attaches the guard.

`transformers.trainer.DEFAULT_CALLBACKS` is the list of callbacks that each Trainer starts with. It is appended to when
transformers is imported, by a hook on the import, so that processes that train nothing pay nothing; an environment's
own sitecustomize is run first.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class _Finder(PathFinder):
    """Finds the modules of `_WHEN_RUN` as Python would, and does what belongs to each when it has been run."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = _WHEN_RUN.get(fullname)
        spec = super().find_spec(fullname, path, target) if then is not None else None
        if then is not None and spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _attach(trainer: Any) -> None:
    try:
        from lora_tool.train.attached_guard import AttachedGuard, write_what_was_seen
    except ImportError as error:
        sys.stderr.write(
            f"lora-tool guard: {sys.executable} cannot import lora-tool, so its processes are not guarded: {error}\n"
        )
        return
    trainer.DEFAULT_CALLBACKS.append(AttachedGuard)
    atexit.register(write_what_was_seen)


def _hush_own_warnings(_: ModuleType) -> None:
    """Leave out what transformers tells TRL and PEFT, and no user can mend."""
    import warnings  # where something is trained

    warnings.filterwarnings("ignore", r".*gradient_checkpointing\w*` is deprecated", FutureWarning)


def _hush_launcher(launch: Any) -> None:
    """Leave out accelerate's list of the values that nobody gave, as `lora-tool train` does."""
    launch.logger.addFilter(lambda record: "values were not passed" not in record.getMessage())


_WHEN_RUN: dict[str, Callable[[Any], None]] = {
    "transformers.trainer": _attach,
    "transformers.modeling_utils": _hush_own_warnings,
    "transformers.training_args": _hush_own_warnings,
    "accelerate.commands.launch": _hush_launcher,
}


def _run_next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    here = Path(__file__).resolve().parent
    others = [place for place in sys.path if Path(place or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def _quietly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what ends the process, but not a stop of ours, nor the launcher's word for it: the parent says why, once."""
    stopped = kind.__name__ == "TrainingStopped"
    if kind.__name__ in ("CalledProcessError", "ChildFailedError"):
        outcomes = Path(os.environ["LORA_TOOL_JOB"]).glob("outcome-*.json")
        stopped = any('"status": "stopped"' in path.read_text(encoding="utf-8") for path in outcomes)
    if not stopped:
        _print_error(kind, error, trace)


_run_next()
_print_error = sys.excepthook
sys.excepthook = _quietly
sys.meta_path.insert(0, _Finder)
