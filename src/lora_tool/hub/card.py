"""The README that is pushed: the user's own, with the metadata that it lacks and a section that lora-tool keeps.

Which README is the user's? The one in the folder, or the one on the Hub, where people edit it in the browser. The
section's first line remembers two hashes: `from`, of the folder's README that it was made from, and `as`, of what was
pushed around the section. So an edit on either side is seen, and what somebody wrote on the Hub is never overwritten
by an older or another file here; where both sides changed, the Hub's stays and a warning says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import yaml
from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.display import printable
from lora_tool.core.errors import BadConfig, Defect, Problem
from lora_tool.formats.manifest import Manifest
from lora_tool.hub.options import Readme
from lora_tool.hub.origin import Origin, is_hub_id

# The YAML block of a model card, changed key by key: what the user wrote stays as it was written.


# the Hub's own pattern (huggingface_hub/repocard.py, REGEX_YAML_BLOCK)
_BLOCK = re.compile(
    r"\A(?P<open>\s*---(?:\r\n|\r|\n))(?P<yaml>.*?)(?P<close>(?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|\Z))", re.DOTALL
)
_LARGEST = 1 << 20
_SECTION = re.compile(
    r"<!-- lora-tool: begin from=(?P<made_from>\w+) as=(?P<pushed_as>\w+) -->.*?<!-- lora-tool: end -->", re.DOTALL
)
_PEFT_TAG = re.compile(r"base_model:(?:(?:adapter|merge|quantized|finetune):)?")
"""How a tag of PEFT's begins that names the base, perhaps by a local path."""
_NONE = "none"
_EDITED = "edited"
_MADE_BY_MACHINES = ("# Model Card for Model ID", "This modelcard aims to be a base template")
_UNFILLED = "[More Information Needed]"


class Card(Struct, frozen=True, kw_only=True):
    """A README without our section, and the hashes that the section's first line remembered."""

    yaml: str | None
    """The text of its metadata, None where it has no block of them."""
    metadata: Mapping[str, Any]
    body: str
    newline: str
    where: str
    made_from: str | None = None
    pushed_as: str | None = None

    def text(self) -> str:
        """Return the whole README."""
        end = self.newline
        return self.body if self.yaml is None else f"---{end}{self.yaml}{end}---{end}{self.body}"

    @property
    def digest(self) -> str:
        text = self.text().replace("\r\n", "\n").strip()
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def by_machine(self) -> bool:
        """Whether it is PEFT's or transformers' form that nobody has filled in."""
        return _UNFILLED in self.body and any(mark in self.body for mark in _MADE_BY_MACHINES)

    @property
    def edited(self) -> bool:
        """Whether it is not what was pushed."""
        return self.pushed_as != self.digest


def read_card(data: bytes, where: str) -> Card:
    """Return the README `data`. Raises `BadConfig` where its metadata are no YAML mapping."""
    if len(data) > _LARGEST:
        raise _bad(where, f"is {len(data):,} bytes, more than the {_LARGEST:,} of a model card")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _bad(where, f"is not UTF-8: {error.reason} at byte {error.start}") from error
    newline = "\r\n" if "\r\n" in text else "\n"
    match, made_from, pushed_as = _BLOCK.match(text), None, None
    block, body = (None, text) if match is None else (match["yaml"], text[match.end() :])
    section = _SECTION.search(body)
    if section is not None:
        made_from, pushed_as = section.groups()
        before, after = body[: section.start()].rstrip("\r\n"), body[section.end() :].lstrip("\r\n")
        body = before + (newline * 2 if before and after else newline if before else "") + after
    return Card(
        yaml=block,
        metadata=_parsed(block or "", where),
        body=body,
        newline=newline,
        where=where,
        made_from=made_from,
        pushed_as=pushed_as,
    )


def changed(card: Card, changes: Mapping[str, Any]) -> Card:
    """Return the card with the keys of `changes` set, or taken out where the value is None; all else is as it was."""
    if not changes:
        return card
    merged = {**card.metadata, **changes}
    wanted = {key: value for key, value in merged.items() if value is not None or key not in changes}
    text = _spliced(card, changes)
    try:
        kept = text is not None and _parsed(text, card.where) == wanted
    except BadConfig:
        kept = False
    # else it is a flow mapping, an anchor, or another form without one key per line
    return replace(card, yaml=text if kept else _dump(wanted, card.newline), metadata=wanted)


def _spliced(card: Card, changes: Mapping[str, Any]) -> str | None:
    """Return the block with the lines of the changed keys replaced; None where its keys are not one per line."""
    block = yaml.compose(card.yaml or "", yaml.SafeLoader)
    if isinstance(block, yaml.MappingNode) and block.flow_style:
        return None
    lines = (card.yaml or "").split(card.newline)
    keys = [(key.value, key.start_mark.line) for key, _ in block.value] if block is not None else []
    ends = [line for _, line in keys[1:]] + [len(lines)]
    written = {key: _dump({key: value}, card.newline) for key, value in changes.items() if value is not None}
    parts = [card.newline.join(lines[: keys[0][1]])] if keys else [card.yaml or ""]
    for (key, begin), end in zip(keys, ends, strict=False):
        own = card.newline.join(lines[begin:end])
        parts.append(written.pop(key, "") if key in changes else own)
    return card.newline.join(part for part in (*parts, *written.values()) if part)


def _dump(table: Mapping[str, Any], newline: str) -> str:
    text: str = yaml.safe_dump(dict(table), allow_unicode=True, sort_keys=False, default_flow_style=False, width=1000)
    return text.rstrip("\n").replace("\n", newline)


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(f"{text}\n")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 2}" if mark is not None else ""
        raise _bad(where, f"has metadata that is not YAML{line}: {getattr(error, 'problem', None) or error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise _bad(where, f"has metadata of type {type(data).__name__}; expected a mapping of keys to values")
    return data


def _bad(where: str, message: str) -> BadConfig:
    problem = Problem(defect=Defect.BAD_FIELD, path=where, message=message)
    return BadConfig(problem, hint="correct README.md, or move it away and push writes one")


class Licence(Struct, frozen=True, kw_only=True):
    """The base model's licence as its card names it, and whether the base is gated."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = False


class MergedCard(Struct, frozen=True, kw_only=True):
    """The README to push, and what has to be said about it."""

    data: bytes
    reason: str
    warnings: tuple[str, ...] = ()


def merge_card(
    local: bytes | None,
    hub: bytes | None,
    *,
    origin: Origin,
    section: str,
    licence: Licence,
    title: str,
    readme: Readme = Readme.AUTO,
) -> MergedCard:
    """Return the README: the user's text, the metadata it lacks, and `section` at its end.

    Pushing the result again gives the same bytes. Raises `BadConfig` for metadata that are no YAML mapping.
    """
    here = None if local is None else read_card(local, "README.md")
    there = None if hub is None else read_card(hub, "README.md on the Hub")
    chosen, warnings = _choose(here, there, readme)
    source = chosen or read_card(f"\n# {title}\n".encode(), "README.md")
    # keys that only the folder's README has are added to the Hub's; a form that nobody filled in has none of its own
    ours = here.metadata if here is not None and not here.by_machine else {}
    added = {key: value for key, value in ours.items() if key not in source.metadata}
    changes, more = _metadata_changes({**source.metadata, **added}, origin, licence, by_machine=source.by_machine)
    changes = {**added, **changes}
    card = changed(source, changes)
    made_from = _NONE if here is None else here.digest
    pushed_as = _EDITED if source is there and there.edited else card.digest
    marked = f"<!-- lora-tool: begin from={made_from} as={pushed_as} -->\n{section}\n<!-- lora-tool: end -->\n"
    body, end = card.body.rstrip("\r\n"), card.newline
    text = replace(card, body=(f"{body}{end}{end}" if body else "") + marked.replace("\n", end)).text()
    reason = "written"
    if chosen is not None:
        changed_keys = f", with {', '.join(changes)}" if changes else ""
        reason = f"the {'Hub' if source is there else 'folder'}'s{changed_keys}"
    return MergedCard(data=text.encode("utf-8", "surrogatepass"), reason=reason, warnings=(*warnings, *more))


def _choose(here: Card | None, there: Card | None, readme: Readme) -> tuple[Card | None, tuple[str, ...]]:
    """Return the README to build on, and a warning where another that was written by hand stays behind."""
    if here is None or there is None:
        return here or there, ()
    if readme is Readme.LOCAL or here.text() == there.text():
        return here, ()
    if readme is Readme.HUB or there.made_from == here.digest or (here.by_machine and not there.by_machine):
        return there, ()
    if not there.edited or (there.by_machine and there.made_from is None):
        return here, ()
    warning = "README.md differs from the one on the Hub; the Hub's is kept (--readme local pushes the folder's)"
    return there, (warning,)


def _metadata_changes(
    have: Mapping[str, Any], origin: Origin, licence: Licence, *, by_machine: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys that the card lacks, or may not keep, and warnings. What the user wrote stays otherwise."""
    warnings: list[str] = []
    changes = _base_changes(have, origin)
    if origin.relation and changes.get("base_model", have.get("base_model")) is None:
        warnings.append("the Hub id of the base model is unknown: add `base_model: owner/name` to README.md")
    library = "peft" if origin.adapter else "transformers"
    for key, value in (("library_name", library), ("pipeline_tag", origin.pipeline)):
        if value is not None and (have.get(key) is None or (by_machine and have[key] != value)):
            changes[key] = value
        elif value is not None and have[key] != value:
            warnings.append(f"README.md says {key}: {have[key]}, but the model is {value}; README.md is left unchanged")
    tags = _tags(have.get("tags"), origin)
    if tags != have.get("tags"):
        changes["tags"] = tags
    if not have.get("license"):
        changes |= {key: value for key, value in licence.metadata.items() if value and not have.get(key)}
        if origin.relation and "license" not in changes:
            warnings.append("the licence of the base model is unknown: add `license:` to README.md")
    return changes, tuple(warnings)


def _base_changes(have: Mapping[str, Any], origin: Origin) -> dict[str, Any]:
    """Return what changes of `base_model` and its relation: a local path goes, the Hub id comes where none is there."""
    named = _as_list(have.get("base_model"))
    kept = [name for name in named if _is_on_the_hub(name, origin)]
    base = kept if len(kept) > 1 else next(iter(kept), origin.base)
    changes = {"base_model": base} if kept != named or (base and not named) else {}
    if base and origin.relation and "base_model_relation" not in have:
        changes["base_model_relation"] = origin.relation
    return changes


def _tags(have: object, origin: Origin) -> list[Any]:
    listed = [(tag, _PEFT_TAG.match(str(tag))) for tag in _as_list(have)]
    tags = [tag for tag, of in listed if of is None or _is_on_the_hub(str(tag)[of.end() :], origin)]
    ours = {"lora": origin.adapter, "merged-lora": origin.merged, "reward-model": origin.reward, "lora-tool": True}
    return tags + [tag for tag, holds in ours.items() if holds and tag not in tags]


def _is_on_the_hub(name: object, origin: Origin) -> bool:
    """Whether a card may name it as a model: an id with an owner that is no folder here, or the base's old short id."""
    return is_hub_id(name) and name != origin.local and ("/" in str(name) or name == origin.base)


def _as_list(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


# The part of a model card that lora-tool writes: what was merged into what, how exactly, and how it was checked.


_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")
_LONGEST = 200
_FINGERPRINT = 16


def section_text(checkpoint: AdapterDir | ModelDir, manifest: Manifest | None, origin: Origin) -> str:
    """Return the section as Markdown: the same folder gives the same text, wherever and whenever it is made."""
    rows = list(_merge_rows(manifest) if manifest is not None and origin.merged else _plain_rows(checkpoint, origin))
    if manifest is not None and not origin.merged:
        rows += [row for row in _merge_rows(manifest) if row[0] in ("checkpoint", "made with")]
    title = "## How this model was made" if origin.merged else "## What is in this repository"
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join([title, "", _sentence(origin), "", *table])


def _sentence(origin: Origin) -> str:
    base = f"[{_md(origin.base)}](https://huggingface.co/{origin.base})" if origin.base else ""
    model = "reward model" if origin.reward else "model"
    if origin.merged:
        into = base or "its base model"
        return f"A {model}: a LoRA adapter merged into {into} by lora-tool. `lora_tool.json` records every tensor."
    trained = f" trained on {base}" if base else ""
    if origin.adapter and origin.reward:
        return f"A LoRA adapter of a reward model{trained}, for PEFT; its score head is in the adapter."
    return f"A LoRA adapter{trained}, for PEFT." if origin.adapter else f"A {model}."


def _plain_rows(checkpoint: AdapterDir | ModelDir, origin: Origin) -> Iterator[tuple[str, str]]:
    if isinstance(checkpoint, AdapterDir) and checkpoint.config is not None:
        config = checkpoint.config
        kind = "DoRA" if config.use_dora else "rsLoRA" if config.use_rslora else "LoRA"
        yield "adapter", f"{kind}, rank {config.r}, alpha {config.lora_alpha:g}"
        targets = config.target_modules
        ends = sorted({name.rpartition(".")[2] for name in targets or ()})
        yield "targets", _md(targets if isinstance(targets, str) else ", ".join(ends) or "none")
        if config.modules_to_save:
            yield "trained whole", _md(", ".join(config.modules_to_save))
    elif isinstance(checkpoint, ModelDir) and checkpoint.config is not None:
        yield "architecture", _md(", ".join(checkpoint.config.architectures) or "unknown")
    if origin.pipeline is not None:
        yield "task", origin.pipeline
    yield "tensors", str(len(checkpoint.tensors))
    yield "stored as", ", ".join(sorted({str(tensor.dtype) for tensor in checkpoint.tensors.values()})) or "none"


def _merge_rows(manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    raw = manifest.raw if manifest is not None else {}
    inputs = raw.get("inputs")
    for name, entry in inputs.items() if isinstance(inputs, Mapping) else ():
        if isinstance(entry, Mapping):
            yield _md(name), _input(entry)
    counts = raw.get("counts")
    if isinstance(counts, Mapping):
        yield "tensors", _md(", ".join(f"{count} {action}" for action, count in counts.items()))
    for key, shown in (("task", "task"), ("num_labels", "labels"), ("precision", "precision"), ("dtype", "stored as")):
        if raw.get(key) is not None:
            yield shown, _md(raw[key])
    versions = raw.get("versions")
    if isinstance(versions, Mapping):
        yield "made with", _md(", ".join(f"{name} {number}" for name, number in versions.items()))
    yield "verification", _verification(raw.get("verification"))


def _input(entry: Mapping[str, Any]) -> str:
    hub_id, revision, path = entry.get("hub_id"), entry.get("revision"), entry.get("path")
    if isinstance(hub_id, str):
        shown = f"[{_md(hub_id)}](https://huggingface.co/{_md(hub_id)})"
        if isinstance(revision, str):
            shown += f" at `{_code(revision)}`"
    else:
        shown = f"a local folder `{_code(PurePath(path).name)}`" if isinstance(path, str) else "unknown"
    known = entry.get("fingerprint")
    return f"{shown}, fingerprint `{_code(known)[:_FINGERPRINT]}`" if isinstance(known, str) else shown


def _verification(entry: object) -> str:
    """Return the manifest's record of a check as a sentence; what is not of the form we know is shown as it is."""
    if entry is None:
        return "not recorded"
    if not isinstance(entry, Mapping):
        return _md(entry)
    total, right, errors = (entry.get(key) for key in ("tensors", "right", "errors"))
    if not all(isinstance(number, int) for number in (total, right, errors)):
        shown = [f"{name} {value}" for name, value in entry.items() if isinstance(value, str | int | float)]
        return _md(", ".join(shown) or "recorded in lora_tool.json")
    verdict = "passed" if errors == 0 else f"FAILED with {errors} errors"
    details = [f"{right} of {total} tensors match a second, independent computation"]
    if entry.get("largest_ulps") is not None:
        details.append(f"at most {entry['largest_ulps']} ulp apart")
    if entry.get("values_compared") is not None:
        details.append(f"{entry['values_compared']} of {entry.get('values')} values compared")
    return _md(f"{verdict}: {', '.join(details)}")


def _code(text: object) -> str:
    return printable(str(text))[:_LONGEST].replace("`", "")


def _md(text: object) -> str:
    """Return `text` so that Markdown shows it as it is: names come from files, and could be links or HTML."""
    return _SPECIAL.sub(r"\\\1", printable(str(text))[:_LONGEST])
