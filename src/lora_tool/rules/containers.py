"""LT1xx: the files themselves, whatever model is in them. One rule for each `Defect` that reading can meet."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.errors import Defect
from lora_tool.report.model import Severity
from lora_tool.rules.registry import Case, Hit, rule


def _hits(case: Case, defect: Defect, hint: str | None = None) -> Iterator[Hit]:
    for problem in case.checkpoint.problems:
        if problem.defect is defect:
            yield Hit(path=problem.path, subject=problem.subject, message=problem.message, hint=hint)


_COPY_AGAIN = "copy or download the file again, and compare its size with the original's"
_SAVE_AGAIN = "save it again with save_pretrained(), or take the file from the original"


@rule("LT101", Severity.ERROR, "weights file is truncated")
def truncated(case: Case) -> Iterator[Hit]:
    """The file ends before the data that its header promises.

    Why it matters: a download or copy was cut off, or the disk was full while saving. Loading fails, or, where a
    library only checks the header, reads garbage.

    Example: `adapter_model.safetensors` claims 83,951,968 bytes of data and holds 41,943,040.

    What to do: copy or download the file again; if it was cut off while training, use an earlier checkpoint.
    """
    yield from _hits(case, Defect.TRUNCATED, _COPY_AGAIN)


@rule("LT102", Severity.ERROR, "header of a weights file is not valid")
def bad_header(case: Case) -> Iterator[Hit]:
    """The first bytes are no safetensors header, or an entry in it makes no sense.

    Why it matters: no tensor of the file can be trusted. Often it is an HTML error page, a Git LFS pointer, or a
    pickle that was renamed.

    Example: the file begins with `version https://git-lfs.github.com/spec/v1`: it is a pointer, not the weights.

    What to do: fetch the real file (`git lfs pull`, `hf download`), or save it again.
    """
    yield from _hits(case, Defect.BAD_HEADER, "fetch the real file: git lfs pull, or hf download")


@rule("LT103", Severity.ERROR, "bytes in a weights file that belong to no tensor")
def hole(case: Case) -> Iterator[Hit]:
    """Between or behind the tensors there are bytes that the header gives to none of them.

    Why it matters: the format forbids it, because hidden bytes can be anything; the reference reader refuses the file.

    Example: the header was edited by hand to take a tensor out, and its data was left in.

    What to do: save the file again with the safetensors package.
    """
    yield from _hits(case, Defect.HOLE, _SAVE_AGAIN)


@rule("LT104", Severity.ERROR, "tensors in a weights file overlap")
def overlap(case: Case) -> Iterator[Hit]:
    """Two tensors claim the same bytes.

    Why it matters: changing one would change the other; the format forbids it and the reference reader refuses it.

    Example: a hand-written header gives tied weights the same `data_offsets`.

    What to do: save tied weights once, with save_pretrained().
    """
    yield from _hits(case, Defect.OVERLAP, _SAVE_AGAIN)


@rule("LT105", Severity.ERROR, "a name appears twice")
def duplicate_key(case: Case) -> Iterator[Hit]:
    """A tensor name, or a key of a JSON file, is there more than once.

    Why it matters: libraries take one of the two without a word, and not all take the same.

    Example: `adapter_config.json` has `"r": 8` at the top and `"r": 16` further down.

    What to do: keep the right one and delete the other.
    """
    yield from _hits(case, Defect.DUPLICATE_KEY, "keep the right one and delete the other")


@rule("LT106", Severity.ERROR, "size of a tensor is not that of its shape and dtype")
def wrong_size(case: Case) -> Iterator[Hit]:
    """The header gives a tensor more or fewer bytes than its shape and dtype need.

    Why it matters: its values cannot be told from its neighbour's.

    Example: BF16 [4096, 8] needs 65,536 bytes, the header gives it 131,072: it was saved as F32.

    What to do: save the file again.
    """
    yield from _hits(case, Defect.WRONG_SIZE, _SAVE_AGAIN)


@rule("LT107", Severity.ERROR, "a shard that the index names is missing")
def shard_missing(case: Case) -> Iterator[Hit]:
    """`model.safetensors.index.json` names a file that is not there.

    Why it matters: loading fails, or, with `low_cpu_mem_usage`, leaves those weights random.

    Example: 3 of 4 shards were downloaded.

    What to do: fetch the missing file.
    """
    yield from _hits(case, Defect.SHARD_MISSING, "fetch the missing file: hf download")


@rule("LT108", Severity.ERROR, "the index names a file outside its folder")
def shard_name(case: Case) -> Iterator[Hit]:
    """A shard name in the index is a path, not a bare file name.

    Why it matters: `../x` or `/x` makes a loader read a file that does not belong to the checkpoint; transformers
    follows it. It is a mistake at best and an attack at worst, so it is never followed here.

    Example: `"lm_head.weight": "../other-model/model.safetensors"`.

    What to do: do not load the checkpoint before you know who wrote that line; then put the file beside the index.
    """
    yield from _hits(case, Defect.SHARD_NAME, "put the file beside the index and name it without a folder")


@rule("LT109", Severity.ERROR, "index and shards do not agree")
def index_mismatch(case: Case) -> Iterator[Hit]:
    """The index puts a tensor where it is not, or leaves out one that is there.

    Why it matters: the first fails on loading, the second is dropped without a word.

    Example: shards of two saves with different shard sizes lie in one folder.

    What to do: save the model again into an empty folder.
    """
    yield from _hits(case, Defect.INDEX_MISMATCH, "save the model again into an empty folder")


@rule("LT110", Severity.ERROR, "weights are a pickle")
def pickle_weights(case: Case) -> Iterator[Hit]:
    """The weights are in a `.bin` file, which is a pickle, and in no safetensors file.

    Why it matters: loading a pickle can run any code. It is named here and not read.

    Example: an adapter saved with `safe_serialization=False`, or by OpenRLHF under ZeRO-3.

    What to do: load it where you trust it and save it with `save_pretrained(folder, safe_serialization=True)`.
    """
    yield from _hits(case, Defect.PICKLE, "load it where you trust it, then save_pretrained() writes safetensors")


@rule("LT111", Severity.WARNING, "total_size of the index is wrong")
def total_size(case: Case) -> Iterator[Hit]:
    """`metadata.total_size` of the index is not the sum of the tensors' bytes.

    Why it matters: tools that plan memory or downloads by it are misled. The weights themselves are fine.

    Example: axolotl's merge wrote the number of tensors there.

    What to do: correct the number, or let `lora-tool merge` write the index.
    """
    yield from _hits(case, Defect.TOTAL_SIZE, "write the number found here into the index")


@rule("LT112", Severity.ERROR, "not a regular file inside the folder")
def not_a_file(case: Case) -> Iterator[Hit]:
    """What should be a file is a folder, a pipe, a device, unreadable, or a link out of the checkpoint.

    Why it matters: reading it would hang or fail, or read what belongs to somebody else. The links of the Hub cache
    into its own `blobs` are followed.

    Example: `model.safetensors` links to `/mnt/old-disk/…`, which the next machine does not have.

    What to do: put the real file there.
    """
    yield from _hits(case, Defect.NOT_A_FILE, "put the real file there: cp --dereference")


@rule("LT113", Severity.ERROR, "a JSON file cannot be read")
def bad_json(case: Case) -> Iterator[Hit]:
    """A JSON file is empty, cut off, too deep, too large or not JSON.

    Why it matters: without its config a checkpoint cannot be loaded.

    Example: `adapter_config.json` has 0 bytes because the disk was full.

    What to do: take the file from another checkpoint of the same run; all have the same config.
    """
    yield from _hits(case, Defect.BAD_JSON, "take the file from another checkpoint of the same run")


@rule("LT114", Severity.WARNING, "weights file that no index names")
def stray_weights(case: Case) -> Iterator[Hit]:
    """A shard lies in the folder, but the index does not name it.

    Why it matters: it is ignored on loading, uploaded on pushing, and may be a leftover of another save.

    Example: a model saved in 2 shards over an older one in 5 leaves three old ones.

    What to do: delete it if it is old; if it is not, the index is wrong.
    """
    yield from _hits(case, Defect.STRAY_WEIGHTS, "delete it if it is from an older save")


@rule("LT115", Severity.ERROR, "no weights")
def no_weights(case: Case) -> Iterator[Hit]:
    """There is a config, but no weights file that belongs to it.

    Why it matters: there is nothing to load. Under ZeRO-3 or FSDP the weights may still be in shards beside it.

    Example: a full finetune under ZeRO-3 without gathering leaves config.json and `global_step100/`.

    What to do: look for the weights beside the config or in the checkpoint before it.
    """
    yield from _hits(case, Defect.NO_WEIGHTS, "look for the weights beside the config, or in an earlier checkpoint")
