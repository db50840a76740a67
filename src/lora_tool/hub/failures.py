"""The one map from what huggingface_hub, its HTTP client and hf_xet raise to our errors.

The client raises many things for one cause: `HfHubHTTPError` for an answer, its HTTP library's transport errors for
none, a bare `RuntimeError` around both where an LFS upload failed, `ConnectionError` with the status in its text from
hf_xet, `ValueError` where an answer was not JSON or the card was refused. Classes of the HTTP library are known by
the module that they come from: huggingface_hub has changed that library twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import errors as hub_errors

from lora_tool.display import printable
from lora_tool.errors import HubConflict, HubError, HubRefused, HubUnreachable
from lora_tool.hub.redaction import redacted

_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "ssl", "socket")
_XET_STATUS = re.compile(r"\b(?:status code:? |\()?(?P<status>[45]\d\d)\b(?=[ )]|\Z)")
_QUOTA = re.compile(r"storage (?:limit|quota)|quota|limit reached|exceeded", re.IGNORECASE)
_LONGEST = 200
_CARD_REFUSED = "Invalid metadata in README.md"
_AGAIN = "run the same command again: what is uploaded already is not sent twice"
_LOG_IN = "hf auth login, or set HF_TOKEN; in CI set HF_OIDC_RESOURCE"


class WaitTooLong(Exception):
    """The Hub asks to wait longer than we do. `seconds` is what it asked for."""

    def __init__(self, seconds: int, status: int) -> None:
        super().__init__(f"asked to wait {seconds} s")
        self.seconds = seconds
        self.status = status


def translated(error: BaseException, repo: str) -> HubError:
    """Return the error as one of ours: one line of cause and one of remedy, without tokens or signed URLs."""
    if isinstance(error, HubError):
        return error
    chain = list(_chain(error))
    if str(error).startswith(_CARD_REFUSED):
        return HubRefused(
            f"{repo}: the Hub refuses the model card: {_said(error)}", hint="correct README.md's metadata"
        )
    for cause in chain:
        if isinstance(cause, WaitTooLong):
            return HubUnreachable(
                f"{repo}: the Hub answers {cause.status} and asks to wait {cause.seconds} s",
                hint=f"run the same command again in {cause.seconds} s",
            )
        if isinstance(cause, hub_errors.HfHubHTTPError) and getattr(cause, "response", None) is not None:
            return _from_answer(cause, repo)
    for cause in chain:
        found = _without_answer(cause, repo)
        if found is not None:
            return found
    # the client says with a RuntimeError that an upload failed
    what = "" if isinstance(error, RuntimeError) else "the Hub's answer could not be understood: "
    return HubUnreachable(f"{repo}: {what}{_said(error)}", hint=_AGAIN)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _from_answer(error: hub_errors.HfHubHTTPError, repo: str) -> HubError:
    response: Any = error.response
    status = int(response.status_code)
    said = _said(getattr(error, "server_message", None) or response.headers.get("x-error-message") or "")
    if isinstance(error, hub_errors.GatedRepoError):
        return HubRefused(f"{repo}: access is gated, and this token was not let in", hint=f"ask on the page of {repo}")
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return HubRefused(
            f"{repo}: no such repository, or the token may not see it ({status})",
            hint="check the name and `hf auth whoami`; a private repository needs a token of its owner",
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return HubRefused(f"{repo}: no such revision ({status})", hint="name a branch: --revision main")
    if _is_storage(response):
        return _from_storage(status, repo)
    return _from_status(status, said, repo, retry_after=response.headers.get("retry-after"))


def _is_storage(response: Any) -> bool:  # noqa: ANN401 - the HTTP library's, whichever it is
    """Whether the answer came from a storage host with a signed URL, not from the Hub."""
    query = urlsplit(str(getattr(response, "url", ""))).query
    return "X-Amz-Signature" in query or "Signature=" in query or "sig=" in query


def _from_storage(status: int, repo: str) -> HubError:
    kind = HubUnreachable if _is_transient(status) else HubRefused
    return kind(f"{repo}: the storage did not take an upload ({_named(status)}); nothing was committed", hint=_AGAIN)


def _from_status(status: int, said: str, repo: str, *, retry_after: str | None = None) -> HubError:  # noqa: PLR0911 - one per cause
    detail = f": {said}" if said else ""
    cause = f"{repo}: {_named(status)}{detail}"
    if status == HTTPStatus.UNAUTHORIZED:
        return HubRefused(f"{repo}: the Hub does not accept the token ({_named(status)}){detail}", hint=_LOG_IN)
    if status == HTTPStatus.PAYMENT_REQUIRED or (status == HTTPStatus.FORBIDDEN and _QUOTA.search(said)):
        return HubRefused(cause, hint="free storage at https://huggingface.co/settings/storage, or push with --public")
    if status == HTTPStatus.FORBIDDEN:
        return HubRefused(
            f"{repo}: the token may not do this ({_named(status)}){detail}",
            hint="use a token with write access to this repository: https://huggingface.co/settings/tokens",
        )
    if status in (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED):
        return HubConflict(
            f"{repo} was changed while this push ran ({_named(status)}){detail}",
            hint="look at the new commit, then run the same command again",
        )
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        wait = f" in {retry_after} s" if retry_after and retry_after.isdigit() else " later"
        return HubUnreachable(cause, hint=f"run the same command again{wait}")
    if _is_transient(status):
        return HubUnreachable(cause, hint=_AGAIN)
    return HubRefused(cause, hint="lora-tool push … --dry-run shows what would be sent")


def _is_transient(status: int) -> bool:
    return status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS) or status >= 500  # noqa: PLR2004


def _named(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def _without_answer(error: BaseException, repo: str) -> HubError | None:  # noqa: PLR0911 - one per cause
    """Return the error for a cause that carries no HTTP answer; None for one that says nothing by itself."""
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return HubUnreachable(f"{repo}: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE to push")
    if isinstance(error, hub_errors.LocalTokenNotFoundError):
        return HubRefused(f"{repo}: no token", hint=_LOG_IN)
    if type(error).__name__ in ("OIDCError", "DeviceCodeError"):
        return HubRefused(f"{repo}: no token by OIDC: {_said(error)}", hint="permissions: id-token: write, in the job")
    if type(error).__module__.partition(".")[0] == "hf_xet" and "Authentication" in type(error).__name__:
        return HubRefused(f"{repo}: the storage does not accept the token: {_said(error)}", hint=_LOG_IN)
    module = type(error).__module__.partition(".")[0]
    if module in _TRANSPORT or isinstance(error, ConnectionError | TimeoutError) or _is_xet(error):
        status = _XET_STATUS.search(str(error))
        if status is not None:
            return _from_status(int(status["status"]), "", repo)
        return HubUnreachable(f"{repo}: no connection to the Hub: {_said(error)}", hint=_AGAIN)
    if isinstance(error, json.JSONDecodeError):
        return HubUnreachable(f"{repo}: the Hub's answer is not JSON: {_said(error)}", hint=_AGAIN)
    if isinstance(error, ValueError) and "LFS batch" in str(error):
        return HubRefused(f"{repo}: {_said(error)}", hint="lora-tool push … --dry-run shows what would be sent")
    return None


def _is_xet(error: BaseException) -> bool:
    """Whether hf_xet raised it: its errors are built-in ones whose text speaks of the network or the CAS."""
    text = str(error).lower()
    return (
        isinstance(error, RuntimeError | OSError)
        and not getattr(error, "filename", None)
        and ("network" in text or "cas " in text or "xet" in text or "reqwest" in text)
    )


def _said(what: object) -> str:
    """Return what was said as one short printable line, with nothing secret in it."""
    line = " ".join(str(what).split())
    if isinstance(what, BaseException) and not line:
        line = type(what).__name__
    line = redacted(line)
    return printable(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…")
