"""Asking an OpenAI-compatible server: which models it serves, which next tokens they predict, which scores they give.

Nothing is asked twice for a failure, no redirect is followed, and an answer that comes slowly or is too long ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct, field

from lora_tool.checkpoints.hub_client.redaction import redacted
from lora_tool.core.display import printable, shortened
from lora_tool.core.errors import ServerError, ServerUnreachable, WrongValue

KEYS = ("VLLM_API_KEY", "OPENAI_API_KEY")
"""The environment variables that a key is taken from."""
MOST = 5
"""Log probabilities of one token that every server gives: OpenAI's maximum."""
_REQUEST = 120.0
"""Seconds for one answer: the first one with an adapter may have to load it."""
_ALL = 900.0
"""Seconds for all answers together."""
_LARGEST = 4 << 20
_LONGEST = 300
_BUSY = frozenset({408, 425, 429, 502, 503, 504})
_DENIED = frozenset({401, 403})
_ABSENT = -1000.0
"""Below this a log probability stands for minus infinity, which JSON does not have: vLLM writes -9999."""

Prompt = str | Sequence[int]
NextTokens = Mapping[str | int, float]
"""The likeliest next tokens, by their ids where the server says those, each with its log probability; or scores."""


def server_url(value: object) -> str:
    """Return the address of a server without `/v1`. Raises `WrongValue` for what is none, or holds a password."""
    text = str(value)
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        known = None
    if not known or parts.query or parts.fragment or not (text.isascii() and text.isprintable()) or " " in text:
        raise WrongValue(f"served: expected the address of a server, such as http://localhost:8000, found {text!r}")
    if "@" in parts.netloc:
        raise WrongValue(f"served: an address may not hold a password; set {KEYS[0]} to the server's key")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _key() -> str:
    """Return the key of the environment, "" without one. Raises `WrongValue` for one that no header can hold."""
    name = next((name for name in KEYS if os.environ.get(name, "").strip()), None)
    key = os.environ[name].strip() if name else ""
    if not (key.isascii() and (key.isprintable() or not key)):
        raise WrongValue(f"{name} holds characters that no HTTP header may have")
    return key


class OpenAIServer(Struct, frozen=True, kw_only=True):
    """A running server, and until when it may answer."""

    url: str
    until: float = field(default_factory=lambda: time.monotonic() + _ALL)

    def get(self, path: str) -> Any:
        """Return the JSON at `path`. Raises `ServerError`, and `ServerUnreachable` where a retry may succeed."""
        return self._answer(path)

    def predict(self, model: Mapping[str, Any], prompt: Prompt) -> NextTokens:
        """Return the tokens that the `model`, the fields of a request that name it, finds likeliest after the prompt.

        Raises as `get`, and `ServerError` where the answer holds no log probabilities.
        """
        asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": MOST}
        answer = self._answer("/v1/completions", {**model, **asked, "return_tokens_as_token_ids": True})
        try:
            found = _likeliest(answer["choices"][0]["logprobs"])
        except (AttributeError, LookupError, TypeError, ValueError):
            found = {}
        if not found:
            raise ServerError(
                f"{self.url}/v1/completions answers without log probabilities: {_start_of(json.dumps(answer))}",
                hint="start the server so that it gives them: `logprobs` in its answers to /v1/completions",
            )
        return found

    def score(self, model: Mapping[str, Any], text: Prompt) -> NextTokens:
        """Return the scores that the `model`, a classifier, gives the text, by their labels' numbers. Raises as `predict`.

        `use_activation` is vLLM's: without it there are probabilities, in which large differences vanish.
        """
        answer = self._answer("/classify", {**model, "input": text, "use_activation": False})
        found: dict[str | int, float]
        try:
            found = {label: float(score) for label, score in enumerate(answer["data"][0]["probs"])}
        except (LookupError, TypeError, ValueError):
            found = {}
        if not found:
            raise ServerError(f"{self.url}/classify answers without scores: {_start_of(json.dumps(answer))}")
        return found

    def _answer(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        key, where = _key(), f"{self.url}{path}"
        seconds = min(_REQUEST, self.until - time.monotonic())
        try:
            reply = _sent(self.url, path, body, key, seconds)
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate is not accepted: {error.verify_message}"
            raise ServerError(f"{where}: {why}", hint="set SSL_CERT_FILE to the authority's certificate") from None
        except (OSError, HTTPException) as error:
            why = f"no answer in {max(seconds, 0):.0f} s" if isinstance(error, TimeoutError) else _words(error)
            raise ServerUnreachable(
                f"{where}: {why}", hint="look whether the server runs, then run the same command again"
            ) from None
        if reply.status != HTTPStatus.OK:
            raise _refused(reply, where, key)
        if len(reply.body) > _LARGEST:
            raise ServerError(f"{where}: the answer is longer than {_LARGEST >> 20} MiB")
        try:
            return json.loads(reply.body)
        except (ValueError, RecursionError):
            begins = _start_of(reply.body.decode(errors="replace"), key)
            raise ServerError(f"{where}: expected JSON, as OpenAI-compatible servers answer, found {begins}") from None


class _Reply(NamedTuple):
    """What a server sent back: the status, where it redirects to, and the beginning of the body."""

    status: int
    reason: str
    location: str | None
    body: bytes


def _sent(url: str, path: str, body: Mapping[str, Any] | None, key: str, seconds: float) -> _Reply:
    """Return the server's reply, after so many seconds at most. Raises OSError and HTTPException."""
    parts, end = urlsplit(url), time.monotonic() + seconds
    if seconds <= 0:
        raise TimeoutError
    of_scheme = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = of_scheme(parts.hostname or "", parts.port, timeout=seconds)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    with contextlib.closing(connection):
        connection.connect()
        # a socket's own limit begins again with each byte that arrives
        timer = threading.Timer(end - time.monotonic(), _cut, [connection.sock])
        timer.daemon = True
        timer.start()
        try:
            sent = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", parts.path + path, sent, headers)
            response = connection.getresponse()
            raw = response.read(_LARGEST + 1)
        except (OSError, HTTPException):
            if time.monotonic() < end:
                raise
        finally:
            timer.cancel()
    if time.monotonic() >= end:
        raise TimeoutError
    return _Reply(response.status, response.reason, response.getheader("Location"), raw)


def _cut(connected: socket.socket) -> None:
    """End whatever waits for the socket; one that is closed already has nobody that waits."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS would be forgotten, by its own, under who reads


def _refused(reply: _Reply, where: str, key: str) -> ServerError:
    """Return what a status means that is not OK."""
    said = f"{where}: {reply.status} {_start_of(reply.reason, key)}{_message_in(reply.body, key)}"
    if reply.status in _BUSY:
        return ServerUnreachable(said, hint="run the same command again later")
    if reply.status in _DENIED:
        why = "the server does not accept the key" if key else "the server asks for a key"
        return ServerError(said, hint=f"{why}: set {KEYS[0]} to the key that it was started with")
    if reply.location is not None:
        to = _start_of(reply.location, key)
        return ServerError(f"{said}: redirects to {to}", hint="give the address that answers: `served=URL`")
    return ServerError(said)


def _message_in(body: bytes, key: str) -> str:
    """Return what the server wrote about its error, after a colon; "" where it wrote no JSON."""
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    for name in ("error", "message", "detail"):
        found = found.get(name, found) if isinstance(found, dict) else found
    return f": {_start_of(str(found), key)}"


def _words(error: Exception) -> str:
    return _start_of(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _start_of(text: str, key: str = "") -> str:
    """Return the beginning of what a server wrote, harmless and without the key."""
    return redacted(shortened(printable(text.replace(key, "***") if key else text), _LONGEST))


def _likeliest(said: Mapping[str, Any]) -> NextTokens:
    """Return the tokens of the first position, from the form of llama.cpp (`content`) or from OpenAI's.

    llama.cpp and vLLM (`token_id:5`) say ids; SGLang says the text of a token.
    """
    content = said.get("content")
    if content:
        pairs = [(each["id"], each["logprob"]) for each in content[0]["top_logprobs"]]
    else:
        pairs = [(_id_in(name), value) for name, value in said["top_logprobs"][0].items()]
    return {token: float(value) for token, value in pairs if math.isfinite(value) and value > _ABSENT}


def _id_in(name: str) -> str | int:
    number = name.removeprefix("token_id:")
    return int(number) if number != name and number.isdecimal() else name


def farthest(one: Sequence[NextTokens], other: Sequence[NextTokens]) -> float:
    """Return the largest difference of two log probabilities of one token, over all prompts."""
    return max(map(_distance, one, other))


def _distance(one: NextTokens, other: NextTokens) -> float:
    """Return the largest difference of a token's log probabilities, or the least that it can be where one is not said.

    A token that is not among the likeliest has at most the log probability of the last one of those.
    """
    both = [abs(one[token] - other[token]) for token in one.keys() & other.keys()]
    ends = [(one[token], other) for token in one.keys() - other.keys()]
    ends += [(other[token], one) for token in other.keys() - one.keys()]
    return max(0.0, *both, *(value - min(rest.values()) for value, rest in ends))
