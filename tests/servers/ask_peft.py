"""What the PEFT of this Python takes, as JSON: its version, the fields that its `LoraConfig` lacks, and what it refuses."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json

import peft
from peft.tuners import tuners_utils

from tests.servers.fields import ASKED


def refused() -> dict[str, list[str]]:
    """Return the modules of each model type that a function of PEFT's refuses, from the sets in its source."""
    tree = ast.parse(inspect.getsource(tuners_utils._check_lora_target_modules_mamba))
    sets = {
        node.targets[0].id: sorted(ast.literal_eval(node.value))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Set)
    }
    return dict.fromkeys(sets["mamba_model_types"], sets["incompatible_modules"])


if __name__ == "__main__":
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    fields = {name: None if name in known else "ignores" for name in ASKED}
    print(json.dumps({"record": {"version": peft.__version__, "fields": fields, "refused": refused()}}))
