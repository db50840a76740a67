"""The README that TRL and PEFT write beside an adapter names the base by its local path; this takes the path out."""

from __future__ import annotations

import re
from pathlib import Path

CARD = "README.md"
_NONE = "[None](https://huggingface.co/None)"


def clean_card(folder: Path, base: str | None) -> bool:
    """Take the local path of the base model out of the README in `folder`; return whether anything was changed.

    A base from the Hub stays named as it is. Without a README nothing is done.
    """
    path = folder / CARD
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    local = base if base and _is_local(base) else None
    cleaned = without_path(text, local)
    if cleaned != text:
        path.write_text(cleaned, encoding="utf-8")
    return cleaned != text


def without_path(text: str, local: str | None) -> str:
    """Return the card without `local`, a path of this machine: its metadata lines go, its last name stays in the prose."""
    if local is None:
        return text
    name = Path(local).name or "a local model"
    spelled = sorted({local, str(Path(local).resolve()), local.rstrip("/")}, key=len, reverse=True)
    for path in spelled:
        quoted = re.escape(path)
        text = re.sub(rf"^base_model(_relation)?: *['\"]?{quoted}['\"]? *\n", "", text, flags=re.MULTILINE)
        text = re.sub(rf"^- *['\"]?base_model:(adapter|finetune):{quoted}['\"]? *\n", "", text, flags=re.MULTILINE)
        text = re.sub(rf"\[{quoted}\]\(https://huggingface\.co/{quoted}\)", f"`{name}`", text)
        text = text.replace(f"https://huggingface.co/{path}", "").replace(path, name)
    return text.replace(_NONE, f"`{name}`")


def _is_local(base: str) -> bool:
    return Path(base).is_dir() or base.startswith(("/", "./", "../", "~"))
