"""The door of engines: one class that is given plain data, here to send it to another process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import FindingsFound
from lora_tool.core.progress import Progress
from lora_tool.execution.engine import execute
from lora_tool.execution.local_engine import Worker, batches_of
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.work import Finished, Sample, Work, WorkDone, added_up
from lora_tool.plans.consolidate.library import plan_consolidate
from lora_tool.plans.core.manifest import sha256_of

ROOT = Path(__file__).parents[2]


def write(sent: bytes) -> list[Sample]:
    """Write a batch of units, in a process that knows nothing but what was sent."""
    path, inputs, precision, batch = pickle.loads(sent)
    out = os.open(path, os.O_RDWR)
    try:
        with Sources(inputs) as sources:
            worker = Worker(sources, precision)
            return [sample for unit in batch if (sample := worker.write(unit, out)) is not None]
    finally:
        os.close(out)


def look(sent: bytes) -> bytes:
    """Run a part of the check of values, as `write` does."""
    return pickle.dumps(pickle.loads(sent).run(lambda _: None))


class ProcessEngine:
    """Every batch and check in another process, which sees the same files."""

    def run(self, work: Work, *, finished: Finished, progress: Progress) -> WorkDone:
        """See `Engine`."""
        plan = work.plan
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as workers:
            looks = [workers.submit(look, pickle.dumps(check)) for check in work.checks]
            for shard in work.shards:
                path = work.folder / shard.filename
                out = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
                os.ftruncate(out, len(shard.header) + shard.data_bytes)
                write_exactly(out, memoryview(shard.header), 0)
                sent = [(path, plan.inputs, plan.precision, batch) for batch in batches_of(shard, plan.precision)]
                done = workers.map(write, map(pickle.dumps, sent))
                samples = [sample for some in done for sample in some]
                os.fsync(out)
                os.close(out)
                finished(shard, added_up(samples))
                progress(shard.data_bytes)
            findings = [finding for each in looks for finding in pickle.loads(each.result())]
        return WorkDone(hashes={path: sha256_of(path) for path in plan.hashed}, findings=findings)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_merge_in_another_process_writes_the_same_bytes(tmp_path: Path) -> None:
    adapter = open_checkpoint(ROOT / "fixtures/reward-qwen2/adapter")
    assert isinstance(adapter, AdapterDir)
    plan = plan_merge(open_model(ROOT / "fixtures/reward-qwen2/base"), adapter, max_shard_size=60_000)
    told: list[int] = []
    execute(plan, tmp_path / "sent", engine=ProcessEngine(), progress=told.append)
    execute(plan, tmp_path / "here")
    assert content(tmp_path / "sent") == content(tmp_path / "here")
    assert sum(told) == plan.data_bytes


def test_values_are_checked_in_another_process(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(ROOT / "fixtures/zero/stage2-reward", tmp_path / "run"))
    plan = plan_consolidate(checkpoint)
    assert plan.values is not None
    assert pickle.loads(pickle.dumps(plan)) == plan
    execute(plan, tmp_path / "sent", engine=ProcessEngine())
    execute(plan, tmp_path / "here")
    assert content(tmp_path / "sent") == content(tmp_path / "here")

    span = next(plan.steps).op.inputs[0].spans[0]
    data = bytearray(span.path.read_bytes())
    data[span.offset] ^= 1
    span.path.write_bytes(data)
    with pytest.raises(FindingsFound, match="LT411"):
        execute(plan_consolidate(checkpoint), tmp_path / "damaged", engine=ProcessEngine())
    assert not (tmp_path / "damaged").exists()
