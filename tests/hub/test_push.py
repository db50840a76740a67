"""`lora-tool push`, as it is typed, against a Hub on the loopback that huggingface_hub's own client talks to."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tool import plan_push, push
from lora_tool.hub.model import UploadAction
from tests.cli.calling import FIXTURES, Caller
from tests.hub.conftest import REPO, environment
from tests.hub.faults import flip
from tests.hub.server import Hub
from tests.hub.store import Repo

WRITES = r"^(POST|PUT|DELETE) (?!/api/validate-yaml|/api/models/[^ ]+/preupload)"


def assert_holds(repo: Repo, folder: Path, revision: str = "main") -> None:
    """Every pushed file but those that push writes is the folder's, byte for byte."""
    files = repo.files(revision)
    weights = {path.name for path in folder.glob("*.safetensors")}
    assert weights <= files.keys()
    for name, content in files.items():
        if name not in ("README.md", "lora_tool.json", "notes.txt"):
            assert content == (folder / name).read_bytes(), name


def test_a_dry_run_creates_nothing(hub: Hub, call: Caller, merged: Path) -> None:
    called = call("push", merged, REPO, "--dry-run")
    assert called.code == 0, called.err
    assert "me/reward will be created, private (the default; --public changes it)" in called.out
    for name in ("config.json", "model-00001-of-00003.safetensors", "README.md"):
        assert f"add     {name}" in called.out
    as_json = call("push", merged, REPO, "--dry-run", "--json").json
    assert (as_json["create_repo"], as_json["private"], as_json["parent_commit"]) == (True, True, None)
    assert {file["change"] for file in as_json["files"]} == {"add"}
    assert hub.repos == {}
    assert hub.asked(r"^(POST|PUT|DELETE)") == []


def test_the_first_push_is_one_private_commit(hub: Hub, call: Caller, merged: Path) -> None:
    called = call("push", merged, REPO)
    assert called.code == 0, called.err
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.history == ["Upload reward model with lora-tool", "initial commit"]
    assert len(hub.asked("^POST .*/commit/")) == 1
    assert json.loads(hub.asked("^POST .*/commit/")[0].body.splitlines()[0])["value"]["parentCommit"] == (
        repo.head.parent
    )
    assert_holds(repo, merged)
    assert repo.head.oid in called.out
    assert hub.url + "/me/reward" in called.out


def test_the_same_again_makes_no_commit_and_sends_nothing(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO).code == 0
    head = hub.repos[REPO].head.oid
    hub.log.clear()
    again = call("push", merged, REPO, "--json")
    assert again.code == 0, again.err
    assert (again.json["changed"], again.json["commit"]) == (False, head)
    assert hub.repos[REPO].head.oid == head
    assert hub.asked(WRITES) == []


def test_only_what_changed_is_sent(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO).code == 0
    shard = merged / "model-00002-of-00003.safetensors"
    shard.write_bytes(flip(shard.read_bytes()))
    hub.log.clear()
    called = call("push", merged, REPO, "--json")
    assert called.code == 0, called.err
    changes = {file["name"]: file["change"] for file in called.json["files"]}
    assert changes.pop(shard.name) == "update"
    assert set(changes.values()) == {"same"}
    assert [asked.path.rpartition("/")[2] for asked in hub.asked("^PUT")] == [
        hashlib.sha256(shard.read_bytes()).hexdigest()
    ]
    assert_holds(hub.repos[REPO], merged)


@pytest.mark.parametrize(
    ("old", "removed"),
    [
        ({f"model-0000{at}-of-00005.safetensors" for at in range(1, 6)}, None),
        ({"model.safetensors"}, None),
        (
            {"model-00004-of-00004.safetensors", "model-00002-of-00003.safetensors"},
            {"model-00004-of-00004.safetensors"},
        ),
        ({"model.fp16.safetensors", "onnx/model.onnx", "notes.txt", "pytorch_model.bin"}, set()),
    ],
    ids=["five shards", "one file", "a shard of the same name stays", "what is not ours stays"],
)
def test_weights_of_an_older_push_go_in_the_same_commit(
    old: set[str], removed: set[str] | None, hub: Hub, call: Caller, merged: Path
) -> None:
    hub.repo(REPO).commit_files(dict.fromkeys(old, b"old"), title="older")
    called = call("push", merged, REPO, "--json")
    assert called.code == 0, called.err
    gone = old if removed is None else removed
    assert {file["name"] for file in called.json["files"] if file["change"] == "remove"} == gone
    assert hub.repos[REPO].files().keys() & old == old - gone
    assert len(hub.repos[REPO].history) == 3


def test_one_file_over_shards_removes_their_index(hub: Hub, call: Caller, merged: Path, tmp_path: Path) -> None:
    assert call("push", merged, REPO).code == 0
    single = tmp_path / "single"
    adapter = FIXTURES / "reward-qwen2" / "adapter"
    assert call("merge", adapter, "--rm", "-o", single, "--max-shard-size", "1GB").code == 0
    assert call("push", single, REPO).code == 0
    weights = {name for name in hub.repos[REPO].files() if name.startswith("model")}
    assert weights == {"model.safetensors"}


def test_an_adapter_is_pushed_without_what_training_left(hub: Hub, call: Caller, adapter: Path) -> None:
    (adapter / ".env").write_text("HF_TOKEN=hf_" + "x" * 34)
    (adapter / "runs").mkdir()
    called = call("push", adapter, "me/adapter")
    assert called.code == 0, called.err
    files = hub.repos["me/adapter"].files()
    assert set(files) == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors"),
        *("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    }
    for name in (".env", "optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin", "runs/"):
        assert f"not pushed: {name}: " in called.err


def test_a_pull_request_leaves_the_branch_alone(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    head = repo.head.oid
    called = call("push", merged, REPO, "--create-pr")
    assert called.code == 0, called.err
    assert f"{hub.url}/{REPO}/discussions/1" in called.out
    assert repo.head.oid == head
    assert_holds(repo, merged, "refs/pr/1")
    again = call("push", merged, REPO, "--create-pr", "--json")
    assert (again.code, again.json["changed"], len(repo.pulls)) == (0, False, 1)
    assert again.json["pull_request"] == f"{hub.url}/{REPO}/discussions/1"


def test_a_pull_request_by_a_reader(hub: Hub, call: Caller, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repo(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "r" * 34)
    assert call("push", merged, REPO, "--create-pr").code == 0
    refused = call("push", merged, REPO)
    assert refused.code == 4
    assert "403 Forbidden" in refused.err


def test_a_branch_is_created_from_main(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    head = repo.head.oid
    dry = call("push", merged, REPO, "--revision", "v2/beta", "--dry-run")
    assert "branch v2/beta will be created from main" in dry.out
    assert "v2/beta" not in repo.branches
    called = call("push", merged, f"hf://{REPO}@v2/beta")
    assert called.code == 0, called.err
    assert repo.head.oid == head
    assert_holds(repo, merged, "v2/beta")
    assert repo.commits[repo.branches["v2/beta"]].parent == head


def test_a_tag_is_put_on_the_commit(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO, "--tag", "v1").code == 0
    repo = hub.repos[REPO]
    assert repo.tags == {"v1": repo.head.oid}
    assert call("push", merged, REPO, "--tag", "v1").code == 0
    assert call("push", merged, REPO, "--tag", "v1.1").code == 0
    assert repo.tags == {"v1": repo.head.oid, "v1.1": repo.head.oid}
    head = repo.head.oid
    (merged / "LICENSE").write_text("a licence")
    refused = call("push", merged, REPO, "--tag", "v1")
    assert refused.code == 6
    assert "tag v1 exists" in refused.err
    assert repo.head.oid == head


def test_a_tag_on_another_commit_is_not_moved(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO).code == 0
    repo = hub.repos[REPO]
    assert repo.head.parent is not None
    repo.tags["v1"] = repo.head.parent
    refused = call("push", merged, REPO, "--tag", "v1")
    assert refused.code == 6
    assert "no second commit" in refused.err
    assert repo.tags["v1"] == repo.head.parent


@pytest.mark.parametrize(("option", "private"), [([], True), (["--private"], True), (["--public"], False)])
def test_visibility_of_a_new_repository(option: list[str], private: bool, hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO, *option).code == 0
    assert hub.repos[REPO].private is private


def test_only_a_branch_is_pushed_to(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    repo.tags["v1"] = repo.head.oid
    for revision in ("v1", repo.head.oid):
        refused = call("push", merged, REPO, "--revision", revision)
        assert refused.code == 4
        assert "only a branch can be pushed to" in refused.err
    assert len(repo.history) == 1


def test_an_open_pull_request_can_be_pushed_to(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    assert call("push", merged, REPO, "--create-pr").code == 0
    (merged / "LICENSE").write_text("a licence")
    called = call("push", merged, REPO, "--revision", "refs/pr/1")
    assert called.code == 0, called.err
    assert_holds(repo, merged, "refs/pr/1")
    assert len(repo.history) == 1


def test_visibility_of_an_old_repository_stays(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    refused = call("push", merged, REPO, "--private")
    assert refused.code == 6
    assert "is public, but --private was requested" in refused.err
    assert len(repo.history) == 1
    called = call("push", merged, REPO)
    assert (called.code, repo.private) == (0, False)
    assert "exists and is public" in called.err


def test_a_name_without_owner_is_mine(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, "reward").code == 0
    assert REPO in hub.repos


def test_reading_back_sees_what_the_tree_does_not(hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, REPO, "--verify", "download").code == 0
    sha = hub.repos[REPO].head.tree["model-00001-of-00003.safetensors"].sha256
    good = hub.repos[REPO].head.tree["model-00001-of-00003.safetensors"].content
    hub.stored[sha] = flip(good)
    assert call("push", merged, REPO).code == 0
    called = call("push", merged, REPO, "--verify", "download")
    assert called.code == 5
    assert "model-00001-of-00003.safetensors reads back with sha256" in called.err


def test_no_token_leaves_the_hub_and_none_is_printed(hub: Hub, call: Caller, merged: Path) -> None:
    called = call("push", merged, REPO, "--verify", "download")
    assert called.code == 0
    elsewhere = [asked for asked in hub.log if asked.headers["host"].startswith("localhost")]
    assert {asked.method for asked in elsewhere} == {"PUT", "GET"}
    assert not [asked for asked in elsewhere if "authorization" in asked.headers]
    assert all(
        asked.headers.get("authorization") == f"Bearer {hub.token}" for asked in hub.asked("^POST .*/(commit|batch)")
    )
    assert hub.token not in called.out + called.err


def test_keyless_ci_exchanges_an_id_token(
    hub: Hub, call: Caller, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_OIDC_RESOURCE", REPO)
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", "an-id-token")
    called = call("push", merged, REPO)
    assert called.code == 0, called.err
    used = {asked.headers.get("authorization") for asked in hub.asked("^POST /api/models/.*/commit/")}
    assert used == {"Bearer hf_jwt_" + "o" * 30}


def test_an_id_token_that_is_not_accepted(
    hub: Hub, call: Caller, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv("HF_OIDC_RESOURCE", REPO)
    monkeypatch.setenv("HF_OIDC_ID_TOKEN", "another-token-that-is-secret")
    called = call("push", merged, REPO)
    assert called.code == 4, called.err
    assert "another-token" not in called.err
    assert hub.repos == {}


def test_large_files_go_in_parts_and_long_trees_in_pages(hub: Hub, call: Caller, merged: Path) -> None:
    hub.part_bytes, hub.page = 1000, 3
    assert call("push", merged, REPO, "--verify", "download").code == 0
    assert len(hub.asked("^PUT /storage/[0-9a-f]+/[0-9]+")) > 6
    assert len(hub.asked("^POST /api/complete_multipart")) == 3
    assert_holds(hub.repos[REPO], merged)
    hub.log.clear()
    assert call("push", merged, REPO).code == 0
    assert hub.asked(WRITES) == []


@pytest.mark.parametrize("kind", ["adapter over model", "model over adapter"])
def test_kinds_are_not_mixed(kind: str, hub: Hub, call: Caller, merged: Path, adapter: Path) -> None:
    first, second = (merged, adapter) if kind == "adapter over model" else (adapter, merged)
    assert call("push", first, REPO).code == 0
    head = hub.repos[REPO].head.oid
    refused = call("push", second, REPO)
    assert refused.code == 6
    assert "together neither would load" in refused.err
    assert hub.repos[REPO].head.oid == head


def test_what_is_no_model_is_refused_with_what_to_do(hub: Hub, call: Caller) -> None:
    refused = call("push", FIXTURES / "fsdp2-full", REPO)
    assert refused.code == 3
    assert "expected an adapter or a model" in refused.err
    assert "lora-tool consolidate" in refused.err
    run = call("push", FIXTURES / "reward-run", REPO)
    assert run.code == 3
    assert "checkpoint-4" in run.err
    assert hub.log == []


def test_what_is_broken_is_not_pushed(hub: Hub, call: Caller, merged: Path) -> None:
    shard = merged / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    refused = call("push", merged, REPO)
    assert refused.code == 1
    assert "LT1" in refused.err
    assert hub.log == []


def test_a_gitignore_on_the_hub_drops_nothing_silently(hub: Hub, call: Caller, merged: Path) -> None:
    hub.repo(REPO).commit_files({".gitignore": b"tokenizer.json\n"})
    head = hub.repos[REPO].head.oid
    refused = call("push", merged, REPO)
    assert refused.code == 4
    assert "the repository's .gitignore excludes tokenizer.json" in refused.err
    assert hub.repos[REPO].head.oid == head


@pytest.mark.parametrize(
    "arguments",
    [
        ["a/b/c"],
        ["../x"],
        [""],
        ["a/b.git"],
        ["a/x--y"],
        ["a/" + "b" * 100],
        ["me/x@main", "--revision", "dev"],
        ["me/x", "--create-pr", "--tag", "v1"],
        ["me/x", "--tag", "v 1"],
        ["me/x", "--revision", "a..b"],
        ["me/x", "--message", " "],
        ["me/x", "--verify", "never"],
        ["me/x", "--ignore", "XY1"],
        ["me/x", "--dyr-run"],
    ],
)
def test_a_wrong_usage_is_told(arguments: list[str], hub: Hub, call: Caller, merged: Path) -> None:
    assert call("push", merged, *arguments).code == 2
    assert hub.log == []


def test_the_library_plans_and_pushes(hub: Hub, merged: Path) -> None:
    plan = plan_push(merged, REPO, private=False, message="from Python")
    assert hub.asked(WRITES) == []
    assert {file.change for file in plan.files} == {UploadAction.ADD}
    done = push(plan)
    assert done.commit == hub.repos[REPO].head.oid
    assert hub.repos[REPO].history[0] == "from Python"
    assert done.checked == len(plan.files)
    assert {file.name: file.sha256 for file in done.files} == {
        name: hashlib.sha256(content).hexdigest() for name, content in hub.repos[REPO].files().items()
    }


SCORE = """
import sys, torch
from transformers import AutoModelForSequenceClassification
for name in sys.argv[1:]:
    model, info = AutoModelForSequenceClassification.from_pretrained(name, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits
    print(logits.double().numpy().tobytes().hex())
"""


def test_a_pushed_reward_model_loads_from_the_hub_and_scores_the_same(hub: Hub, merged: Path, tmp_path: Path) -> None:
    """As a user does it: two programs, HF_ENDPOINT and HF_TOKEN in the environment, nothing patched."""
    settings = environment(hub, tmp_path)
    for command in (
        ["-m", "lora_tool", "push", str(merged), REPO, "--verify", "download"],
        ["-c", SCORE, REPO, str(merged)],
    ):
        done = subprocess.run([sys.executable, *command], env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    there, here = done.stdout.split()
    assert there == here
