from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import checkpoint_edits as edit
from tests.judging import codes, judge, lines
from tests.mutations import CAUSAL, FIXTURES, MODEL, RUN, SHARDED, copy_of
from tests.mutations.lt5_other_base import record

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


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


def _in_32_bits(tensor: edit.Raw) -> edit.Raw:
    halves = (tensor.data[at : at + 2] for at in range(0, len(tensor.data), 2))
    return edit.Raw("F32", tensor.shape, b"".join(b"\0\0" + half for half in halves))


def _with_more_tokens(tensor: edit.Raw) -> edit.Raw:
    more = tensor.shape[0] == 304
    return edit.Raw(tensor.dtype, (320, 16), tensor.data + bytes(16 * 16 * 2)) if more else tensor


def _tuned(tensor: edit.Raw) -> edit.Raw:
    return edit.Raw("F32", tensor.shape, bytes(each ^ 0x10 for each in _in_32_bits(tensor).data))


@pytest.mark.parametrize(
    ("change", "found"),
    [(_in_32_bits, set()), (_with_more_tokens, set()), (_tuned, {"LT520"}), (edit.scrambled, {"LT520"})],
)
def test_the_named_base_in_another_type_is_no_other_base(
    change: Callable[[edit.Raw], edit.Raw], found: set[str], tmp_path: Path
) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    other = Path(shutil.copytree(folder.parent / "base", tmp_path / "other"))
    for shard in SHARDS:
        with edit.tensors(other, shard) as table:
            table.update({name: change(tensor) for name, tensor in table.items()})
    assert codes(judge(folder, base=other)) & {"LT520"} == found


@pytest.mark.parametrize(
    ("named", "fields", "found"),
    [
        ("unsloth/Llama-3.1-8B-bnb-4bit", {}, False),
        ("microsoft/phi-4", {}, False),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", {}, False),
        ("/gone/models--meta-llama--Llama-3.1-8B/snapshots/abc", {"model_type": "qwen3"}, True),
        ("C:\\models\\Qwen3-8B", {}, True),
        ("google/gemma-2-9b", {"model_type": "gemma2"}, False),
        ("mistralai/Mixtral-8x7B-v0.1", {"model_type": "mixtral"}, False),
    ],
)
def test_a_base_that_is_not_here_is_doubted_by_its_name_or_not_compared(
    named: str, fields: dict[str, str], found: bool, tmp_path: Path
) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    with edit.fields(folder) as config:
        config["base_model_name_or_path"] = named
    with edit.fields(folder.parent / "base", "config.json") as config:
        config.update(fields)
    report = judge(folder, base=folder.parent / "base", select=["LT520"])
    assert codes(report) == ({"LT520"} if found else set())
    assert [each.code for each in report.skipped] == ([] if found else ["LT520"])
