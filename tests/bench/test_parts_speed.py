"""What it costs to cut a plan of 671 B parameters into parts, to ship and to finish them:
`pytest -m bench -s tests/bench/test_parts_speed.py`.

Base and adapter are DeepSeek-V3's of `sparse_models.py`; the plan writes 1.34 TB, and every part of it is walked
without writing: cut, pickled, read again, its inputs compared with what the plan saw, its work handed out as units.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_tool import plan_merge
from lora_tool.execution.attempts import WorkPart, parts_of
from lora_tool.execution.journal import Journal, digest_of
from lora_tool.execution.local_engine import batches_of
from lora_tool.execution.reading import Sources
from lora_tool.execution.work import Work
from tests.bench.sparse_models import DEEPSEEK_V3, make_adapter, make_base

pytestmark = pytest.mark.bench


@contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.process_time()
    yield
    print(f"{what:<52}{time.process_time() - began:8.2f} s CPU")


def walk(sent: bytes) -> int:
    """Do all of a part but reading and writing weights; return the bytes that it would write."""
    part: WorkPart = pickle.loads(sent)
    work = part.work
    with Sources(work.plan.inputs):
        return sum(
            unit.nbytes for shard in work.shards for batch in batches_of(shard, work.plan.precision) for unit in batch
        )


def test_a_terabyte_in_parts(tmp_path: Path) -> None:
    make_base(tmp_path / "base", DEEPSEEK_V3)
    make_adapter(tmp_path / "adapter", DEEPSEEK_V3)
    print()
    with timed("plan"):
        plan = plan_merge(tmp_path / "base", tmp_path / "adapter", ignore=["LT208"])
    with timed("digest"):
        digest = digest_of(plan)
    folder = tmp_path / "unfinished"
    folder.mkdir()
    journal = Journal(folder, digest)
    journal.begin()
    with timed("cut"):
        parts = list(parts_of(Work(plan=plan, folder=folder, digest=digest, shards=plan.shards)))
    with timed("pickle"):
        sent = [pickle.dumps(part) for part in parts]
    print(
        f"{len(sent)} parts, {sum(map(len, sent)) / 1e6:.1f} MB together, the largest {max(map(len, sent)) / 1e3:.0f} kB"
    )
    with timed("all parts walked, as the nodes do it"):
        walked = sum(map(walk, sent))
    print(f"{walked / 1e12:.2f} TB would be written")
    assert walked == plan.data_bytes
    assert max(map(len, sent)) <= 200_000
    with timed("1000 records written and read"):
        for number in range(1000):
            journal.note(f"{number}.json", {"plan": digest, "state": [1, 2, "3"], "notes": {}})
        assert all(journal.noted(f"{number}.json") for number in range(1000))
