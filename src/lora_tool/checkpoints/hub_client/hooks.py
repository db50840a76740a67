"""What huggingface_hub's client asks and is answered, seen while we use it, and a timeout where it has none.

The client waits as long as a server's `Retry-After` asks, five times, and asks for a repository's commit without any
timeout (huggingface_hub 2.4, `_http_backoff_base`, `default_client_factory` and `HfApi.model_info`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.utils import _http
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from lora_tool.checkpoints.hub_client.failures import too_long
from lora_tool.checkpoints.hub_client.redaction import redacted_logs

Hook = Callable[[Any], None]
"""Called with a request before it is sent, or with an answer; an exception from it ends the request."""

_READING = ("GET", "HEAD")


@contextlib.contextmanager
def hooked(before: Hook, after: Hook, *, bars: bool, silence: float | None = None) -> Iterator[None]:
    """Call `before` with each request and `after` with each answer; no log record holds a secret meanwhile.

    The client's own progress `bars` are shown only if wanted. A request that has no timeout gets one:
    HF_HUB_ETAG_TIMEOUT for reading, `silence` seconds for sending. A package older than 1.0 has another client, which
    stays as it is.
    """
    set_factory: Callable[[Any], None] = getattr(huggingface_hub, "set_client_factory", lambda _: None)
    # the factory in use has no public name
    default: Any = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None) or getattr(_http, "default_client_factory", None)

    def limit(request: Any) -> None:  # noqa: ANN401 - the HTTP library's, whichever it is
        timeout = constants.HF_HUB_ETAG_TIMEOUT if request.method in _READING else silence
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = given | {
            phase: given.get(phase) or timeout for phase in ("connect", "read", "write")
        }

    def make() -> Any:  # noqa: ANN401
        client = default()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", []), limit, before],
            "response": [*hooks.get("response", []), after],
        }
        return client

    hides = not bars and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    set_factory(make)
    try:
        with redacted_logs():
            yield
    finally:
        set_factory(default)
        if hides:
            enable_progress_bars()


def asked_wait(response: Any) -> int | None:  # noqa: ANN401
    """Return the seconds that an answer of the Hub asks to wait, None for one that does not."""
    if response is None or int(response.status_code) not in (429, 503):
        return None
    named = str(response.headers.get("retry-after") or "").strip()
    if named.isdigit():
        return int(named)
    limit = _http.parse_ratelimit_headers(response.headers)
    return limit.reset_in_seconds if limit is not None and limit.remaining == 0 else None


def require_wait(response: Any, longest: float) -> None:  # noqa: ANN401
    """Return unless an answer asks to wait more than `longest` seconds. Raises `GaveUp`."""
    wait = asked_wait(response)
    if wait is not None and wait > longest:
        raise too_long(wait, int(response.status_code))
