"""The one map from errors to exit codes."""

from __future__ import annotations

from lora_tool.core import errors

DONE = 0
FINDINGS = 1
USAGE = 2
CANNOT = 3
FAILED_CHECK = 5
INTERRUPTED = 130
NOBODY_READS = 141

MEANINGS = {
    DONE: "done",
    FINDINGS: "findings; of a training: it was refused, stopped, or its result is bad",
    USAGE: "usage error, such as an unknown option; the closest one is suggested",
    CANNOT: "an input cannot be read, or the request cannot be carried out",
    4: "the Hub or a server refused",
    FAILED_CHECK: "the written output, or what a server serves, is wrong",
    6: "conflict: the output exists, or somebody else changed the repository",
    7: "network failure or overload: a retry may succeed",
    INTERRUPTED: "interrupted",
    NOBODY_READS: "the reader of the output closed the pipe, as in `… | head -1`",
}
"""Exit code → what it says; help and README print it."""

# the most specific class first: the first that matches decides
_BY_ERROR: tuple[tuple[type[errors.LoraToolError], int], ...] = (
    (errors.FindingsFound, FINDINGS),
    (errors.VerificationFailed, FAILED_CHECK),
    (errors.WrongValue, USAGE),
    (errors.HubRefused, 4),
    (errors.OutputExists, 6),
    (errors.HubConflict, 6),
    (errors.HubUnreachable, 7),
    (errors.HubError, 4),
    (errors.ServerUnreachable, 7),
    (errors.ServerError, 4),
    (errors.LoraToolError, CANNOT),
)


def exit_code(error: errors.LoraToolError) -> int:
    """Return the exit code of an error."""
    return next(code for kind, code in _BY_ERROR if isinstance(error, kind))
