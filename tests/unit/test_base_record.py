from __future__ import annotations

import shutil
from pathlib import Path

from tests import checkpoint_edits as edit
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, MODEL, RUN, SHARDED, copy_of
from tests.mutations.lt5_hazards import record


def test_the_recorded_base_is_silent_however_it_is_cut_into_shards(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    base = folder.parent / "base"
    record(folder, base)
    assert lines(judge(folder, base=base)) == []
    table: edit.Tensors = {}
    for shard in sorted(base.glob("model-*.safetensors")):
        table |= edit.read(shard)
        shard.unlink()
    (base / edit.INDEX).unlink()
    edit.write(base / "model.safetensors", table)
    assert lines(judge(folder, base=base)) == []


def test_without_a_base_nothing_is_compared(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    record(folder, folder.parent / "base")
    assert lines(judge(folder)) == []


def test_a_link_out_of_the_folder_is_norecord(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    (tmp_path / "elsewhere.json").write_text("[]")
    (folder / "lora_tool_train.json").symlink_to(tmp_path / "elsewhere.json")
    assert lines(judge(folder)) == []


def test_the_message_names_the_base_that_was_trained_on(tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    base = folder.parent / "base"
    record(folder, base)
    other = Path(shutil.copytree(base, tmp_path / "other"))
    with edit.tensors(other, "model-00002-of-00002.safetensors") as table:
        name = next(name for name in table if name.startswith("model.layers"))
        table[name] = edit.scrambled(table[name])
    report = judge(folder, base=other)
    assert codes(report) == {"LT507", "LT520"}
    assert report.findings[0].message.endswith(": some/model")
    assert str(report.findings[0].hint).startswith("lora-tool validate --base some/model ")


def test_the_record_of_a_run_is_that_of_its_checkpoints(tmp_path: Path) -> None:
    folder = copy_of(RUN, tmp_path)
    record(folder.parent, FIXTURES / MODEL)
    assert lines(judge(folder, base=FIXTURES / MODEL)) == []
    record(folder.parent, FIXTURES / SHARDED)
    assert codes(judge(folder, base=FIXTURES / MODEL)) == {"LT507"}
