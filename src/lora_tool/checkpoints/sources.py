"""Where a model or adapter is: a local path, a Hub id, or the address of its page, made into a local folder."""

from __future__ import annotations

import contextlib
import enum
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import TypeAlias

from msgspec import Struct

from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    RunDir,
    adapter_name,
    adapters_below,
    as_adapter,
    as_model,
    open_adapter,
    open_checkpoint,
)
from lora_tool.checkpoints.path_suggestions import Fits, no_such_folder, not_a_folder, probably_meant
from lora_tool.core.display import from_here
from lora_tool.core.errors import BrokenFile, HubError, IncompleteCheckpoint, NotACheckpoint, UnsupportedAdapter
from lora_tool.core.hub_names import FORMS, HubName, hub_id_of, hub_name, is_address
from lora_tool.core.progress import decided
from lora_tool.formats.adapter_config import FILE_NAME as ADAPTER_CONFIG
from lora_tool.formats.files import expanded, is_file, is_folder
from lora_tool.formats.model_config import FILE_NAME as CONFIG
from lora_tool.formats.model_config import read_model_config
from lora_tool.formats.quantised.names import full_precision_name, give_full_precision, quantised_by_name, require_read

# Whether huggingface_hub's cache may hold a repository, without importing huggingface_hub, which takes half a second.


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache's folder, by the variables that huggingface_hub reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environment.get(name):
            return _expanded(environment[name])
    home = environment.get("HF_HOME") or str(Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return _expanded(home) / "hub"


def may_hold(reference: str) -> bool:
    """Return whether the cache has a folder for the model that a reference to the Hub names."""
    named = hub_name(reference)
    return named is not None and (cache_folder() / f"models--{named.id.replace('/', '--')}").is_dir()


def _expanded(path: str) -> Path:
    return expanded(os.path.expandvars(path))


Reference: TypeAlias = str | os.PathLike[str] | Checkpoint
"""How a caller names a checkpoint: a path, a Hub id, or the opened checkpoint itself."""
_IN_CACHE = re.compile(r"/models--(?P<repo>[^/]+)/snapshots/(?P<commit>[^/]+)")
_BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.md", "LICENSE*", "NOTICE*")


@enum.unique
class Wanted(str, enum.Enum):
    """The expected kind of a Hub id: an adapter's id must not fetch gigabytes if it proves to be a model's."""

    MODEL = "*.safetensors"
    ADAPTER = "adapter_model*.safetensors"
    EVERYTHING = "*"
    """Rank files have any name, and lie in folders."""

    @property
    def torch_files(self) -> str:
        """The pattern of the weights for repositories without safetensors files."""
        return "adapter_model.bin" if self is Wanted.ADAPTER else "pytorch_model*.bin"

    def fits(self, folder: Path) -> bool:
        """Return whether a folder may have been meant: one that is plainly of the other kind was not."""
        other, own = (ADAPTER_CONFIG, CONFIG) if self is Wanted.MODEL else (CONFIG, ADAPTER_CONFIG)
        return folder.is_dir() and (is_file(folder / own) or not is_file(folder / other))


class Source(Struct, frozen=True, kw_only=True):
    """A folder on this disk and the user's name for it; `hub_id` and `revision` (a commit) if it is from the Hub."""

    path: Path
    reference: str
    hub_id: str | None = None
    revision: str | None = None


def source_of(path: Path, reference: str | None = None) -> Source:
    """Return the source of a local folder; Hub id and commit come from a path into the Hub cache."""
    cached = _IN_CACHE.search(os.path.realpath(path))
    return Source(
        path=path,
        reference=reference or str(path),
        hub_id=cached["repo"].replace("--", "/", 1) if cached else None,
        revision=cached["commit"] if cached else None,
    )


def beside(source: Source, ending: str) -> Path:
    """Return where what is made of a checkpoint goes by default: a sibling that ends in it, here for one of the Hub."""
    if source.hub_id is not None:
        return Path(f"{source.hub_id.rpartition('/')[2]}-{ending}")
    folder = source.path.resolve()
    return from_here(folder.parent / f"{folder.name}-{ending}")


def unfetched(reference: str, near: Path | None = None) -> Source:
    """Return the source that `reference` means before anything is fetched, as `resolve` does afterwards."""
    local = None if is_address(reference) else local_folder(reference, near)
    hub_id = hub_id_of(reference) if local is None else None
    path = expanded(reference)
    return source_of(path, reference) if hub_id is None else Source(path=path, reference=reference, hub_id=hub_id)


def located(checkpoint: Reference, wanted: Wanted, near: Path | None = None, *, only: bool = False) -> Source:
    """Return where a checkpoint is; a Hub id is downloaded. Raises as `resolve` does; `only` what is wanted is suggested."""
    if isinstance(checkpoint, str | os.PathLike):
        fits = wanted.fits if only else os.path.isdir
        return resolve(checkpoint, near=near, download=True, wanted=wanted, fits=fits)
    return source_of(checkpoint.root)


def several(checkpoints: Reference | Sequence[Reference]) -> tuple[Reference, ...]:
    """Return one or several references as a tuple."""
    if isinstance(checkpoints, Sequence) and not isinstance(checkpoints, str):
        return tuple(checkpoints)
    return (checkpoints,)


def resolve(
    reference: str | os.PathLike[str],
    *,
    near: Path | None = None,
    revision: str | None = None,
    download: bool = False,
    wanted: Wanted = Wanted.MODEL,
    fits: Fits = os.path.isdir,
) -> Source:
    """Return the local folder that `reference`, a path or a Hub id, means.

    An existing path is local; ``hf://`` and the address of a page are the Hub; a bare ``owner/name`` is local if such a
    folder exists, else the Hub; each may end in ``@revision``. A relative path is searched in the working directory
    and in `near`, then for a model in the folders above it (PEFT writes the path as it was typed when training); if two
    exist and differ, that is an error. A Hub id is taken from huggingface_hub's cache; it is downloaded only with
    `download`, and only the weights that are `wanted`; never those of a format that is not read. Raises
    `NotACheckpoint`, which lists the places searched, `IncompleteCheckpoint` for files missing in the cache, `HubError`
    where the Hub fails, `UnsupportedAdapter` for a model whose quantised weights are not read.
    """
    reference = os.fspath(reference)
    if not reference:  # an empty variable of a script, which Path would take for the working directory
        raise NotACheckpoint("the name is empty: give a folder or a Hub id")
    if not is_address(reference):
        local = local_folder(reference, near)
        if local is not None:
            if reference != str(local):
                decided(f"{reference} is the folder {local}{_seen_from(reference, near, local)}")
            return source_of(local, reference)
        _require_no_file(reference)
    named = hub_name(reference)
    if named is not None and named.has_owner:
        return _from_hub(named, reference, revision, download=download, wanted=wanted)
    if is_address(reference):
        raise NotACheckpoint(
            f"{reference}: no such folder, and not the name of a model on the Hub", hint=f"give a model as {FORMS}"
        )
    looked_in = "looked in " + " and ".join(dict.fromkeys(map(os.path.abspath, filter(None, (Path(), near)))))
    looked_in += ", and in the folders above" if near else ""
    raise no_such_folder(reference, "" if Path(reference).is_absolute() else looked_in, fits=fits)


def opened(checkpoint: Reference, *, wanted: Wanted = Wanted.ADAPTER) -> Checkpoint:
    """Return the checkpoint that is given, or the one at a path, or of a Hub id, whose `wanted` weights are downloaded.

    Raises as `resolve` and `open_checkpoint` do.
    """
    if not isinstance(checkpoint, str | os.PathLike):
        return checkpoint
    return open_checkpoint(resolve(checkpoint, download=True, wanted=wanted).path)


def opened_model(model: Reference, *, near: Path | None = None, download: bool = True) -> ModelDir:
    """Return the model that is given, or the one at a path or of a Hub id. Raises as `resolve` and `open_model` do."""
    if isinstance(model, str | os.PathLike):
        model = open_checkpoint(resolve(model, near=near, download=download).path)
    return as_model(model, hint="give a model: `base=MODEL`")


def opened_adapter(adapter: Reference) -> AdapterDir:
    """Return the adapter that is given, or the one at a path or of a Hub id, downloaded. Raises `CheckpointError`."""
    if isinstance(adapter, str | os.PathLike):
        return open_adapter_at(resolve(adapter, download=True, wanted=Wanted.ADAPTER).path)
    return _the_adapter(adapter)


def open_adapter_at(path: Path) -> AdapterDir:
    """Return the adapter in the folder `path`, or one folder down, where PEFT saves one that is not called `default`.

    Raises `NotACheckpoint` where something else, or more than one, is there.
    """
    inner = adapters_below(path)
    if len(inner) > 1:
        raise several_adapters(path, tuple(map(open_adapter, inner)), "merge")
    return _the_adapter(open_checkpoint(inner[0] if inner else path))


def several_adapters(path: Path, adapters: Sequence[AdapterDir], command: str) -> NotACheckpoint:
    """Return the error for a folder of several adapters where one is wanted; its hint names one that was trained."""
    names = {adapter.root: adapter_name(adapter) for adapter in adapters}
    first = next((root for root, name in names.items() if name == root.name), adapters[0].root)
    several = ", or several to merge their sum" if command == "merge" else ""
    return NotACheckpoint(
        f"{path} holds {len(adapters)} adapters: {', '.join(names.values())}",
        hint=f"give one{several}: lora-tool {command} {shlex.quote(str(first))}",
    )


def _the_adapter(opened: Checkpoint) -> AdapterDir:
    """Return the checkpoint, which is an adapter. Raises `NotACheckpoint`, with the merge that may have been meant."""
    root, hint = shlex.quote(str(opened.root)), None
    if isinstance(opened, RunDir):
        hint = f"give one of its checkpoints; to see which is the best: lora-tool ls {root}"
    elif isinstance(opened, ModelDir) and opened.manifest is None:
        hint = f"lora-tool merge ADAPTER --base {root}"
    return as_adapter(opened, hint=hint)


def local_folder(reference: str, near: Path | None = None) -> Path | None:
    """Return the folder on this disk that `reference` means, as `resolve` finds it; None where there is none."""
    path = expanded(reference)
    candidates = [path] if near is None or path.is_absolute() else [path, near / path]
    found = list(filter(is_folder, candidates))
    if not found and near is not None and not path.is_absolute():
        # the path was typed where the training ran, and `near` lies somewhere below that folder
        above = (folder / path for folder in Path(os.path.abspath(near)).parents)  # noqa: PTH100 - links stay as named
        found = [candidate for candidate in above if is_file(candidate / CONFIG)]
    if len(found) > 1:  # a folder that only has the name is not the base
        found = [candidate for candidate in found if is_file(candidate / CONFIG)] or found
    if len(found) > 1 and not found[0].samefile(found[1]):
        message = f"{reference} means two folders: {found[0].resolve()} and {found[1].resolve()}"
        raise NotACheckpoint(message, hint="choose one: `base=PATH`")
    return _tidy(found[0]) if found else None


def _seen_from(reference: str, near: Path | None, found: Path) -> str:
    """Return from where a relative path was `found`, "" for any other."""
    path = expanded(reference)
    if path.is_absolute() or near is None:
        return ""
    for folder, where in ((path, "the working directory"), (near / path, near)):
        if is_folder(folder) and folder.samefile(found):
            return f", seen from {where}"
    return f", seen from a folder above {near}"


def moved_to(reference: str, near: Path) -> Path | None:
    """Return the moved model of a dead path: the one folder of that name in `near`, in one of the two folders above it,
    or in the working directory. None where there is none or several, and for names of the Hub.

    The longest end of the path that exists is taken, also of a Windows path. The folder may still hold another model
    than the path meant: nothing compares them.
    """
    path = expanded(reference)
    if is_address(reference) or hub_id_of(reference) is not None or is_folder(path):
        return None
    typed = PureWindowsPath(reference) if "\\" in reference else path
    parts = [part for part in typed.parts if part not in (typed.anchor, "..")]
    above = Path(os.path.abspath(near)).parents[:2]  # noqa: PTH100 - links stay as named
    places = (near, *above, Path())
    for at in range(len(parts)):
        folders = [place.joinpath(*parts[at:]) for place in places]
        found = {os.path.realpath(folder): folder for folder in folders if is_file(folder / CONFIG)}
        if found:
            return _tidy(next(iter(found.values()))) if len(found) == 1 else None
    return None


def _require_no_file(reference: str) -> None:
    """Raise `NotACheckpoint` for a file, which is often named where its folder is meant, and for a link to nothing."""
    path = expanded(reference)
    if path.is_symlink() and not os.path.exists(path):  # noqa: PTH110 - Path.exists raises for a link to itself
        raise NotACheckpoint(f"{reference} is a link to {os.readlink(path)}, which leads to nothing")  # noqa: PTH115
    if os.path.lexists(path):
        raise not_a_folder(reference)


def _tidy(path: Path) -> Path:
    """Return the path without `..` where that is the same folder; through a link it may not be."""
    tidy = Path(os.path.normpath(path))
    return tidy if tidy.is_dir() and tidy.samefile(path) else path


def _from_hub(named: HubName, reference: str, revision: str | None, *, download: bool, wanted: Wanted) -> Source:
    hub_id, revision = named.id, named.revision or revision
    if not download and not may_hold(hub_id):
        raise _not_in_cache(hub_id, revision, reference)
    from lora_tool.checkpoints.hub_client.downloading import download as fetch  # not needed for local paths
    from lora_tool.checkpoints.hub_client.downloading import in_cache

    if not download:
        path = in_cache(hub_id, revision, [wanted.value, *_BESIDE_WEIGHTS])
        if path is None:
            raise _not_in_cache(hub_id, revision, reference)
        decided(f"{reference} is {hub_id} on the Hub, commit {path.name}, in the cache: {path}")
        return Source(path=path, reference=reference, hub_id=hub_id, revision=path.name)

    def look(folder: Path) -> None:
        with contextlib.suppress(BrokenFile, OSError):  # opening it will report what is unreadable
            require_read(read_model_config(folder / CONFIG), hub_id)

    try:
        path = fetch(
            hub_id,
            revision,
            absent="" if is_address(reference) else "not a folder here",
            beside=_BESIDE_WEIGHTS,
            weights=(wanted.value, wanted.torch_files),
            look=look if wanted is Wanted.MODEL else None,
        )
    except HubError as error:
        error.hint = probably_meant(reference) or error.hint
        raise
    if wanted is Wanted.MODEL and not _has_weights(path, wanted):
        _refuse_by_name(hub_id, path)
    if wanted is Wanted.ADAPTER:
        _require_no_model(hub_id, path)
    decided(f"{reference} is {hub_id} on the Hub, now at commit {path.name}: {path}")
    return Source(path=path, reference=reference, hub_id=hub_id, revision=path.name)


def _not_in_cache(hub_id: str, revision: str | None, reference: str) -> IncompleteCheckpoint:
    better = full_precision_name(hub_id)
    at = f" --revision {revision}" if revision and not better else ""
    return IncompleteCheckpoint(
        f"{reference}: not a local folder and not in the Hub cache{quantised_by_name(hub_id)}",
        hint=probably_meant(reference) or f"hf download {better or hub_id}{at}",
    )


def _has_weights(path: Path, wanted: Wanted) -> bool:
    return any(any(path.glob(each)) for each in (wanted.value, wanted.torch_files))


def _require_no_model(hub_id: str, path: Path) -> None:
    """Raise `NotACheckpoint` for a model whose weights were not downloaded: nothing true could be said of them."""
    is_model = is_file(path / CONFIG) and not is_file(path / ADAPTER_CONFIG)
    if is_model and not any(_has_weights(path, each) for each in (Wanted.MODEL, Wanted.ADAPTER)):
        raise NotACheckpoint(
            f"{hub_id} is a model on the Hub, and its weights are not in the cache: only an adapter is downloaded here",
            hint=f"hf download {hub_id}, then run the same command again",
        )


def _refuse_by_name(hub_id: str, path: Path) -> None:
    """Raise `UnsupportedAdapter` for a repository without weights that transformers reads, and a name that says why."""
    if full_precision_name(hub_id) is not None:
        raise UnsupportedAdapter(
            f"{hub_id} holds no model.safetensors; its name suggests weights in a special quantised format",
            hint=give_full_precision(hub_id, None, path),
        )
