"""A merge of 1.5 GB on two Ray nodes of this machine beside the local engine: `pytest -m bench -s tests/bench/test_ray_speed.py`.

Two nodes on one machine gain nothing: the difference is what a cluster costs, joining it, asking the nodes, importing
numpy in each worker.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from tests.bench.models import make_adapter, make_base
from tests.bench.processes import interleaved, table
from tests.bench.test_merge_speed import LAYERS
from tests.cluster.conftest import Cluster, cluster, joined

pytestmark = pytest.mark.bench
__all__ = ["cluster", "joined"]  # the fixtures

MOST_S = 15.0
"""What the cluster may cost."""


def test_two_nodes_beside_one_machine(joined: Cluster, tmp_path: Path) -> None:
    make_base(tmp_path / "base", layers=LAYERS, shards=8)
    make_adapter(tmp_path / "adapter", layers=LAYERS, rank=16)
    out = tmp_path / "merged"
    merge = [sys.executable, "-m", "lora_tool", "merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "base")]
    merge += ["-o", str(out), "--quiet"]
    runs = interleaved({"this machine": merge, "two Ray nodes": [*merge, *joined.options]}, out=out, rounds=3)
    print(f"\n{table(runs, against='this machine')}")
    here, there = (statistics.median(one.wall for one in taken) for taken in runs.values())
    assert there < here + MOST_S
