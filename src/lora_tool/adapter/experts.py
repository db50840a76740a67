"""What checkpoints, and the adapters on them, call the matrices of single experts."""

from __future__ import annotations

import re

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,6})\.(?P<projection>\w+)")
"""The path of an expert's matrix."""
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down: most models' names, and Mixtral's."""
