"""What is pushed and what is not: by kind, by name, and by what is written in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.core.errors import CorruptFile, PlanError
from lora_tool.hub import contents as local_paths
from lora_tool.hub.contents import SecretFound, never, require_no_secrets, select
from lora_tool.hub.model import PushContent
from tests.cli.calling import Caller
from tests.hub.conftest import REPO
from tests.hub.server import Hub

TRAINING = """optimizer.pt optimizer.bin scheduler.pt scaler.pt rng_state.pth rng_state_3.pth trainer_state.json
training_args.bin zero_to_fp32.py latest events.out.tfevents.1 random_states_0.pkl""".split()  # noqa: SIM905
SECRETS = """.env .env.local prod.env .netrc .git-credentials id_rsa id_ed25519 server.key cert.pem gcp-credentials.json
token hf.token .pypirc""".split()  # noqa: SIM905
PICKLES = "pytorch_model.bin adapter_model.bin model.pt x.pth x.ckpt x.pkl x.pickle x.joblib".split()  # noqa: SIM905
FOLDERS = "runs wandb global_step2 checkpoint-4 .git .cache mlruns pytorch_model_fsdp_0 __pycache__".split()  # noqa: SIM905


def opened(folder: Path) -> AdapterDir | ModelDir:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, AdapterDir | ModelDir)
    return checkpoint


@pytest.mark.parametrize("name", TRAINING + SECRETS + PICKLES)
def test_what_is_never_pushed(name: str, merged: Path) -> None:
    before = {content.name for content in select(opened(merged))[0]}
    (merged / name).write_bytes(b"{}")
    contents, left_out = select(opened(merged), ["*.safetensors", "*"])
    assert {content.name for content in contents} == before
    assert next(item for item in left_out if item.name == name).reason
    with pytest.raises(PlanError, match="is never pushed"):
        select(opened(merged), [name])


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_never_pushed(name: str, merged: Path) -> None:
    (merged / name).mkdir()
    (merged / name / "x.txt").write_text("x")
    contents, left_out = select(opened(merged), ["*.json", "*"])
    assert not any(content.name.startswith(name) for content in contents)
    assert f"{name}/" in {item.name for item in left_out}


def test_everything_of_a_model_is_pushed(merged: Path) -> None:
    (merged / "additional_chat_templates").mkdir()
    for name in ("LICENSE", "NOTICE.txt", "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt"):
        (merged / name).write_text("{}")
    (merged / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (merged / "model-00009-of-00009.safetensors").write_bytes(
        (merged / "model-00001-of-00003.safetensors").read_bytes()
    )
    contents, left_out = select(opened(merged))
    names = {content.name for content in contents}
    assert names == {path.relative_to(merged).as_posix() for path in merged.rglob("*") if path.is_file()} - {
        "model-00009-of-00009.safetensors"
    }
    assert [(item.name, item.reason) for item in left_out] == [
        ("model-00009-of-00009.safetensors", "a weights file that the index does not name")
    ]


@pytest.mark.parametrize(
    ("kind", "pickle", "hint"),
    [
        ("adapter", "adapter_model.bin", "lora-tool convert {} --to peft -o OUT"),
        ("merged", "pytorch_model.bin", "Qwen2ForSequenceClassification.from_pretrained('{}')"),
    ],
)
def test_weights_in_a_pickle_are_not_left_behind(
    kind: str, pickle: str, hint: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    torch.save({"weight": torch.ones(2)}, folder / pickle)
    assert pickle not in {content.name for content in select(opened(folder))[0]}  # beside the safetensors
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(PlanError, match=f"{pickle} is a pickle, which is never pushed") as raised:
        select(opened(folder))
    assert raised.value.hint is not None
    assert hint.format(folder) in raised.value.hint


def test_more_is_included_by_name(hub: Hub, call: Caller, merged: Path) -> None:
    (merged / "plots").mkdir()
    for name in ("plots/loss.png", "plots/note.md", "eval.json"):
        (merged / name).write_bytes(b"x")
    assert "not pushed: eval.json: not a file of a model; --include eval.json adds it" in (
        call("push", merged, REPO, "--dry-run").out
    )
    called = call("push", merged, REPO, "--include", "plots/*.png", "--include", "eval.json")
    assert called.code == 0, called.err
    assert hub.repos[REPO].files().keys() >= {"plots/loss.png", "eval.json"}
    assert "plots/note.md" not in hub.repos[REPO].files()
    assert call("push", merged, REPO, "--include", "nothing*").code == 3


def test_a_link_out_of_the_folder_is_refused(merged: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (merged / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptFile, match="is a link that leads out of its folder"):
        select(opened(merged))
    (merged / "LICENSE").unlink()
    (merged / "link.md").symlink_to(tmp_path / "secret")
    with pytest.raises(CorruptFile, match="is a link that leads out of its folder"):
        select(opened(merged), ["link.md"])
    (merged / "link.md").unlink()
    os.mkfifo(merged / "NOTICE")
    with pytest.raises(CorruptFile, match="is not a regular file"):
        select(opened(merged))


def test_a_snapshot_of_the_cache_can_be_pushed(merged: Path, tmp_path: Path) -> None:
    """Its files are links into `blobs`, which count as inside."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in merged.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert len(select(opened(snapshot))[0]) == len(list(blobs.iterdir()))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "LICENSE", "plots/a.png", "model.safetensors"])
def test_what_may_be_pushed(name: str) -> None:
    assert never(name) is None


GOOD_SECRETS = {
    "Hugging Face token": "hf_" + "aB3" * 12,
    "AWS key": "AKIA" + "A1B2C3D4E5F6G7H8",
    "GitHub token": "ghp_" + "a1" * 18,
    "GitLab token": "glpat-" + "a1b2" * 6,
    "OpenAI or Anthropic key": "sk-ant-" + "a1b2" * 10,
    "Slack token": "xoxb-" + "1234567890",
    "Google key": "AIza" + "a" * 35,
    "Weights & Biases key": "WANDB_API_KEY=" + "0123456789abcdef0123456789abcdef01234567",
    "JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4",
    "private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
}


@pytest.mark.parametrize("kind", GOOD_SECRETS)
def test_a_secret_is_found_and_not_repeated(kind: str, hub: Hub, call: Caller, merged: Path) -> None:
    config = merged / "tokenizer_config.json"
    table = json.loads(config.read_text())
    config.write_text(json.dumps({**table, "note": GOOD_SECRETS[kind]}, indent=1))
    refused = call("push", merged, REPO)
    assert refused.code == 3, refused.err
    assert f"holds a secret ({kind}); nothing was pushed" in refused.err
    assert "tokenizer_config.json: line " in refused.err
    assert GOOD_SECRETS[kind] not in refused.err
    assert hub.repos == {}


def test_the_value_of_an_own_variable_is_a_secret(merged: Path) -> None:
    value = "correct horse battery"
    contents = [PushContent(name="README.md", data=f"x\n{value}\n".encode())]
    require_no_secrets(contents, {"GREETING": value, "SHORT_TOKEN": "x"})
    require_no_secrets(contents, {"SOME_TOKEN": str(merged)})
    with pytest.raises(
        SecretFound, match=r"README\.md: line 2 holds a secret \(the value of \$MY_PASSWORD\)"
    ) as caught:
        require_no_secrets(contents, {"MY_PASSWORD": value})
    assert value not in str(caught.value)


def test_the_metadata_of_weights_is_looked_at(hub: Hub, call: Caller, merged: Path) -> None:
    path = merged / "model-00001-of-00003.safetensors"
    try:
        tensors = load_file(path)
    except TypeError:
        pytest.skip("no bfloat16 in this numpy")
    save_file(tensors, path, {"format": "pt", "argv": "--token hf_" + "aB3" * 12})
    refused = call("push", merged, REPO)
    assert refused.code == 3, refused.err
    assert "holds a secret (Hugging Face token)" in refused.err
    assert hub.repos == {}


def test_a_secret_in_the_commits_words_is_found(hub: Hub, call: Caller, merged: Path) -> None:
    refused = call("push", merged, REPO, "--message", "with hf_" + "aB3" * 12)
    assert refused.code == 3
    assert "the commit's message: line 1 holds a secret (Hugging Face token)" in refused.err
    assert hub.repos == {}


def test_words_that_look_like_secrets_are_not(merged: Path) -> None:
    words = (
        "hf_hub_download hf_transfer sk-learn AKIA ghp_ token=abc eyJ task-oriented-dialogue-with-a-long-name-indeed"
    )
    require_no_secrets([PushContent(name="README.md", data=words.encode())], {})
    require_no_secrets(select(opened(merged))[0], {})


def test_the_manifests_paths_are_taken_out_and_nothing_else() -> None:
    table = {"path": "/w", "hub_id": "me/w", "note": "merging /w into /home/al/base/x", "x": ["/home/al/base", "a/w"]}
    paths = tuple(sorted(local_paths._absolute_paths(table), key=len, reverse=True))
    assert local_paths._cleaned(table, paths) == {
        "path": "w",
        "hub_id": "me/w",
        "note": "merging w into base/x",
        "x": ["base", "a/w"],
    }


def test_a_model_with_code_of_its_own_is_said(hub: Hub, call: Caller, merged: Path) -> None:
    config = merged / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "auto_map": {"AutoModel": "m.M"}}))
    (merged / "m.py").write_text("")
    called = call("push", merged, REPO, "--dry-run")
    assert "--include '*.py' pushes it" in called.err
    assert call("push", merged, REPO, "--include", "*.py").code == 0
    assert "m.py" in hub.repos[REPO].files()


def test_what_failed_its_verification_is_not_pushed(hub: Hub, call: Caller, merged: Path) -> None:
    path = merged / "lora_tool.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "verification": {"errors": 2, "tensors": 9}}))
    refused = call("push", merged, REPO)
    assert refused.code == 5
    assert "a verification with 2 errors" in refused.err
    assert "lora-tool verify" in refused.err
    assert hub.log == []
