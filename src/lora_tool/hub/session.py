"""How huggingface_hub's client behaves while we use it: bounded waits, timeouts, nothing after an interrupt.

The client waits as long as a server's `Retry-After` asks, five times, and has no timeout of its own
(huggingface_hub 2.4, `_http_backoff_base` and `default_client_factory`).
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub.utils import _http
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from lora_tool.errors import HubUnreachable, LoraToolError
from lora_tool.hub.failures import WaitTooLong, causes_of, translated
from lora_tool.hub.redaction import redacted, redacted_logs

Answer = TypeVar("Answer")

LONGEST_WAIT = 60
"""Seconds that we wait when the Hub asks us to; where it asks for more, we stop and say so."""

STALLED = 300
"""Seconds without a byte after which a connection is given up. A commit of many files takes the Hub minutes."""

_ATTEMPTS = 4


class Interrupted(Exception):
    """A request that was about to be sent after the user had interrupted the push."""


_HOPELESS = (huggingface_hub.errors.OfflineModeIsEnabled, WaitTooLong, Interrupted)
"""What trying again at once cannot help: offline by wish, a wait that is too long, an interrupt."""


class Session:
    """One use of the client, for one repository: requests with retries, and long work that Ctrl-C can end."""

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.api = huggingface_hub.HfApi(library_name="lora-tool")
        self.warnings: list[str] = []
        self._stop = threading.Event()

    def ask(
        self,
        call: Callable[[], Answer],
        *,
        retry: bool = True,
        despite: Callable[[BaseException], Answer | None] = lambda _: None,
    ) -> Answer:
        """Return what the Hub answers to `call`, which may be repeated. Raises `HubError`.

        `despite` is asked after each failure whether the Hub has done it all the same.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._caught(call)
            except Exception as error:  # noqa: BLE001 - the map knows them
                failure = self._failure(error)
                done = despite(failure)
                if done is not None:
                    return done
                causes = list(causes_of(error))
                hopeless = any(isinstance(cause, _HOPELESS) for cause in causes)
                if not retry or not isinstance(failure, HubUnreachable) or attempt == _ATTEMPTS or hopeless:
                    raise failure from (error.__cause__ if failure is error else error)
                asked = next((wait for cause in causes if (wait := _wait_of(getattr(cause, "response", None)))), None)
                time.sleep(min(asked or 2 ** (attempt - 1), LONGEST_WAIT))
        raise AssertionError("the loop returns or raises")

    def work(self, call: Callable[[], Answer]) -> Answer:
        """Return what `call` returns, run in a thread of its own so that Ctrl-C is seen at once. Raises `HubError`.

        After an interrupt the thread may live on while a socket blocks; nothing that comes after it is done.
        """
        done: Future[Answer] = Future()

        def run() -> None:
            try:
                done.set_result(self._caught(call))
            except BaseException as error:  # noqa: BLE001 - it is raised again in the caller's thread
                done.set_exception(error)

        threading.Thread(target=run, name="lora-tool push", daemon=True).start()
        try:
            return done.result()
        except KeyboardInterrupt:
            self._stop.set()
            raise
        except Exception as error:  # noqa: BLE001 - as above
            failure = self._failure(error)
            raise failure from (error.__cause__ if failure is error else error)

    def _failure(self, error: Exception) -> Exception:
        """Return `error` as one of ours. One of this machine, a file's or a mistake of ours, stays what it is."""
        local = isinstance(error, OSError) and error.filename and not hasattr(error, "response")
        known = isinstance(error, LoraToolError | AssertionError | ImportError)
        return error if local or known else translated(error, self.repo)

    def _caught(self, call: Callable[[], Answer]) -> Answer:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = call()
        for warning in caught:
            warned = redacted(" ".join(str(warning.message).split()))
            if warned not in self.warnings and issubclass(warning.category, UserWarning):
                self.warnings.append(warned)
        return result

    def before(self, _request: Any) -> None:  # noqa: ANN401 - the HTTP library's, whichever it is
        if self._stop.is_set():
            raise Interrupted

    def after(self, response: Any) -> None:  # noqa: ANN401
        wait = _wait_of(response)
        if wait is not None and wait > LONGEST_WAIT:
            raise WaitTooLong(wait, int(response.status_code))


def require_client() -> Callable[[Callable[[], Any]], None]:
    """Return what sets the client that huggingface_hub makes. Raises `LoraToolError` for a package without it."""
    set_factory: Callable[[Callable[[], Any]], None] | None = getattr(huggingface_hub, "set_client_factory", None)
    if set_factory is None:
        raise LoraToolError(
            f"push needs huggingface_hub 1.0 or newer, found {huggingface_hub.__version__}",
            hint="pip install -U huggingface_hub",
        )
    return set_factory


@contextlib.contextmanager
def session(repo: str, *, progress: bool) -> Iterator[Session]:
    """Yield a session; the process's client is set back afterwards. Raises `LoraToolError` for an old package."""
    set_factory = require_client()
    # the factory in use has no public name
    before: Callable[[], Any] = getattr(_http, "_GLOBAL_CLIENT_FACTORY", _http.default_client_factory)
    opened = Session(repo)

    def bounded() -> Any:  # noqa: ANN401
        client = before()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", []), opened.before],
            "response": [*hooks.get("response", []), opened.after],
        }
        client.timeout = STALLED
        return client

    bars = not are_progress_bars_disabled()
    set_factory(bounded)
    try:
        if not progress:
            disable_progress_bars()
        with redacted_logs():
            yield opened
    finally:
        set_factory(before)
        if bars and not progress:
            enable_progress_bars()


def _wait_of(response: Any) -> int | None:  # noqa: ANN401
    if response is None or int(response.status_code) not in (429, 503):
        return None
    named = str(response.headers.get("retry-after") or "").strip()
    if named.isdigit():
        return int(named)
    limit = _http.parse_ratelimit_headers(response.headers)
    return limit.reset_in_seconds if limit is not None and limit.remaining == 0 else None
