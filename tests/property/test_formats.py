"""Headers and adapter names: writing and reading are inverse, and the reference package agrees."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lora_tool.core import keys
from lora_tool.core.errors import CorruptFile
from lora_tool.core.keys import Part
from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.files import parse_json, parse_names
from lora_tool.formats.safetensors import build_header, scan_file
from tests.headers import read_file
from tests.property.strategies import NAMES, specs

NUMPY = [DType.BOOL, DType.U8, DType.I8, DType.I16, DType.F16, DType.I32, DType.F32, DType.F64, DType.I64]
SEGMENTS = st.from_regex(r"[a-z_]{1,8}|[0-9]{1,3}", fullmatch=True).filter(
    lambda text: text not in {part.value for part in Part} | {"token_adapter"}
)
MODULES = st.lists(SEGMENTS, min_size=1, max_size=5).map(".".join)


@given(specs(), st.dictionaries(NAMES, NAMES, max_size=3))
def test_scanning_a_built_header_gives_it_back(wanted: list[TensorSpec], metadata: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        header = build_header(wanted, metadata)
        path.write_bytes(header + bytes(sum(spec.nbytes for spec in wanted)))
        scanned = read_file(path)
    assert [tensor.spec for tensor in scanned.tensors.values()] == wanted
    assert scanned.metadata == metadata
    assert scanned.data_start == len(header)
    assert len(header) % 8 == 0


@given(specs(NUMPY))
def test_the_reference_package_reads_the_same(wanted: list[TensorSpec]) -> None:
    data = bytes(at % 2 for at in range(sum(spec.nbytes for spec in wanted)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(build_header(wanted, {"format": "np"}) + data)
        at = 0
        with safe_open(path, framework="np") as file:
            assert set(file.keys()) == {spec.name for spec in wanted}
            for spec in wanted:
                array = file.get_tensor(spec.name)
                assert array.shape == spec.shape
                assert array.tobytes() == data[at : at + spec.nbytes]
                at += spec.nbytes


@given(specs(NUMPY), st.data())
def test_a_file_is_refused_by_us_wherever_the_reference_package_refuses_it(
    wanted: list[TensorSpec], data: st.DataObject
) -> None:
    whole = bytearray(build_header(wanted, {}) + bytes(sum(spec.nbytes for spec in wanted)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    broken = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(broken)
        problems = scan_file(path).problems
        try:
            with safe_open(path, framework="np") as file:
                names = set(file.keys())
        except Exception:  # noqa: BLE001 - the package raises what it likes
            assert problems
        else:
            assert problems or names == set(read_file(path).tensors)


TEXTS = st.text(':"\\ab', max_size=3).map(json.dumps)
TABLES = st.recursive(
    TEXTS | st.sampled_from(["7", "[1, 2]", "null", "broken"]),
    lambda inner: st.lists(st.tuples(TEXTS, inner), max_size=3).map(
        lambda pairs: "{" + ",".join(f"{key}:{value}" for key, value in pairs) + "}"
    ),
    max_leaves=8,
)
"""JSON with colons in its texts, with keys that repeat at any depth, and with errors."""


@given(TABLES)
def test_names_are_parsed_as_any_json_is(text: str) -> None:
    def outcome(parse: Callable[[bytes, Path], Any]) -> object:
        try:
            return parse(text.encode(), Path("x"))
        except CorruptFile as error:
            return str(error)

    assert outcome(parse_names) == outcome(parse_json)


@given(st.binary(max_size=200))
def test_any_bytes_are_scanned_without_an_unexpected_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        path.write_bytes(data)
        assert scan_file(path).problems or data.startswith(b"\x02")
        with pytest.raises(CorruptFile):
            read_file(Path(folder) / "missing.safetensors")


@given(MODULES, st.sampled_from(["lora_A", "lora_B"]), st.sampled_from(["weight", "bias"]), st.none() | SEGMENTS)
def test_a_lora_name_is_taken_apart_and_put_together(module: str, part: str, leaf: str, adapter: str | None) -> None:
    if adapter in ("weight", "bias"):
        return
    name = ".".join(filter(None, ("base_model.model", module, part, adapter, leaf)))
    key = keys.parse(name)
    assert (key.module, key.part.value, key.leaf, key.adapter_name) == (module, part, leaf, adapter)
    assert key.canonical == f"base_model.model.{module}.{part}.{leaf}"
    assert keys.parse(key.canonical).canonical == key.canonical


@given(st.text(max_size=60) | MODULES.map(lambda module: f"base_model.model.{module}"))
def test_every_name_parses_and_its_canonical_form_is_stable(name: str) -> None:
    key = keys.parse(name)
    assert key.text == name
    assert keys.parse(key.canonical).canonical == key.canonical


ENDS = st.sampled_from(
    [
        "lora_A.weight",
        "lora_B.default.weight",
        "lora_A.3.weight",
        "modules_to_save.2.0.bias",
        "weight",
        "lora_embedding_A",
    ]
)
BEGINNINGS = st.sampled_from(["base_model.model.", "base_model.model.module.", "_orig_mod.", ""])
NUMBERED = st.lists(st.sampled_from(["a", "lora_A", "0", "12", "w1", "_orig_mod"]), max_size=4).map(".".join)


@given(st.lists(st.builds(lambda *parts: "".join(parts), BEGINNINGS, NUMBERED, st.just("."), ENDS), unique=True))
def test_names_parsed_together_are_parsed_one_by_one(names: list[str]) -> None:
    assert keys.parse_all(names) == {name: keys.parse(name) for name in names}


@given(MODULES, st.sets(MODULES, max_size=4))
def test_a_target_is_the_module_or_a_dotted_end_of_it(module: str, names: set[str]) -> None:
    expected = any(module == name or module.endswith(f".{name}") for name in names)
    assert keys.is_under(module, frozenset(names)) == expected
