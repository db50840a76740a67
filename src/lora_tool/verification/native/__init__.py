"""The comparisons in C, and what loads them: two modules, because that of copies does without numpy."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("compare.so")
"""What `build_kernel.py` makes of `compare.c`."""
VERSION = 3
"""Of the functions in `compare.c`."""
