"""An OpenAI-compatible server on the loopback device, which answers what a test wants it to."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from lora_tool.verification.prompts import OUR_PROMPTS

Answer = Callable[[Mapping[str, Any]], Any]
"""Gets the request to /v1/completions; returns the likeliest tokens, or the whole answer where it is none of these."""

BASE: dict[str, Any] = {"id": "base", "owned_by": "vllm", "root": "some/base", "parent": None}
CARDS: list[dict[str, Any]] = [BASE, {"id": "ours", "owned_by": "vllm", "root": "elsewhere", "parent": "base"}]
TOKENS = {f"token_id:{at}": -0.5 - at for at in range(5)}


def moved(asked: Mapping[str, Any], by: float = 0.25) -> Mapping[str, float]:
    """Answer as a server that applies the adapter: with other tokens than the base."""
    return {token: value - by * (asked["model"] != "base") for token, value in TOKENS.items()}


class FakeServer:
    """The server; `asked` has the body of each request, with its path and the key that came with it."""

    def __init__(self, answer: Answer, *, cards: Any = CARDS, loras: Any = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self._pages = {"/v1/models": {"data": cards}, "/lora-adapters": loras}
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        atexit.register(self._socket.close)  # of one that is never asked
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeServer]:
        """Answer as long as this is open."""
        server = self._server()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join(5)
            server.server_close()

    def answer_one_verification(self) -> None:
        """Answer, in a thread, as often as a verification with the built-in prompts asks."""
        server = self._server()
        server.timeout = 600

        def serve() -> None:
            for _ in range(1 + 4 * len(OUR_PROMPTS)):
                server.handle_request()

        threading.Thread(target=serve, daemon=True).start()

    def _server(self) -> HTTPServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append({"path": self.path, "key": self.headers.get("Authorization")})
                self._send(fake._pages.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.asked.append({**body, "path": self.path, "key": self.headers.get("Authorization")})
                found = fake._answer(body)
                likeliest = isinstance(found, dict) and all(isinstance(value, float) for value in found.values())
                self._send({"choices": [{"logprobs": {"top_logprobs": [found]}}]} if likeliest else found)

            def _send(self, found: Any) -> None:
                status, headers = 200, {}
                if isinstance(found, tuple):
                    status, headers, found = found
                if found is None:
                    status, found = 404, {"error": {"message": "no such page"}}
                drops = found if isinstance(found, Iterator) else ()
                raw = found if isinstance(found, bytes) else b"" if drops else json.dumps(found).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client may have gone
                    for each in itertools.chain([raw], drops):
                        self.wfile.write(each)

            def log_message(self, *_: Any) -> None:
                pass

        return _Bound(self._socket, Handler)


class _Bound(HTTPServer):
    def __init__(self, bound: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(bound.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
