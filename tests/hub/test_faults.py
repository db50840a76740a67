"""Each way in which the Hub, its storage or the network fails: the exit code, what is said, HEAD, and the next push."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calling import Caller
from tests.hub.conftest import REPO
from tests.hub.faults import flip
from tests.hub.server import SIGNATURE, Hub
from tests.hub.test_push import assert_holds

COMMIT = "^POST /api/models/me/reward/commit/"
ALWAYS = 99
QUOTA = b'{"error":"Private repository storage limit reached, please upgrade your plan"}'


@dataclass(frozen=True)
class Case:
    """A fault, and what is to come of it. `commits` is how often HEAD moves, before the push that goes well."""

    on: str
    code: int
    words: tuple[str, ...] = ()
    fault: dict[str, Any] = field(default_factory=dict)
    commits: int = 0


CASES = {
    # who may not, or what is not accepted
    "401 on info": Case(
        "^GET /api/models/me/reward$", 4, ("does not accept the token", "hf auth login"), {"status": 401}
    ),
    "403 on preupload": Case("preupload", 4, ("403 Forbidden", "write access"), {"status": 403}),
    "403 on commit": Case(COMMIT, 4, ("403 Forbidden",), {"status": 403}),
    "quota on commit": Case(COMMIT, 4, ("storage limit reached", "free storage"), {"status": 403, "body": QUOTA}),
    "repo gone at commit": Case(
        COMMIT, 4, ("no such repository",), {"status": 404, "headers": {"X-Error-Code": "RepoNotFound"}}
    ),
    "400 on commit": Case(COMMIT, 4, ("400 Bad Request", "fault of the test"), {"status": 400}),
    "the card is refused": Case(
        "validate-yaml",
        4,
        ("refuses the model card", "bad value of license"),
        {"status": 400, "body": b'{"errors":[{"message":"bad value of license"}],"warnings":[]}'},
    ),
    "an expired link": Case(
        "^PUT /storage", 7, ("storage did not accept", "403", "probably expired"), {"status": 403, "times": ALWAYS}
    ),
    # somebody else's change
    "409 on commit": Case(COMMIT, 6, ("was changed while this push ran",), {"status": 409}),
    # what a later try may do
    "429 on commit": Case(COMMIT, 7, ("429 Too Many Requests",), {"status": 429, "times": ALWAYS}),
    "429 for an hour": Case(
        "preupload", 7, ("asks to wait 3600 s", "in 3600 s"), {"status": 429, "headers": {"Retry-After": "3600"}}
    ),
    "a rate limit of an hour": Case(
        "/tree/", 7, ("asks to wait 3000 s",), {"status": 429, "headers": {"RateLimit": '"api";r=0;t=3000'}}
    ),
    "500 on commit": Case(COMMIT, 7, ("500 Internal Server Error",), {"status": 500, "times": ALWAYS}),
    "503 on upload": Case("^PUT /storage", 7, ("storage did not accept", "503"), {"status": 503, "times": ALWAYS}),
    "502 with a page": Case("validate-yaml", 7, ("not JSON",), {"status": 502, "body": b"<html>", "times": ALWAYS}),
    "an answer that is no JSON": Case(COMMIT, 7, ("not JSON",), {"status": 200, "body": b"<html>", "times": ALWAYS}),
    "an answer without a commit": Case(
        COMMIT, 7, ("could not be understood",), {"status": 200, "body": b"{}", "times": ALWAYS}
    ),
    "the line drops before": Case(COMMIT, 7, ("no connection to the Hub",), {"drop": "before", "times": ALWAYS}),
    "the line drops on upload": Case(
        "^PUT /storage", 7, ("no connection to the Hub",), {"drop": "body", "times": ALWAYS}
    ),
    "an upload that a proxy swallows": Case(
        "^PUT /storage", 7, ("does not have a file that was just uploaded",), {"status": 200, "times": ALWAYS}
    ),
    # what goes well in the end
    "500 on commit once": Case(COMMIT, 0, (), {"status": 500}, 1),
    "503 on upload once": Case("^PUT /storage", 0, (), {"status": 503}, 1),
    "the line drops in between once": Case(COMMIT, 0, (), {"drop": "body"}, 1),
    "the line drops on upload once": Case("^PUT /storage", 0, (), {"drop": "body"}, 1),
    "the answer is lost": Case(COMMIT, 0, ("the Hub's answer was lost",), {"drop": "after"}, 1),
    # what is not what was sent
    "a byte flips on commit": Case(
        COMMIT, 5, ("has hash", "push again"), {"corrupt": lambda body: body.replace(b"Lm", b"Ln")}, 1
    ),
}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_told_and_the_next_push_succeeds(
    name: str, hub: Hub, call: Caller, merged: Path, waits: list[float]
) -> None:
    case, repo = CASES[name], hub.repo(REPO)
    hub.fault(case.on, **case.fault)
    called = call("push", merged, REPO)
    assert called.code == case.code, called.err + called.out
    for word in case.words:
        assert word in called.err + called.out
    assert len(repo.history) - 1 == case.commits
    assert max(waits, default=0) <= 61
    assert "Traceback" not in called.err
    if case.code:
        told = [line for line in called.err.splitlines() if line.startswith(("error:", "hint:"))]
        assert [line.partition(":")[0] for line in told] == ["error", "hint"]
        hub.faults.clear()
        again = call("push", merged, REPO)
        assert again.code == 0, again.err
        assert len(repo.history) - 1 == case.commits + 1
    assert_holds(repo, merged)
    for secret in (hub.token, SIGNATURE, "X-Amz-Signature=5"):
        assert secret not in called.out + called.err


def test_what_is_uploaded_is_not_sent_twice(hub: Hub, call: Caller, merged: Path) -> None:
    hub.repo(REPO)
    hub.fault(COMMIT, status=403)
    assert call("push", merged, REPO).code == 4
    assert len(hub.asked("^PUT")) == 3
    hub.log.clear()
    assert call("push", merged, REPO).code == 0
    assert hub.asked("^PUT") == []
    assert_holds(hub.repos[REPO], merged)


def test_a_lost_answer_is_not_committed_twice_whatever_comes_next(
    hub: Hub, call: Caller, merged: Path, waits: list[float]
) -> None:
    """The commit lands, its answer is lost, and HEAD cannot be read either: the next push finds it done."""
    repo = hub.repo(REPO)
    hub.fault(COMMIT, drop="after", times=ALWAYS, action=lambda: hub.fault("^GET", status=503, times=ALWAYS))
    called = call("push", merged, REPO)
    assert called.code == 7, called.err
    assert len(repo.history) == 2
    assert waits
    hub.faults.clear()
    again = call("push", merged, REPO, "--json")
    assert (again.code, again.json["changed"]) == (0, False)
    assert len(repo.history) == 2


def test_a_lost_answer_to_a_pull_request_opens_no_second_one(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    hub.fault(COMMIT, drop="after")
    called = call("push", merged, REPO, "--create-pr", "--json")
    assert called.code == 0, called.err
    assert len(repo.pulls) == 1
    assert called.json["pull_request"].endswith("/discussions/1")


@pytest.mark.parametrize("moment", ["preupload", "^PUT /storage", COMMIT])
def test_somebody_elses_commit_in_between(moment: str, hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    hub.fault(moment, action=lambda: repo.commit_files({"notes.txt": b"mine"}))
    called = call("push", merged, REPO)
    assert called.code == 6, called.err
    assert "was changed while this push ran" in called.err
    assert repo.history == ["by somebody else", "initial commit"]
    assert call("push", merged, REPO).code == 0
    assert repo.files()["notes.txt"] == b"mine"
    assert_holds(repo, merged)


def test_somebody_elses_commit_of_the_same_is_no_conflict(hub: Hub, call: Caller, merged: Path) -> None:
    repo = hub.repo(REPO)
    assert call("push", merged, REPO).code == 0
    whole = repo.head.tree
    repo.branches["main"] = repo.head.parent or ""

    def same_by_another() -> None:
        repo.branches["main"] = repo.add_commit(repo.head.oid, "the same, by another", whole).oid

    hub.fault(COMMIT, action=same_by_another)
    called = call("push", merged, REPO)
    assert called.code == 0, called.err
    assert repo.history == ["the same, by another", "initial commit"]


def test_a_repository_that_appears_meanwhile(hub: Hub, call: Caller, merged: Path) -> None:
    hub.fault("repos/create", action=lambda: hub.repo(REPO).commit_files({"config.json": b"{}"}))
    called = call("push", merged, REPO)
    assert called.code == 6, called.err
    assert "while this push ran" in called.err
    assert len(hub.repos[REPO].history) == 2
    assert call("push", merged, REPO).code == 0


@pytest.mark.parametrize("fault", [{"status": 500}, {"drop": "after"}, {"drop": "before"}])
def test_creating_the_repository_is_tried_again(
    fault: dict[str, Any], hub: Hub, call: Caller, merged: Path, waits: list[float]
) -> None:
    hub.fault("repos/create", **fault)
    called = call("push", merged, REPO)
    assert called.code == 0, called.err
    assert hub.repos[REPO].private
    assert len(hub.repos[REPO].history) == 2
    assert waits


def test_a_repository_that_may_not_be_created(
    hub: Hub, call: Caller, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "r" * 34)
    called = call("push", merged, REPO)
    assert called.code == 4
    assert "403 Forbidden" in called.err
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 7)
    assert "does not accept the token" in call("push", merged, REPO).err
    monkeypatch.delenv("HF_TOKEN")
    assert call("push", merged, REPO).code == 4
    assert hub.repos == {}


def test_a_flipped_byte_in_storage_is_seen_when_read_back(hub: Hub, call: Caller, merged: Path) -> None:
    hub.fault("^PUT /storage", corrupt=flip)
    called = call("push", merged, REPO, "--verify", "download")
    assert called.code == 5, called.err
    assert "reads back with sha256" in called.err


def test_no_network_at_all(hub: Hub, call: Caller, merged: Path) -> None:
    hub.__exit__()
    called = call("push", merged, REPO)
    assert called.code == 7
    assert "no connection to the Hub" in called.err
    assert "run the same command again" in called.err


def test_offline_by_wish(hub: Hub, call: Caller, merged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    called = call("push", merged, REPO)
    assert called.code == 7
    assert "HF_HUB_OFFLINE is set" in called.err
    shown = call("push", merged, REPO, "--dry-run")
    assert shown.code == 0
    assert "warning: this is the plan for an empty repository: " in shown.err
    assert "add     model-00001-of-00003.safetensors" in shown.out
    assert hub.log == []


def test_a_file_that_changes_under_the_push(hub: Hub, call: Caller, merged: Path) -> None:
    repo, config = hub.repo(REPO), merged / "config.json"
    hub.fault("preupload", action=lambda: config.write_text(config.read_text() + "\n"))
    called = call("push", merged, REPO)
    assert called.code == 3, called.err
    assert "config.json changed after the push was planned" in called.err
    assert len(repo.history) == 1
    assert call("push", merged, REPO).code == 0
