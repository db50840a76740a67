"""What `validate` and `prepare` say about adapters, beside what a server does with them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lora_tool import Server, prepare, validate
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report import Severity
from tests.oracle.adapter_cases import Case
from tests.servers.cases import BASES, PROMPTS, SIZES, expected_of, farthest, loaded, norm_of, values_of

HERE = Path(__file__).parent
RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
OF_VLLM: Mapping[str, Any] = {
    "enable_lora": True,
    "max_loras": 1,
    "max_cpu_loras": 1,
    "max_lora_rank": 512,
    "max_logprobs": 304,
}
NEAR: Mapping[Server, float] = {Server.VLLM: 5e-5, Server.LLAMA_CPP: 2e-4}
"""In log probability. Both have 5e-6 for most adapters; an init of PEFT's is computed again with 4e-5."""
_OWN = 1e-3
_TOO_SMALL = 0.005
_LIMIT_S = 3600


@dataclass(frozen=True, kw_only=True)
class Tried:
    """An adapter, in the form that PEFT saved and in the form that `prepare` wrote."""

    case: Case
    folder: Path
    expected: list[list[float]] | None
    """None where PEFT does not load it."""
    errors: tuple[str, ...]
    prepared: Path | None
    refusal: str
    prepared_errors: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Seen:
    """Where the two do not agree, and how many times they were compared."""

    disagreements: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)


def answers_of(server: Server, job: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the server says of each adapter, by name; `""` is the model without one."""
    folder.mkdir(exist_ok=True)
    given, answers, said = (folder / name for name in ("job.json", "answers.jsonl", "said.txt"))
    given.write_text(json.dumps({"prompts": PROMPTS, "vocabulary": SIZES["vocab_size"], "adapters": {}, **job}))
    python, path = python_of(server, converts=not str(job["model"]).endswith(".gguf"))
    command = [python, str(HERE / f"run_{server.value.replace('.', '_')}.py"), str(given), str(answers)]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with said.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=out, env=environment, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, said.read_text()[-3000:]
    return {answer["name"]: answer for answer in map(json.loads, answers.read_text().splitlines())}


def python_of(server: Server, *, converts: bool = True) -> tuple[str, str]:
    """Return the Python that runs the server, and the value of its PYTHONPATH; skip the test where there is none."""
    if server is Server.VLLM:
        python = os.environ.get("VLLM_PYTHON", "")
        if not Path(python).is_file():
            pytest.skip("VLLM_PYTHON names no Python that has vLLM: .ci/servers makes one")
        return python, ""
    sources = os.environ.get("LLAMA_CPP", "")
    if converts and not Path(sources, "convert_lora_to_gguf.py").is_file():
        pytest.skip("LLAMA_CPP names no folder with llama.cpp's converters: .ci/servers makes one")
    if importlib.util.find_spec("xllamacpp") is None and not Path(sources, "xllamacpp").is_dir():
        pytest.skip("xllamacpp is not installed: pip install xllamacpp")
    return sys.executable, os.pathsep.join((f"{sources}/gguf-py", sources)) if sources else ""


def _served(prepared: Path) -> Path:
    """Return what a server is given of an output: for llama.cpp a file, if `prepare` wrote that."""
    return prepared / "adapter.gguf" if (prepared / "adapter.gguf").exists() else prepared


def tried(server: Server, case: Case, base: Path, folder: Path) -> Tried | None:
    """Write the adapter, ask `validate`, and let `prepare` write its form. None where PEFT cannot make it on this base."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of targets that are odd on purpose
        try:
            adapter = case.trained(base, folder / "adapter")
        except (ValueError, AttributeError):
            return None
        try:
            expected = expected_of(case, base, adapter, folder / "with-prefix")
        except Exception:  # noqa: BLE001 - PEFT raises what torch, transformers and its own checks raise
            expected = None
    try:
        prepared, refusal = prepare(adapter, server, base=base, out=folder / "prepared").path, ""
    except LoraToolError as error:
        prepared, refusal = None, str(error)
    return Tried(
        case=case,
        folder=adapter,
        expected=expected,
        errors=errors_of(server, adapter, base),
        prepared=prepared,
        refusal=refusal,
        prepared_errors=errors_of(server, prepared, base) if prepared else (),
    )


def errors_of(server: Server, adapter: Path, base: Path) -> tuple[str, ...]:
    found = validate(adapter, base=base, servers=[server]).findings
    return tuple(sorted({each.code for each in found if each.severity is Severity.ERROR}))


def compared(server: Server, name: str, folder: Path) -> Seen:
    """Return how the server's answers about all adapters of a base agree with what is said about them."""
    base = BASES[name].write(folder / "base")
    plain = values_of(loaded(base, None))
    every = ((kind, tried(server, case, base, folder / kind)) for kind, case in BASES[name].kinds())
    made = {kind: each for kind, each in every if each is not None}
    adapters = {f"{kind} as it is": str(each.folder) for kind, each in made.items()}
    adapters |= {f"{kind} prepared": str(_served(each.prepared)) for kind, each in made.items() if each.prepared}
    computes = not (server is Server.VLLM and BASES[name].experts)
    job = {"model": str(base), "adapters": adapters, "compute": computes, "options": OF_VLLM}
    answers = answers_of(server, job, folder / "asked")
    seen, near = Seen(), NEAR[server]
    if "error" not in answers[""] and computes:
        own = farthest(answers[""]["values"], plain)  # llama.cpp's GELU, of GPT-2 and Gemma, is a table of 16 bits
        assert own < _OWN, "the base itself is served otherwise"
        near += 4 * own
    for kind, each in made.items():
        trained = each.case.served and each.expected is not None
        if computes and trained and each.expected is not None:
            assert farthest(each.expected, plain) > _TOO_SMALL, f"{kind}: nothing would be seen of it"
        outcomes = {}
        for form, path in (("as it is", each.folder), ("prepared", each.prepared)):
            if path is not None:
                answer = answers.get(f"{kind} {form}", answers[""])
                outcomes[form], seen.details[f"{kind} {form}"] = outcome(
                    answer, each.expected if trained else None, near, (base, path)
                )
        seen.outcomes[kind] = (outcomes["as it is"], outcomes.get("prepared", "refused by prepare"))
        found = "; ".join(_disagreements(each, outcomes))
        if found:
            seen.disagreements[kind] = found
    return seen


def outcome(
    answer: dict[str, Any], expected: list[list[float]] | None, near: float, folders: tuple[Path, Path]
) -> tuple[str, str]:
    """Return what the server did with an adapter in a word, and in numbers."""
    if "error" in answer:
        return REFUSED, answer["error"]
    if expected is None:
        return WRONG, "PEFT does not load it, or not as it was trained"
    if answer["values"] is None:
        loaded_norm, whole = answer["norm"], norm_of(*folders)
        return (RIGHT if abs(loaded_norm - whole) < 1e-4 * whole else WRONG), f"‖B‖ {loaded_norm:.5f} of {whole:.5f}"
    apart = farthest(answer["values"], expected)
    return (RIGHT if apart < near else WRONG), f"{apart:.1e}"


def _disagreements(each: Tried, outcomes: Mapping[str, str]) -> list[str]:
    """Return what `validate` and `prepare` say of an adapter that is not what the server does."""
    found = []
    served = outcomes["as it is"]
    if served == RIGHT and each.errors:
        found.append(f"right, but {' '.join(each.errors)}")
    if served != RIGHT and not each.errors:
        found.append(f"{served}, and no error")
    if each.prepared is None and served == RIGHT:
        found.append("right, but prepare refuses")
    if each.prepared is not None and outcomes["prepared"] != RIGHT:
        found.append(f"prepared: {outcomes['prepared']}" + (", and no error" if not each.prepared_errors else ""))
    if each.prepared is not None and outcomes["prepared"] == RIGHT and each.prepared_errors:
        found.append(f"prepared: right, but {' '.join(each.prepared_errors)}")
    return found
