"""What fuzzing found (`python -m tests.fuzz`), each kept as the file that showed it."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_tool.core.errors import CorruptFile
from lora_tool.formats.distributed_tensors import KNOWN
from lora_tool.formats.pickles import load
from tests.fuzz.commands import must_hold, run
from tests.fuzz.targets import FIXTURES, TARGETS

FIELDS: dict[str, tuple[str, str, object, int, str]] = {
    "half a surrogate pair in a config that is rewritten": ("base/config.json", "comment", "\ud800", 0, ""),
    "labels without numbers": ("base/config.json", "id2label", {"": "a"}, 1, "id2label"),
    "labels that are lists": ("base/config.json", "id2label", {"0": []}, 1, "id2label"),
    "tokens that are no list": ("adapter/tokenizer.json", "added_tokens", True, 0, ""),
    "a rank that is not a number": ("adapter/adapter_config.json", "rank_pattern", {"q": float("nan")}, 1, "rank_patt"),
    "a rank of two and a half": ("adapter/adapter_config.json", "rank_pattern", {"q": 2.5}, 1, "int of at least 1"),
    "an infinite alpha": ("adapter/adapter_config.json", "alpha_pattern", {"q": float("inf")}, 1, "alpha_pattern"),
    "a base of 5,000 letters": ("adapter/adapter_config.json", "base_model_name_or_path", "a" * 5000, 3, "[…]"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_judged_and_never_a_crash(name: str, tmp_path: Path) -> None:
    file, field, value, expected, word = FIELDS[name]
    shutil.copytree(FIXTURES / "reward-qwen2", tmp_path, dirs_exist_ok=True)
    table = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps({**table, field: value}))
    base = () if "base_model" in field else ("--base", tmp_path / "base")
    code, _, err = run(("merge", tmp_path / "adapter", *base, "-o", tmp_path / "out", "--dry-run"))
    assert (code, word in err) == (expected, True), err
    assert len(err) < 2500


def test_a_token_id_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "adapter" / "tokenizer_config.json"
    table = json.loads(path.read_text())
    path.write_text(json.dumps({**table, "pad_token": "[x]", "added_tokens_decoder": {"9" * 5000: {"content": "[x]"}}}))
    code, _, err = run(
        ("merge", tmp_path / "adapter", "--base", tmp_path / "base", "-o", tmp_path / "out", "--dry-run")
    )
    assert code == 0, err


@pytest.fixture(scope="module")
def merged_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair, out = FIXTURES / "reward-qwen2", tmp_path_factory.mktemp("manifest") / "merged"
    assert run(("merge", pair / "adapter", "--base", pair / "base", "-o", out))[0] == 0
    return out


@pytest.mark.parametrize("field", ["task", "dtype", "precision", "num_labels", "inputs", "ledger", "merged_adapters"])
@pytest.mark.parametrize("value", [["q_proj", 1], {}, 7, None, "nonsense"], ids=str)
def test_a_manifest_is_not_believed(field: str, value: object, merged_once: Path, tmp_path: Path) -> None:
    pair = FIXTURES / "reward-qwen2"
    merged = Path(shutil.copytree(merged_once, tmp_path / "merged"))
    given = ("--base", pair / "base", "--adapter", pair / "adapter")
    table = json.loads((merged / "lora_tool.json").read_text())
    (merged / "lora_tool.json").write_text(json.dumps({**table, field: value}))
    for arguments in (
        ("verify", merged, *given),
        ("validate", merged),
        ("inspect", merged, "--json"),
        ("ls", tmp_path),
    ):
        must_hold(arguments)


def _no_utf8_name(path: Path) -> None:
    data = path.read_bytes()
    name = b"/data.pkl"
    at = data.rindex(name) - 1  # in the central directory
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])


def _pickled(pickle: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with zipfile.ZipFile(path) as old:
            members = {info.filename: old.read(info) for info in old.infolist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, data in members.items():
                new.writestr(name, pickle if name.endswith("data.pkl") else data)

    return change


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def _table(**values: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(_text(name) + value for name, value in values.items()) + b"u."


_DOUBLING = b"]q\x01" + b"".join(b"](h\x01h\x01eq\x01" for _ in range(60))
_OPTIMIZER = b"}(" + _text("fp32_flat_groups") + b"]"

RANK_FILES: dict[str, Callable[[Path], None]] = {
    "a member's name that is no UTF-8": _no_utf8_name,
    "parameter shapes that are a number": _pickled(_table(module=b"}", param_shapes=b"K\x05")),
    "buffer names that are a number": _pickled(_table(module=b"}", param_shapes=b"]", buffer_names=b"K\x05")),
    "shared parameters that are numbers": _pickled(_table(module=b"}", param_shapes=b"]", shared_params=b"]K\x05a")),
    "a shape larger than any file": _pickled(
        _table(module=b"}", param_shapes=b"](}(" + _text("w") + b"\x8a\x08" + b"\xff" * 7 + b"\x7f\x85ue")
    ),
    "a list that contains itself": _pickled(_table(module=b"}", ds_config=b"]q\x01h\x01a")),
    "a config of exponential size": _pickled(_table(module=b"}", ds_config=b"}(" + _text("a") + _DOUBLING + b"u")),
    "a config with two types of keys": _pickled(_table(module=b"}", ds_config=b"}(" + _text("a") + b"NK\x01Nu")),
}


@pytest.mark.parametrize("name", RANK_FILES)
@pytest.mark.parametrize("command", ["validate", "consolidate", "inspect"])
def test_a_rank_file_is_judged_and_never_a_crash(name: str, command: str, tmp_path: Path) -> None:
    root = tmp_path / "zero"
    shutil.copytree(FIXTURES / "zero" / "stage2-reward", root)
    RANK_FILES[name](next((root / "global_step2").glob("*model_states.pt")))
    options: tuple[Any, ...] = ("--dry-run", "-o", tmp_path / "out") if command == "consolidate" else ()
    code, _, err = run((command, root, *options))
    assert code in (0, 1, 3), err
    assert "Traceback" not in err


@pytest.mark.parametrize("count", [2**40, 0, 2**63 - 1])
def test_a_number_of_processes_is_not_believed(count: int, tmp_path: Path) -> None:
    """A set of all the ranks that are missing would need terabytes."""
    root = tmp_path / "zero"
    shutil.copytree(FIXTURES / "zero" / "stage2-reward", root)
    number = b"\x8a\x08" + count.to_bytes(8, "little")
    state = _OPTIMIZER + _text("partition_count") + number + b"u"
    for path in (root / "global_step2").glob("*optim_states.pt"):
        _pickled(_table(optimizer_state_dict=state))(path)
    code, _, err = run(("validate", root))
    assert code == 1, err


@pytest.mark.parametrize(
    "pickle",
    [b"\x80\x02" + _DOUBLING + b".", b"\x80\x02" + b"]" * 300 + b"a" * 299 + b".", b"\x80\x02]q\x01h\x01a."],
    ids=["unfolds", "deep", "contains itself"],
)
def test_an_object_that_cannot_be_walked_through_is_refused(pickle: bytes) -> None:
    with pytest.raises(ValueError, match="holds a pickle"):
        load(pickle, known=KNOWN, persistent=lambda pid: pid)


def test_a_length_beyond_every_index_is_refused() -> None:
    with pytest.raises(ValueError, match="ends without its STOP"):
        load(b"\x80\x04\x8e" + b"\xff" * 8 + b".", known=KNOWN, persistent=lambda pid: pid)


BYTES: dict[str, bytes] = {
    "dcp": b"\x80\x04\x8e" + b"\xff" * 8 + b".",
    "torch-file": b"PK\x05\x06" + bytes(18),
    "safetensors": (2**63).to_bytes(8, "little") + b"{}",
    "configs": b'{"rank_pattern": {"a": NaN}, "peft_type": "LORA", "id2label": {"": []}}',
}


@pytest.mark.parametrize("target", BYTES)
def test_bytes_that_broke_a_reader_no_longer_do(target: str) -> None:
    TARGETS[target](BYTES[target])


def test_a_chunk_that_is_no_chunk_is_refused() -> None:
    """`state_dict_metadata` of one tensor whose chunks are numbers."""
    with pytest.raises((CorruptFile, ValueError)):
        load(b"\x80\x02K\x01K\x02a.", known=KNOWN, persistent=lambda pid: pid)
