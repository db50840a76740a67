"""What trainers save, by their own functions, against what the training gathered: every tensor, bit for bit.

What is found where files are broken, swapped or of another run is in test_faults_of_kinds.py, kind by kind.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from lora_tool import merge
from lora_tool.checkpoints import ShardedDir, open_checkpoint, open_sharded
from lora_tool.checkpoints.states.training_state import training_state
from lora_tool.core.errors import FindingsFound, IncompleteCheckpoint, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.verification.validating import validate
from lora_tool.workflows.inventory import inventory
from lora_tool.workflows.prune import Why, choose
from tests.contract.test_checkpoint_kinds import require_plain_data
from tests.oracle import trainer_saves
from tests.oracle.test_faults_of_kinds import Run, negated

WEIGHTS = "adapter_model.safetensors"
HEADLESS = "verl-lora-only-bf16"
"""verl's `save_lora_only` leaves `modules_to_save` out: the head is lost."""


def require_equal(found: Path, truth: Path, *, only: str = "") -> None:
    """Assert that both files have the same tensors, of the same type, bit for bit; of the truth those with this in it."""
    one, other = load_file(found), {name: tensor for name, tensor in load_file(truth).items() if only in name}
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert one[name].dtype == tensor.dtype
        assert torch.equal(one[name], tensor), name


def dtype_of(name: str) -> str:
    return "bf16" if "bf16" in name else "fp32"


def codes(folder: Path, severity: Severity = Severity.WARNING) -> set[str]:
    found = validate(open_sharded(folder), deep=True).findings
    return {finding.code for finding in found if finding.severity >= severity}


@pytest.mark.parametrize("name", trainer_saves.KINDS)
def test_it_is_what_was_gathered(trainers: Path, tmp_path: Path, name: str) -> None:
    """Bit for bit, as the state and as the adapter that PEFT saves of it; PEFT loads all of that."""
    folder, adapter = trainers / name, trainers / f"adapter-{dtype_of(name)}"
    assert codes(folder) == set()
    assert open_checkpoint(folder).kind is open_sharded(folder).kind
    require_plain_data(open_sharded(folder))
    state = training_state(open_sharded(folder))
    if not state.without_values and not state.shapeless:
        execute(plan_consolidate(folder, what="state"), tmp_path / "state")
        require_equal(tmp_path / "state" / "model.safetensors", trainers / f"truth-{dtype_of(name)}.safetensors")
    if name == HEADLESS:
        with pytest.raises(
            FindingsFound,
            match=r"LT415 .*`score`: was trained whole \(`modules_to_save`\), but the checkpoint holds none",
        ):
            plan_consolidate(folder, adapter_config=adapter)
    ignored = ("LT415",) if name == HEADLESS else ()
    execute(plan_consolidate(folder, adapter_config=adapter, ignore=ignored), tmp_path / "adapter")
    require_equal(tmp_path / "adapter" / WEIGHTS, adapter / WEIGHTS, only="lora_" if name == HEADLESS else "")
    if name == "verl-fsdp2":
        model = PeftModel.from_pretrained(
            AutoModelForSequenceClassification.from_pretrained(trainers / "base"), tmp_path / "adapter"
        )
        again = model.load_adapter(tmp_path / "adapter", "again")
        assert ([*again.missing_keys], [*again.unexpected_keys]) == ([], [])


def test_a_slice_without_a_shape_is_refused_by_name(trainers: Path, tmp_path: Path) -> None:
    """FSDP1's local state: r follows from the factors and the weight under them, the head's shape from the config."""
    folder = Path(shutil.copytree(trainers / "fsdp1-local", tmp_path / "run"))
    with pytest.raises(
        UnsupportedCheckpoint, match=r"embed_tokens.weight` and \d+ more are saved as 1,590 elements without a shape"
    ):
        plan_consolidate(folder, what="state")
    (folder / "config.json").unlink()
    with pytest.raises(UnsupportedCheckpoint, match=r"score\S+ is saved as 30 elements without a shape"):
        plan_consolidate(folder, adapter_config=trainers / "adapter-fp32")
    (folder / "pytorch_model_fsdp_rank3.bin").unlink()
    assert codes(folder, Severity.ERROR) == {"LT401"}
    state = training_state(open_sharded(folder))
    with pytest.raises(IncompleteCheckpoint, match="the files of 1 of 4 ranks are missing or unreadable"):
        state.assemble(state.entries)


def test_under_hsdp_one_replica_is_enough_and_both_are_compared(trainers: Path, tmp_path: Path) -> None:
    actor = Path(shutil.copytree(trainers / "verl-hsdp" / "global_step_3" / "actor", tmp_path / "actor"))
    (actor / "model_world_size_4_rank_3.pt").unlink()
    assert codes(actor) == {"LT401"}
    assert codes(actor, Severity.ERROR) == set()
    adapter = trainers / "adapter-fp32"
    execute(plan_consolidate(actor, adapter_config=adapter), tmp_path / "out")
    require_equal(tmp_path / "out" / WEIGHTS, adapter / WEIGHTS)


@pytest.mark.parametrize("name", ["dcp-tp", "fsdp2-dcp-bf16"])
def test_what_dcp_to_torch_makes_is_read(trainers: Path, tmp_path: Path, name: str) -> None:
    """A file of any name, beside the adapter's config."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (folder,) = {path.parent for path in (trainers / name).rglob(".metadata")}
    adapter = trainers / f"adapter-{dtype_of(name)}"
    dcp_to_torch_save(str(folder), str(tmp_path / "whole.pt"))
    assert open_checkpoint(tmp_path).kind.name == "training state in one file"
    require_plain_data(open_sharded(tmp_path))
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    execute(plan_consolidate(tmp_path), tmp_path / "adapter")
    require_equal(tmp_path / "adapter" / WEIGHTS, adapter / WEIGHTS)


def test_rank_0s_slices_under_the_name_of_the_whole(trainers: Path, tmp_path: Path) -> None:
    """As accelerate wrote `pytorch_model_fsdp.bin` under FSDP2 once; the adapter beside it is good."""
    folder = Path(shutil.copytree(trainers / "adapter-fp32", tmp_path / "checkpoint-4"))
    shutil.copy(trainers / "fsdp2-ranks" / "pytorch_model_fsdp_0_rank0.bin", folder / "pytorch_model_fsdp.bin")
    assert codes(folder) == {"LT401"}
    with pytest.raises(FindingsFound, match="holds what rank 0 of 4 had of each tensor"):
        plan_consolidate(folder)
    assert "LT401" in {finding.code for finding in validate(open_checkpoint(folder)).findings}


@pytest.mark.filterwarnings("ignore")
def test_another_programs_lora_is_not_written_as_a_model(tmp_path: Path) -> None:
    """Torchtitan's names, in a distributed checkpoint beside its optimizer."""
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = {f"layers.0.attention.wq.{leaf}.weight": torch.ones(4, 4) for leaf in ("lora_a", "lora_b")}
    state = {"layers.0.attention.wq.weight": torch.ones(4, 4), **weights, "optimizer": {"step": torch.ones(1)}}
    save(state, checkpoint_id=str(tmp_path / "step-4"), no_dist=True)
    for what in ("auto", "model"):
        with pytest.raises(UnsupportedCheckpoint, match=r"not PEFT's \(`layers\.0\.attention\.wq\.lora_a\.weight`\)"):
            plan_consolidate(tmp_path / "step-4", what=what)
    assert len(list(plan_consolidate(tmp_path / "step-4", what="state").steps)) == 3


def test_verls_merged_folder_is_not_merged(trainers: Path, tmp_path: Path) -> None:
    """`verl.model_merger` writes the base and, in a folder in it, the adapter, whose config names no base."""
    merged = Path(shutil.copytree(trainers / "base", tmp_path / "merged"))
    inside = Path(shutil.copytree(trainers / "adapter-fp32", merged / "lora_adapter"))
    config = json.loads((inside / "adapter_config.json").read_text())
    (inside / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    (finding,) = (finding for finding in validate(open_checkpoint(merged)).findings if finding.code == "LT321")
    assert finding.hint == f"lora-tool merge {inside}"
    merge(inside, out=tmp_path / "truly-merged")
    merge(trainers / "adapter-fp32", base=trainers / "base", out=tmp_path / "expected")
    require_equal(tmp_path / "truly-merged" / "model.safetensors", tmp_path / "expected" / "model.safetensors")


def test_a_file_of_zeros_without_a_row_of_lora_a(trainers: Path, tmp_path: Path) -> None:
    """The last rank has none of the three rows of each lora_A, and lora_B may be zero: the base's weights tell."""
    folder = Path(shutil.copytree(trainers / "safetensors", tmp_path / "run"))
    last = max(folder.glob("shard-*.safetensors"))
    data = last.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    last.write_bytes(data[:header] + bytes(len(data) - header))
    assert codes(folder) == {"LT413"}


@pytest.fixture
def verl_run(trainers: Path, tmp_path: Path) -> Path:
    """A run of verl with two steps, which points at the first, and a critic."""
    run = Path(shutil.copytree(trainers / "verl-fsdp2", tmp_path / "run"))
    shutil.copytree(run / "global_step_3", run / "global_step_5")
    shutil.copytree(run / "global_step_5" / "actor", run / "global_step_5" / "critic")
    return run


def test_verls_steps_are_tags(verl_run: Path) -> None:
    opened = open_checkpoint(verl_run)
    assert isinstance(opened, ShardedDir)
    assert list(opened.rank_files) == ["global_step_3/actor", "global_step_5/actor", "global_step_5/critic"]
    for tag, folder in {
        None: "global_step_3/actor",
        "global_step_5": "global_step_5/actor",
        "global_step_5/critic": "global_step_5/critic",
    }.items():
        assert training_state(opened, tag=tag).folder == verl_run / folder
    assert training_state(open_sharded(verl_run / "global_step_5")).folder.name == "actor"
    (finding,) = (found for found in validate(opened).findings if found.code == "LT409")
    assert "names global_step_3/actor, but global_step_5/actor is newer" in finding.message
    (verl_run / "latest_checkpointed_iteration.txt").write_text("4")
    assert codes(verl_run) == {"LT409"}
    with pytest.raises(NotACheckpoint, match="names global_step_4, which does not exist"):
        plan_consolidate(verl_run)
    with pytest.raises(
        NotACheckpoint, match="the tag global_step_7 was requested, but the folder is one step of a verl checkpoint"
    ):
        plan_consolidate(verl_run / "global_step_5" / "actor", tag="global_step_7")


def test_two_runs_of_verl_in_one_folder(verl_run: Path) -> None:
    actor = verl_run / "global_step_3" / "actor"
    shutil.copy(actor / "model_world_size_4_rank_0.pt", actor / "model_world_size_8_rank_7.pt")
    assert codes(actor) == {"LT403"}


def test_a_replica_that_differs(trainers: Path, tmp_path: Path) -> None:
    """Under HSDP ranks 0 and 2 hold the same; a file of another step is told by that."""
    actor = Path(shutil.copytree(trainers / "verl-hsdp" / "global_step_3" / "actor", tmp_path / "actor"))
    Run(root=actor, pieces=[], other=actor).rewrite(actor / "model_world_size_4_rank_0.pt", negated)
    assert codes(actor) == {"LT407"}
    with pytest.raises(FindingsFound, match=r"is a replica of model_world_size_4_rank_0\.pt, but holds other values"):
        plan_consolidate(actor)


def test_what_one_rank_says_of_its_files_is_missing(trainers: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trainers / "dcp-without-collectives", tmp_path / "run"))
    (folder / "__1.metadata").unlink()
    assert codes(folder) == {"LT401"}
    with pytest.raises(
        FindingsFound, match=r"LT401 .*__1\.metadata: is missing, so that nothing says what its rank saved"
    ):
        plan_consolidate(folder)


def test_the_config_in_the_adapter_that_older_verl_puts_beside(trainers: Path, tmp_path: Path) -> None:
    actor = Path(shutil.copytree(trainers / "verl-fsdp2" / "global_step_3" / "actor", tmp_path / "actor"))
    (actor / "lora_train_meta.json").unlink()
    shutil.copytree(trainers / "adapter-fp32", actor / "lora_adapter")
    out = execute(plan_consolidate(actor), tmp_path / "out")
    require_equal(out / WEIGHTS, trainers / "adapter-fp32" / WEIGHTS)


def test_the_steps_of_a_verl_run_are_listed_and_pruned_one_by_one(trainers: Path, tmp_path: Path) -> None:
    for step in (1, 2, 10):
        shutil.copytree(trainers / "verl-fsdp2" / "global_step_3", tmp_path / f"global_step_{step}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    next((tmp_path / "global_step_10").rglob("model_*_rank_1.pt")).unlink()
    (run,) = inventory(tmp_path)
    assert [(item.row.step, item.row.verdict) for item in run.checkpoints] == [(1, "good"), (2, "good"), (10, "broken")]
    kept = {choice.checkpoint.root.name: choice.why for choice in choose([run], keep_last=1, keep_best=0)}
    assert kept == {"global_step_1": Why.OLDER, "global_step_2": Why.LAST, "global_step_10": Why.NEWER}
