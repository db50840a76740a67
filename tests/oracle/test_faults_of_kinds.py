"""Every kind of pieces with every fault: which rules find it. A cell that is `none` says what nothing in the files tells.

What only DeepSpeed's files can have is in tests/unit/test_zero_faults.py, test_zero_universal.py and
test_deepspeed_parallel.py.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_tool import consolidate
from lora_tool.checkpoints import open_sharded
from lora_tool.checkpoints.states.training_state import training_state
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report import Severity
from lora_tool.formats.torch_zip import Record
from lora_tool.verification.validating import validate
from tests.hostile.folders import FIXTURES
from tests.unit.test_ranks_on_disk import cut, whole

TABLE = """
                 missing  last   lone   truncated  empty  copied             swapped      foreign                  step  bit    NaN          zeros
verl             LT401    LT401  LT401  LT402      LT402  LT404,LT405,LT408  LT404        LT404,LT407,LT408        none  LT411  LT412        LT413
fsdp2-ranks      LT401    .      LT401  .          .      LT404,LT405,LT408  .            LT404,LT407,LT408        .     .      LT412        .
fsdp1-ranks      .        LT401  .      LT402      .      .                  LT404        .                        .     LT411  .            .
fsdp1-local      LT401    LT401  LT401  LT402      LT402  LT404,LT405        LT404        LT404,LT407              none  LT411  LT412        LT413
fsdp1-dcp        .        .      .      .          LT402  LT405              .            .                        .     .      .            LT413
fsdp2-dcp        LT401    LT401  LT401  LT402      LT402  LT405              none         LT402                    none  LT411  LT412        LT413
tensor-parallel  LT401    LT401  LT401  LT402      LT402  LT402              LT402        LT402                    none  LT411  LT412        LT413
both             LT401    .      .      .          .      .                  LT402        LT402                    .     LT411  .            .
megatron         .        .      LT401  LT402      .      .                  .            .                        none  LT411  LT412        .
safetensors      LT401    LT401  LT401  LT402      LT402  LT405,LT408        none         LT408                    none  none   LT412        LT413
full             .        .      .      LT402      LT402  .                  .            .                        none  LT411  LT412        LT413
one-file         .        .      .      LT402      LT402  .                  .            .                        none  LT411  LT412        LT413
zero2            LT401    LT401  LT401  LT402      LT402  LT404,LT405        LT404,LT414  LT407                    none  LT411  LT412,LT414  LT413,LT414
zero3            LT401    LT401  LT401  LT402      LT402  LT404,LT405        LT404        LT403,LT404,LT407,LT408  none  LT411  LT412        LT413
"""
"""Kind × fault → the codes; `.` where a kind of one file cannot have the fault, or another row shows it by the same reader.

Under tensor parallelism ranks save different ones of the tensors that are not cut, so that no two files have one layout.
Under ZeRO-2 the 16-bit weights are saved whole, and masters that are not theirs are LT414 too.
"""
CELLS = {
    (kind, fault): frozenset() if cell == "none" else frozenset(cell.split(","))
    for faults in [TABLE.split("\n")[1].split()]
    for kind, *cells in map(str.split, TABLE.strip().split("\n")[1:])
    for fault, cell in zip(faults, cells, strict=True)
    if cell != "."
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What `trainer_saves` or a fixture has of a kind: its folder, the pattern of its pieces, another run's folder."""

    name: str
    pieces: str
    foreign: str = ""

    def source(self, trainers: Path) -> Path:
        return (FIXTURES if self.name.startswith(("megatron", "zero/")) else trainers) / self.name


DISTCP = "__*_0.distcp"
MASTERS = "global_step2/*_optim_states.pt"
KINDS = {
    "verl": Kind(name="verl-fsdp2", pieces="model_*.pt", foreign="verl-fsdp1-bf16"),
    "fsdp2-ranks": Kind(name="fsdp2-ranks", pieces="pytorch_*.bin", foreign="fsdp1-ranks"),
    "fsdp1-ranks": Kind(name="fsdp1-ranks", pieces="pytorch_*.bin", foreign="fsdp2-ranks"),
    "fsdp1-local": Kind(name="fsdp1-local", pieces="pytorch_*.bin", foreign="fsdp1-ranks"),
    "fsdp1-dcp": Kind(name="fsdp1-dcp", pieces=DISTCP, foreign="fsdp2-dcp-bf16"),
    "fsdp2-dcp": Kind(name="fsdp2-dcp-bf16", pieces=DISTCP, foreign="fsdp1-dcp"),
    "tensor-parallel": Kind(name="dcp-tp", pieces=DISTCP, foreign="dcp-fsdp-tp-bf16"),
    "both": Kind(name="dcp-fsdp-tp-bf16", pieces=DISTCP, foreign="dcp-tp"),
    "megatron": Kind(name="megatron-lora", pieces=DISTCP, foreign="megatron-moe"),
    "safetensors": Kind(name="safetensors", pieces="shard-*.safetensors", foreign="causal-llama"),
    "full": Kind(name="fsdp2-full", pieces="pytorch_model_fsdp.bin"),
    "one-file": Kind(name="one-file", pieces="state.pt"),
    "zero2": Kind(name="zero/stage2-reward", pieces=MASTERS, foreign="zero/stage1-reward"),
    "zero3": Kind(name="zero/stage3-reward", pieces=MASTERS, foreign="zero/stage3-hpz"),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A copy of a checkpoint that a test may break."""

    root: Path
    pieces: list[Path]
    """The files of the ranks, in their order."""
    other: Path
    """The second rank's file of another run."""

    @property
    def second(self) -> Path:
        return self.pieces[min(1, len(self.pieces) - 1)]

    def rewrite(self, path: Path, change: Callable[[bytes], bytes]) -> None:
        """Change what the file has of the module's tensors; checksums are right again then."""
        state = training_state(open_sharded(self.root))
        data = bytearray(path.read_bytes())
        for record in sorted(state.records(state.assemble(state.entries)), key=str):
            if record.path != path:
                continue
            at = record.offset
            old = bytes(data[at : at + record.nbytes])
            data[at : at + record.nbytes] = change(old)
            if isinstance(record, Record) and record.nbytes:
                new = zlib.crc32(change(old)).to_bytes(4, "little")
                begin = data.rindex(b"PK\x03\x04", 0, at)
                end = data.index(b"PK\x05\x06", at)
                data[begin:end] = data[begin:end].replace(record.crc.to_bytes(4, "little"), new)
        path.write_bytes(data)


def swapped(run: Run) -> None:
    """Of files of one layout: the first rank's has more than the others'."""
    one, other = run.pieces[-3:-1] if len(run.pieces) > 2 else run.pieces
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def flipped(run: Run) -> None:
    state = training_state(open_sharded(run.root))
    factors = (tensor for name, tensor in state.assemble(state.entries).items() if ".lora_" in name)
    span = next(span for tensor in factors for span in tensor.places if span.path == run.second and span.nbytes)
    data = bytearray(run.second.read_bytes())
    data[span.offset] ^= 1
    run.second.write_bytes(data)


def leave_the_first(run: Run) -> None:
    for piece in run.pieces[1:]:
        piece.unlink()


def negated(data: bytes) -> bytes:
    """Return floats of any size with some of their mantissas changed, as those of another step are."""
    return bytes(byte ^ (at % 4 == 0) for at, byte in enumerate(data))


FAULTS: dict[str, Callable[[Run], object]] = {
    "missing": lambda run: run.second.unlink(),
    "last": lambda run: run.pieces[-1].unlink(),
    "lone": leave_the_first,
    "truncated": lambda run: os.truncate(run.second, run.second.stat().st_size // 2),
    "empty": lambda run: os.truncate(run.second, 0),
    "copied": lambda run: shutil.copy(run.pieces[0], run.second),
    "swapped": swapped,
    "foreign": lambda run: shutil.copy(run.other, run.second),
    "step": lambda run: run.rewrite(run.second, negated),
    "bit": flipped,
    "NaN": lambda run: run.rewrite(run.second, lambda data: b"\xff" * len(data)),
    "zeros": lambda run: run.rewrite(run.second, lambda data: bytes(len(data))),
}


def pieces_of(root: Path, pattern: str) -> list[Path]:
    return sorted(path for path in root.rglob(pattern) if "optimizer" not in str(path.parent.name))


@pytest.fixture
def run(request: pytest.FixtureRequest, trainers: Path, tmp_path: Path) -> Run:
    kind = KINDS[request.param]
    root = tmp_path / "run"
    if request.param == "one-file":
        root.mkdir()
        torch.save({"model": load_file(trainers / "truth-fp32.safetensors")}, root / "state.pt")
    else:
        shutil.copytree(kind.source(trainers), root)
    foreign = Kind(name=kind.foreign, pieces=kind.pieces).source(trainers) if kind.foreign else root
    if request.param == "safetensors":
        foreign = tmp_path / "other"
        foreign.mkdir()
        cut(foreign, whole(), 4)
    return Run(root=root, pieces=pieces_of(root, kind.pieces), other=pieces_of(foreign, kind.pieces)[-1])


@pytest.mark.parametrize(("run", "fault"), CELLS, indirect=["run"])
def test_what_is_found(request: pytest.FixtureRequest, run: Run, fault: str, trainers: Path, tmp_path: Path) -> None:
    kind = request.node.callspec.params["run"]
    FAULTS[fault](run)
    expected = CELLS[kind, fault]
    report = validate(open_sharded(run.root), deep=True)
    assert {found.code for found in report.at_least(Severity.WARNING)} == expected
    if expected:
        adapter = trainers / "adapter-fp32" if kind == "fsdp1-local" else None  # other tensors have no shapes there
        with pytest.raises(FindingsFound, match="|".join(expected)):
            consolidate(run.root, what="adapter" if adapter else "state", adapter_config=adapter, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()
