"""What each entry point loads, as `sys.modules` of a fresh process tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lora_tool
from tests.bench.models import make_adapter

ROOT = Path(__file__).parents[2]
ADAPTER = str(ROOT / "fixtures" / "causal-llama" / "adapter")
HEAVY = {"rich", "numpy", "torch", "transformers", "peft", "huggingface_hub", "safetensors", "ml_dtypes", "click"}
PROBE = """
import json, sys
{code}
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
CALL = """
from lora_tool.cli.main import main
try:
    main({arguments!r})
except SystemExit as exit:
    assert exit.code == 0, exit.code
"""


def modules(code: str) -> set[str]:
    """Return the names of the modules that a process has loaded after running `code`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(code=code)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


def loaded(code: str) -> set[str]:
    """Return which heavy packages a process has loaded after running `code`."""
    return HEAVY & {name.partition(".")[0] for name in modules(code)}


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import lora_tool", set()),
        ("from lora_tool import open_checkpoint, plan_merge, validate", set()),
        (CALL.format(arguments=["--help"]), {"click"}),
        (CALL.format(arguments=["merge", "--help"]), {"click"}),
        (CALL.format(arguments=["rules"]), {"click"}),
        (CALL.format(arguments=["train", "--help"]), {"click"}),
        (CALL.format(arguments=["guard", "--help"]), {"click"}),
        (CALL.format(arguments=["init", "reward"]), {"click"}),
        (CALL.format(arguments=["validate", ADAPTER, "--headers-only"]), {"click"}),
        (CALL.format(arguments=["merge", ADAPTER, "--dry-run"]), {"click", "numpy", "ml_dtypes"}),
    ],
    ids=[
        "package",
        "public names",
        "help",
        "merge help",
        "rules",
        "train help",
        "guard help",
        "init",
        "headers",
        "dry run",
    ],
)
def test_nothing_is_loaded_before_it_is_needed(code: str, allowed: set[str]) -> None:
    assert loaded(code) <= allowed


def test_a_plain_merge_needs_numpy_and_no_torch_and_nothing_of_other_plans(tmp_path: Path) -> None:
    seen = modules(CALL.format(arguments=["merge", ADAPTER, "-o", str(tmp_path / "out")]))
    assert "numpy" in seen
    assert not seen & {"torch", "transformers", "peft", "safetensors"}
    assert not seen & {"lora_tool.verification.verifying", "lora_tool.plans.convert", "lora_tool.plans.algebra"}
    assert not seen & {"statistics"}
    of_quantised = {
        "formats.quantised.coded",
        "plan.merge.quantised",
        "verification.requantised",
        "verification.dequantised",
    }
    of_others = {
        "plan.merge.model.converted",
        "plan.merge.fused",
        "plan.merge.untying",
        "plan.merge.in_memory",
        "verification.diagnosis",
        "execution.attempts",
    }
    assert not seen & {f"lora_tool.{name}" for name in of_quantised | of_others}


def test_a_plainly_stored_model_is_verified_without_torch(tmp_path: Path) -> None:
    lora_tool.merge(ADAPTER, out=tmp_path / "out", untie=True, precision="peft")
    assert not loaded(CALL.format(arguments=["verify", str(tmp_path / "out")])) & {"torch", "transformers", "peft"}
    (tmp_path / "out" / "lora_tool.json").unlink()  # as another tool would leave it
    inputs = ["--adapter", ADAPTER, "--base", str(Path(ADAPTER).with_name("base"))]
    seen = loaded(CALL.format(arguments=["verify", str(tmp_path / "out"), *inputs]))
    assert not seen & {"torch", "transformers", "peft"}


def test_an_adapter_is_judged_without_what_plans_are_made_of() -> None:
    seen = modules(CALL.format(arguments=["validate", ADAPTER]))
    assert not seen & {"lora_tool.plans.core.plan", "lora_tool.plans.adapter.combine", "lora_tool.models.mapping.model"}
    assert not seen & {"lora_tool.formats.torch_zip", "zipfile", "difflib"}


def test_a_new_adapter_is_made_without_the_options_and_the_plan_of_a_merge(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    seen = modules(CALL.format(arguments=["prepare", ADAPTER, "--for", "vllm", "-o", out]))
    assert not seen & {"lora_tool.plans.merge.options", "lora_tool.plans.merge.plan_merge", "lora_tool.workflows.merge"}
    assert not seen & {"lora_tool.plans.algebra.plan_extract", "lora_tool.plans.merge.quantised", "statistics"}


def test_what_only_moves_values_is_written_and_read_back_without_numpy(tmp_path: Path) -> None:
    """The import takes longer than copying a usual adapter does."""
    make_adapter(tmp_path / "adapter", layers=1, rank=4)
    arguments = ["prepare", str(tmp_path / "adapter"), "--for", "vllm", "-o", str(tmp_path / "out")]
    assert loaded(CALL.format(arguments=arguments)) <= {"click"}
    assert json.loads((tmp_path / "out" / "lora_tool.json").read_text())["verification"]["errors"] == 0


def test_rank_files_are_joined_without_numpy(tmp_path: Path) -> None:
    ranks = str(ROOT / "fixtures" / "zero" / "stage3-full")
    assert loaded(CALL.format(arguments=["consolidate", ranks, "-o", str(tmp_path / "out")])) <= {"click"}


def test_a_plan_is_printed_without_what_computes_and_rank_files_without_other_rules(tmp_path: Path) -> None:
    merging = modules(CALL.format(arguments=["merge", ADAPTER, "-o", str(tmp_path / "out"), "--dry-run"]))
    assert not merging & {"lora_tool.execution.engine", "concurrent.futures"}
    ranks = str(ROOT / "fixtures" / "zero" / "stage3-full")
    joining = modules(CALL.format(arguments=["consolidate", ranks, "-o", str(tmp_path / "out"), "--dry-run"]))
    assert not joining & {"lora_tool.execution.engine", "lora_tool.rules.judging", "concurrent.futures"}


@pytest.mark.parametrize("words", ["merge --dry-run", "push --dry-run", "ls"])
def test_a_configuration_may_name_rules_to_any_command(words: str, tmp_path: Path) -> None:
    """In a fresh process, where the command itself has to load the rules."""
    (tmp_path / "lora-tool.toml").write_text('ignore = ["LT206"]\nselect = ["LT2", "LT3"]\n')
    name, *options = words.split()
    typed = [name, ADAPTER, *(["me/model"] if name == "push" else []), *options]
    modules(f"import os; os.chdir({str(tmp_path)!r})\n" + CALL.format(arguments=typed).replace("== 0", "!= 2"))
