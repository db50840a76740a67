"""The one map from the client's exceptions to exit codes, for those that no loopback can provoke."""

from __future__ import annotations

import json
import logging
import ssl

import httpx2
import pytest
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils._http import hf_raise_for_status

from lora_tool.checkpoints.hub_client.failures import too_long, translated
from lora_tool.checkpoints.hub_client.redaction import redacted, redacted_logs
from lora_tool.cli.exit_codes import exit_code

URL = "https://huggingface.co/api/models/me/x"
TOKEN = "hf_" + "a1B2" * 9
SIGNED = "https://s3.amazonaws.com/bucket/key?X-Amz-Signature=abcdef0123&X-Amz-Credential=AKIAEXAMPLE"


def answer(
    status: int, *, url: str = URL, body: object = None, method: str = "GET", token: bool = True, **headers: str
) -> hub_errors.HfHubHTTPError:
    """Return what the client raises for this answer to a request with a token, or without one."""
    sent = {"Authorization": f"Bearer {TOKEN}"} if token else {}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = httpx2.Response(
        status,
        headers=named,
        content=json.dumps(body or {}).encode(),
        request=httpx2.Request(method, url, headers=sent),
    )
    with pytest.raises(hub_errors.HfHubHTTPError) as caught:
        hf_raise_for_status(response)
    return caught.value


def wrapped(cause: BaseException, text: str = "Error while uploading 'model.safetensors' to the Hub.") -> Exception:
    error = RuntimeError(text)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (answer(401), 4, "no such repository, or the token may not see it"),
        (answer(401, X_Error_Message="Invalid credentials in Authorization header"), 4, "does not accept the token"),
        (answer(403, X_Error_Code="GatedRepo"), 4, "the repository is gated"),
        (answer(404, X_Error_Code="RevisionNotFound"), 4, "no such revision"),
        (answer(404, X_Error_Code="EntryNotFound"), 4, "404 Not Found"),
        (answer(403, body={"error": "You have exceeded your storage quota"}), 4, "exceeded your storage quota"),
        (answer(409), 6, "409 Conflict"),
        (answer(412), 6, "412 Precondition Failed"),
        (answer(418), 4, "418"),
        (answer(429), 7, "429 Too Many Requests"),
        (answer(408), 7, "408 Request Timeout"),
        (answer(500), 7, "500"),
        (answer(599), 7, "599"),
        (
            wrapped(answer(403, url=SIGNED, method="PUT")),
            7,
            "did not accept an upload (403 Forbidden): the signed address it was given has probably expired",
        ),
        (wrapped(answer(400, url=SIGNED, method="PUT")), 4, "not accept an upload (400 Bad Request); nothing"),
        (wrapped(answer(503, url=SIGNED, method="PUT")), 7, "not accept an upload (503 Service Unavailable)"),
        (answer(503, url=SIGNED), 7, "the Hub's storage did not deliver a file (503 Service Unavailable)"),
        (answer(401, token=False), 4, "or it is private, and no token was sent"),
        (answer(401, token=False, X_Error_Code="GatedRepo"), 4, "the repository is gated, and no token was sent"),
        (wrapped(httpx2.WriteError("broken pipe")), 7, "no connection to the Hub: broken pipe"),
        (RuntimeError("Error while uploading 'x' to the Hub."), 7, "Error while uploading 'x'"),
        # hf_xet raises built-in errors with the status in the text
        (
            ConnectionError("Network error: Client error: token request failed (401 Unauthorized)"),
            4,
            "401 Unauthorized",
        ),
        (ConnectionError("Network error: HTTP status client error (403 Forbidden) for url"), 4, "403 Forbidden"),
        (ConnectionError("Network error: status code: 429 for url (x)"), 7, "429 Too Many Requests"),
        (ConnectionError("Network error: (500 Internal Server Error)"), 7, "500"),
        (RuntimeError("CAS service error: reqwest error: connection reset"), 7, "no connection to the Hub"),
        (ConnectionResetError(104, "Connection reset by peer"), 7, "no connection to the Hub"),
        (TimeoutError("timed out"), 7, "timed out"),
        (ssl.SSLCertVerificationError("certificate verify failed"), 7, "certificate verify failed"),
        (httpx2.ConnectTimeout(""), 7, "ConnectTimeout"),
        (hub_errors.LocalTokenNotFoundError("no token"), 4, "no token"),
        (hub_errors.OfflineModeIsEnabled("offline"), 7, "HF_HUB_OFFLINE"),
        (hub_errors.OIDCError("no id token"), 4, "cannot get a token by OIDC"),
        (ValueError("LFS batch API returned errors:\nEncountered error: quota"), 4, "LFS batch API returned errors"),
        (KeyError("commitOid"), 7, "could not be understood"),
        (wrapped(too_long(3600, 429)), 7, "asks to wait 3600 s"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str | int) else type(value).__name__,
)
def test_each_cause_has_a_code_a_line_and_a_remedy(error: Exception, code: int, words: str) -> None:
    ours = translated(error, "me/x")
    assert exit_code(ours) == code
    assert words in str(ours)
    assert str(ours).startswith("me/x")
    assert "\n" not in str(ours)
    assert ours.hint


@pytest.mark.parametrize("secret", [TOKEN, f"Bearer {TOKEN}", SIGNED, "https://me:password1@host/x", "sig=abcdef"])
def test_no_error_repeats_a_secret(secret: str) -> None:
    for error in (
        httpx2.ConnectError(f"failed for {secret}"),
        ConnectionError(f"Network error: {secret}"),
        wrapped(ValueError(secret), f"while uploading {secret}"),
        answer(400, body={"error": f"bad {secret}"}),
        answer(403, body={"error": f"bad {secret}"}),
    ):
        told = str(translated(error, "me/x"))
        for part in ("a1B2", "X-Amz-Signature=a", "password1", "abcdef", "AKIAEXAMPLE"):
            assert part not in told


def test_a_long_answer_is_cut() -> None:
    assert len(str(translated(answer(400, body={"error": "x" * 10_000}), "me/x"))) < 300


def test_control_characters_are_escaped() -> None:
    told = str(translated(answer(400, body={"error": "\x1b[2Jgone\n::error::x"}), "me/x"))
    assert "\x1b" not in told
    assert "\n" not in told


@pytest.mark.parametrize(
    "text", ["plain words", "Token expired.", "https://huggingface.co/me/x", "hf_hub", "model-00001-of-00002"]
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_no_log_record_holds_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("huggingface_hub.somewhere")
    logger.propagate = True
    logging.getLogger("huggingface_hub").propagate = True
    before = logging.getLogRecordFactory()
    with redacted_logs(), caplog.at_level(logging.DEBUG):
        logger.warning("HTTP Error 503 thrown while requesting PUT %s", SIGNED)
        logger.warning("broken %s %d", TOKEN)  # noqa: PLE1206 - so that logging itself fails
        try:
            raise ValueError(TOKEN)  # noqa: TRY301
        except ValueError:
            logger.exception("failed")
    assert "X-Amz-Signature" not in caplog.text
    assert "a1B2" not in caplog.text
    assert "thrown while requesting PUT https://s3.amazonaws.com/bucket/key?***" in caplog.text
    assert "ValueError: hf_***" in caplog.text
    assert logging.getLogRecordFactory() is before
