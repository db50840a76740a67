"""A distribution of its own adds a command, an engine, a kind of checkpoint and a server, without a line in `src/`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tool.core.errors import MissingDependency
from lora_tool.workflows import drawing

ROOT = Path(__file__).parents[2]
ADAPTER = ROOT / "fixtures" / "causal-llama" / "adapter"
MERGE = ("merge", ADAPTER, "--base", ADAPTER.parent / "base", "-q")
ENTRY_POINTS = """
[lora_tool.commands]
toy = toy.command:command

[lora_tool.engines]
toy = toy.engine:ENGINE
broken = toy.engine:NOTHING

[lora_tool.kinds]
toy = toy.kind:ADDED

[lora_tool.servers]
toy = toy.server:SERVER
"""
MODULES = {
    "__init__": "",
    "command": """
import click

@click.command("toy", short_help="Say hello.")
def command():
    click.echo("hello")
""",
    "engine": """
from contextlib import contextmanager
from msgspec import Struct
from lora_tool.core.engines import ClusterEngine
from lora_tool.core.errors import ExecutionError

class Toy(Struct):
    address: str | None
    workers: int | None

    def require(self):
        if self.address == "nowhere:1":
            raise ExecutionError("nobody answers at nowhere:1")

    @contextmanager
    def connected(self):
        yield self

    def require_nodes(self, surroundings):
        surroundings.enter("toy")

    def map(self, group, *, progress):
        for place, task in enumerate(group.tasks):
            print("task", task.name)
            group.done(place, task.run(progress))

ENGINE = ClusterEngine(cluster=Toy)
""",
    "kind": """
from lora_tool.checkpoints import Claim, ShardedDir, ShardedKind
from lora_tool.checkpoints.added import AddedKind
from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.core.tensors import FileStamp
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.safetensors import scan_file

class ToyState(TrainingState, frozen=True, kw_only=True):
    stored: dict

    def absent_files(self):
        return iter(())

    def assemble(self, wanted):
        return {name: tensor for name, tensor in self.stored.items() if name in wanted}

def state(checkpoint, *, tag=None, or_newest=False):
    path = checkpoint.root / "toy.weights"
    tensors = dict(scan_file(path).tensors)
    return ToyState(
        root=checkpoint.root,
        folder=checkpoint.root,
        title="toy checkpoint",
        entries={name: StateEntry(role=Role.TRAINED, shape=tensor.shape) for name, tensor in tensors.items()},
        stamps={path: FileStamp.of(path)},
        stored=tensors,
    )

KIND = ShardedKind(
    name="toy checkpoint",
    sign="toy.weights",
    landmarks=("toy.weights",),
    weights=("toy.weights",),
    recognise=lambda folder: Claim.WEIGHTS if "toy.weights" in folder.files else None,
    open=lambda folder: ShardedDir(kind=KIND, folder=folder, rank_files={".": ("toy.weights",)}),
)
ADDED = AddedKind(kind=KIND, state=state)
""",
    "server": '''
from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.serving.forms import AddedServer, ServingForm

SERVER = AddedServer(form=ServingForm(name="Toy"))

@rule("TOY001", Severity.ERROR, on=AdapterSubject, needs={Need.CONFIG, Need.SERVER})
def odd_rank(subject):
    """A rank that the toy does not like.

    What it does: Looks at the rank.

    Why it matters: The toy counts in tens.

    Example: r=4.

    What to do: Train again.
    """
    if "toy" in subject.servers and subject.config.r % 10:
        yield Fault(message=f"Toy counts in tens, and r is {subject.config.r}", subject="r")
''',
}


def install(folder: Path, name: str, entry_points: str) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages with the toy in it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy").mkdir()
    for name, text in MODULES.items():
        (folder / "toy" / f"{name}.py").write_text(text)
    install(folder, "toy", ENTRY_POINTS)
    return folder


def run(
    site: Path | str, *words: str | Path, code: int = 0, program: tuple[str, ...] = ("-m", "lora_tool")
) -> tuple[str, str]:
    """Return what the command prints to stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "src")]), "COLUMNS": "200"}
    command = [sys.executable, *program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_command(site: Path) -> None:
    assert run(site, "toy") == ("hello\n", "")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nothing_there:command", "ModuleNotFoundError: No module named 'nothing_there'"),
        ("toy.command:nothing", "AttributeError: module 'toy.command' has no attribute 'nothing'"),
        ("toy.command:click", "expected click.core.Command, found module"),
    ],
)
def test_a_command_that_is_broken_harms_no_other(site: Path, tmp_path: Path, target: str, why: str) -> None:
    install(tmp_path, "broken", f"[lora_tool.commands]\nbroken = {target}\nmerge = toy.command:command\n")
    paths = f"{tmp_path}{os.pathsep}{site}"
    helped, errors = run(paths, "--help")
    (warning,) = errors.splitlines()
    assert warning.startswith("warning: broken: its entry point `broken` of lora_tool.commands does not")
    assert why in warning
    assert "  toy          Say hello.\n" in helped
    assert "  merge        Say hello.\n" not in helped
    _, errors = run(paths, "broken", code=3)
    assert errors.startswith("error: broken: ")
    assert "hint: pip install --upgrade broken" in errors


def test_an_engine(site: Path, tmp_path: Path) -> None:
    run(site, *MERGE, "-o", tmp_path / "here")
    printed, _ = run(site, *MERGE, "-o", tmp_path / "there", "--engine", "toy", "--workers", "2")
    assert "task model-00001-of-" in printed
    assert content(tmp_path / "there") == content(tmp_path / "here")
    printed, _ = run(site, "verify", tmp_path / "there", "--engine", "toy")
    assert "task " in printed


def test_an_engine_is_required_before_anything_is_read(site: Path, tmp_path: Path) -> None:
    merge = ("merge", "no-such-adapter", "--base", "no-such-base", "-o", tmp_path / "out", "--engine")
    _, errors = run(site, *merge, "toy", "--address", "nowhere:1", code=3)
    assert errors.startswith("error: nobody answers at nowhere:1")
    _, errors = run(site, *merge, "broken", code=3)
    assert errors.startswith("error: toy: its entry point `broken` of lora_tool.engines does not load: AttributeError")
    _, errors = run(site, *merge, "tyo", code=2)
    assert "expected one of local, broken, " in errors
    assert "found 'tyo'" in errors


def test_a_kind_of_checkpoint(site: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    shutil.copyfile(ADAPTER / "adapter_model.safetensors", checkpoint / "toy.weights")
    shutil.copyfile(ADAPTER / "adapter_config.json", tmp_path / "adapter_config.json")
    printed, _ = run(site, "inspect", checkpoint)
    assert "toy checkpoint" in printed
    run(site, "consolidate", checkpoint, "-o", tmp_path / "out", "-q")
    printed, _ = run(site, "diff", tmp_path / "out", ADAPTER, "-q")
    assert printed.startswith("6 same\n")


def test_a_server(site: Path, tmp_path: Path) -> None:
    rank = json.loads((ADAPTER / "adapter_config.json").read_text())["r"]
    printed, _ = run(site, "validate", ADAPTER, "--for", "toy", code=1)
    assert "TOY001" in printed
    assert f"Toy counts in tens, and r is {rank}" in printed
    run(site, "validate", ADAPTER, "--for", "toy", "--ignore", "TOY001")
    run(site, "validate", ADAPTER, "--for", "vllm")
    _, errors = run(site, "validate", ADAPTER, "--for", "tyo", code=2)
    assert "toy" in errors
    run(site, "prepare", ADAPTER, "--for", "toy", "-o", tmp_path / "out", "-q")
    assert json.loads((tmp_path / "out" / "lora_tool.json").read_text())["for"] == "toy"
    run(site, "verify", tmp_path / "out", "-q")


def test_without_a_package_that_draws_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "entry_points", lambda _: {})
    with pytest.raises(MissingDependency, match="a package that draws is not installed") as raised:
        drawing.drawer()
    assert raised.value.hint
    assert "[plot]" in raised.value.hint


PROBE = """
import sys
from lora_tool.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "toy" or name == "importlib.metadata"))
"""


@pytest.mark.parametrize(
    "words",
    [
        ("validate", ADAPTER, "-q"),
        ("validate", ROOT / "fixtures" / "reward-run" / "checkpoint-4", "-q"),
        ("validate", ADAPTER.parent / "base", "-q"),
        ("consolidate", ROOT / "fixtures" / "zero" / "stage3-reward", "--dry-run"),
        (*MERGE, "--dry-run"),
    ],
    ids=lambda words: f"{words[0]} {Path(words[1]).name}",
)
def test_a_plain_path_reads_no_entry_points(words: tuple[str | Path, ...], site: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out") if words[0] in ("merge", "consolidate") else ()
    printed, _ = run(site, *words, *out, program=("-c", PROBE))
    assert printed.splitlines()[-1] == "[]"
