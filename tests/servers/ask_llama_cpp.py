"""What llama.cpp's converter takes, as JSON: LLAMA_CPP=FOLDER is its source, and xllamacpp says the build."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

from tests.servers.fields import unread

if __name__ == "__main__":
    converter = Path(os.environ["LLAMA_CPP"]) / "convert_lora_to_gguf.py"
    build = importlib.metadata.version("xllamacpp").rpartition(".")[2]
    options = ["--base"] if '"--base"' in converter.read_text(encoding="utf-8") else ["none"]
    # ranks are those of the tensors; it reads aLoRA's field, and a run gave other log probabilities than PEFT's
    left = {
        name: to for name, to in unread([converter]).items() if name not in ("rank_pattern", "alora_invocation_tokens")
    }
    print(json.dumps({"record": {"version": f"b{build}", "fields": left}, "options": options}))
