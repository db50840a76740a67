"""The coverage-guided fuzzer: `python -m tests.fuzz TARGET [SECONDS]` (pip install atheris).

It begins with the fixtures' files, keeps what reaches new code under `fuzz-corpus/TARGET`, and stops at the first
failure, which it writes to `crash-…`. A find belongs into `tests/fuzz/finds.py`, so that it stays fixed.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lora_tool"]):
    from tests.fuzz.targets import TARGETS, seeds


def main() -> None:
    """Fuzz one target, for a minute by default."""
    if not sys.argv[1:] or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {'|'.join(TARGETS)} [SECONDS]")
    target, seconds = sys.argv[1], sys.argv[2] if sys.argv[2:] else "60"
    corpus = Path("fuzz-corpus") / target
    corpus.mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(seeds(target)):
        if len(seed) < 100_000:
            (corpus / f"seed-{at}").write_bytes(seed)
    warnings.simplefilter("ignore")
    limits = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=100000"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], TARGETS[target])
    atheris.Fuzz()


main()
