"""What a folder is."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
import torch

from lora_tool.checkpoints import (
    ADAPTER,
    BASE_MODEL,
    DCP,
    MERGED_MODEL,
    RUN,
    TRAINED_ADAPTER,
    TRAINED_MODEL,
    ZERO,
    AdapterDir,
    Kind,
    ModelDir,
    RunDir,
    ShardedDir,
    open_checkpoint,
    open_model,
    open_sharded,
    require_whole,
    saves_in,
)
from lora_tool.checkpoints.nearby import consolidate_command
from lora_tool.core.errors import BadConfig, CorruptFile, Defect, NotACheckpoint
from tests.mutations import FIXTURES, SHARDED, break_, copy_of


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("causal-llama/base", BASE_MODEL),
        ("reward-qwen2/base", BASE_MODEL),
        ("causal-llama/adapter", ADAPTER),
        ("reward-run/checkpoint-2", TRAINED_ADAPTER),
        ("reward-run", RUN),
    ],
)
def test_the_fixtures(path: str, kind: Kind) -> None:
    opened = open_checkpoint(FIXTURES / path)
    assert opened.kind is kind
    assert str(kind) in kind.with_article
    assert opened.root == FIXTURES / path
    assert opened.problems == ()
    require_whole(opened)


def test_a_run_lists_its_checkpoints_by_step(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    run = open_checkpoint(tmp_path)
    assert isinstance(run, RunDir)
    assert saves_in(run.folder) == ("checkpoint-3", "checkpoint-20", "checkpoint-100")


def test_a_trainer_checkpoint_knows_its_step() -> None:
    opened = open_checkpoint(FIXTURES / "reward-run" / "checkpoint-4")
    assert isinstance(opened, AdapterDir)
    assert opened.folder.trainer is not None
    assert opened.folder.trainer.global_step == 4
    assert opened.keys.keys() == opened.tensors.keys()


def test_a_manifest_makes_a_merged_model(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "causal-llama" / "base", tmp_path / "merged")
    (tmp_path / "merged" / "lora_tool.json").write_text('{"merged_adapters": []}')
    assert open_model(tmp_path / "merged").kind is MERGED_MODEL
    (tmp_path / "merged" / "trainer_state.json").write_text('{"global_step": 1}')
    assert open_model(tmp_path / "merged").kind is MERGED_MODEL
    (tmp_path / "merged" / "lora_tool.json").unlink()
    assert open_model(tmp_path / "merged").kind is TRAINED_MODEL


ZERO_3 = [
    f"global_step10/{name}"
    for rank in range(2)
    for name in (
        f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
    )
]
ZERO_2 = ["global_step10/mp_rank_00_model_states.pt", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt"]


@pytest.mark.parametrize("names", [ZERO_3, ZERO_2], ids=["stage 3", "stage 2"])
def test_a_deepspeed_checkpoint(names: list[str], tmp_path: Path) -> None:
    files(tmp_path, *names, "zero_to_fp32.py", "config.json", "rng_state_0.pth", "scheduler.pt")
    (tmp_path / "latest").write_text("global_step10")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 10}')
    opened = open_checkpoint(tmp_path)
    assert isinstance(opened, ShardedDir)
    assert opened.kind is ZERO
    assert opened.latest == "global_step10"
    assert opened.rank_files == {"global_step10": tuple(sorted(name.partition("/")[2] for name in names))}


def test_a_tag_is_itself_a_deepspeed_checkpoint(tmp_path: Path) -> None:
    opened = open_checkpoint(files(tmp_path, *ZERO_3) / "global_step10")
    assert isinstance(opened, ShardedDir)
    assert opened.latest is None
    assert list(opened.rank_files) == ["."]


def test_tags_are_sorted_by_step(tmp_path: Path) -> None:
    names = [name.replace("step10", f"step{step}") for step in (9, 10, 100) for name in ZERO_2]
    opened = open_checkpoint(files(tmp_path, *names))
    assert isinstance(opened, ShardedDir)
    assert list(opened.rank_files) == ["global_step9", "global_step10", "global_step100"]
    assert opened.latest is None


@pytest.mark.parametrize("where", ["", "pytorch_model_fsdp_0/"])
def test_an_fsdp_checkpoint(where: str, tmp_path: Path) -> None:
    files(tmp_path, f"{where}.metadata", f"{where}__0_0.distcp", f"{where}__1_0.distcp", "scheduler.pt")
    opened = open_checkpoint(tmp_path)
    assert isinstance(opened, ShardedDir)
    assert opened.kind is DCP
    assert opened.rank_files == {where.rstrip("/") or ".": ("__0_0.distcp", "__1_0.distcp")}


def test_finished_weights_win_over_a_deepspeed_folder_beside_them(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "causal-llama" / "adapter", tmp_path, dirs_exist_ok=True)
    assert isinstance(open_checkpoint(files(tmp_path, *ZERO_3)), AdapterDir)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin"])
def test_an_old_pickle_is_named_and_not_read(name: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / name, _use_new_zipfile_serialization=False)
    opened = open_checkpoint(tmp_path)
    assert Defect.PICKLE in {problem.defect for problem in opened.problems}
    with pytest.raises((CorruptFile, BadConfig)):
        require_whole(opened)


def test_a_config_alone_is_a_model_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    opened = open_checkpoint(tmp_path)
    assert isinstance(opened, ModelDir)
    assert [problem.defect for problem in opened.problems] == [Defect.NO_WEIGHTS]
    with pytest.raises(CorruptFile, match=r"model\.safetensors: is missing"):
        require_whole(opened)


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("adapter_model.safetensors.tmp", "is missing, but adapter_model.safetensors.tmp is there"),
        (".adapter_model.safetensors.Q7bXw2", "is missing, but .adapter_model.safetensors.Q7bXw2 is there"),
        ("Adapter_Model.safetensors", "is missing, but Adapter_Model.safetensors is there"),
        ("adapter_model.fp16.safetensors", "is missing, but adapter_model.fp16.safetensors is there"),
        ("adapter_model.safetensors/x", "is a folder, not a file"),
    ],
)
def test_what_lies_in_the_place_of_a_file_is_named(there: str, said: str, tmp_path: Path) -> None:
    files(tmp_path, there)
    shutil.copy(FIXTURES / "causal-llama" / "adapter" / "adapter_config.json", tmp_path)
    opened = open_checkpoint(tmp_path)
    assert [problem.message for problem in opened.problems] == [said]


@pytest.mark.parametrize(
    ("injury", "fatal"),
    [
        ("LT107", True),  # a shard is missing
        ("LT109", True),  # the index lacks a tensor
        ("LT109 in another shard", True),
        ("LT111", False),  # a wrong total size
        ("LT114", False),  # a stray shard
    ],
)
def test_which_disagreement_of_an_index_with_its_shards_is_fatal(injury: str, fatal: bool, tmp_path: Path) -> None:
    base = copy_of(SHARDED, tmp_path)
    break_(base, injury)
    opened = open_checkpoint(base)
    assert opened.problems
    with pytest.raises(CorruptFile) if fatal else contextlib.nullcontext():
        require_whole(opened)


def test_shards_without_an_index_are_not_guessed_together(tmp_path: Path) -> None:
    base = copy_of(SHARDED, tmp_path)
    (base / "model.safetensors.index.json").unlink()
    with pytest.raises(CorruptFile, match=r"index\.json: is missing, but 2 shards are there"):
        require_whole(open_checkpoint(base))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda _: None, "no such folder"),
        (lambda path: path.write_text(""), "is a file, not a folder"),
        (lambda path: path.mkdir(), "is an empty folder"),
        (lambda path: files(path, "notes.txt"), "holds no adapter_config.json"),
        (lambda path: path.symlink_to(path), "x, which leads to no folder"),
        (lambda path: files(path, "sub/config.json"), "is not a checkpoint itself, but holds: sub"),
        (
            lambda path: files(
                path, "a/config.json", *(f"{of}/global_step1/mp_rank_00_model_states.pt" for of in "bc")
            ),
            "is not a checkpoint itself, but holds: a, b, c",
        ),
    ],
    ids=["missing", "file", "empty", "nothing", "link to itself", "around", "of several kinds"],
)
def test_nothing_known_is_said_so(make: object, words: str, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "x")
    with pytest.raises(NotACheckpoint, match=words):
        open_checkpoint(tmp_path / "x")


@pytest.mark.parametrize(
    ("folder", "kind", "command"),
    [
        ("causal-llama/adapter", "an adapter", "merge"),
        ("causal-llama/base", "a base model", "validate"),
        ("reward-run", "a run folder", "ls"),
    ],
)
def test_what_is_no_rank_files_is_said_with_the_command_that_takes_it(folder: str, kind: str, command: str) -> None:
    root = FIXTURES / folder
    with pytest.raises(NotACheckpoint, match=f"is {kind}: expected rank files") as caught:
        open_sharded(root)
    named = str(caught.value.hint)
    # a training checkpoint beside it may hold what an adapter lacks
    assert named == f"lora-tool {command} {root}" or (command == "merge" and "lora-tool consolidate" in named)


@pytest.mark.parametrize(
    "other",
    [
        ("other/adapter_config.json", "other/global_step2/mp_rank_00_model_states.pt"),
        ("lr2/checkpoint-2/adapter_config.json", "lr2/checkpoint-2/global_step2/mp_rank_00_model_states.pt"),
        ("lr2/global_step2/mp_rank_00_model_states.pt",),
    ],
    ids=["its config", "its checkpoint", "its name"],
)
def test_another_run_in_the_same_folder_is_not_taken_for_the_adapters_own(
    other: tuple[str, ...], tmp_path: Path
) -> None:
    files(tmp_path, "adapter/adapter_config.json", *other)
    assert consolidate_command(tmp_path / "adapter") is None


def test_an_adapter_in_a_models_folder_is_told_apart(tmp_path: Path) -> None:
    for part in ("base", "adapter"):
        shutil.copytree(FIXTURES / "causal-llama" / part, tmp_path, dirs_exist_ok=True)
    with pytest.raises(NotACheckpoint, match=r"holds an adapter beside a model's config\.json: expected a model alone"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("rank_file", "adapter", "command"),
    [
        ("global_step2/mp_rank_00_model_states.pt", "adapter", " --adapter-config {adapter}"),
        ("epoch_1/mp_rank_00_model_states.pt", "adapter", "/epoch_1 --adapter-config {adapter}"),
        (
            "_actor/global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt",
            "adapter",
            "/_actor --adapter-config {adapter}",
        ),
        ("checkpoint-9/global_step9/mp_rank_00_model_states.pt", "adapter", "/checkpoint-9 --adapter-config {adapter}"),
        ("checkpoint-9/pytorch_model_fsdp_0/.metadata", "adapter", "/checkpoint-9 --adapter-config {adapter}"),
        ("dcp/.metadata", "adapter", "/dcp --adapter-config {adapter}"),
        ("global_step2/mp_rank_00_model_states.pt", ".", ""),
        ("_actor/global_step2/mp_rank_00_model_states.pt", ".", "/_actor"),
        ("my_ckpt/global_step2/mp_rank_00_model_states.pt", "adapter", "/my_ckpt --adapter-config {adapter}"),
    ],
)
def test_an_adapter_without_weights_names_the_command_that_makes_them(
    rank_file: str, adapter: str, command: str, tmp_path: Path
) -> None:
    files(tmp_path, rank_file, f"{adapter}/adapter_config.json")
    found = consolidate_command(tmp_path / adapter)
    assert found == f"lora-tool consolidate {tmp_path}{command.format(adapter=tmp_path / adapter)}"


def test_the_newest_checkpoint_is_named(tmp_path: Path) -> None:
    for step in (9, 10):
        files(tmp_path, f"checkpoint-{step}/global_step{step}/mp_rank_00_model_states.pt")
    files(tmp_path, "final/adapter_config.json", "checkpoint-10/adapter_config.json")
    with pytest.raises(NotACheckpoint) as caught:
        open_sharded(tmp_path / "final")
    assert caught.value.hint == f"lora-tool consolidate {tmp_path / 'checkpoint-10'}"
