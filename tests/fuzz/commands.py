"""Running the command line in this process, and what must hold whatever it was given."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

from lora_tool.cli.main import main
from tests.cli.calling import Called

DOCUMENTED = {0, 1, 3, 5, 6}
"""Exit codes that bad input may give: done, findings, cannot, check failed, conflict."""


def run(arguments: Sequence[str | Path]) -> Called:
    """Return what `lora-tool ARGUMENTS` exits with and says. What is raised besides SystemExit is raised here."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = stopped.code
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    assert isinstance(code, int)
    return Called(code, *texts)


def must_hold(arguments: Sequence[str | Path]) -> int:
    """Run the command, and assert what is true of every run: a documented exit, and text that cannot act."""
    code, out, err = run(arguments)
    assert code in DOCUMENTED, (code, err)
    assert code != 3 or err.startswith("error: "), err
    for text in (out, err):
        assert all(c.isprintable() or c in "\n\t" for c in text), repr(text)
        assert not any(line.startswith("::") for line in text.splitlines()), text
    message, _, _ = err.partition("\nhint: ")
    if code == 3:
        assert len(message) < 3000, len(message)
    if "--json" in arguments and out:
        json.loads(out, parse_constant=_no_constant)
    return code


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
