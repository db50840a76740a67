"""Pickles that call what no checkpoint needs are errors that name file and callable; those of real programs are not."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import os
import pathlib
import pickle
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from lora_tool.formats.pickle_names import foreign
from lora_tool.formats.pickles import names_in
from lora_tool.formats.unread_pickles import foreign_calls
from tests.hostile.folders import FIXTURES, Pair, copy_pair, lora_tool
from tests.hostile.test_rank_files import repickled

SYSTEM = b"cposix\nsystem\nX\x02\x00\x00\x00ls\x85R0"
"""Calls `os.system` and throws the result away."""
GETATTR = b"c__builtin__\ngetattr\n"


def text(words: str) -> bytes:
    return b"X" + len(words.encode()).to_bytes(4, "little") + words.encode()


HARMFUL = {
    "a call": (b"cposix\nsystem\n" + text("ls") + b"\x85R.", "posix.system"),
    "a call that is thrown away": (SYSTEM + b"N.", "posix.system"),
    "a name that is not called": (b"cbuiltins\nexec\nq\x00.", "builtins.exec"),
    "a name on the stack": (text("nt") + text("system") + b"\x93.", "nt.system"),
    "a path of names": (text("torch") + text("os.system") + b"\x93.", "torch.os.system"),
    "a class in a module in a module": (text("numpy") + text("ctypes.CDLL") + b"\x93)R.", "numpy.ctypes.CDLL"),
    "an instance": (b"(X\x02\x00\x00\x00lsios\nsystem\n.", "os.system"),
    "protocol 0": (b"cos\nsystem\n(S'true'\ntR.", "os.system"),
    "protocol 0, a function of a library": (b"cevil\nrun\n(S'true'\ntR.", "evil.run"),
    "a new object": (b"csubprocess\nPopen\n" + text("ls") + b"\x85\x81.", "subprocess.Popen"),
    "a class that another module imported": (b"cevil.tools\nPopen\n)\x81.", "evil.tools.Popen"),
    "an attribute": (GETATTR + b"(cos\npath\n" + text("join") + b"tR.", "os.path"),
    "a method of a library's class": (
        GETATTR + b"(ctransformers\nAutoModel\n" + text("from_pretrained") + b"tR" + text("evil/model") + b"\x85R.",
        "transformers.AutoModel.from_pretrained",
    ),
    "attributes by operator": (b"coperator\nattrgetter\n" + text("system") + b"\x85R.", "operator.attrgetter"),
    "a partial function": (b"cfunctools\npartial\nccode\ninteract\n\x85R.", "code.interact"),
    "the state of an object": (b"cfoo\nBar\n)\x81}" + text("x") + b"cposix\nsystem\nsb.", "posix.system"),
    "the registry of extensions": (b"\x82\x01.", "copyreg._inverted_registry[1]"),
    "a pickle in the pickle": (b"c_pickle\nloads\nC\x01N\x85R.", "_pickle.loads"),
    "torch's file in the pickle": (b"ctorch.storage\n_load_from_bytes\nC\x01N\x85R.", "torch.storage._load_from_bytes"),
    "Python 2's name": (b"ccommands\ngetoutput\n" + text("ls") + b"\x85R.", "commands.getoutput"),
    "a letter that looks like another": (b"cp\xd0\xbesix\nsystem\n.", "p\\u043esix.system"),
    "a second pickle": (b"N.\x80\x02cposix\nsystem\n)R.", "posix.system"),
    "the end is missing": (SYSTEM, "posix.system"),
    "an instruction that no checkpoint needs": (b"cposix\nsystem\n2.", "posix.system"),
    "what runs code of a graph": (
        b"ctorch.fx.graph_module\nreduce_graph_module\n)R.",
        "torch.fx.graph_module.reduce_graph_module",
    ),
}


@pytest.mark.parametrize("what", HARMFUL)
def test_what_no_checkpoint_needs_is_named(what: str) -> None:
    pickled, name = HARMFUL[what]
    found = names_in(b"\x80\x02" + pickled)
    assert name in foreign(found)
    assert name in foreign(found, weights=True)


class Settings:
    """A class of somebody's training script."""


settings = type("settings", (), {"__module__": __name__})


NEEDED: dict[str, Callable[[], Any]] = {
    "values": lambda: [1, 2.5, "x", b"y", None, True, 3 + 4j, {5}, frozenset({6}), slice(7), range(8), bytearray(b"9"), ...],
    "containers": lambda: [collections.OrderedDict(a=1), collections.defaultdict(list), collections.deque([1])],
    "what settings are made of": lambda: [
        argparse.Namespace(r=8), pathlib.Path("a"), dt.timedelta(1), dt.datetime.now(dt.timezone.utc), type(None)
    ],
    "arrays": lambda: [np.float32(1), np.arange(3), np.zeros(2, "O"), np.dtype("f4"), np.array("x")],
    "random states": lambda: [
        random.getstate(), np.random.default_rng(3), np.random.RandomState(3), random.Random(3)
    ],
    "torch's": lambda: [torch.float32, torch.device("cpu"), torch.Size((1,)), torch.strided],
    "a class of the user's": Settings,
    "one that is not spelled as a class": settings,
    "a class": lambda: collections.Counter,
}  # fmt: skip


@pytest.mark.parametrize("what", NEEDED)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_checkpoints_need_is_not_named(what: str, protocol: int) -> None:
    assert foreign(names_in(pickle.dumps(NEEDED[what](), protocol))) == ()


@pytest.mark.parametrize("pickled", [b"cmine\nSettings\n)\x81.", b"cdatasets.arrow\nTable\n)\x81."])
def test_classes_of_other_programs_are_in_states_and_not_in_weights(pickled: bytes) -> None:
    assert foreign(names_in(pickled)) == ()
    assert len(foreign(names_in(pickled), weights=True)) == 1


def calling(path: Path, harm: bytes = SYSTEM) -> Path:
    """Put instructions before those of the torch file's pickle."""
    repickled(path, lambda pickled: pickled[:2] + harm + pickled[2:])
    return path


def weights_of(pair: Pair) -> Path:
    """Keep the adapter's weights in a pickle."""
    held = pair.adapter / "adapter_model.safetensors"
    path = held.with_name("adapter_model.bin")
    torch.save(load_file(held), path)
    held.unlink()
    return path


def legacy(pair: Pair) -> Path:
    path = pair.adapter / "scheduler.pt"
    torch.save({"lr": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    assert data.startswith(magic)
    path.write_bytes(magic + b"\x80\x02" + SYSTEM + data[len(magic) + 2 :])
    return path


def arguments(pair: Pair) -> Path:
    torch.save({"r": 8}, pair.adapter / "training_args.bin")
    return calling(pair.adapter / "training_args.bin")


def base(pair: Pair) -> Path:
    shards = sorted(pair.base.glob("model*.safetensors*"))
    weights = {name: tensor for path in shards if path.suffix != ".json" for name, tensor in load_file(path).items()}
    torch.save(weights, pair.base / "pytorch_model.bin")
    for path in shards:
        path.unlink()
    return calling(pair.base / "pytorch_model.bin")


def parameter(pair: Pair) -> Path:
    """Beside the adapter a rank file has a call in the place of a parameter, so that the ranks cannot be put together."""
    tag = FIXTURES / "zero" / "stage3-reward" / "global_step2"
    shutil.copytree(tag, pair.adapter / tag.name)
    path = next((pair.adapter / tag.name).glob("*_model_states.pt"))
    torch.save({"module": {"a.weight": 0}, "ds_version": "0.19.8"}, path)
    repickled(path, lambda pickled: pickled.replace(b"K\x00", b"cposix\nsystem\nX\x02\x00\x00\x00ls\x85R", 1))
    return path


FOLDERS: dict[str, Callable[[Pair], Path]] = {
    "weights": lambda pair: calling(weights_of(pair)),
    "training arguments": arguments,
    "a state of torch's old format": legacy,
    "the base": base,
}


@pytest.mark.parametrize("what", FOLDERS)
def test_every_command_refuses_by_file_and_callable(tmp_path: Path, what: str) -> None:
    pair = copy_pair(tmp_path)
    path = FOLDERS[what](pair)
    with_base = ["--base", str(pair.base)]
    out = ["-o", str(pair.out)]
    calls = [["validate", str(pair.adapter), *with_base], pair.arguments, ["ci", str(pair.adapter), *with_base, *out]]
    if what != "the base":
        calls += [
            ["convert", str(pair.adapter), "--to", "peft", *out],
            ["resize", str(pair.adapter), "--rank", "2", *out],
        ]
    else:
        calls += [["extract", str(pair.base), "--base", str(FIXTURES / "causal-llama" / "base"), "--rank", "2", *out]]
    for call in calls:
        done = lora_tool(*call)
        assert done.code == 1, call
        assert "LT116" in done.out + done.err, call
        assert "posix.system" in done.out + done.err, call
        assert path.name in done.out + done.err, call
        assert not pair.out.exists()
    done = lora_tool(*pair.arguments, "--ignore", "LT116")
    assert done.code == 0, done.out + done.err
    assert pair.out.is_dir()


def test_a_call_is_named_where_the_ranks_cannot_be_put_together(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = parameter(pair)
    for call in (["validate", str(pair.adapter)], pair.arguments):
        done = lora_tool(*call)
        assert done.code == 1, done
        assert f"{path.parent.name}/{path.name}" in done.out + done.err
        assert "posix.system" in done.out + done.err


def test_the_same_folders_without_the_call_are_good(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    weights_of(pair)
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"state": {0: torch.ones(2)}}, pair.adapter / name, _use_new_zipfile_serialization=name < "p")
    torch.save(random.getstate(), pair.adapter / "rng_state.pth")
    (pair.adapter / "tokens.bin").write_bytes(b"cat\ndog\n" * 100)
    assert "LT116" not in lora_tool("validate", str(pair.adapter)).out


def of_a_rank(folder: Path) -> Path:
    shutil.copytree(FIXTURES / "zero" / "stage3-reward", folder)
    return calling(next(folder.rglob("*_optim_states.pt")))


def of_a_chunk(folder: Path) -> Path:
    save_dcp({"model": {"a.weight": torch.ones(4, 4)}}, checkpoint_id=folder, no_dist=True)
    path = calling(next(folder.glob("*.distcp")))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = path.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def of_the_metadata(folder: Path) -> Path:
    save_dcp({"model": {"a.weight": torch.ones(4, 4)}}, checkpoint_id=folder, no_dist=True)
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(b"\x80\x02" + SYSTEM + data)
    return folder / ".metadata"


def beside_the_ranks(folder: Path) -> Path:
    shutil.copytree(FIXTURES / "zero" / "stage3-reward", folder)
    torch.save({}, folder / "global_step2" / "common.pt")
    return calling(folder / "global_step2" / "common.pt")


def of_the_optimizer(folder: Path) -> Path:
    shutil.copytree(FIXTURES / "fsdp2-full", folder)
    (folder / "optimizer_0").mkdir()
    (folder / "optimizer_0" / ".metadata").write_bytes(b"\x80\x02" + SYSTEM + b"N.")
    return folder / "optimizer_0" / ".metadata"


class Called:
    """Unpickled by torch's own loader, it runs a program."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("true",))


def of_an_object(folder: Path) -> Path:
    save_dcp({"model": {"a.weight": torch.ones(4, 4)}, "data": {"at": [Called()]}}, checkpoint_id=folder, no_dist=True)
    return next(folder.glob("*.distcp"))


def of_an_object_beside(folder: Path) -> Path:
    shutil.copytree(FIXTURES / "fsdp2-full", folder)
    save_dcp({"a": torch.ones(4, 4), "data": Called()}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    return next((folder / "optimizer_0").glob("*.distcp"))


MADE = [of_a_rank, of_a_chunk, of_the_metadata, beside_the_ranks, of_the_optimizer, of_an_object, of_an_object_beside]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("make", MADE)
def test_consolidate_refuses_by_file_and_callable(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "run")
    out = tmp_path / "out"
    for call in (["validate", str(tmp_path / "run")], ["consolidate", str(tmp_path / "run"), "-o", str(out)]):
        done = lora_tool(*call)
        assert done.code == 1, done
        assert f"{path.name}" in done.out + done.err
        assert "LT116" in done.out + done.err
        assert "posix.system" in done.out + done.err
    done = lora_tool("consolidate", str(tmp_path / "run"), "-o", str(out), "--ignore", "LT116")
    assert done.code == 0, done
    assert out.is_dir()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_objects_of_a_healthy_run_are_silent(tmp_path: Path) -> None:
    objects = {
        "lr": 1e-4,
        "rng": random.getstate(),
        "numpy": np.random.default_rng(3),
        "at": collections.OrderedDict(a=1),
    }
    save_dcp(
        {"model": {"a.weight": torch.ones(4)}, "states": objects, "loader": [Settings()]},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    assert "LT116" not in lora_tool("validate", str(tmp_path)).out


def test_many_names_take_no_time(tmp_path: Path) -> None:
    """What is read of one file is bounded, in time and in memory."""
    start = time.process_time()
    path = tmp_path / "optimizer.pt"
    path.write_bytes(b"\x80\x02" + b"cposix\nsystem\n0" * (1 << 17) + b"]" * (1 << 25))
    assert [problem.subject for problem in foreign_calls(path)] == ["posix.system"]
    assert time.process_time() - start < 30
