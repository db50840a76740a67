"""Which folder a reference means."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from lora_tool.checkpoints.sources import Wanted, located, resolve
from lora_tool.core.errors import CheckpointError, HubUnreachable, IncompleteCheckpoint, NotACheckpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub cache with one model at one commit, and a machine without network."""
    hub = tmp_path / "hub"
    repo = hub / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs" / "aa").write_text("{}")
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/aa")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return hub


def test_an_existing_path_is_local(tmp_path: Path) -> None:
    source = resolve(str(tmp_path))
    assert (source.path, source.hub_id, source.revision) == (tmp_path, None, None)


def test_a_relative_path_is_looked_for_beside_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve("../base", near=tmp_path / "adapter").path.samefile(tmp_path / "base")


def test_a_path_as_it_was_typed_for_the_training_is_found_above_the_adapter(tmp_path: Path) -> None:
    checkpoint, base = tmp_path / "runs/mine/checkpoint-5", tmp_path / "models/base"
    checkpoint.mkdir(parents=True)
    base.mkdir(parents=True)
    with pytest.raises(NotACheckpoint, match="and in the folders above"):
        resolve("./models/base", near=checkpoint)  # a folder, and no model
    (base / "config.json").write_text("{}")
    assert resolve("./models/base", near=checkpoint).path == base
    another = tmp_path / "runs/models/base"
    another.mkdir(parents=True)
    (another / "config.json").write_text("{}")
    with pytest.raises(NotACheckpoint, match="means two folders"):
        resolve("./models/base", near=checkpoint)


def test_two_folders_of_one_name_are_not_guessed_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here/base", "adapter/base"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(NotACheckpoint, match="base means two folders") as caught:
        resolve("base", near=tmp_path / "adapter")
    assert caught.value.hint == "choose one: `base=PATH`"


def test_a_folder_that_only_has_the_name_of_the_base_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here/base", "adapter/base"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "adapter/base/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    assert resolve("base", near=tmp_path / "adapter").path == tmp_path / "adapter/base"


def test_the_same_folder_by_two_ways_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("base", near=tmp_path).path.samefile(tmp_path / "base")


@pytest.mark.parametrize("reference", ["owner/name", "hf://owner/name", "hf://owner/name@main", f"owner/name@{COMMIT}"])
def test_a_hub_id_is_taken_from_the_cache(reference: str, cache: Path) -> None:
    source = resolve(reference)
    assert source.path == cache / "models--owner--name" / "snapshots" / COMMIT
    assert (source.hub_id, source.revision, source.reference) == ("owner/name", COMMIT, reference)


def test_a_path_into_the_cache_tells_its_origin(cache: Path) -> None:
    source = resolve(str(cache / "models--owner--name" / "snapshots" / COMMIT))
    assert (source.hub_id, source.revision) == ("owner/name", COMMIT)


def test_a_local_folder_wins_over_a_hub_id(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve("owner/name").hub_id is None
    assert resolve("hf://owner/name").path.is_relative_to(cache)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("reference", ["owner/other", "hf://owner/other", "owner/name@v2"])
@pytest.mark.parametrize("download", [False, True])
def test_what_is_not_in_the_cache_is_said_so(reference: str, download: bool) -> None:
    with pytest.raises(HubUnreachable if download else IncompleteCheckpoint, match="not in the Hub cache") as caught:
        resolve(reference, download=download)
    assert caught.value.hint is not None
    assert "hf download owner/" in caught.value.hint


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "reference", ["nowhere", "/nowhere/at/all", "a/b/c", "../x", "", "hf://", "hf://x", "a b/c", "~nobody/x"]
)
def test_what_is_neither_path_nor_id_is_said_so(reference: str) -> None:
    words = "no such folder" if reference else "the name is empty: give a folder or a Hub id"
    with pytest.raises(NotACheckpoint, match=words):
        resolve(reference)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("runs/reward-qwen2/adaptr", "runs/reward-qwen2/adapter"),
        ("runs/reward-qwen/adapter", "runs/reward-qwen2/adapter"),
        ("runs/rewardqwen2", "runs/reward-qwen2"),  # may be a Hub id, too
        ("hf://owner/name", None),
        ("runs/reward-qwen/base", None),  # no such folder in what is nearest
        ("runs/something/else", None),
        ("runs/reward-qwen2/weights", None),  # a file's name is none
    ],
)
def test_a_mistyped_path_is_told_from_the_nearest_folder(
    typed: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "reward-qwen2" / "adapter").mkdir(parents=True)
    (tmp_path / "runs" / "reward-qwen2" / "weight").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve(typed)
    said = caught.value.hint or ""
    assert said == f"did you mean {meant}?" if meant else not said.startswith("did you mean")


def test_a_folder_of_the_other_kind_is_not_what_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-base").mkdir()
    (tmp_path / "my-base" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    for wanted, hint in ((Wanted.MODEL, "did you mean my-base?"), (Wanted.ADAPTER, None)):
        with pytest.raises(CheckpointError) as caught:
            located("my-bas", wanted, only=True)
        assert caught.value.hint == hint


def test_a_name_in_another_unicode_form_is_told_as_bash_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mode\u0300le's").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve("mod\u00e8le's")
    assert (caught.value.hint or "").endswith(r": $'mode\U00000300le\'s'")
