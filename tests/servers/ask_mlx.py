"""What the MLX-LM of this Python takes, as JSON, read from its source: importing it needs MLX."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

from tests.servers.fields import unread

if __name__ == "__main__":
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    reader = folder / "tuner" / "utils.py"
    record = {
        "version": importlib.metadata.version("mlx-lm"),
        "fields": unread([reader]),
        "mlx": '"adapters.safetensors"' in reader.read_text(encoding="utf-8"),
    }
    options = re.findall(r'"(--[a-z-]+)"', (folder / "generate.py").read_text(encoding="utf-8"))
    print(json.dumps({"record": record, "options": options}))
