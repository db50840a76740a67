"""What the PEFT of this Python takes, as JSON: its version, and the fields that its `LoraConfig` does not have."""

from __future__ import annotations

import dataclasses
import json

import peft

from tests.servers.fields import ASKED

if __name__ == "__main__":
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    fields = {name: None if name in known else "ignores" for name in ASKED}
    print(json.dumps({"record": {"version": peft.__version__, "fields": fields}}))
