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
from http.client import responses
from typing import Any

from huggingface_hub import constants
from huggingface_hub import errors as hub_errors
from msgspec import Struct
from msgspec.structs import asdict

from lora_tool.checkpoints.hub_client.redaction import redacted
from lora_tool.core.display import printable
from lora_tool.core.errors import HubConflict, HubError, HubRefused, HubUnreachable, LoraToolError

Failure = tuple[type[HubError], str, str]
"""The meaning of an error: its class, the cause, and the remedy, in which `{again}` is a field of `Doing`."""


class Doing(Struct, frozen=True, kw_only=True):
    """The remedies that depend on the request to the Hub."""

    again: str = "run the same command again"
    later: str = "run the same command again later"
    permit: str = "use a token with write access to this repository: https://huggingface.co/settings/tokens"
    online: str = "unset HF_HUB_OFFLINE to push"
    revision: str = "name a branch: --revision main"
    look: str = "lora-tool push … --dry-run shows what would be sent"


PLANNING = Doing()
PUSHING = Doing(again="run the same command again: files already uploaded are not sent twice")


def downloading(repo: str, revision: str | None) -> Doing:
    """Return the next steps after a download of `repo` that failed, at `revision` (None for main)."""
    fetch = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    page = f"{constants.ENDPOINT}/{repo}"
    return Doing(
        again="run the same command again: files already downloaded are kept",
        permit="use a token with read access to this repository: https://huggingface.co/settings/tokens",
        online=f"unset HF_HUB_OFFLINE, or on a connected machine with the same cache run: {fetch}",
        revision=f"its branches and tags are listed at {page}",
        look=f"look at {page}",
    )


_TRANSPORT = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "ssl", "socket")
_XET = re.compile(r"network|cas |xet|reqwest", re.IGNORECASE)
"""hf_xet's errors are built-in ones whose text speaks of the network or of the CAS."""
_XET_STATUS = re.compile(r"\b(?:status code:? |\()?(?P<status>[45]\d\d)\b(?=[ )]|\Z)")
_QUOTA = re.compile(r"storage (?:limit|quota)|quota|limit reached|exceeded", re.IGNORECASE)
_SIGNED = re.compile(r"[?&](?:X-Amz-Signature|Signature|sig)=")
_VERIFIES_UPLOAD = re.compile(r"/lfs/(?:objects/)?verify\b")
"""The address at which the Hub confirms that an upload has arrived."""
_LONGEST = 200
_CARD_REFUSED = "Invalid metadata in README.md"
_CONNECTION = "check the connection to {endpoint}, then {again}"
_LOG_IN = "hf auth login, or set HF_TOKEN; in CI set HF_OIDC_RESOURCE"

_TOO_MANY, _UNAUTHORISED, _FORBIDDEN, _NOT_FOUND = 429, 401, 403, 404
_FREE_STORAGE = "free storage at https://huggingface.co/settings/storage, or push with --public"
_MOVED: Failure = (
    HubConflict,
    "the repository was changed while this push ran ({status})",
    "look at the new commit, then run the same command again",
)
_BY_STATUS: dict[int, Failure] = {
    **dict.fromkeys((408, 425, *range(500, 600)), (HubUnreachable, "{status}", "{again}")),
    _UNAUTHORISED: (HubRefused, "the Hub does not accept the token ({status})", _LOG_IN),
    402: (HubRefused, "{status}", _FREE_STORAGE),
    _FORBIDDEN: (HubRefused, "the token may not do this ({status})", "{permit}"),
    409: _MOVED,
    412: _MOVED,
    _TOO_MANY: (HubUnreachable, "{status}", "{later}"),
}
_BY_CLASS: dict[type, Failure] = {
    hub_errors.GatedRepoError: (
        HubRefused,
        "the repository is gated, and this token has no access ({status})",
        "request access on its page: {page}",
    ),
    hub_errors.RepositoryNotFoundError: (
        HubRefused,
        "no such repository, or the token may not see it ({status})",
        "check the name and `hf auth whoami`; a private repository needs a token of its owner",
    ),
    hub_errors.RevisionNotFoundError: (HubRefused, "no such revision ({status})", "{revision}"),
    hub_errors.OfflineModeIsEnabled: (HubUnreachable, "HF_HUB_OFFLINE is set", "{online}"),
    hub_errors.LocalTokenNotFoundError: (HubRefused, "no token", _LOG_IN),
}
_WITHOUT_TOKEN: dict[type, Failure] = {
    hub_errors.GatedRepoError: (
        HubRefused,
        "the repository is gated, and no token was sent ({status})",
        "request access on its page, {page}, then run hf auth login, or set HF_TOKEN",
    ),
    hub_errors.RepositoryNotFoundError: (
        HubRefused,
        "no such repository, or it is private, and no token was sent ({status})",
        "check the name; for a private one: hf auth login, or set HF_TOKEN",
    ),
}


class GaveUp(Exception):
    """We wait for the Hub no longer; `hint` is the remedy."""

    def __init__(self, what: str, hint: str = _CONNECTION) -> None:
        super().__init__(what)
        self.hint = hint


def too_long(seconds: int, status: int) -> GaveUp:
    """Return the error for an answer that asks to wait longer than we do."""
    what = f"the Hub answers {status} and asks to wait {seconds} s"
    return GaveUp(what, f"run the same command again in {seconds} s")


def translated(error: BaseException, repo: str, doing: Doing = PUSHING, *, named: str | None = None) -> HubError:
    """Return the error as one of ours: one line of cause and one of remedy, without tokens or signed URLs.

    `repo` is the requested repository, `doing` the remedies for the request, `named` the user's name for `repo`.
    """
    if isinstance(error, HubError):
        return error
    # the client says with a RuntimeError that an upload failed
    what = "" if isinstance(error, RuntimeError) else "the Hub's answer could not be understood: "
    unknown = HubUnreachable, f"{what}{_said(error)}", "{again}"
    causes = [cause for cause in causes_of(error) if not isinstance(cause, hub_errors.LocalEntryNotFoundError)]
    given_up = [(HubUnreachable, str(cause), cause.hint) for cause in causes if isinstance(cause, GaveUp)]
    found = (meaning(cause) for meaning in (_from_answer, _without_answer) for cause in causes)
    kind, what, hint = next(filter(None, (*given_up, *found)), unknown)
    page = f"{constants.ENDPOINT}/{repo}"
    return kind(f"{named or repo}: {what}", hint=hint.format(page=page, endpoint=constants.ENDPOINT, **asdict(doing)))


def as_ours(error: Exception, repo: str, doing: Doing) -> Exception:
    """Return `error` as `translated` does. Errors of local files and mistakes of ours are returned unchanged."""
    local = isinstance(error, OSError) and error.filename and not hasattr(error, "response")
    known = isinstance(error, LoraToolError | AssertionError | ImportError)
    return error if local or known else translated(error, repo, doing)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _from_answer(error: BaseException) -> Failure | None:
    """Return the meaning of an error of known class, or with an answer of the Hub or its storage; None for another."""
    if str(error).startswith(_CARD_REFUSED):
        return HubRefused, f"the Hub refuses the model card: {_said(error)}", "correct README.md's metadata"
    response: Any = getattr(error, "response", None)
    status = 0 if response is None else int(response.status_code)
    table = _BY_CLASS if response is None or _had_token(response) else _BY_CLASS | _WITHOUT_TOKEN
    known = next((table[each] for each in type(error).__mro__ if each in table), None)
    if known is not None:
        return known[0], known[1].format(status=_with_phrase(status)), known[2]
    if not isinstance(error, hub_errors.HfHubHTTPError) or response is None:
        return None
    if _SIGNED.search(str(response.url)):
        return _from_storage(status, reads=response.request.method == "GET")
    if status == _NOT_FOUND and _VERIFIES_UPLOAD.search(str(response.url)):
        what = "the Hub's storage does not have a file that was just uploaded; nothing was committed"
        return HubUnreachable, what, "{again}"
    said = _said(error.server_message or response.headers.get("x-error-message") or "")
    return _from_status(status, said, response.headers.get("retry-after") or "", had_token=_had_token(response))


def _from_storage(status: int, *, reads: bool) -> Failure:
    """Return the meaning of an answer of a storage host, whose address carries the permission: each run gets new ones."""
    what = f"the Hub's storage did not {'deliver a file' if reads else 'accept an upload'} ({_with_phrase(status)})"
    expired = status in (_UNAUTHORISED, _FORBIDDEN)
    what += ": the signed address it was given has probably expired" if expired else ""
    passing = expired or _from_status(status)[0] is HubUnreachable
    return HubUnreachable if passing else HubRefused, what + ("" if reads else "; nothing was committed"), "{again}"


def _from_status(status: int, said: str = "", retry_after: str = "", *, had_token: bool = True) -> Failure:
    kind, what, hint = _BY_STATUS.get(status, (HubRefused, "{status}", "{look}"))
    if status == _UNAUTHORISED and not had_token:
        what = "the Hub requires a token, and none was sent ({status})"
    if status == _FORBIDDEN and _QUOTA.search(said):
        what, hint = "{status}", _FREE_STORAGE
    if status == _TOO_MANY and retry_after.isdigit():
        hint = f"run the same command again in {retry_after} s"
    return kind, what.format(status=_with_phrase(status)) + (f": {said}" if said else ""), hint


def _had_token(response: Any) -> bool:  # noqa: ANN401 - the HTTP library's, whichever it is
    return "authorization" in response.request.headers


def _with_phrase(status: int) -> str:
    return f"{status} {responses.get(status, '')}".rstrip()


def _without_answer(error: BaseException) -> Failure | None:  # noqa: PLR0911 - one per cause
    module, name, said = type(error).__module__.partition(".")[0], type(error).__name__, _said(error)
    if name in ("OIDCError", "DeviceCodeError"):
        return HubRefused, f"cannot get a token by OIDC: {said}", "add to the job: permissions: id-token: write"
    if module == "hf_xet" and "Authentication" in name:
        return HubRefused, f"the Hub's storage does not accept the token: {said}", _LOG_IN
    by_xet = isinstance(error, RuntimeError | OSError) and not getattr(error, "filename", None) and _XET.search(said)
    if module in _TRANSPORT or isinstance(error, ConnectionError | TimeoutError) or by_xet:
        status = _XET_STATUS.search(str(error))
        if status is not None:
            return _from_status(int(status["status"]))
        silent = isinstance(error, TimeoutError) or name.endswith("Timeout")
        what = "the Hub does not answer" if silent else "no connection to the Hub"
        return HubUnreachable, f"{what}: {said}", _CONNECTION
    if isinstance(error, json.JSONDecodeError):
        return HubUnreachable, f"the Hub's answer is not JSON: {said}", "{again}"
    if isinstance(error, ValueError) and "LFS batch" in str(error):
        return HubRefused, said, "{look}"
    return None


def _said(what: object) -> str:
    """Return the text as one short printable line, without secrets."""
    line = redacted(" ".join(str(what).split()) or (type(what).__name__ if isinstance(what, BaseException) else ""))
    return printable(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…")
