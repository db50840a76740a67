"""The one map from errors to exit codes."""

from __future__ import annotations

from lora_tool import errors

DONE = 0
FINDINGS = 1
USAGE = 2
CANNOT = 3
FAILED_CHECK = 5
INTERRUPTED = 130
NOBODY_READS = 141

MEANINGS = {
    DONE: "done",
    FINDINGS: "findings; of `train` a run that was refused, stopped, or ended badly",
    USAGE: "usage: an unknown option or key, with the closest one",
    CANNOT: "cannot be read or cannot be done, said by name",
    4: "the Hub refused",
    FAILED_CHECK: "what was written is not what should have been",
    6: "conflict: the output exists, or somebody else changed the repository",
    7: "network or overload: a later try may do",
    INTERRUPTED: "interrupted",
    NOBODY_READS: "the reader of the output left, as in `… | head -1`",
}
"""Exit code → what it says; help and README print it."""

# the most specific class first: the first that matches decides
_BY_ERROR: tuple[tuple[type[errors.LoraToolError], int], ...] = (
    (errors.FindingsFound, FINDINGS),
    (errors.VerificationFailed, FAILED_CHECK),
    (errors.TrainingStopped, FINDINGS),
    (errors.BadRunConfig, USAGE),
    (errors.WrongValue, USAGE),
    (errors.HubRefused, 4),
    (errors.OutputExists, 6),
    (errors.HubConflict, 6),
    (errors.HubUnreachable, 7),
    (errors.HubError, 4),
    (errors.LoraToolError, CANNOT),
)


def exit_code(error: errors.LoraToolError) -> int:
    """Return the exit code of an error."""
    return next(code for kind, code in _BY_ERROR if isinstance(error, kind))
