"""What is fuzzed: each target takes bytes, and fails with anything but the errors that the project documents."""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from safetensors import safe_open

from lora_tool.checkpoints import ZERO, ShardedDir
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.verl import VERL
from lora_tool.core.errors import BadConfig, CheckpointError, CorruptFile, PlanError
from lora_tool.formats.adapter_config import AdapterConfig, read_adapter_config
from lora_tool.formats.dcp import assemble_dcp, read_dcp
from lora_tool.formats.manifest import read_manifest
from lora_tool.formats.model_config import read_model_config
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.tokenizer import read_tokenizer, turn_end
from lora_tool.formats.torch_zip import read_torch_file
from lora_tool.formats.trainer_state import read_trainer_state
from lora_tool.rules.consolidating import judge_files
from lora_tool.rules.training.sharded_subject import sharded_subject
from tests.fuzz.choices import Choices
from tests.fuzz.commands import must_hold, run
from tests.fuzz.injuries import injure

FIXTURES = Path(__file__).parents[2] / "fixtures"
RANK_FILES = Path(__file__).parents[1] / "rank_files"
"""One rank's file each of DTensors under HSDP and over tensor parallelism, and of ShardedTensors."""


def _pair(root: Path) -> Sequence[Sequence[str | Path]]:
    adapter, base, out = root / "adapter", root / "base", root / "out"
    return (
        ("validate", adapter, "--base", base, "--json", "--deep"),
        ("validate", base, "--deep"),
        ("inspect", adapter, "--json"),
        ("inspect", adapter),
        ("inspect", base),
        ("merge", adapter, "--base", base, "-o", out, "--dry-run"),
        ("merge", adapter, "--base", base, "-o", out, "--dry-run", "--json"),
        ("diff", adapter, FIXTURES / "reward-qwen2" / "adapter"),
        ("diff", base, FIXTURES / "reward-qwen2" / "base", "--json"),
        ("ls", root, "--json"),
    )


def _merged(root: Path) -> Sequence[Sequence[str | Path]]:
    inputs = FIXTURES / "reward-qwen2"
    given = ("--base", inputs / "base", "--adapter", inputs / "adapter")
    return (
        ("verify", root, *given),
        ("verify", root, *given, "--json"),
        ("validate", root, "--json"),
        ("inspect", root),
        ("diff", root, inputs / "base"),
    )


def _sharded(root: Path) -> Sequence[Sequence[str | Path]]:
    out = root.parent / "out"
    return (
        ("validate", root, "--json"),
        ("validate", root),
        ("inspect", root),
        ("consolidate", root, "-o", out, "--dry-run"),
        ("consolidate", root, "-o", out, "--dry-run", "--what", "state", "--json"),
    )


def _run_folder(root: Path) -> Sequence[Sequence[str | Path]]:
    return (
        ("validate", root, "--json"),
        ("inspect", root),
        ("inspect", root / "checkpoint-2", "--json"),
        ("ls", root),
        ("prune", root),
        ("prune", root, "--json", "--keep-last", "0", "--apply"),
    )


FOLDERS: Mapping[str, Callable[[Path], Sequence[Sequence[str | Path]]]] = {
    "causal-llama": _pair,
    "reward-qwen2": _pair,
    "reward-run": _run_folder,
    "fsdp2-reward": _sharded,
    "zero/stage1-reward": _sharded,
    "zero/stage2-tied": _sharded,
    "zero/stage3-reward": _sharded,
    "zero/stage3-saved": _sharded,
    "merged": _merged,
    "torch files": _pair,
}


def folders(data: bytes) -> None:
    """Injure a fixture once to three times, and run one command on it."""
    choices = Choices(data)
    name = choices.pick(list(FOLDERS))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "root"
        made = {"merged": _merged_model, "torch files": _torch_files}
        shutil.copytree(made[name]() if name in made else FIXTURES / name, root)
        done = [injure(root, choices) for _ in range(1 + choices.below(3))]
        arguments = choices.pick(FOLDERS[name](root))
        try:
            must_hold(arguments)
        except BaseException as error:
            error.add_note(f"{name}: {'; '.join(done)}: {' '.join(map(str, arguments))}")
            raise


def safetensors(data: bytes) -> None:
    """Read the bytes as a safetensors file; where the reference package reads it, both see the same names."""
    path = _file("x.safetensors", data)
    scanned = scan_file(path)
    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
    except Exception:  # noqa: BLE001 - the package raises what it likes
        assert scanned.problems
    else:
        assert scanned.problems or names == set(scanned.tensors)


def torch_file(data: bytes) -> None:
    """Read the bytes as what `torch.save` wrote."""
    with contextlib.suppress(CorruptFile):
        read_torch_file(_file("x.pt", data))


def torch_pickle(data: bytes) -> None:
    """Read the bytes as the pickle of the rank files of a model and of its optimizer."""
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        with zipfile.ZipFile(_place() / name, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            archive.writestr("archive/data/0", bytes(64))
    with contextlib.suppress(CheckpointError, PlanError):
        subject = sharded_subject(ShardedDir(kind=ZERO, folder=read_folder(_place()), rank_files={".": ()}))
        judge_files(subject)
        subject.state.assemble(subject.state.entries)


def rank_pickle(data: bytes) -> None:
    """Read the bytes as the pickle of two ranks' DTensors or ShardedTensors."""
    paths = [_place() / f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
    for path in paths:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", data)
            for key, nbytes in _STORAGES.items():
                archive.writestr(f"archive/data/{key}", bytes(nbytes))
    with contextlib.suppress(CheckpointError, PlanError):
        names = tuple(path.name for path in paths)
        subject = sharded_subject(ShardedDir(kind=VERL, folder=read_folder(_place()), rank_files={".": names}))
        judge_files(subject)
        subject.state.assemble(subject.state.entries)


_STORAGES = {"0": 72, "1": 16, "2": 48, "3": 16, "4": 72}
"""Sizes of the storages in `RANK_FILES`, as far as the reader is to get behind them."""


def dcp(data: bytes) -> None:
    """Read the bytes as the `.metadata` of a distributed checkpoint."""
    path = _file(".metadata", data)
    with contextlib.suppress(CheckpointError, PlanError):
        found = read_dcp(path.parent)
        assemble_dcp(found, found.tensors)


def configs(data: bytes) -> None:
    """Read the bytes as each of the JSON files, and ask an adapter's config about modules."""
    path = _file("config.json", data)
    for read in (read_model_config, read_trainer_state, read_manifest, read_adapter_config):
        with contextlib.suppress(CorruptFile, BadConfig):
            config = read(path)
            if isinstance(config, AdapterConfig) and not config.problems:
                config.targets("model.layers.0.self_attn.q_proj")
                assert config.scaling("model.layers.1.mlp.down_proj") is not None
    for name in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        _file(name, data)
    turn_end(read_tokenizer(path.parent, ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json")))


def _file(name: str, data: bytes) -> Path:
    path = _place() / name
    path.write_bytes(data)
    return path


@lru_cache
def _place() -> Path:
    """Return one folder for all that is written: making a new one each time is what would take the time."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return place


@lru_cache
def _torch_files() -> Path:
    """Return a base and an adapter whose weights `torch.save` wrote."""
    from safetensors.torch import load_file
    from torch import save

    out = _place() / "torch-files"
    shutil.copytree(FIXTURES / "causal-llama", out)
    (out / "base" / "model.safetensors.index.json").unlink()
    for folder, name in (("adapter", "adapter_model.bin"), ("base", "pytorch_model.bin")):
        shards = sorted((out / folder).glob("*.safetensors"))
        save({key: tensor for shard in shards for key, tensor in load_file(shard).items()}, out / folder / name)
        for shard in shards:
            shard.unlink()
    return out


@lru_cache
def _merged_model() -> Path:
    """Return a model that the command itself merged."""
    out = _place() / "merged"
    pair = FIXTURES / "reward-qwen2"
    code, _, err = run(("merge", pair / "adapter", "--base", pair / "base", "-o", out))
    assert code == 0, err
    return out


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "safetensors": safetensors,
    "torch-file": torch_file,
    "torch-pickle": torch_pickle,
    "rank-pickle": rank_pickle,
    "dcp": dcp,
    "configs": configs,
    "folders": folders,
}


def seeds(target: str) -> Iterator[bytes]:
    """Yield real files for a fuzzer to begin with."""
    patterns = {
        "safetensors": ("**/*.safetensors",),
        "torch-file": ("**/*states.pt", "**/*.bin"),
        "dcp": ("**/.metadata",),
        "configs": ("**/*config.json", "**/trainer_state.json"),
    }
    for pattern in patterns.get(target, ()):
        yield from (path.read_bytes() for path in sorted(FIXTURES.glob(pattern)))
    pickled = {"torch-pickle": FIXTURES.glob("**/*states.pt"), "rank-pickle": RANK_FILES.iterdir()}
    if target in pickled:
        for path in sorted(pickled[target]):
            with zipfile.ZipFile(path) as archive:
                yield from (archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
