"""Adapters out of adapters and models: `pytest -m bench -s tests/bench/test_algebra_speed.py`.

combine, resize and prepare beside a synced copy of their inputs, of 128 MB to 1.66 GB, the decomposition that
PEFT's `svd` calls beside ours, the residual of extract beside the best that there is, and its memory at the widths of 8 B.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import open_adapter
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.weights import read_single
from lora_tool.plans.algebra.krylov import nearest
from lora_tool.plans.algebra.spectrum import Reader, compressed
from lora_tool.plans.algebra.terms import factors_of_sum
from tests.bench import processes
from tests.bench.models import EIGHT_BILLION, SMALL, Sizes, make_adapter, make_base
from tests.bench.processes import interleaved, table

RANK, ROUNDS = 64, 3
HALF_OF_70B = Sizes(hidden=8192, intermediate=28672, vocabulary=128256, heads=64, kv_heads=8)
SHAPES = {"128 MB": (SMALL, 14), "670 MB": (EIGHT_BILLION, 32), "1.66 GB": (HALF_OF_70B, 40)}
"""The sizes of a base and how many layers of it have LoRA: at the last, starting Python is a small part of the time."""

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module", params=SHAPES)
def adapters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Two all-linear float32 adapters of rank 64, with other values: on 14 layers of 2048, and on all of Llama 3 8B."""
    root = tmp_path_factory.mktemp("bench")
    first, second = root / "first", root / "second"
    sizes, layers = SHAPES[request.param]
    make_adapter(first, layers=layers, rank=RANK, sizes=sizes)
    shutil.copytree(first, second)
    path = second / "adapter_model.safetensors"
    save_file({name: -tensor.roll(1) for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    print(f"\ntwo adapters of {path.stat().st_size / 1e6:.0f} MB")
    yield first, second
    shutil.rmtree(root)


def test_against_a_copy_of_the_inputs(adapters: tuple[Path, Path]) -> None:
    first, second = map(str, adapters)
    out = adapters[0].parent / "out"

    def ours(command: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "lora_tool", command, *options, "-o", str(out), "-q"]

    both = f"mkdir {out} && cp -r {first} {second} {out} && sync {out}/*/*"
    two = {
        "cp of both": ["sh", "-c", both],
        "combine, exact": ours("combine", first, second),
        "combine --rank 64": ours("combine", first, second, "--rank", "64"),
    }
    one = {
        "cp": ["sh", "-c", f"cp -r {first} {out} && sync {out}/*"],
        "resize --rank 16": ours("resize", first, "--rank", "16"),
        "prepare --for vllm": ours("prepare", first, "--for", "vllm"),
        "prepare --for mlx": ours("prepare", first, "--for", "mlx"),
        "--version": [sys.executable, "-m", "lora_tool", "--version"],
    }
    for cold in (), adapters:
        for commands, copy in ((two, "cp of both"), (one, "cp")):
            runs = interleaved(commands, out=out, rounds=ROUNDS, cold=cold)
            print(f"\ninputs {'on the disk alone' if cold else 'in the page cache'}\n{table(runs, against=copy)}")


def test_against_pefts_svd(tmp_path: Path) -> None:
    """Two adapters of rank 64 on one 4096 x 1024 matrix, to rank 64: the CPU of the decomposition alone."""
    torch.manual_seed(0)
    folders = []
    for at in range(2):
        make_adapter(tmp_path / str(at), layers=1, rank=RANK, targets=("self_attn.q_proj",))
        path = tmp_path / str(at) / "adapter_model.safetensors"
        save_file(
            {name: torch.randn((RANK, 1024) if "lora_A" in name else (4096, RANK)) for name in load_file(path)},
            path,
        )
        folders.append(tmp_path / str(at))
    (factors,) = factors_of_sum([view_of(open_adapter(each)) for each in folders], (1.0, 1.0))
    pairs = [
        [
            torch.from_numpy(np.fromfile(part.path, np.float32, part.spec.numel, offset=part.spans[0].offset)).reshape(
                part.shape
            )
            for part in (term.b, term.a)
        ]
        for term in factors.terms
    ]

    def theirs() -> None:
        delta = sum((factors.terms[at].scale * b @ a for at, (b, a) in enumerate(pairs)), torch.zeros(4096, 1024))
        left, values, right = torch.linalg.svd(delta)  # as `add_weighted_adapter` does, with all of U
        _ = left[:, :RANK] @ torch.diag(values[:RANK]), right[:RANK]

    seconds, reader = {}, Reader(files=OpenFiles(opened_regular))
    for name, run in (("ours", lambda: compressed(factors, reader, rank=RANK)), ("PEFT's svd", theirs)):
        run()
        taken = []
        for _ in range(ROUNDS):
            begun = time.process_time()
            run()
            taken.append(time.process_time() - begun)
        seconds[name] = min(taken)
    times = seconds["PEFT's svd"] / seconds["ours"]
    print(
        f"\n4096 x 1024, 2 x rank 64: {', '.join(f'{n} {s:.3f} s' for n, s in seconds.items())} of CPU, {times:.0f} ×"
    )
    assert times >= 50


def test_residual_of_extract_beside_the_best(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    before = torch.tensor(generator.standard_normal((2048, 1024)) * 0.02).to(torch.bfloat16)
    left, right = (np.linalg.qr(generator.standard_normal((side, 1024))).Q for side in (2048, 1024))
    change = torch.tensor((left * np.arange(1.0, 1025.0) ** -0.7) @ right.T) * 0.05
    after = (before.double() + change).to(torch.bfloat16)
    for name, tensor in (("before", before), ("after", after)):
        save_file({"w": tensor}, tmp_path / name)
    tables = [read_single(tmp_path / name).tensors["w"] for name in ("after", "before")]
    best = torch.linalg.svdvals(after.double() - before.double())
    for rank in (16, 64):
        begun = time.process_time()
        found = nearest(*tables, rank=rank)
        cpu = time.process_time() - begun
        least = float(best[rank:].norm())
        print(f"\n2048 x 1024 at rank {rank}: {found.residual / least:.6f} of the best residual, {cpu:.2f} s of CPU")
        assert found.residual <= 1.002 * least


def test_memory_of_extract_at_the_widths_of_8b(tmp_path: Path) -> None:
    """One layer of Llama 3 8B, all of whose matrices changed."""
    base, tuned, out = tmp_path / "base", tmp_path / "tuned", tmp_path / "out"
    make_base(base, layers=1, shards=1, sizes=replace(EIGHT_BILLION, vocabulary=1024))
    shutil.copytree(base, tuned)
    path = tuned / "model-00001-of-00001.safetensors"
    changed = {
        name: tensor if "norm" in name else tensor + 1e-3 * torch.randn(tensor.shape).to(tensor.dtype)
        for name, tensor in load_file(path).items()
    }
    save_file(changed, path, metadata={"format": "pt"})
    command = [sys.executable, "-m", "lora_tool", "extract", str(tuned), "--base", str(base), "--rank", "64"]
    taken = processes.run([*command, "-o", str(out), "-q"])
    print(f"\nextract of a layer of 8 B at rank 64: {taken.cpu:.1f} s of CPU, {taken.rss:.0f} MB")
    assert taken.rss <= 200
