"""`lora-tool verify ADAPTER --served URL`: a server that applies the adapter, one that does not, and those that fail."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_tool import ServerError, verify
from lora_tool.verification import openai_server
from tests.checkpoint_edits import fields, filled, tensors
from tests.cli.calling import Caller
from tests.fake_server import BASE, CARDS, TOKENS, FakeServer, moved
from tests.mutations import CAUSAL, REWARD, copy_of

SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter whose base is not here, so that PEFT is not asked."""
    folder = copy_of(CAUSAL, tmp_path)
    shutil.rmtree(folder.parent / "base")
    return folder


def _asked(call: Caller, adapter: Path, answer: Any, *more: str, **of: Any) -> tuple[Any, FakeServer]:
    with FakeServer(answer, **of).running() as server:
        return call("verify", adapter, "--served", server.url, *more), server


def test_an_adapter_that_is_applied(call: Caller, adapter: Path) -> None:
    called, server = _asked(call, adapter, moved)
    assert called.code == 0, called.err
    assert "`ours`, and its base `base`" in called.out
    assert "40 log probabilities differ by 0.25, those of two answers to one request by 0" in called.out
    assert "LT824" in called.out, "it says that PEFT was not asked"
    assert [each["model"] for each in server.asked[1:5]] == ["base", "ours", "base", "ours"]
    assert len(server.asked) == 1 + 8 * 4
    assert _asked(call, adapter, moved, "--strict")[0].code == 5
    several, _ = _asked(call, adapter, moved, str(adapter))
    assert several.out.splitlines()[-1].split() == [str(adapter), "right"]


def test_a_base_that_is_served_under_the_adapters_name(call: Caller, adapter: Path) -> None:
    called, _ = _asked(call, adapter, lambda _: TOKENS, "--json")
    assert called.code == 5
    [finding] = called.json["findings"]
    assert finding["code"] == "LT823"
    assert called.json["verification"]["served"]["applied"] is False
    with FakeServer(lambda _: TOKENS).running() as server:
        found = verify(adapter, served=server.url)
    assert [each.code for each in found.report.findings] == ["LT823"]
    assert "LT823" in found._repr_html_()


def test_noise_is_no_adapter(call: Caller, adapter: Path) -> None:
    times = iter(range(1000))

    def noisy(_: Mapping[str, Any]) -> Mapping[str, float]:
        return {token: value + 0.01 * (next(times) % 7) for token, value in TOKENS.items()}

    assert _asked(call, adapter, noisy)[0].code == 5
    small, _ = _asked(call, adapter, lambda body: moved(body, 0.003))
    assert small.code == 0
    assert "info     LT823" in small.out, "a 16-bit server may round so"


def test_an_adapter_that_changes_nothing_cannot_be_told(call: Caller, adapter: Path) -> None:
    with tensors(adapter) as table:
        table.update({name: filled(0.0, *each.shape) for name, each in table.items() if "lora_B" in name})
    called, _ = _asked(call, adapter, lambda _: TOKENS)
    assert called.code == 0
    assert "no answer can show whether it is applied" in called.out


def _of(content: Any) -> Any:
    return lambda _: content


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        pytest.param(_of({"choices": [{"text": "x", "logprobs": None}]}), 4, "without log prob", id="no logprobs"),
        pytest.param(_of({"choices": []}), 4, "without log prob", id="no choice"),
        pytest.param(_of({"a": float("nan"), "b": -9999.0}), 4, "without log prob", id="no numbers"),
        pytest.param(_of((401, {}, {"error": "Unauthorized"})), 4, "asks for a key: set VLLM_API_KEY", id="401"),
        pytest.param(_of((404, {}, {"message": "no `ours`\x1b[2J"})), 4, r"no `ours`\x1b[2J", id="404"),
        pytest.param(_of((500, {}, b"<html>")), 4, "500 Internal Server Error", id="500"),
        pytest.param(_of((503, {}, {"detail": "loading"})), 7, "503 Service Unavailable: loading", id="busy"),
        pytest.param(_of(b"<html>hello"), 4, "expected JSON, as OpenAI-compatible servers answer", id="garbage"),
        pytest.param(_of(b"[" * 100_000), 4, "expected JSON", id="deep"),
        pytest.param(_of(b" " * (5 << 20)), 4, "longer than 4 MiB", id="huge"),
        pytest.param(_of((200, {"Content-Length": "99"}, b'{"cho')), 4, "expected JSON", id="cut off"),
        pytest.param(
            _of((307, {"Location": f"http://elsewhere/?key={SECRET}"}, b"")), 4, "redirects to http://e", id="redirect"
        ),
    ],
)
def test_what_servers_answer_instead(call: Caller, adapter: Path, answer: Any, code: int, said: str) -> None:
    called, server = _asked(call, adapter, answer)
    assert (called.code, called.out) == (code, ""), called.err
    assert said in called.err
    assert SECRET not in called.err
    assert len(server.asked) == 2, "nothing is asked twice"


def test_a_server_that_hangs(call: Caller, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_server, "_REQUEST", 0.2)
    started = time.monotonic()
    called, _ = _asked(call, adapter, lambda _: time.sleep(1.0))
    assert called.code == 7
    assert "no answer in 0 s" in called.err
    assert time.monotonic() - started < 5
    drops = (b" " * 2**20 for _ in iter(lambda: time.sleep(0.1), 0))
    assert _asked(call, adapter, lambda _: (200, {"Content-Length": str(9 * 2**20)}, drops))[0].code == 7
    monkeypatch.setattr(openai_server, "_ALL", 0.0)
    assert _asked(call, adapter, moved)[0].code == 7
    assert call("verify", adapter, "--served", "http://127.0.0.1:9").code == 7


def test_a_key_is_sent_and_never_shown(call: Caller, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    called, server = _asked(call, adapter, moved, "--json")
    assert {each["key"] for each in server.asked} == {f"Bearer {SECRET}"}
    assert SECRET not in called.out
    called, _ = _asked(call, adapter, lambda _: (403, {}, {"error": f"{SECRET} may not"}))
    assert "*** may not" in called.err
    monkeypatch.setenv("VLLM_API_KEY", f"{SECRET}\nX: y")
    called, _ = _asked(call, adapter, moved)
    assert called.code == 2
    assert SECRET not in called.err


OTHER = {**CARDS[1], "id": "other"}
LLAMA = [{"id": "model.gguf", "owned_by": "llamacpp"}]


def _lora(at: int, path: str = "ours.gguf", scale: float = 1.0) -> dict[str, Any]:
    return {"id": at, "path": path, "scale": scale}


@pytest.mark.parametrize(
    ("cards", "more", "expected"),
    [
        pytest.param([*CARDS, OTHER], ["--served-name", "other"], "other", id="named"),
        pytest.param([*CARDS, {**OTHER, "root": "/models/adapter"}], [], "other", id="by its folder"),
        pytest.param([BASE, {"id": "loaded later"}], ["--served-name", "new"], None, id="unlisted, unknown base"),
        pytest.param([BASE], ["--served-name", "new"], "new", id="unlisted"),
        pytest.param([{"id": "../base"}, {"id": "merged"}], [], "merged", id="beside the base that the config names"),
        pytest.param(
            [{**card, "owned_by": "sglang"} for card in CARDS], [], "base:ours", id="SGLang's name of an adapter"
        ),
        pytest.param([BASE, {**OTHER, "parent": "meta/base"}], [], "other", id="a parent that is not served"),
        pytest.param([*CARDS, OTHER], [], None, id="two"),
        pytest.param([BASE], [], None, id="none"),
        pytest.param([BASE, {**BASE, "id": "alias"}], [], None, id="a base with two names"),
    ],
)
def test_which_name_is_the_adapters(
    call: Caller, adapter: Path, cards: Any, more: list[str], expected: str | None
) -> None:
    called, server = _asked(
        call, adapter, lambda body: moved({"model": body["model"].replace("../", "")}), *more, cards=cards
    )
    assert called.code == (3 if expected is None else 0), called.err
    assert [each["model"] for each in server.asked[2:3]] == ([] if expected is None else [expected])
    if expected is None:
        assert "`base`" in called.err or "`ours`" in called.err


def test_llama_cpp_has_scales_instead_of_names(call: Caller, adapter: Path) -> None:
    def of_llama_cpp(body: Mapping[str, Any]) -> Any:
        [lora] = body["lora"]
        top = [{"id": at, "logprob": -1.0 - at - 0.3 * lora["scale"]} for at in range(5)]
        return {"choices": [{"logprobs": {"content": [{"id": 0, "top_logprobs": top}]}}]}

    called, server = _asked(call, adapter, of_llama_cpp, cards=LLAMA, loras=[_lora(0)])
    assert called.code == 0, called.err
    assert "`ours.gguf`, and its base `model.gguf`" in called.out
    assert [each["lora"] for each in server.asked[2:4]] == [[{"id": 0, "scale": 0.0}], [{"id": 0, "scale": 1.0}]]
    off, _ = _asked(call, adapter, of_llama_cpp, cards=LLAMA, loras=[_lora(0, scale=0.0)])
    assert off.code == 5, "loaded without being applied"
    two = [_lora(0), _lora(1, "/x/two.gguf")]
    assert _asked(call, adapter, of_llama_cpp, cards=LLAMA, loras=two)[0].code == 3
    assert _asked(call, adapter, of_llama_cpp, "--served-name", "two", cards=LLAMA, loras=two)[0].code == 0
    assert _asked(call, adapter, of_llama_cpp, cards=LLAMA, loras=[])[0].code == 3


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("localhost:8000", []),
        ("ftp://localhost", []),
        ("http://me:secret@localhost", []),
        ("http://localhost?x=1", []),
        ("http://localhost:99999", []),
        ("http://localhost/ü", []),
        ("http://local host", []),
        ("http://localhost", ["--adapter", "x"]),
        ("http://localhost", ["--sample"]),
        (None, ["--served-name", "x"]),
    ],
)
def test_usage(call: Caller, adapter: Path, url: str | None, more: list[str]) -> None:
    given = [] if url is None else ["--served", url]
    called = call("verify", adapter, *given, *more)
    assert called.code == 2
    assert "secret" not in called.err


def test_a_reward_adapter_is_asked_for_scores(call: Caller, tmp_path: Path) -> None:
    def scored(by: float) -> Any:
        return lambda body: {"data": [{"probs": [-0.8 + by * (body["model"] != "base")]}]}

    adapter = copy_of(REWARD, tmp_path)
    shutil.rmtree(adapter.parent / "base")
    called, server = _asked(call, adapter, scored(1.5))
    assert called.code == 0, called.err
    assert "8 scores differ by 1.5" in called.out
    assert {(each["path"], each["use_activation"]) for each in server.asked[1:]} == {("/classify", False)}
    assert _asked(call, adapter, scored(0.0))[0].code == 5
    assert _asked(call, adapter, lambda _: {"data": []})[0].code == 4


def test_adapters_of_other_tasks_are_refused(call: Caller, adapter: Path) -> None:
    with fields(adapter) as config:
        config["task_type"] = "TOKEN_CLS"
    called = call("verify", adapter, "--served", "http://127.0.0.1:9")
    assert called.code == 3
    assert "TOKEN_CLS" in called.err


@pytest.mark.parametrize("place", ["data", "[]", "null"])
def test_lists_of_models_in_no_known_form(adapter: Path, place: str) -> None:
    cards = json.loads(place) if place != "data" else place
    with FakeServer(moved, cards=cards).running() as server, pytest.raises(ServerError, match="lists no models"):
        verify(adapter, served=server.url)
