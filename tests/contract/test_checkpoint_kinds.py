"""The door for kinds of checkpoints: one module, this one, and every command takes what it describes.

The kind defined here has rank files of its own, `slice_N.safetensors` with some rows of every tensor, and `slices.json`.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Container, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import pytest

from lora_tool.checkpoints import Claim, Folder, ShardedDir, ShardedKind, kinds, open_checkpoint, open_sharded
from lora_tool.checkpoints.added import AddedKind
from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.checkpoints.states.training_state import training_state
from lora_tool.core import doors
from lora_tool.core.errors import IncompleteCheckpoint, NotACheckpoint
from lora_tool.core.tensors import FileStamp, StoredTensor, TensorSpec
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.safetensors import scan_file
from lora_tool.hub.contents import pushable, select
from lora_tool.rules.training.value_check import value_check
from tests.checkpoint_edits import Raw, Tensors, read, write
from tests.cli.calling import FIXTURES, Caller

ADAPTER, BASE = FIXTURES / "causal-llama" / "adapter", FIXTURES / "causal-llama" / "base"


# the kind, as a module of its own would have it


def _recognise(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if "slices.json" in folder.files else None


def _open(folder: Folder) -> ShardedDir:
    names = tuple(name for name in folder.files if name.startswith("slice_"))
    return ShardedDir(kind=SLICED, folder=folder, rank_files={".": names}, problems=folder.problems)


class SlicedState(TrainingState, frozen=True, kw_only=True):
    slices: tuple[dict[str, StoredTensor], ...]
    lost: tuple[Path, ...]

    def absent_files(self) -> Iterator[tuple[Path, str]]:
        return ((path, "and slices.json says that there is one") for path in self.lost)

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        return {name: self._joined(name) for name in self.entries if name in wanted}

    def _joined(self, name: str) -> StoredTensor:
        parts = [held[name] for held in self.slices]
        spec = TensorSpec(name=name, dtype=parts[0].dtype, shape=self.entries[name].shape)
        spans = tuple(span for part in parts for span in part.spans)
        if sum(span.nbytes for span in spans) != spec.nbytes:
            raise IncompleteCheckpoint(f"{self.folder}: `{name}` is not whole")
        return StoredTensor(spec=spec, spans=spans)


def sliced_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> SlicedState:  # noqa: ARG001 - one step only
    told = json.loads((checkpoint.root / "slices.json").read_text())
    paths = [checkpoint.root / f"slice_{rank}.safetensors" for rank in range(told["ranks"])]
    there = [path for path in paths if path.exists()]
    return SlicedState(
        root=checkpoint.root,
        folder=checkpoint.root,
        title=f"sliced checkpoint {checkpoint.root}, {len(paths)} ranks",
        entries={name: StateEntry(role=Role.TRAINED, shape=tuple(shape)) for name, shape in told["shapes"].items()},
        stamps={path: FileStamp.of(path) for path in there},
        slices=tuple(dict(scan_file(path).tensors) for path in there),
        lost=tuple(path for path in paths if path not in there),
    )


SLICED = ShardedKind(
    name="sliced checkpoint",
    sign="slices.json",
    landmarks=("slices.json",),
    weights=("slice_*.safetensors",),
    others=("slices.json",),
    folders=("slices_of_step*",),
    recognise=_recognise,
    open=_open,
)


ADDED = AddedKind(kind=SLICED, state=sliced_state)


# what every command makes of it


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    group = cast("dict[str, EntryPoint]", doors.entry_points(doors.KINDS))
    group["sliced"] = EntryPoint("sliced", f"{__name__}:ADDED", doors.KINDS)
    yield
    del group["sliced"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The fixture adapter as two ranks would have left it, its config in the folder above."""
    root = tmp_path / "run" / "sliced"
    root.mkdir(parents=True)
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(BASE)
    (root.parent / "adapter_config.json").write_text(json.dumps(config))
    write_slices(root, read(ADAPTER / "adapter_model.safetensors"))
    return root


def write_slices(root: Path, tensors: Tensors, ranks: int = 2) -> None:
    saved = {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}
    shapes = {name: tensor.shape for name, tensor in saved.items()}
    (root / "slices.json").write_text(json.dumps({"ranks": ranks, "shapes": shapes}))
    for rank in range(ranks):
        write(root / f"slice_{rank}.safetensors", {name: rows(tensor, rank, ranks) for name, tensor in saved.items()})


def rows(tensor: Raw, rank: int, ranks: int) -> Raw:
    count, width = tensor.shape[0], len(tensor.data) // tensor.shape[0]
    first, last = (count * at // ranks for at in (rank, rank + 1))
    return Raw(tensor.dtype, (last - first, *tensor.shape[1:]), tensor.data[first * width : last * width])


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(capsys)


def test_it_is_opened_and_described(run: Path, call: Caller) -> None:
    opened = open_checkpoint(run)
    assert isinstance(opened, ShardedDir)
    assert opened.kind is SLICED
    assert opened == open_sharded(run)
    told = call("inspect", run, "--json").json
    assert (told["kind"], told["tags"][0]["files"]) == ("sliced checkpoint", 2)
    (listed,) = call("ls", run.parent, "--json").json["runs"]
    assert listed["checkpoints"][0]["kind"] == "sliced checkpoint"


def test_its_faults_are_findings_and_refuse(run: Path, call: Caller, tmp_path: Path) -> None:
    assert call("validate", run, "--deep").code == 0
    slice_ = run / "slice_1.safetensors"
    content = slice_.read_bytes()
    slice_.write_bytes(content[:-4] + struct.pack("<f", float("nan")))
    for called in (call("validate", run, "--deep"), call("consolidate", run, "-o", tmp_path / "out")):
        assert (called.code, "LT412" in called.out + called.err) == (1, True)
    slice_.unlink()
    for called in (call("validate", run), call("consolidate", run, "-o", tmp_path / "out")):
        assert (called.code, "LT401" in called.out + called.err) == (1, True)
        assert "slice_1.safetensors" in called.out + called.err


def test_its_adapter_is_the_one_that_was_trained(run: Path, call: Caller, tmp_path: Path) -> None:
    assert call("consolidate", run, "-o", tmp_path / "adapter").code == 0
    assert read(tmp_path / "adapter" / "adapter_model.safetensors") == read(ADAPTER / "adapter_model.safetensors")
    assert call("ci", run, "-o", tmp_path / "merged").code == 0
    assert call("verify", tmp_path / "merged").code == 0


def test_an_adapter_without_weights_is_mended_from_it(run: Path, call: Caller, tmp_path: Path) -> None:
    """As after a training that saved its config and pieces alone: the command that helps is named, and `ci` uses it."""
    assert f"lora-tool consolidate {run}" in call("validate", run.parent).out
    shutil.copy(run.parent / "adapter_config.json", run)
    assert call("ci", run, "-o", tmp_path / "merged").code == 0


def test_it_is_no_use_to_others(run: Path) -> None:
    with pytest.raises(NotACheckpoint, match="is a sliced checkpoint: expected an adapter or a model") as refused:
        pushable(open_checkpoint(run))
    assert refused.value.hint == f"lora-tool consolidate {run}"
    shutil.copytree(ADAPTER, run, dirs_exist_ok=True)
    contents, left = select(pushable(open_checkpoint(run)))
    assert {"slice_0.safetensors", "slices.json"} <= {item.name for item in left if "training state" in item.reason}
    assert {"adapter_model.safetensors"} <= {item.name for item in contents}


def test_a_folder_without_it_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NotACheckpoint, match=r"slices\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotACheckpoint, match=r"slices\.json"):
        open_sharded(tmp_path)


# what holds for every kind


def test_each_kind_is_complete() -> None:
    assert len({kind.name for kind in kinds()}) == len({kind.sign for kind in kinds()}) == len(list(kinds()))
    assert {kind.with_article.partition(" ")[0] for kind in kinds()} == {"a", "an"}


@pytest.mark.parametrize(
    "sample", ["zero/stage1-reward", "zero/stage2-tied", "zero/stage3-reward", "fsdp2-reward", "megatron-lora"]
)
def test_a_state_is_plain_data(sample: str) -> None:
    """As are those that tests/oracle/test_trainer_checkpoints.py makes; test_kinds_in_commands.py has all kinds."""
    require_plain_data(open_sharded(FIXTURES / sample))


def require_plain_data(opened: ShardedDir) -> None:
    """Assert that a state can be sent to another process, and that its values are good there, too."""
    state = training_state(opened)
    copy = pickle.loads(pickle.dumps(state))
    assert copy == state
    assert copy.assemble(state.entries) == state.assemble(state.entries)
    assert pickle.loads(pickle.dumps(value_check(state, state.assemble(state.entries)))).run(lambda _: None) == []
