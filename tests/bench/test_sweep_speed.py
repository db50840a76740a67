"""Twenty adapters of one base: as many merges against one with `--each`:
`pytest -m bench -s tests/bench/test_sweep_speed.py`.

Bytes are those of read calls, `copy_file_range` included, as Linux counts them for a process. Both keep
what they write, 7 GB: in a virtual machine memory that was just given up costs less than other memory.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.bench.models import make_adapter, make_base

pytestmark = pytest.mark.bench

COUNT = 20
COUNTED = """
import json, resource, sys
from lora_tool.cli.main import main
try:
    main(sys.argv[2:])
except SystemExit as ended:
    code = ended.code
used = resource.getrusage(resource.RUSAGE_SELF)
counts = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
with open(sys.argv[1], "w") as file:
    json.dump([int(counts["rchar"]), used.ru_utime + used.ru_stime], file)
sys.exit(code)
"""


class Cost(NamedTuple):
    read: int
    cpu: float


def cost(tmp_path: Path, *args: str | Path) -> Cost:
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "cost"), "merge", *map(str, args), "--quiet"]
    subprocess.run(command, check=True)
    return Cost(*json.loads((tmp_path / "cost").read_text()))


@pytest.mark.parametrize("targets", [("self_attn.q_proj", "self_attn.v_proj"), None], ids=["q-v", "linear"])
def test_twenty_merges_against_one_with_each(tmp_path: Path, targets: tuple[str, ...] | None) -> None:
    make_base(tmp_path / "base", layers=1, shards=2)
    for number in range(COUNT):
        make_adapter(tmp_path / f"a{number}", layers=1, rank=16, targets=targets)
    adapters = [tmp_path / f"a{number}" for number in range(COUNT)]
    alone = [cost(tmp_path, adapter, "-o", tmp_path / "out" / adapter.name) for adapter in adapters]
    shutil.rmtree(tmp_path / "out")
    each = cost(tmp_path, *adapters, "--each", "-o", tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    read, cpu = sum(one.read for one in alone), sum(one.cpu for one in alone)
    print(f"\n{COUNT} merges: {read / 1e9:.2f} GB read, {cpu:.1f} s CPU")
    print(f"one --each: {each.read / 1e9:.2f} GB read, {each.cpu:.1f} s CPU")
    print(f"that is {each.read / read:.0%} of the bytes and {each.cpu / cpu:.0%} of the CPU")
    assert each.read < 0.6 * read
    assert each.cpu < 0.8 * cpu
