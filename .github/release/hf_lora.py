"""Write the files of the repository `hf-lora`, which `hf extensions install OWNER/hf-lora` installs: `python hf_lora.py FOLDER`.

They are written anew for each release: huggingface_hub looks for another commit there, and for no release of lora-tool.
"""

import sys
from pathlib import Path

from lora_tool.core.version import __version__

PROJECT = f"""\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "hf-lora"
version = "{__version__}"
description = "Check, merge and publish LoRA checkpoints: lora-tool as hf lora"
readme = "README.md"
license = "Apache-2.0"
requires-python = ">=3.10"
dependencies = ["lora-tool=={__version__}"] # it has the script `hf-lora`

[tool.hatch.build.targets.wheel]
bypass-selection = true # there is no code here
"""

README = """\
# hf lora

[lora-tool](https://github.com/OWNER/lora-tool) as an extension of Hugging Face's command line:

```
hf extensions install OWNER/hf-lora
hf lora validate my-adapter
```
"""


def write(folder: Path) -> None:
    """Write the repository's files into the folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
