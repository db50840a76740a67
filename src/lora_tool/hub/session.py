"""How huggingface_hub's client behaves while we push: bounded waits, retries, nothing after an interrupt."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import huggingface_hub

from lora_tool.checkpoints.hub_client.failures import PUSHING, Doing, GaveUp, as_ours, causes_of
from lora_tool.checkpoints.hub_client.hooks import asked_wait, hooked, require_wait
from lora_tool.checkpoints.hub_client.redaction import redacted
from lora_tool.core.errors import HubUnreachable, LoraToolError

Answer = TypeVar("Answer")

LONGEST_WAIT = 60
"""Seconds that we wait when the Hub asks us to; where it asks for more, we stop and say so."""

STALLED = 300
"""Seconds without a byte after which an upload is given up. A commit of many files takes the Hub minutes."""

_ATTEMPTS = 4


class Interrupted(Exception):
    """A request that was about to be sent after the user had interrupted the push."""


_HOPELESS = (huggingface_hub.errors.OfflineModeIsEnabled, GaveUp, Interrupted)
"""What trying again at once cannot help: offline by wish, a wait that is too long, an interrupt."""


class Session:
    """One use of the client, for one repository: requests with retries, and long work that Ctrl-C can end."""

    def __init__(self, repo: str, doing: Doing) -> None:
        self.repo = repo
        self.doing = doing
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
                failure = as_ours(error, self.repo, self.doing)
                done = despite(failure)
                if done is not None:
                    return done
                causes = list(causes_of(error))
                hopeless = any(isinstance(cause, _HOPELESS) for cause in causes)
                if not retry or not isinstance(failure, HubUnreachable) or attempt == _ATTEMPTS or hopeless:
                    raise failure from (error.__cause__ if failure is error else error)
                asked = next((wait for cause in causes if (wait := asked_wait(getattr(cause, "response", None)))), None)
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
            failure = as_ours(error, self.repo, self.doing)
            raise failure from (error.__cause__ if failure is error else error)

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
        require_wait(response, LONGEST_WAIT)


def require_client() -> None:
    """Return if huggingface_hub's client can be set. Raises `LoraToolError` for a package without that."""
    if getattr(huggingface_hub, "set_client_factory", None) is None:
        raise LoraToolError(
            f"push needs huggingface_hub 1.0 or newer, found {huggingface_hub.__version__}",
            hint="pip install -U huggingface_hub",
        )


@contextlib.contextmanager
def session(repo: str, *, progress: bool, doing: Doing = PUSHING) -> Iterator[Session]:
    """Yield a session; the process's client is set back afterwards. Raises `LoraToolError` for an old package.

    `doing` says what the next step after a failure is.
    """
    require_client()
    opened = Session(repo, doing)
    with hooked(opened.before, opened.after, bars=progress, silence=STALLED):
        yield opened
