"""Each fault of a ZeRO checkpoint, made by a small change of a good one, is found under its code, and only that."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.checkpoint.state_dict_saver import save

from lora_tool.checkpoints import ShardedDir, open_checkpoint, open_sharded
from lora_tool.core.errors import Defect, FindingsFound, NotACheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.core.report import Severity
from lora_tool.core.report.model import refuse_errors
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.consolidating import judge_files
from lora_tool.rules.training.sharded_subject import sharded_subject
from lora_tool.verification.validating import ValidateOptions, findings_on, validate
from tests.bench.zero_checkpoints import write

ZERO = Path(__file__).resolve().parents[2] / "fixtures" / "zero"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


@pytest.fixture
def stage3(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZERO / "stage3-reward", tmp_path / "stage3")) / "global_step2"


@pytest.fixture
def stage2(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ZERO / "stage2-tied", tmp_path / "stage2")) / "global_step2"


def plan(folder: Path, **choices: Any) -> Plan:
    """Plan, and look at the values as whoever executes the plan does."""
    planned = plan_consolidate(folder.parent, **{"what": "state", **choices})
    if planned.values is None:
        return planned
    kept = refuse_errors(planned.values.run(lambda _: None), planned.values.ignored)
    return replace(planned, findings=(*planned.findings, *kept))


def warned(planned: Plan) -> list[str]:
    return [str(finding) for finding in planned.findings if finding.severity > Severity.INFO]


def codes(tag: Path) -> set[str]:
    """Return the codes of what `validate` shows, values read; `consolidate` must refuse on the errors among them."""
    checkpoint = open_sharded(tag.parent)
    assert isinstance(checkpoint, ShardedDir)
    report = validate(checkpoint, deep=True)
    errors = {finding.code for finding in report.at_least(Severity.ERROR)} - {"LT415"}  # no head is needed for a state
    if errors:
        with pytest.raises(FindingsFound, match="|".join(errors)) as refused:
            plan(tag)
        assert refused.value.report is not None
        assert {finding.code for finding in refused.value.report.findings} <= errors
    else:
        plan(tag)
    return {finding.code for finding in report.findings}


def resave(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load with torch, change and save again under the same name, as a run would have written it."""
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def test_a_missing_model_file_without_frozen_parameters_is_harmless(tmp_path: Path) -> None:
    tag = Path(shutil.copytree(ZERO / "stage3-full", tmp_path / "full")) / "global_step2"
    (tag / MODEL.format(1)).unlink()
    assert len(warned(plan(tag))) == 1


@pytest.mark.parametrize("pattern", ["*rank_1_*model_states.pt", "*model_states.pt", "*rank_1_*optim_states.pt"])
@pytest.mark.parametrize("ranks", [(3, 2), (2, 3)])
def test_files_of_a_run_with_other_ranks(tmp_path: Path, ranks: tuple[int, int], pattern: str) -> None:
    """The same model and config; a piece that is too long would be read without an error, and be wrong."""
    for name, world in zip(("run", "other"), ranks, strict=True):
        write(tmp_path / name, {"model.norm.weight": (7, 3)}, {"model.embed.weight": (10,)}, ranks=world)
    run = tmp_path / "run" / "global_step10"
    for path in run.glob(pattern):
        other = tmp_path / "other" / "global_step10" / path.name
        if other.exists():
            shutil.copy(other, path)
    assert codes(run) >= {"LT403", "LT408"}


def test_a_rank_file_of_another_step(stage2: Path) -> None:
    name = OPTIM.format(1)
    shutil.copy(stage2.parent / "global_step1" / name, stage2 / name)
    assert codes(stage2) == {"LT406", "LT414"}


def test_another_order_of_parameters(stage3: Path) -> None:
    def reverse(value: dict[str, Any]) -> None:
        value["param_shapes"] = [dict(reversed(group.items())) for group in value["param_shapes"]]

    resave(stage3 / MODEL.format(1), reverse)
    assert codes(stage3) == {"LT407"}


def test_shapes_that_need_more_than_there_is(stage3: Path) -> None:
    def grow(value: dict[str, Any]) -> None:
        group = value["param_shapes"][0]
        group[next(iter(group))] = torch.Size([3, 17])

    for rank in range(2):
        resave(stage3 / MODEL.format(rank), grow)
    assert "LT408" in codes(stage3)


def test_latest_names_an_older_tag(stage2: Path) -> None:
    (stage2.parent / "latest").write_text("global_step1")
    assert codes(stage2) == {"LT409"}
    assert "global_step2" in warned(plan(stage2))[0]
    assert warned(plan(stage2, tag="global_step2")) == []


def test_frozen_parameters_that_were_not_saved() -> None:
    assert codes(ZERO / "stage3-headless" / "global_step2") == {"LT410", "LT415"}


def other_masters(path: Path) -> None:
    """Multiply what the optimizer file has of the module's masters."""

    def change(value: dict[str, Any]) -> None:
        state = value["optimizer_state_dict"]
        (state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"])[0].data.mul_(1.5)

    resave(path, change)


def test_masters_that_do_not_belong_to_the_weights_beside(stage2: Path) -> None:
    other_masters(stage2 / OPTIM.format(1))
    assert codes(stage2) == {"LT414"}
    with pytest.raises(FindingsFound, match="it is from another run or step"):
        plan(stage2)


def test_masters_that_zenflow_leaves_behind(stage2: Path, tmp_path: Path) -> None:
    other_masters(stage2 / OPTIM.format(1))
    zenflow = {"stage": 2, "zenflow": {"topk_ratio": 0.1}}
    for rank in range(2):
        resave(stage2 / OPTIM.format(rank), lambda value: value.update(ds_config={"zero_optimization": zenflow}))
    with pytest.raises(FindingsFound, match="ZenFlow updates some of those without their masters") as refused:
        plan(stage2)
    assert refused.value.report is not None
    (model,) = stage2.glob("*model_states.pt")
    assert f"copy {model} alone into an empty folder as state.pt" in str(refused.value.report.findings[0].hint)
    (tmp_path / "alone").mkdir()
    shutil.copy(model, tmp_path / "alone" / "state.pt")
    assert open_checkpoint(tmp_path / "alone").kind.name == "training state in one file"


@pytest.fixture
def gathered(tmp_path: Path) -> Path:
    """A ZeRO-3 checkpoint with the gathered adapter beside it, as the HF Trainer writes both."""
    return Path(shutil.copytree(ZERO / "stage3-frozen-head", tmp_path / "gathered")) / "global_step2"


def test_masters_that_do_not_belong_to_the_adapter_beside(gathered: Path) -> None:
    def judged() -> list[tuple[str, str]]:
        report = validate(open_sharded(gathered.parent), deep=True)
        return sorted({(finding.code, finding.severity.value) for finding in report.findings})

    assert judged() == []
    other_masters(gathered / OPTIM.format(1))
    assert judged() == [("LT414", "error")]
    with pytest.raises(FindingsFound, match=r"LT414 .*adapter_model\.safetensors"):
        plan(gathered)
    (gathered.parent / "trainer_state.json").unlink()
    assert judged() == [("LT414", "warning")], "nobody knows of which step the adapter is"


@pytest.mark.parametrize("names", ["named", "not named"])
def test_a_frozen_head_that_was_not_saved(gathered: Path, names: str) -> None:
    """Before 0.9.1 frozen parameters were named and not saved; `exclude_frozen_parameters` drops the names, too."""

    def exclude(value: dict[str, Any]) -> None:
        frozen = value["frozen_param_shapes"]
        value["frozen_param_shapes"] = value["frozen_param_fragments"] = None
        if names == "not named":
            value["module"] = {name: tensor for name, tensor in value["module"].items() if name not in frozen}

    for rank in range(2):
        resave(gathered / MODEL.format(rank), exclude)
    # the path of the base model is relative, and there is none here
    assert codes(gathered) == {"LT410", "LT415"}
    with pytest.raises(FindingsFound, match="`score`: the head is lost"):
        plan(gathered, what="adapter")
    written = plan(gathered, what="adapter", ignore=["LT415"])
    assert any("LT415" in warning for warning in warned(written))
    assert not any("score" in step.out.name for step in written.steps)


def test_a_checkpoint_of_deepspeed_0_9_1(stage2: Path) -> None:
    """No 0.9 runs beside a torch of today: a file of 0.19 is written again in the older shape."""

    def older(value: dict[str, Any]) -> None:
        value["shared_params"] = [list(pair) for pair in value["shared_params"].items()]
        value["sparse_tensor_module_names"] = set()
        value["ds_version"] = "0.9.1"
        for key in ("checkpoint_parallel_dimensions", "data_sampler", "random_ltd"):
            value.pop(key, None)

    now = plan(stage2)
    resave(stage2 / "mp_rank_00_model_states.pt", older)
    then = plan(stage2)
    assert [step.out for step in then.steps] == [step.out for step in now.steps]
    assert [leftover.name for leftover in then.leftovers] == ["lm_head.weight"]


def test_masters_lost_and_model_files_kept(stage2: Path, stage3: Path) -> None:
    """Without its optimizer files a ZeRO checkpoint is no checkpoint of stage 0: under stage 3 it has no weights."""
    for tag in (stage2, stage3):
        for path in tag.glob("*_optim_states.pt"):
            path.unlink()
        assert codes(tag) == {"LT401"}


REFUSED = {
    "mp_rank_01_model_states.pt": "tensor parallelism",
    "zero_pp_rank_0_mp_rank_01_model_states.pt": "tensor parallelism",
    "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt": "tensor parallelism",
    "layer_03-model_00-model_states.pt": "pipeline parallelism",
    "layer_00-model_states.pt": "pipeline parallelism",
    "expert_3_mp_rank_00_model_states.pt": "DeepSpeed-MoE",
    "layer_0_expert_0_mp_rank_00_model_states.pt": "DeepSpeed-MoE",
    "expp_rank_0_mp_rank_00_optim_states.pt": "DeepSpeed-MoE",
    "offloaded_tensors": "NVMe",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": "two sorts",
    "mp_rank_00_model_states.pt": "two runs",
    "zero": "universal",
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_are_refused_by_name(stage3: Path, name: str) -> None:
    (stage3 / name).touch()
    with pytest.raises(UnsupportedCheckpoint, match=REFUSED[name]):
        plan(stage3)
    with pytest.raises(UnsupportedCheckpoint, match=REFUSED[name]) as refused:
        validate(open_sharded(stage3.parent))
    assert refused.value.hint


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"mp_world_size": 2}, "mp_world_size is 2: tensor parallelism"),
        ({"checkpoint_parallel_dimensions": {"tp_degree": 2}}, "is 2: tensor parallelism"),
        ({"checkpoint_parallel_dimensions": {"pp_degree": 2}}, "pp_degree is 2: .* pipeline parallelism"),
        ({"num_experts": [4, 4]}, "DeepSpeed-MoE"),
    ],
)
def test_parallelism_that_only_the_file_names_is_refused(stage2: Path, said: dict[str, Any], words: str) -> None:
    """The files of layers and experts may have been left behind."""
    resave(stage2 / "mp_rank_00_model_states.pt", lambda value: value.update(said))
    with pytest.raises(UnsupportedCheckpoint, match=words) as refused:
        plan(stage2)
    assert refused.value.hint


def test_groups_of_ranks_that_have_all_parameters_are_refused(stage3: Path) -> None:
    """MiCS, of DeepSpeed before 0.19."""
    for path in stage3.glob("*_model_states.pt"):
        resave(path, lambda value: value["ds_config"]["zero_optimization"].update(mics_shard_size=4))
    with pytest.raises(
        UnsupportedCheckpoint, match="mics_shard_size is 4: under MiCS every 4 ranks hold all parameters"
    ):
        plan(stage3)


def test_openrlhf_puts_it_one_folder_down(stage3: Path, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    shutil.copytree(stage3.parent, root / "_actor")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "_actor" / name).rename(root / name)
    report = validate(open_checkpoint(root))
    (hint,) = {finding.hint for finding in report.findings if finding.code == "LT206"}
    assert f"lora-tool consolidate {root / '_actor'}" in str(hint)
    found = open_sharded(root)
    assert found.root == root / "_actor"
    assert len(list(plan_consolidate(found).steps)) == 31, "with the config of the folder above"
    (root / "adapter_config.json").unlink()
    (root / "adapter_model.safetensors").unlink()
    assert open_checkpoint(root).root == root / "_actor"


def test_a_legacy_rank_file_is_refused_by_name(stage2: Path) -> None:
    path = stage2 / "mp_rank_00_model_states.pt"
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    assert codes(stage2) == {"LT402"}
    with pytest.raises(FindingsFound, match=r"before 1\.6"):
        plan(stage2)


def test_a_deep_check_tells_of_every_byte_that_it_reads() -> None:
    asked: list[int] = []
    done: list[int] = []

    @contextlib.contextmanager
    def watch(nbytes: int) -> Iterator[Callable[[int], None]]:
        asked.append(nbytes)
        yield done.append

    findings_on(open_sharded(ZERO / "stage3-full"), ValidateOptions(deep=True), watch=watch)
    assert len(asked) == 1
    assert sum(done) == asked[0] > 0


def test_a_frozen_second_adapter_may_have_another_rank(tmp_path: Path) -> None:
    """A reference policy beside the trained one, as DPO keeps it."""
    folder = Path(shutil.copytree(ZERO / "stage3-reward", tmp_path / "two"))

    def add_reference(value: dict[str, Any]) -> None:
        for name, shape in list(value["param_shapes"][0].items()):
            if ".lora_A." in name:
                other = name.replace(".default.", ".reference.")
                value["frozen_param_shapes"][other] = torch.Size((2 * shape[0], shape[1]))
                value["frozen_param_fragments"][other] = torch.zeros(shape[0] * shape[1], dtype=torch.bfloat16)
                value["module"][other] = torch.zeros(0, dtype=torch.bfloat16)

    for path in (folder / "global_step2").glob("*_model_states.pt"):
        resave(path, add_reference)
    found = plan(folder / "global_step2", what="adapter")
    assert not any("reference" in step.out.name for step in found.steps)
    assert sum(".reference." in item.name for item in found.leftovers) > 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("saved", [[], ["base_model.model.score.weight"]], ids=["nothing", "the head alone"])
def test_a_checkpoint_without_the_adapter_is_no_model(tmp_path: Path, saved: list[str]) -> None:
    """What PEFT 0.21 gives accelerate to save under FSDP1."""
    folder = tmp_path / "checkpoint-2" / "pytorch_model_fsdp_0"
    save({"model": {name: torch.ones(1, 8) for name in saved}}, checkpoint_id=str(folder), no_dist=True)
    assert codes(folder) == {"LT416"}
    with pytest.raises(FindingsFound, match="LT416"):
        plan(folder)


def test_a_rank_file_that_may_not_be_read_is_no_damage(stage3: Path) -> None:
    problem = Problem(defect=Defect.NOT_A_FILE, path="a b.pt", message=f"cannot be opened: {os.strerror(errno.EACCES)}")
    subject = sharded_subject(open_sharded(stage3.parent))
    (found,) = judge_files(replace(subject, state=replace(subject.state, problems=(problem,))))
    assert (found.code, found.hint) == ("LT402", "chmod u+r 'a b.pt'")


@pytest.mark.parametrize(
    ("latest", "said"), [("", "is empty"), ("global_step9", "names global_step9, which does not exist")]
)
def test_latest_of_no_use_is_told_with_the_tags_that_are_there(latest: str, said: str, stage2: Path) -> None:
    (stage2.parent / "latest").write_text(latest)
    (found,) = [each for each in validate(stage2.parent).findings if each.code == "LT409"]
    assert found.message == f"`latest` {said}; the folder has: global_step1, global_step2"
    if latest:
        with pytest.raises(NotACheckpoint, match=said):
            plan(stage2)


def test_a_tensor_of_dcp_that_its_tables_name_differently_is_neither_left_out_nor_renamed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ZERO.parent / "fsdp2-full", tmp_path / "run"))
    metadata = folder / "pytorch_model_fsdp_0" / ".metadata"
    good, refused = metadata.read_bytes(), 0
    names = {step.out.name for step in plan_consolidate(folder, what="state").steps}
    for found in re.finditer(rb"model\.layers\.0\.self_attn\.q_proj\.weight", good):
        at = found.start() + 9
        metadata.write_bytes(good[:at] + b"L" + good[at + 1 :])
        try:
            assert {step.out.name for step in plan_consolidate(folder, what="state").steps} == names
        except FindingsFound:
            refused += 1
    assert refused
