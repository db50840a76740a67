"""Links out of a folder are not followed; the links of the Hub cache are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.fuzz.commands import must_hold, run
from tests.hostile.folders import FIXTURES, assert_refused, copy_pair, lora_tool


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("base", "config.json"),
        ("base", "model.safetensors.index.json"),
        ("base", "model-00001-of-00002.safetensors"),
        ("base", "tokenizer.json"),
        ("base", "generation_config.json"),
        ("adapter", "adapter_config.json"),
        ("adapter", "adapter_model.safetensors"),
        ("adapter", "tokenizer_config.json"),
    ],
)
def test_a_link_out_of_the_folder_is_refused_by_name(
    folder: str, name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = copy_pair(tmp_path)
    file = tmp_path / folder / name
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    shutil.move(file, secret)
    file.symlink_to(secret)
    if (folder, name) == ("base", "tokenizer.json"):
        (pair.adapter / name).unlink()  # else the adapter's own is taken
    assert_refused(pair, str(file), "link")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("convert --to peft", "README.md"),
        ("resize --rank 1", "tokenizer.json"),
        ("prepare --for peft", "tokenizer.json"),
        ("consolidate", "tokenizer.json"),
    ],
)
def test_no_command_copies_what_a_link_leads_to(command: str, name: str, tmp_path: Path) -> None:
    source = "zero/stage3-reward" if command == "consolidate" else "reward-qwen2/adapter"
    folder, out = shutil.copytree(FIXTURES / source, tmp_path / "in"), tmp_path / "out"
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    called, *options = command.split()
    assert "LT112  is a link that leads out" in run(("validate", folder)).out
    done = run((called, folder, *options, "-o", out))
    assert done.code in (1, 3)
    assert "is a link that leads out of its folder" in done.err
    assert not out.exists()


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (pair.base / "config.json").rename(pair.base / "real.json")
    (pair.base / "config.json").symlink_to("real.json")
    assert lora_tool(*pair.arguments).code == 0


def test_a_dangling_link_and_a_loop_are_refused(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    weights = pair.adapter / "adapter_model.safetensors"
    weights.unlink()
    for target in ("nowhere", weights.name):
        weights.unlink(missing_ok=True)
        weights.symlink_to(target)
        assert_refused(pair, str(weights))


def test_a_snapshot_of_the_hub_cache_links_into_its_blobs(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    repo = tmp_path / "models--owner--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(pair.base.iterdir())):
        blob = repo / "blobs" / f"{number:064x}"
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    done = lora_tool("merge", str(pair.adapter), "--base", str(snapshot), "-o", str(pair.out))
    assert done.code == 0, done.err
    manifest = (pair.out / "lora_tool.json").read_text()
    assert '"hub_id": "owner/name"' in manifest
    assert f'"revision": "{"a" * 40}"' in manifest


def test_a_local_copy_of_the_hub_links_into_the_cache(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = copy_pair(tmp_path)
    blobs = tmp_path_factory.mktemp("cache") / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    for number, name in enumerate(("model-00001-of-00002.safetensors", "config.json")):
        blob = blobs / f"{number:064x}"
        shutil.move(pair.base / name, blob)
        (pair.base / name).symlink_to(blob)
    assert lora_tool(*pair.arguments).code == 0
    shutil.move(blob, blobs / "config")  # no hash
    (pair.base / name).unlink()
    (pair.base / name).symlink_to(blobs / "config")
    shutil.rmtree(pair.out)
    assert_refused(pair, str(pair.base / name), "link")


def test_a_link_to_itself_as_input_or_output_is_one_error(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert must_hold(("validate", loop)) == 3
    assert must_hold(("merge", pair.adapter, "--base", loop, "-o", pair.out)) == 3
    assert must_hold(("merge", pair.adapter, "--base", pair.base, "-o", loop)) == 6
    assert run(("ci", loop, "-o", pair.out))[0] == 3  # says so in its table of stages
    assert run(("ci", pair.adapter, "--base", pair.base, "-o", loop))[0] == 6
    assert loop.is_symlink()
