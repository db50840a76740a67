"""The door of operations: a new one touches few files, forgetting one of them is mypy's error, and then it works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPERATION = '''

class Negate(_RowOperation, frozen=True, kw_only=True):
    """-W."""

    source: StoredTensor

    def __str__(self) -> str:
        return "negated"

    def cut(self, start: int, rows: int) -> tuple[RowOp, ...]:
        return (Negate(source=rows_of(self.source, start, rows)),)

    def describe(self, input_names: InputNames) -> dict[str, Any]:
        return _described(self, input_names)

    def reference(self, read: ReadValues) -> Values:
        return -read(self.source)


LowRank = '''
ARMS = {
    "execution/backends/numpy_backend.py": "return -self._stored(op.source, first, last), None, False",
    "execution/backends/torch_backend.py": "return -weight",
    "verification/recompute.py": "return Recomputed(base, -2 * base, _no_products)",
}
"""File → what its match does with the operation."""
USE = """
import sys
from pathlib import Path
import numpy as np
from lora_tool.core.tensors import TensorAction
from lora_tool.execution.engine import execute
from lora_tool.formats.weights import read_single
from lora_tool.plans.core.ops import Assemble, Copy, Negate, Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import lay_out
from lora_tool.plans.core.steps import Step
from lora_tool.core.tensors import FileStamp, TensorSpec
from lora_tool.verification.checking import check_written
from tests.property.interpret import load

path, out = Path(sys.argv[1]), Path(sys.argv[2])
(source,) = read_single(path).tensors.values()
op = Assemble(parts=(*Negate(source=source).cut(0, 3), Copy(source=source)))
spec = TensorSpec(name="w", dtype=source.dtype, shape=(3 + source.shape[0], source.shape[1]))
step = Step(out=spec, op=op, action=TensorAction.MERGED, reason=str(op))
plan = Plan(
    shards=lay_out([step], homes={}, max_shard_bytes=None),
    side_files=(),
    leftovers=(),
    inputs=(FileStamp.of(path),),
    precision=Precision(sys.argv[3]),
    manifest={},
)
assert "negated; copied" in str(plan)
assert [part["op"] for part in plan.to_json()["shards"][0]["steps"][0]["parts"]] == ["Negate", "Copy"]
execute(plan, out)
(written,) = read_single(out / "model.safetensors").tensors.values()
assert np.array_equal(load(written), op.reference(load)), "what is written is what the operation means"
evidence = check_written(plan, out).evidence["w"]
print(evidence.verdict.value, evidence.compared)
"""


def forgotten(folder: Path) -> dict[str, int]:
    """Return the files in which mypy says that a match forgets an operation, with how often."""
    matching = [path for path in (folder / "src" / "lora_tool").rglob("*.py") if "assert_never(" in path.read_text()]
    # what the matches are over, and nothing else that these files import: it takes three times as long
    (folder / "mypy.ini").write_text(
        "[mypy]\nmypy_path = src\nexplicit_package_bases = true\npython_version = 3.11\nfollow_imports = skip\n"
        "[mypy-lora_tool.plans.core.*,lora_tool.core.*]\nfollow_imports = normal\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, matching), "src/lora_tool/plans/core/ops.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "error: " in done.stdout or done.returncode == 0, done.stderr
    places = re.findall(r'^src/lora_tool/(\S+):\d+: error: .*assert_never.*"Negate"', done.stdout, re.MULTILINE)
    return {place: places.count(place) for place in places}


def test_an_operation_is_added_in_four_files_and_mypy_names_those_that_forget_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    rooms = tmp_path / "src" / "lora_tool"
    ops = rooms / "plans/core/ops.py"
    text = ops.read_text()
    assert text.count("\n\nLowRank = ") == text.count("\nOnSource = Copy") == 1
    ops.write_text(text.replace("\n\nLowRank = ", OPERATION).replace("\nOnSource = Copy", "\nOnSource = Negate | Copy"))
    assert forgotten(tmp_path) == dict.fromkeys(ARMS, 1)

    for name, arm in ARMS.items():
        code, count = re.subn(
            r"\n( +)(case Copy\(\) \| Cast\(\) \| Dequantise\(\):)",
            rf"\n\1case Negate():\n\1    {arm}\n\1\2",
            (rooms / name).read_text(),
        )
        assert count == 1
        imported = code.replace(
            "from lora_tool.plans.core.ops",
            "from lora_tool.plans.core.ops import Negate\nfrom lora_tool.plans.core.ops",
            1,
        )
        (rooms / name).write_text(imported)
    assert forgotten(tmp_path) == {}

    import numpy as np

    from tests.property.strategies import write_weights

    write_weights(tmp_path / "in.safetensors", {"w": np.arange(60, dtype=np.float32).reshape(12, 5)})
    for precision in ("float32", "peft"):
        done = subprocess.run(
            [sys.executable, "-c", USE, tmp_path / "in.safetensors", tmp_path / precision, precision],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.split() == ["right", "75"], done.stderr
