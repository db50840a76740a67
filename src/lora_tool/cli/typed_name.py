"""The name that was typed: `lora-tool`, `hf-lora`, or `hf lora` where Hugging Face's command line starts us."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

OURS = "lora-tool"
HF = "hf lora"
COMPLETION = "_LORA_TOOL_COMPLETE"
"""The variable in which a shell asks for completions, under whatever name."""
_SCRIPT = "hf-lora"


def typed_name() -> str:
    """Return what was typed to start this process.

    `hf lora WORDS` runs ``~/.local/share/hf/extensions/hf-lora/venv/bin/hf-lora WORDS``, which is on nobody's PATH
    (`_install_python_extension` in huggingface_hub 2.4's cli/extensions.py).
    """
    started = Path(sys.argv[0])
    if started.name != _SCRIPT:
        return OURS
    return HF if started.parts[-4:-1] == (_SCRIPT, "venv", "bin") else _SCRIPT


def speak_as(name: str, commands: Iterable[str]) -> None:
    """Make stdout and stderr say `name` before each of our `commands`; files that are written keep `lora-tool`.

    Hundreds of hints and next steps name commands, and here all of them pass.
    """
    said = spoken(name, commands)
    for stream in ("stdout", "stderr"):
        there = getattr(sys, stream)
        if isinstance(there, io.TextIOWrapper):
            setattr(sys, stream, _Speaking(there, said))


def spoken(name: str, commands: Iterable[str]) -> Callable[[str], str]:
    """Return what puts `name` into a text for `lora-tool` where a command follows, and pip's right place after `hf lora`."""
    words = "|".join((*commands, "help", "COMMAND", "--help"))
    ours = re.compile(rf"(?<![\w/'-]){OURS}(?=\s+(?:{words})(?![\w/-]))")  # a folder may be called `lora-tool merge`
    pip = re.compile(rf"\bpip install (?=(?:--?\w+ )*'?{OURS}\b)")

    def said(text: str) -> str:
        if OURS not in text:
            return text
        if name == HF:
            text = pip.sub(lambda _: f"{_installer()} ", text)
        return ours.sub(name, text)

    return said


def _installer() -> str:
    """Return the command that installs into the environment of the extension, which uv makes without pip."""
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"


class _Speaking(io.TextIOWrapper):
    """A stream with the buffer and the settings of `stream`, through which every text is `said`."""

    def __init__(self, stream: io.TextIOWrapper, said: Callable[[str], str]) -> None:
        settings = (stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)
        super().__init__(stream.buffer, *settings)
        self._kept = stream  # which would close the buffer at its end
        self._said = said

    def write(self, text: str) -> int:
        super().write(self._said(text))
        return len(text)
