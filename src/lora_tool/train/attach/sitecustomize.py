"""Python runs this at its start when `lora-tool guard` put the folder first on PYTHONPATH: it arms the guard.

It does nothing in processes that never import transformers, and lets an environment's own sitecustomize run.
"""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)


def _run_next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    others = [place for place in sys.path if str(Path(place or ".").resolve()) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_run_next()
try:
    from lora_tool.train.attaching import arm
except ImportError as error:
    sys.stderr.write(f"lora-tool guard: {sys.executable} has no lora-tool, so nothing is guarded there: {error}\n")
else:
    arm()
