"""Which files of a folder are its model or adapter, and why each other one stays behind.

An allow-list by kind: what a folder collects in training (optimizer states, pickles, logs, `.env`) is never pushed,
because nobody listed it, and is said, because somebody might look for it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from lora_tool.checkpoints import AdapterDir, Checkpoint, Folder, ModelDir, saves_in, unexpected
from lora_tool.checkpoints.kinds import matches
from lora_tool.checkpoints.registry import sharded_kinds
from lora_tool.core.errors import CorruptFile, PlanError
from lora_tool.core.tensors import FileStamp
from lora_tool.formats import adapter_config, generation_config, manifest, model_config, sentence_transformers
from lora_tool.formats.files import PICKLED, json_bytes, read_json, require_own_file
from lora_tool.formats.safetensors import scan_file
from lora_tool.hub.model import LeftOut, PushContent
from lora_tool.hub.origin import Origin, is_hub_id

README = "README.md"

_STATE = "training state, which only serves to resume the run"
_NEVER = {
    "may hold secrets": """.env .env.* *.env .netrc .git-credentials .pypirc *.pem *.key *.p12 id_rsa* id_ed25519*
        *credentials* token *.token""",
    "git's own": ".git",
    "a cache": ".cache __pycache__ .lora-tool-ci.json",
    "a pickle of the training arguments: loading it can run code, and it reveals local paths": "training_args.bin",
    _STATE: "trainer_state.json optimizer* scheduler.* scaler.* rng_state* random_states_*",
    "a separate checkpoint": "checkpoint-*",
    "training logs": "runs wandb mlruns events.out.tfevents*",
    "a pickle: loading it can run code": " ".join(f"*{end}" for end in PICKLED),
}
"""Why → names of files and folders that no `--include` lets through; nor those of the pieces of checkpoints."""


def pushable(checkpoint: Checkpoint) -> AdapterDir | ModelDir:
    """Return the checkpoint if its kind can be published. Raises `NotACheckpoint` naming what to do first."""
    if isinstance(checkpoint, AdapterDir | ModelDir):
        return checkpoint
    inside = saves_in(checkpoint.folder)
    hint = f"lora-tool push {shlex.quote(str(checkpoint.root / inside[-1]))} REPO" if inside else None
    raise unexpected(checkpoint, "an adapter or a model", hint=hint)


def select(checkpoint: AdapterDir | ModelDir, include: Iterable[str] = ()) -> tuple[list[PushContent], list[LeftOut]]:
    """Return the files to push, without the README, and what stays behind with its reason.

    `include` are patterns of further files (`figures/*.png`), relative to the folder. Raises `CorruptFile` for a file
    that is none or lies outside of the folder, `PlanError` for a pattern that matches nothing that may be pushed and for
    weights in pickles.
    """
    root = checkpoint.root
    _require_safetensors(checkpoint)
    allowed = dict(_allowed(checkpoint))
    for pattern in include:
        matched = [name for name in _walk(root) if fnmatch.fnmatchcase(name, pattern)]
        good = [name for name in matched if never(name) is None]
        if not good:
            why = f": {matched[0]} is never pushed: {never(matched[0])}" if matched else ""
            raise PlanError(f"--include {pattern} matches no file of {root} that may be pushed{why}")
        allowed |= {name: "included by name" for name in good if name != README and name not in allowed}
    contents = []
    for name, reason in sorted(allowed.items()):
        path = root / name
        require_own_file(root, path)
        contents.append(PushContent(name=name, source=path, stamp=FileStamp.of(path), reason=reason))
    return contents, list(_left_out(checkpoint, set(allowed)))


def _require_safetensors(checkpoint: AdapterDir | ModelDir) -> None:
    """Return if the weights are in files that may be pushed. Raises `PlanError` with the way to write such files."""
    held = (file.path for file in checkpoint.weights.files if file.tensors)
    pickle = next((path for path in held if never(path.name)), None)
    if pickle is None:
        return
    classes = checkpoint.whole_config.architectures if isinstance(checkpoint, ModelDir) else ()
    save = f"{next(iter(classes), 'AutoModel')}.from_pretrained({str(checkpoint.root)!r}).save_pretrained(FOLDER)"
    convert = f"lora-tool convert {shlex.quote(str(checkpoint.root))} --to peft -o OUT"
    raise PlanError(
        f"{pickle} is a pickle, which is never pushed: loading it can run code",
        hint=f"write safetensors and push those: {convert if isinstance(checkpoint, AdapterDir) else save}",
    )


def never(name: str) -> str | None:
    """Return why a path in the folder must not be pushed, whoever asks; None if it may."""
    pieces = [pattern for kind in sharded_kinds() for pattern in kind.patterns]
    patterns_of = [(_STATE, pieces), *((reason, patterns.split()) for reason, patterns in _NEVER.items())]
    parts = name.split("/")
    return next((why for part in parts for why, patterns in patterns_of if matches(part, patterns)), None)


def _allowed(checkpoint: AdapterDir | ModelDir) -> Iterator[tuple[str, str]]:
    folder = checkpoint.folder
    if isinstance(checkpoint, AdapterDir):
        names = {adapter_config.FILE_NAME: "adapter config"}
    else:
        names = {model_config.FILE_NAME: "model config", generation_config.FILE_NAME: "generation defaults"}
    names |= {file.path.name: "weights" for file in checkpoint.weights.files if never(file.path.name) is None}
    if checkpoint.weights.index is not None:
        names[checkpoint.weights.index.name] = "weights index"
    names[manifest.FILE_NAME] = "record of what was done"
    names |= dict.fromkeys(folder.tokenizer_files, "tokenizer")
    names |= dict.fromkeys(folder.licence_files, "licence")
    yield from ((name, what) for name, what in names.items() if name in folder.files)
    yield from ((name, "chat template") for name in folder.templates)
    yield from ((name, "module of sentence-transformers") for name in _modules(folder) if never(name) is None)


def _modules(folder: Folder) -> Iterator[str]:
    """Yield the files of sentence-transformers; of modules only where `modules.json` is a good one."""
    yield from sentence_transformers.root_files(folder.files)
    if sentence_transformers.MODULES in folder.files:
        with contextlib.suppress(CorruptFile):
            for module in sentence_transformers.read_modules(folder.root).folders:
                yield from sentence_transformers.files_of(folder.root, module).kept


def _left_out(checkpoint: AdapterDir | ModelDir, allowed: set[str]) -> Iterator[LeftOut]:
    kind = "an adapter" if isinstance(checkpoint, AdapterDir) else "a model"
    for name in checkpoint.folder.files:
        if name in allowed or name == README:
            continue
        reason = never(name)
        if reason is None and name.endswith(".safetensors"):
            reason = "a weights file that the index does not name"
        yield LeftOut(name=name, reason=reason or f"not a file of {kind}; --include {shlex.quote(name)} adds it")
    for name in checkpoint.folder.folders:
        if not any(other.startswith(f"{name}/") for other in allowed):
            yield LeftOut(
                name=f"{name}/",
                reason=never(name) or f"not part of {kind}; --include {shlex.quote(f'{name}/*')} adds it",
            )


def _walk(root: Path) -> Iterator[str]:
    """Yield the paths of all files below `root`, relative and with `/`; links to folders are not followed."""
    for base, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            yield (Path(base) / name).relative_to(root).as_posix()


def read_readme(checkpoint: AdapterDir | ModelDir) -> bytes | None:
    """Return the folder's README.md; None where there is none. Raises `CorruptFile` for what is no own file."""
    if README not in checkpoint.folder.files:
        return None
    path = checkpoint.root / README
    require_own_file(checkpoint.root, path)
    return path.read_bytes()


# Taking this machine's paths out of what is published.

_ABSOLUTE = re.compile(r"(?!.\Z)(?:/|~/|[A-Za-z]:\\)[^\0\n]*\Z")


def without_paths(content: PushContent, origin: Origin) -> PushContent:
    """Return the file without this machine's paths: they tell others nothing but who and where you are.

    In the manifest a path becomes its last name. In an adapter's config a path into the Hub cache becomes the Hub id.
    """
    if content.source is None or content.name not in (manifest.FILE_NAME, adapter_config.FILE_NAME):
        return content
    table = read_json(content.source)
    if content.name == manifest.FILE_NAME:
        cleaned = _cleaned(table, tuple(sorted(_absolute_paths(table), key=len, reverse=True)))
        data, reason = json_bytes(cleaned, indent=1), "without paths of this machine"
    else:
        named = table.get("base_model_name_or_path")
        replaced = {"base_model_name_or_path": origin.base} if origin.base and not is_hub_id(named) else {}
        cleaned = {**table, **replaced}
        data, reason = json_bytes(cleaned, indent=2, sort_keys=True), f"with {origin.base} as the base model"
    if cleaned == table:
        return content
    return PushContent(name=content.name, data=data, reason=f"{content.reason}, {reason}")


def _absolute_paths(value: Any) -> set[str]:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {path for inner in value.values() for path in _absolute_paths(inner)}
    if isinstance(value, list):
        return {path for inner in value for path in _absolute_paths(inner)}
    return {value} if isinstance(value, str) and _ABSOLUTE.match(value) else set()


def _cleaned(value: Any, paths: tuple[str, ...]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {key: _cleaned(inner, paths) for key, inner in value.items()}
    if isinstance(value, list):
        return [_cleaned(inner, paths) for inner in value]
    if not isinstance(value, str):
        return value
    for path in paths:
        # not inside another name: "/w" is no part of the id "me/w"
        name = PurePath(path).name.replace("\\", "\\\\")
        value = re.sub(rf"(?<![\w./~\-]){re.escape(path)}(?![\w\-])", name, value)
    return value


# Finding secrets in what would be published: by their form, and the values of this process's own variables.


_FORMS: tuple[tuple[str, tuple[bytes, ...], re.Pattern[bytes]], ...] = tuple(
    (kind, tuple(begin.encode() for begin in begins.split()), re.compile(form.encode()))
    for kind, begins, form in (
        ("Hugging Face token", "hf_", r"\bhf_(?:[A-Za-z0-9]{30,}|(?:jwt|oauth)_[\w.\-]{20,})"),
        ("AWS key", "AKIA ASIA", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
        ("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"\b(?:gh\w_[A-Za-z0-9]{36,}|github_pat_\w{50,})"),
        ("GitLab token", "glpat-", r"\bglpat-[\w\-]{20,}"),
        ("OpenAI or Anthropic key", "sk-", r"\bsk-(?:ant-|proj-|svcacct-)?[A-Za-z0-9_\-]{32,}"),
        ("Slack token", "xox", r"\bxox[abeprs]-[\w\-]{10,}"),
        ("Google key", "AIza", r"\bAIza[\w\-]{35}"),
        (
            "Weights & Biases key",
            "WANDB_API_KEY wandb_api_key api.wandb.ai",
            r"[\w.]{12,13}[^\n]{0,40}?(?<![0-9A-Za-z])[0-9a-f]{40}\b",
        ),
        ("JSON web token", "eyJ", r"\beyJ[\w\-]{10,}\.eyJ[\w\-]{10,}\.[\w\-]{10,}"),
        ("private key", "-----BEGIN", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----"),
    )
)
"""What it is, how it begins, and its whole form: looking for beginnings takes a hundredth of the time of the forms."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 16
"""A variable's value that is shorter may be a word that is in the file for another reason."""


class SecretFound(PlanError):
    """A file that would be published holds a secret. The message says where and what, never the secret."""


def require_no_secrets(contents: Iterable[PushContent], environment: Mapping[str, str] = os.environ) -> None:
    """Return if no file holds a secret. Raises `SecretFound` for the first one that does.

    Of safetensors files the metadata is looked at, not the weights.
    """
    own = {
        value.strip().encode(): name
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST and not os.path.exists(value)  # noqa: PTH110
    }
    for content in contents:
        for text in _texts(content):
            what = _secret_in(text, own)
            if what is not None:
                line = text.count(b"\n", 0, what[1]) + 1
                raise SecretFound(
                    f"{content.source or content.name}: line {line} holds a secret ({what[0]}); nothing was pushed",
                    hint="remove it from the file and revoke it, as others may know it already",
                )


def _secret_in(text: bytes, own: Mapping[bytes, str]) -> tuple[str, int] | None:
    for kind, begins, form in _FORMS:
        for begin in begins:
            at = text.find(begin)
            while at >= 0:
                if form.match(text, at):
                    return kind, at
                at = text.find(begin, at + 1)
    for value, name in own.items():
        at = text.find(value)
        if at >= 0:
            return f"the value of ${name}", at
    return None


def _texts(content: PushContent) -> Iterator[bytes]:
    if content.data is not None:
        yield content.data
    elif content.source is not None and content.name.endswith(".safetensors"):
        try:
            metadata = scan_file(content.source).metadata
        except CorruptFile:
            return
        yield "\n".join(f"{key}: {value}" for key, value in metadata.items()).encode("utf-8", "surrogatepass")
    elif content.source is not None:
        yield content.source.read_bytes()
