"""The model card: what the user wrote stays, what the Hub needs is added, and a second push changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from lora_tool.core.errors import BadConfig
from lora_tool.hub import card
from lora_tool.hub.card import Licence, MergedCard, changed, merge_card, read_card
from lora_tool.hub.options import Readme
from lora_tool.hub.origin import Origin
from tests.cli.calling import Caller
from tests.hub.conftest import REPO
from tests.hub.server import Hub

RM = Origin(
    adapter=False, merged=True, reward=True, pipeline="text-classification", base="Qwen/Qwen2-0.5B", base_folder=None
)
SECTION = "## How this model was made\n\nby hand"
USER = """---
# chosen with care
language: no   # Norwegian
license: mit
tags: [mine, "base_model:adapter:../base"]
datasets:
- me/pairs
model-index:
- name: x
  results: []
---

# My model

Words of mine.
"""


def made(local: str | None, hub: str | None = None, *, origin: Origin = RM, **options: Any) -> MergedCard:
    return merge_card(
        local.encode() if local is not None else None,
        hub.encode() if hub is not None else None,
        origin=origin,
        section=options.pop("section", SECTION),
        licence=options.pop("licence", Licence(metadata={"license": "apache-2.0"})),
        title="reward",
        **options,
    )


def metadata(card: MergedCard) -> dict[str, Any]:
    return dict(yaml.safe_load(card.data.decode().split("---")[1]))


def test_a_card_is_written_where_there_is_none() -> None:
    card = made(None)
    assert metadata(card) == {
        "base_model": "Qwen/Qwen2-0.5B",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["merged-lora", "reward-model", "lora-tool"],
        "license": "apache-2.0",
    }
    text = card.data.decode()
    assert "\n# reward\n" in text
    assert SECTION in text
    read = ModelCard(text)  # huggingface_hub reads it as we mean it
    assert {key: getattr(read.data, key) for key in metadata(card)} == metadata(card)


def test_what_the_user_wrote_stays_to_the_letter() -> None:
    card = made(USER)
    text = card.data.decode()
    for line in USER.splitlines():
        assert line in text or line.startswith("tags:"), line
    data = metadata(card)
    assert data["license"] == "mit"
    assert data["tags"] == ["mine", "merged-lora", "reward-model", "lora-tool"]
    assert data["base_model"] == "Qwen/Qwen2-0.5B"
    assert text.index("Words of mine.") < text.index(SECTION)
    assert "license: mit" in text


@pytest.mark.parametrize("local", [None, USER, "Just words.\n", "---\r\nlicense: mit\r\n---\r\n\r\nWindows\r\n", ""])
def test_pushing_the_result_again_changes_nothing(local: str | None) -> None:
    first = made(local)
    assert made(local, first.data.decode()).data == first.data
    assert made(None, first.data.decode()).data.partition(b"from=")[0] == first.data.partition(b"from=")[0]
    assert made(first.data.decode()).data.count(b"lora-tool: begin") == 1
    once = made(first.data.decode())
    assert made(once.data.decode(), once.data.decode()).data == made(first.data.decode(), once.data.decode()).data


def test_a_new_section_takes_the_old_ones_place() -> None:
    first = made(USER).data.decode()
    second = made(USER, first, section="## Another").data.decode()
    assert "## Another" in second
    assert SECTION not in second


def test_an_edit_on_the_hub_is_kept() -> None:
    first = made(USER).data.decode()
    edited = first.replace("Words of mine.", "Words of mine, corrected in the browser.")
    second = made(USER, edited)
    assert "corrected in the browser" in second.data.decode()
    assert second.warnings == ()
    third = made(USER, second.data.decode())
    assert third.data == second.data
    without_file = made(None, edited)
    assert "corrected in the browser" in without_file.data.decode()


def test_an_edit_here_is_pushed() -> None:
    first = made(USER).data.decode()
    assert "more words" in made(USER + "\nmore words\n", first).data.decode()


def test_edits_on_both_sides_keep_the_hubs_and_say_so() -> None:
    first = made(USER).data.decode()
    edited = first.replace("Words of mine.", "Words of theirs.")
    both = made(USER + "\nmore words\n", edited)
    assert "Words of theirs." in both.data.decode()
    assert "--readme local" in both.warnings[0]
    local = made(USER + "\nmore words\n", edited, readme=Readme.LOCAL)
    assert "more words" in local.data.decode()
    assert "Words of theirs." not in local.data.decode()
    assert made(USER, edited, readme=Readme.HUB).warnings == ()


def test_a_card_that_others_wrote_on_the_hub_is_not_overwritten_by_pefts_form() -> None:
    form = "---\nbase_model: /scratch/me/base\nlibrary_name: peft\n---\n# Model Card for Model ID\n[More Information Needed]\n"
    card = made(form, USER)
    assert "Words of mine." in card.data.decode()
    assert "Model Card for Model ID" not in card.data.decode()
    assert "/scratch" not in card.data.decode()


@pytest.mark.parametrize(
    "path", ["../base", "/scratch/x", "./x", "~/x", "C:\\models\\x", "a/b/c", "base", "out/base", "x/../y", ".."]
)
@pytest.mark.parametrize("form", ["base_model: {0}", "base_model:\n- {0}\n- {0}", "base_model: ['{0}']"])
def test_a_local_path_never_stays(path: str, form: str) -> None:
    text = f"---\n{form.format(path)}\ntags:\n- base_model:adapter:{path}\n- lora\n---\nwords\n"
    unknown = Origin(adapter=True, merged=False, reward=False, pipeline=None, base=None, base_folder=None, local=path)
    card = made(text, origin=unknown)
    assert path not in card.data.decode()
    assert "base_model" not in metadata(card)
    assert "base_model: owner/name" in card.warnings[0]
    if path != "out/base":  # nothing tells it from an id where the folder is not here
        assert metadata(made(text))["base_model"] == "Qwen/Qwen2-0.5B"


def test_the_users_own_base_stays() -> None:
    card = made("---\nbase_model: [me/one, me/two]\nbase_model_relation: merge\n---\n")
    assert metadata(card)["base_model"] == ["me/one", "me/two"]
    assert metadata(card)["base_model_relation"] == "merge"


def test_what_contradicts_is_said_and_kept_unless_a_machine_wrote_it() -> None:
    card = made("---\npipeline_tag: text-generation\n---\nmine\n")
    assert metadata(card)["pipeline_tag"] == "text-generation"
    assert any("pipeline_tag: text-generation" in warning for warning in card.warnings)
    form = "---\npipeline_tag: text-generation\n---\n# Model Card for Model ID\n[More Information Needed]\n"
    assert metadata(made(form))["pipeline_tag"] == "text-classification"


def test_another_licence_brings_its_name_and_link() -> None:
    licence = Licence(metadata={"license": "other", "license_name": "llama3", "license_link": "https://x/y"})
    data = metadata(made(None, licence=licence))
    assert [data[key] for key in ("license", "license_name", "license_link")] == ["other", "llama3", "https://x/y"]
    assert "license_name" not in metadata(made(USER, licence=licence))


@pytest.mark.parametrize(
    "text",
    [
        "---\n[\n---\n",
        "---\n- a\n- b\n---\n",
        "---\na: b: c\n---\n",
        "---\n!!python/object/apply:os.system [ls]\n---\n",
    ],
)
def test_metadata_that_are_no_mapping_are_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=r"README\.md") as caught:
        made(text)
    assert caught.value.hint is not None


def test_a_readme_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadConfig, match="UTF-8"):
        read_card(b"\xff\xfe\x00", "README.md")
    with pytest.raises(BadConfig, match="more than"):
        read_card(b"x" * (2 << 20), "README.md")


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("a: 1\nb: 2", {"a": 3}, "a: 3\nb: 2"),
        ("a: 1 # why\nb: |\n  x: y\n  z\nc: 3", {"c": None}, "a: 1 # why\nb: |\n  x: y\n  z"),
        ("a:\n- 1\n- 2\nb: 2", {"a": [3], "d": "x"}, "a:\n- 3\nb: 2\nd: x"),
        ("{a: 1, b: no}", {"c": 2}, "a: 1\nb: false\nc: 2"),
        ('"a": 1', {"a": 2}, "a: 2"),
        ("a: &x [1]\nb: *x\nc: 3", {"a": [2]}, "a:\n- 2\nb:\n- 1\nc: 3"),
        ("# only words", {"a": 1}, "# only words\na: 1"),
        ("", {"a": "é"}, "a: é"),
    ],
)
def test_metadata_change_key_by_key(before: str, changes: dict[str, Any], after: str) -> None:
    card = read_card(f"---\n{before}\n---\nwords\n".encode(), "README.md")
    assert changed(card, changes).text() == f"---\n{after}\n---\nwords\n"


def test_the_section_tells_the_manifest_and_no_path(hub: Hub, call: Caller, merged: Path) -> None:
    table = json.loads((merged / "lora_tool.json").read_text())
    table["verification"] = {"level": "cheap", "errors": 0, "tensors": 27, "right": 27, "largest_ulps": 0.5}
    table["inputs"]["base"] |= {"hub_id": "Qwen/Qwen2-0.5B", "revision": "abc123", "path": None}
    table["inputs"]["adapter"]["path"] = "/home/alice/| <b>evil</b> [x](http://y)"
    (merged / "lora_tool.json").write_text(json.dumps(table))
    hub.repo("Qwen/Qwen2-0.5B", card={"license": "apache-2.0"})
    called = call("push", merged, REPO)
    assert called.code == 0, called.err
    files = hub.repos[REPO].files()
    card = files["README.md"].decode()
    for words in (
        "passed: 27 of 27 tensors",
        "at most 0.5 ulp apart",
        "| precision | float32 |",
        "at `abc123`",
        "14 merged",
        "lora-tool 0.1.0",
    ):
        assert words in card
    data = yaml.safe_load(card.split("---")[1])
    assert data["base_model"] == "Qwen/Qwen2-0.5B"
    assert data["license"] == "apache-2.0"
    for content in files.values():
        assert b"/home/alice" not in content
        assert str(merged.parent).encode() not in content
    assert "<b>" not in card
    assert json.loads(files["lora_tool.json"])["inputs"]["base"]["hub_id"] == "Qwen/Qwen2-0.5B"


def test_a_gated_base_made_public_is_said(hub: Hub, call: Caller, adapter: Path) -> None:
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "meta/Llama"}))
    hub.repo("meta/Llama", gated=True, card={"license": "llama3.2"})
    called = call("push", adapter, "me/adapter", "--public")
    assert called.code == 0, called.err
    assert "meta/Llama is gated" in called.err
    data = yaml.safe_load(hub.repos["me/adapter"].files()["README.md"].decode().split("---")[1])
    assert data["base_model"] == "meta/Llama"
    assert data["base_model_relation"] == "adapter"
    assert data["license"] == "llama3.2"
    assert data["pipeline_tag"] == "text-classification"
    assert "base_model:adapter" not in str(data["tags"])


def test_an_edit_in_the_browser_survives_the_next_push(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO).code == 0
    repo = hub.repos[REPO]
    edited = repo.files()["README.md"].replace(b"# reward", b"# The reward\n\nRead me.")
    repo.commit_files({"README.md": edited})
    (merged / "LICENSE").write_text("a licence")
    assert call("push", merged, REPO).code == 0
    assert b"Read me." in repo.files()["README.md"]
    head = repo.head.oid
    assert call("push", merged, REPO).code == 0
    assert repo.head.oid == head


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (None, "not recorded"),
        ("by hand", "by hand"),
        ({"passed": True, "by": "somebody"}, "passed True, by somebody"),
        ({"errors": 2, "tensors": 9, "right": 7}, "FAILED with 2 errors: 7 of 9 tensors"),
        ({"deep": {"x": 1}}, "recorded in lora\\_tool.json"),
        ([1, 2], "1, 2"),
    ],
)
def test_every_form_of_a_verification_is_told(entry: object, words: str) -> None:
    assert words in card._verification(entry)
