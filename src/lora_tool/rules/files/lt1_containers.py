"""LT1xx: the files themselves, whatever is in them. Each rule is one defect that the readers report."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import ADAPTER_WEIGHTS, AdapterDir
from lora_tool.checkpoints.folders import listed, renamed
from lora_tool.checkpoints.models import other_models
from lora_tool.checkpoints.nearby import consolidate_command, training_state_near
from lora_tool.checkpoints.registry import holds_rank_files
from lora_tool.core.display import counted
from lora_tool.core.errors import CorruptFile, Defect
from lora_tool.core.report import Severity
from lora_tool.core.report.text import grouped
from lora_tool.formats import manifest
from lora_tool.formats.files import (
    BYTE_ORDER_MARK,
    PICKLED,
    broken_json,
    inside,
    is_file,
    require_own_file,
    way_to_open,
)
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.engine.subjects import Subject, an_earlier_checkpoint, fetched_again

_OTHER_JSON = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "generation_config.json",
        manifest.FILE_NAME,
    }
)
"""JSON objects that are copied or published with the weights; all but a model's manifest are not read to open the folder."""


def defects(subject: Subject, defect: Defect) -> Iterator[Fault]:
    """Yield the folder's problems of one kind as faults."""
    for problem in subject.problems:
        if problem.defect is defect:
            hint = _way_to_read(problem.path, problem.message)
            yield Fault(message=problem.message, subject=problem.subject, path=problem.path, hint=hint)


def _way_to_read(path: str, message: str) -> str | None:
    """Return the command that makes a file readable which the user may not read, or whose beginning nobody reads; None
    for what else is wrong with one.
    """
    name, new = shlex.quote(path), shlex.quote(f"{path}.new")
    if message == BYTE_ORDER_MARK:
        return f"remove the mark: tail -c +4 {name} > {new} && mv {new} {name}"
    return way_to_open(path, message)


@rule("LT101", Severity.ERROR, on=Subject, about=Defect.TRUNCATED)
def truncated(subject: Subject) -> Iterator[Fault]:
    """Truncated weights file.

    What it does: Compares the sizes that a safetensors header claims with the size of the file.
    Why it matters: A full disk, a killed job or a broken download cut the end of the file off. Loading it fails, or, in
    tools that do not check, reads wrong bytes as weights.
    Example: The header of `adapter_model.safetensors` puts `lora_B` at bytes 2,048 to 4,096, but the file has only
    3,000.
    What to do: Copy or download the file again, or save the checkpoint again; the missing bytes cannot be restored.
    """
    cut = (problem for problem in subject.problems if problem.defect is Defect.TRUNCATED)
    for path, (first, *others) in grouped(cut, lambda problem: problem.path).items():
        more = f" ({counted(len(others), 'more tensor')} beyond the end)" if others else ""
        yield Fault(message=f"{first.message}{more}", subject=first.subject, path=path)


@rule("LT102", Severity.ERROR, on=Subject, about=Defect.BAD_HEADER)
def bad_header(subject: Subject) -> Iterator[Fault]:
    """Weights file with a broken header.

    What it does: Reads the header of a safetensors file: length, JSON, dtypes, shapes, offsets.
    Why it matters: Without a valid header no tensor in the file can be located. Often the file is of another kind under
    a wrong name: a pickle, an HTML error page, or a Git LFS pointer.
    Example: `model.safetensors` begins with `version https://git-lfs.github.com/spec/v1`.
    What to do: Download the real file (`git lfs pull`, or `hf download`), or save the checkpoint again.
    """
    return defects(subject, Defect.BAD_HEADER)


@rule("LT103", Severity.ERROR, on=Subject, about=Defect.HOLE)
def hole(subject: Subject) -> Iterator[Fault]:
    """Bytes that belong to no tensor.

    What it does: Checks that the tensors of a safetensors file cover its data without gaps, as the format requires.
    Why it matters: Something was cut out of the header or appended to the data, and safetensors refuses the file.
    Unread bytes can also hide a payload.
    Example: The header lists tensors up to byte 4,096, but the data has 4,100 bytes.
    What to do: Copy or save the file again; do not edit safetensors files by hand.
    """
    return defects(subject, Defect.HOLE)


@rule("LT104", Severity.ERROR, on=Subject, about=Defect.OVERLAP)
def overlap(subject: Subject) -> Iterator[Fault]:
    """Tensors that share bytes.

    What it does: Checks that no two tensors of a safetensors file claim the same bytes.
    Why it matters: The header is wrong for at least one of them. safetensors refuses such a file, and no known program
    writes it.
    Example: Two tensors both have `data_offsets` [0, 512].
    What to do: Save the checkpoint again with safetensors, and do not trust the source of this file.
    """
    return defects(subject, Defect.OVERLAP)


@rule("LT105", Severity.ERROR, on=Subject, about=Defect.DUPLICATE_KEY)
def duplicate_key(subject: Subject) -> Iterator[Fault]:
    """A duplicate name.

    What it does: Looks for repeated keys in JSON files and safetensors headers, and for one tensor in two shards.
    Why it matters: It depends on the reader which of the two counts, so one tool checks a value and another loads a
    different one.
    Example: `adapter_config.json` has `"r": 8` and further down `"r": 16`.
    What to do: Remove the wrong one, or save the checkpoint again.
    """
    return defects(subject, Defect.DUPLICATE_KEY)


@rule("LT106", Severity.ERROR, on=Subject, about=Defect.WRONG_SIZE)
def wrong_size(subject: Subject) -> Iterator[Fault]:
    """A tensor whose size does not match its shape and dtype.

    What it does: Compares each tensor's byte range with its shape and dtype.
    Why it matters: The shape, the dtype or the byte range is wrong, so the values cannot be read; safetensors refuses
    the file.
    Example: An F32 tensor of shape [4, 16] needs 256 bytes, but its header gives it 128.
    What to do: Save the checkpoint again; a header edited by hand is the usual cause.
    """
    return defects(subject, Defect.WRONG_SIZE)


@rule("LT107", Severity.ERROR, on=Subject, about=Defect.SHARD_MISSING)
def shard_missing(subject: Subject) -> Iterator[Fault]:
    """A weights file that the index names is missing.

    What it does: Looks for every file that `model.safetensors.index.json` names.
    Why it matters: The tensors in it are missing, so the model cannot be loaded. A download or copy was interrupted.
    Example: The index names `model-00002-of-00003.safetensors`, but the folder has only files 1 and 3.
    What to do: Copy or download the missing file (`hf download` continues where it stopped).
    """
    return defects(subject, Defect.SHARD_MISSING)


@rule("LT108", Severity.ERROR, on=Subject, about=Defect.SHARD_NAME)
def shard_name(subject: Subject) -> Iterator[Fault]:
    """An index that points outside its folder.

    What it does: Checks that each file name in `model.safetensors.index.json` is a bare file name.
    Why it matters: `../x.safetensors` or an absolute path reads files that are not part of the model. transformers
    silently follows such a path; lora-tool does not.
    Example: `"weight_map": {"lm_head.weight": "/etc/passwd"}`.
    What to do: Do not use this folder unless you know who made it; a valid index holds only bare file names.
    """
    return defects(subject, Defect.SHARD_NAME)


@rule("LT109", Severity.ERROR, on=Subject, about=Defect.INDEX_MISMATCH)
def index_mismatch(subject: Subject) -> Iterator[Fault]:
    """Index and weights files disagree.

    What it does: Compares the tensors that the index names with those in the files.
    Why it matters: A tensor that is only in one of the two is missing or ignored on loading. The shards come from two
    different models, or from two versions of one.
    Example: The index puts `model.norm.weight` in the third file, which does not hold it.
    What to do: Copy the index and all weights files again, from one place.
    """
    return defects(subject, Defect.INDEX_MISMATCH)


@rule("LT110", Severity.ERROR, on=Subject, about=Defect.PICKLE)
def pickle_weights(subject: Subject) -> Iterator[Fault]:
    """Weights in a pickle.

    What it does: Looks for `adapter_model.bin` and `pytorch_model*.bin` without a safetensors file. A file of torch 1.6
    or later is a warning: lora-tool reads it without running its pickle. An older one, or a bare pickle, is an error.
    Why it matters: A pickle can run any code when another tool loads it.
    Example: A folder with `adapter_config.json` and `adapter_model.bin`.
    What to do: `lora-tool merge` writes safetensors, and so does `lora-tool convert ADAPTER --to peft -o OUT`. To convert
    another file, load it on a machine where it may run code and save it again: `model.save_pretrained(folder)`.
    """
    readable = f"to write safetensors: lora-tool convert {shlex.quote(str(subject.checkpoint.root))} --to peft -o OUT"
    for problem in subject.problems:
        if problem.defect is Defect.PICKLE:
            severity = Severity.ERROR if problem.fatal else Severity.WARNING
            hint = readable if isinstance(subject.checkpoint, AdapterDir) else None
            hint = (
                "load it where it may run code, and save it: model.save_pretrained(folder)" if problem.fatal else hint
            )
            yield Fault(
                message=problem.message, subject=problem.subject, path=problem.path, severity=severity, hint=hint
            )


@rule("LT111", Severity.WARNING, on=Subject, about=Defect.TOTAL_SIZE)
def total_size(subject: Subject) -> Iterator[Fault]:
    """The index states a wrong total size.

    What it does: Compares `metadata.total_size` of the index with the bytes of all tensors.
    Why it matters: Loaders plan memory and devices from this number. A wrong one also suggests that the weights were
    rewritten without their index, so the folder may be a mixture.
    Example: `total_size` is 1,000, but the tensors hold 2,048 bytes.
    What to do: Set `metadata.total_size` to the number of bytes of all tensors, or save the model again.

    `lora-tool validate --fix` sets it.
    """
    return defects(subject, Defect.TOTAL_SIZE)


@rule("LT112", Severity.ERROR, on=Subject)
def not_a_file(subject: Subject) -> Iterator[Fault]:
    """Something other than a plain file in this folder.

    What it does: Refuses links out of the folder (those of the Hub's cache are fine), devices, pipes and unreadable
    files: among the weights and configs, and the tokenizer, licence and model card, which commands copy.
    Why it matters: The files that are checked and published should lie in the folder itself; the target of a link may
    change.
    Example: `adapter_model.safetensors` is a link to `/scratch/run3/adapter_model.safetensors`.
    What to do: Put the file itself into the folder: `cp -L FILE FOLDER/`.
    """
    yield from defects(subject, Defect.NOT_A_FILE)
    for path, wrong in _unreported(subject, subject.checkpoint.folder.copied_files):
        if wrong is not None:
            yield Fault(message=wrong, path=path, hint=_way_to_read(str(path), wrong))


def _unreported(subject: Subject, names: Iterable[str]) -> Iterator[tuple[Path, str | None]]:
    """Yield those of the folder's files that have no problem yet, each with the reason why it cannot be copied, if any."""
    root, reported = subject.checkpoint.root, {problem.path for problem in subject.problems}
    for path in map(root.joinpath, names):
        if str(path) in reported:
            continue
        try:
            require_own_file(root, path)
        except CorruptFile as error:
            yield path, error.problem.message
        else:
            yield path, None


@rule("LT113", Severity.ERROR, on=Subject)
def bad_json(subject: Subject) -> Iterator[Fault]:
    """A JSON file that cannot be read.

    What it does: Parses the JSON files beside the weights, the tokenizer's and `lora_tool.json` among them.
    Why it matters: Without a readable config the weights cannot be interpreted.
    Example: `adapter_config.json` ends in the middle of a line, because the disk was full.
    What to do: Correct the file by hand, or copy it from another checkpoint of the same run.
    """
    yield from defects(subject, Defect.BAD_JSON)
    others = filter(_OTHER_JSON.__contains__, subject.checkpoint.folder.files)
    for path, uncopied in _unreported(subject, others):
        wrong = broken_json(path) if uncopied is None else None
        if wrong:
            yield Fault(message=wrong, path=path, hint=_way_to_read(str(path), wrong))


@rule("LT114", Severity.WARNING, on=Subject, about=Defect.STRAY_WEIGHTS)
def stray_weights(subject: Subject) -> Iterator[Fault]:
    """A weights file that is not part of the model.

    What it does: Looks for `model-0000N-of-0000M.safetensors` files that the index does not name, and for the further
    models that accelerate's `save_state` calls `model_1.safetensors`.
    Why it matters: It is left over from an earlier save with another number of files, or it is a second model of the
    same training. transformers ignores it, but every push or copy of the folder takes it along, and it may be the one
    that is wanted.
    Example: A model of two files was saved over one of five, and three of the old files remain.
    What to do: Check that the index names the right files, then remove this one.
    """
    root = str(subject.checkpoint.root)
    others = {file: name for name, file in other_models(subject.checkpoint.folder).items()}
    for fault in defects(subject, Defect.STRAY_WEIGHTS):
        name = others.get(Path(str(fault.path)).name)
        command = name and shlex.join(["lora-tool", "consolidate", root, "--tag", name])
        yield replace(fault, hint=command or fault.hint)


_WITH_INDEX = "copy or download the index too, from where the shards come from (hf download continues where it stopped)"
_IN_ONE_FILE = (
    'python -c "from glob import glob; from safetensors.torch import load_file, save_file; save_file({k: v for f in '
    "glob('adapter_model-*.safetensors') for k, v in load_file(f).items()}, 'adapter_model.safetensors', "
    "{'format': 'pt'})\""
)


@rule("LT115", Severity.ERROR, on=Subject, about=Defect.NO_WEIGHTS)
def weights_absent(subject: Subject) -> Iterator[Fault]:
    """No weights.

    What it does: Looks for `adapter_model.safetensors`, or for `model.safetensors` or its index.
    Why it matters: There is a config but nothing to load. Saving was interrupted, or the weights are elsewhere: under
    DeepSpeed ZeRO-3 and FSDP they are in the rank files of `global_stepN/` or in a `.distcp` folder.
    Example: A `checkpoint-500` that was being written when the job was killed.
    What to do: If `global_stepN/` or `.distcp` files lie beside it, put them together: `lora-tool consolidate
    CHECKPOINT`. Otherwise use the previous checkpoint. PEFT 0.21 cannot read a sharded adapter
    (`adapter_model-00001-of-00002.safetensors`): put its tensors into one file.
    """
    for fault in defects(subject, Defect.NO_WEIGHTS):
        yield replace(fault, hint=_where_they_are(subject))


@rule("LT116", Severity.ERROR, on=Subject)
def foreign_call(subject: Subject) -> Iterator[Fault]:
    """A pickle that calls what no checkpoint needs.

    What it does: Reads the names in every pickle of the folder, without importing or running one: weights, rank files,
    and what a run is resumed from, such as `optimizer.pt`, `training_args.bin` and the objects in `.distcp` files.
    Functions that rebuild tensors, arrays and plain values, and classes of trainers, are fine; anything else of Python's
    own, and any other function, is not. Of a file other than weights the first 16 MB are read.
    Why it matters: A program that loads the file runs what it names. Such a file was made to do harm.
    Example: `adapter_model.bin` calls `posix.system`.
    What to do: Do not load the file with another program, and do not trust the rest of the folder. Save the checkpoint
    again, or download it from where you trust it.
    """
    yield from defects(subject, Defect.FOREIGN_CALL)
    for path in _unread(subject):
        from lora_tool.formats.unread_pickles import foreign_calls  # most folders have none

        with contextlib.suppress(CorruptFile, OSError):
            for problem in foreign_calls(path):
                yield Fault(message=problem.message, subject=problem.subject, path=problem.path)


def _unread(subject: Subject) -> Iterator[Path]:
    """Yield the files in the folder that programs unpickle and that were not read."""
    root, read = subject.checkpoint.root, subject.read_files
    for folder in subject.places:
        below = (f"{name}/.metadata" for name in listed(folder) if "." not in name)
        for path in (folder / name for name in (*listed(folder), *below) if name.endswith(PICKLED)):
            if path not in read and is_file(path) and inside(root, path):
                yield path


def _where_they_are(subject: Subject) -> str | None:
    checkpoint = subject.checkpoint
    if holds_rank_files(checkpoint.folder):
        return f"the folder holds them in pieces: lora-tool consolidate {shlex.quote(str(checkpoint.root))}"
    if not isinstance(checkpoint, AdapterDir):
        return _WITH_INDEX if any("-of-" in name for name in checkpoint.folder.files) else None
    if any(name.startswith("adapter_model-") for name in checkpoint.folder.files):
        return f"{_IN_ONE_FILE} (run it in {checkpoint.root})"
    state = training_state_near(checkpoint.root)
    if state is None and (checkpoint.folder.trainer is None or renamed(checkpoint.folder, ADAPTER_WEIGHTS)):
        return fetched_again(subject, ADAPTER_WEIGHTS)
    if state is None:
        return an_earlier_checkpoint(subject, "no rank files that have them lie in this folder or beside it")
    return f"take them from the training checkpoint {state}: {consolidate_command(checkpoint.root)}"
