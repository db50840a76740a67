"""Keeping tokens and signed URLs out of logs and errors: huggingface_hub logs the full URL of an upload that failed."""

from __future__ import annotations

import contextlib
import logging
import re
import traceback
from collections.abc import Iterator

_SECRETS = (
    (re.compile(r"\bhf_\w[\w.\-]{5,}"), "hf_***"),
    # short words of small letters are the sentence's: "Token expired"
    (
        re.compile(r"\b(Bearer|Basic|Token)\s+(?!(?-i:[a-z]{1,14}\b(?![\w~+/=\-])))[\w.~+/=\-]{6,}", re.IGNORECASE),
        r"\1 ***",
    ),
    (re.compile(r"\beyJ[\w\-]{6,}(?:\.[\w\-]+){1,2}"), "***"),
    # a URL's user and password
    (re.compile(r"(?<=://)[^/\s@'\"]+@"), "***@"),
    # every query of a URL: signatures have too many names
    (re.compile(r"(?P<url>https?://[^\s?'\"<>]+)\?[^\s'\"<>]*"), r"\g<url>?***"),
    (re.compile(r"(?P<name>X-Amz-[\w\-]+|[Ss]ignature|sig|access_?token|token)=[^\s&'\"]+"), r"\g<name>=***"),
)


def redacted(text: str) -> str:
    """Return `text` without tokens, passwords in URLs, and the queries of URLs, where signatures are."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


@contextlib.contextmanager
def redacted_logs() -> Iterator[None]:
    """While it is open, every record of every logger in this process is redacted before any handler sees it."""
    make = logging.getLogRecordFactory()

    def make_redacted(*args: object, **kwargs: object) -> logging.LogRecord:
        record: logging.LogRecord = make(*args, **kwargs)
        try:
            record.msg, record.args = redacted(record.getMessage()), None
        except (TypeError, ValueError):  # logging itself would print that the format is wrong, with the values
            record.msg, record.args = redacted(str(record.msg)), None
        if record.exc_info:
            record.exc_text = redacted("".join(traceback.format_exception(*record.exc_info)).rstrip())
            record.exc_info = None
        return record

    logging.setLogRecordFactory(make_redacted)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
