"""DeepSpeed's universal checkpoints, made by its own `ds_to_universal.py` of real ones: the same bits, and their faults."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from safetensors.torch import load_file

from lora_tool.checkpoints import open_sharded
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.verification.validating import validate
from tests.cli.calling import FIXTURES

ZERO = FIXTURES / "zero"
NAMES = ("stage1-reward", "stage1-bf16-optimizer", "stage2-reward", "stage3-reward")
TAG = "global_step2_universal"
PARAMETERS = tuple(
    f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_A.default.weight" for name in ("q", "o", "k")
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of runs of which the universal checkpoint alone is left, with `latest` still naming the other."""
    root = tmp_path_factory.mktemp("universal")
    for name in NAMES:
        run = Path(shutil.copytree(ZERO / name, root / name))
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        folders = {"input_folder": str(run / "global_step2"), "output_folder": str(run / TAG)}
        ds_to_universal.main(Namespace(**folders, **options, inject_missing_state=True))
        shutil.rmtree(run / "global_step2")
    return root


@pytest.fixture(params=["stage2-reward", "stage3-reward"])
def run(request: pytest.FixtureRequest, made: Path, tmp_path: Path) -> Path:
    """A universal checkpoint to break."""
    return Path(shutil.copytree(made / request.param, tmp_path / "run"))


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_has_the_bits_of_the_training(name: str, made: Path, tmp_path: Path) -> None:
    plan = plan_consolidate(made / name, what="state")
    found = load_file(execute(plan, tmp_path / "out") / "model.safetensors")
    truth = load_file(ZERO / name / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert [key for key, tensor in truth.items() if found[key].dtype != tensor.dtype] == []
    assert [key for key, tensor in truth.items() if not torch.equal(found[key], tensor)] == []
    assert of_rank_files(made / name, deep=True) == {}


def test_the_adapter_is_that_of_the_rank_files(made: Path, tmp_path: Path) -> None:
    ours, theirs = (
        load_file(execute(plan_consolidate(root), tmp_path / root.parent.name) / "adapter_model.safetensors")
        for root in (made / "stage3-reward", ZERO / "stage3-reward")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def of_rank_files(run: Path, *, deep: bool = False) -> dict[str, str]:
    """Return what the rules find in the files of the checkpoint itself: an adapter that was saved empty lies beside."""
    found = validate(run, deep=deep, select=["LT4"]).at_least(Severity.WARNING)
    return {finding.code: str(finding) for finding in found}


def _folder(run: Path, number: int = 0) -> Path:
    return run / TAG / "zero" / PARAMETERS[number]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _longer(run: Path) -> None:
    path = _folder(run) / "fp32.pt"
    value = torch.load(path, weights_only=True)
    longer = torch.cat([value["param"] if isinstance(value, dict) else value] * 2)
    torch.save({"param": longer} if isinstance(value, dict) else longer, path)


def _extra(run: Path) -> None:
    shutil.copytree(_folder(run), run / TAG / "zero" / "model.visual.weight")
    longer = torch.arange(7, dtype=torch.float32)
    torch.save(longer, run / TAG / "zero" / "model.visual.weight" / "fp32.pt")


FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a parameter's folder is missing": ("LT401", lambda run: shutil.rmtree(_folder(run))),
    "a master is missing": ("LT401", lambda run: (_folder(run) / "fp32.pt").unlink()),
    "truncated": ("LT402", lambda run: _cut(_folder(run) / "fp32.pt")),
    "not written by DeepSpeed": ("LT402", lambda run: torch.save(["text"], _folder(run) / "fp32.pt")),
    "copied": ("LT405", lambda run: shutil.copy(_folder(run) / "fp32.pt", _folder(run, 2))),
    "of another module": ("LT407", _extra),
    "of another shape": ("LT408", _longer),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_found_and_refused(kind: str, run: Path, tmp_path: Path) -> None:
    code, injure = FAULTS[kind]
    injure(run)
    assert of_rank_files(run).keys() == {code}
    with pytest.raises(FindingsFound, match=code):
        plan_consolidate(run)
    assert not (tmp_path / "out").exists()


def test_a_parameter_of_another_step(made: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(made / "stage2-reward", tmp_path / "run"))
    torch.save(torch.tensor(9.0), _folder(run) / "step.pt")
    assert "was saved after 9 optimizer steps, but the other parameters after 2" in of_rank_files(run)["LT406"]


def test_swapped_parameters_of_one_shape(made: Path, tmp_path: Path) -> None:
    """Nothing in their files tells; under stage 2 the weights saved beside them do, under stage 3 nothing can."""
    for name, expected in (("stage2-reward", {"LT414"}), ("stage3-reward", set())):
        swapped = Path(shutil.copytree(made / name, tmp_path / name))
        for left in swapped.glob("adapter_model.safetensors"):
            left.unlink()
        one, other = _folder(swapped), _folder(swapped, 2)
        one.rename(tmp_path / "moved")
        other.rename(one)
        (tmp_path / "moved").rename(other)
        assert of_rank_files(swapped, deep=True).keys() == expected, name


def test_beside_the_rank_files_that_it_was_made_of(made: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(ZERO / "stage2-reward", tmp_path / "run"))
    shutil.copytree(made / "stage2-reward" / TAG, both / TAG)
    opened = open_sharded(both)
    assert [*opened.rank_files] == ["global_step2", TAG]
    assert "2 ranks" in plan_consolidate(opened).notes[0]
    assert "universal, 57 parameters" in plan_consolidate(opened, tag=TAG).notes[0]
