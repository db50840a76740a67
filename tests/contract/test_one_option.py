"""An option of a merge is one field on one pass: a line there makes it an argument, two command-line options, a key of
the manifest, and an option that `verify` plans with again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASS = "src/lora_tool/plans/merge/passes/ends.py"
TOY = """\
    toy: int = option(0, "A toy.", parse=int, recorded=Recorded.IF_GIVEN, inferred=lambda merged, base: 5)
"""
SEEN = """
import inspect, json, sys
from pathlib import Path
import click
from lora_tool import execute, merge, plan_merge
from lora_tool.cli import ci, merge as merging
from lora_tool.plans.merge.passes import ends
from lora_tool.plans.merge import plan_merge as planning
from lora_tool.plans.merge.provenance import find_inputs

def text(command, name):
    return command.get_help(click.Context(command, info_name=name))

seen = []
def with_toy(draft, options):
    seen.append(options.toy)
    return draft
planning.PASSES = (*planning.PASSES, with_toy)

base, adapter, out = sys.argv[1:]
written = execute(plan_merge(base, adapter, toy=3), out)
record = json.loads((written / "lora_tool.json").read_text())
find_inputs(written).plan()
(written / "lora_tool.json").unlink()  # as another tool would leave it
find_inputs(written, base=base, adapters=[adapter]).plan()
print(json.dumps({
    "merge": "--toy" in text(merging.command, "merge"),
    "ci": "--toy" in text(ci.command, "ci"),
    "library": "toy" in inspect.signature(merge).parameters and "`toy`: A toy." in merge.__doc__,
    "manifest": record["toy"] == 3,
    "verify": seen == [3, 3, 5],
}))
"""


def test_an_option_is_one_field_on_one_pass(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    written = (tmp_path / PASS).read_text()
    declared = written.replace("    untie: bool", TOY + "    untie: bool", 1)
    assert declared != written
    (tmp_path / PASS).write_text(declared)
    model = ROOT / "fixtures" / "causal-llama"
    done = subprocess.run(
        [sys.executable, "-c", SEEN, str(model / "base"), str(model / "adapter"), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == dict.fromkeys(("merge", "ci", "library", "manifest", "verify"), True)
