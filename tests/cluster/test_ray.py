"""Work on a real Ray cluster of two nodes: one machine's bytes and words, whoever is killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lora_tool import Plan, execute, plan_consolidate, plan_merge
from lora_tool.cluster.ray_cluster import RayCluster
from lora_tool.cluster.task import Surroundings, Task, TaskGroup
from lora_tool.errors import ExecutionError, MissingDependency, OutOfSpace, SourceChanged
from lora_tool.execution.folder import shared_folder
from lora_tool.execution.ray_engine import RayEngine, surroundings_of
from tests.cluster.conftest import Cluster, node_apart
from tests.cluster.tasks import Deadly, Dying, Lacking, Lingering, Stale
from tests.hostile.folders import FIXTURES, Pair, copy_pair, left_behind
from tests.hostile.test_output import content
from tests.hostile.test_shares import work_of
from tests.quantised_models import quantise

NOTHING = Surroundings(directory=None, inputs=(), versions={})
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
MANY_FILES = ("--max-shard-size", "600")
SLOW = """
import sys
from pathlib import Path
from lora_tool.execution import ray_engine
from lora_tool.cli.main import main
from tests.cluster.tasks import Slow
parts_of = ray_engine.parts_of
told = Path(sys.argv[1])
ray_engine.parts_of = lambda work: (Slow(task=part, seconds=1.5, told=told) for part in parts_of(work))
main(sys.argv[2:])
"""
"""The command whose parts take their time."""


def typed(cluster: Cluster, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lora_tool", *arguments]
    return subprocess.run(
        command, env=cluster.environment, capture_output=True, text=True, check=False, cwd=folder, timeout=120
    )


def slow(cluster: Cluster, pair: Pair, told: Path, *options: str) -> subprocess.Popen[str]:
    """Return the slow merge, at work on a node."""
    told.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(told), *pair.arguments, *MANY_FILES, *cluster.options, *options],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread, and no lock
    )
    limit = time.monotonic() + 60
    while not list(told.iterdir()) and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    return process


def reward(_: Path) -> Plan:
    folder = FIXTURES / "reward-qwen2"
    return plan_merge(folder / "base", folder / "adapter", task="reward", max_shard_bytes=2000)


def in_bits_of_peft(_: Path) -> Plan:
    folder = FIXTURES / "causal-llama"
    return plan_merge(folder / "base", folder / "adapter", precision="peft", max_shard_bytes=2000)


def rank_files(_: Path) -> Plan:
    return plan_consolidate(FIXTURES / "zero" / "stage3-reward")


def experts(folder: Path) -> Plan:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    return plan_merge(folder / "base", trained(folder / "base", lora, folder / "adapter"), max_shard_bytes=4000)


def in_eight_bits(folder: Path, **how: Any) -> Plan:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(folder / "plain")
    base, _ = quantise(folder / "plain", folder / "base", "fp8-block", lambda module: "_proj" in module)
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    return plan_merge(base, trained(folder / "plain", lora, folder / "adapter"), max_shard_bytes=4000, **how)


def still_in_eight_bits(folder: Path) -> Plan:
    return in_eight_bits(folder, store="as-base", allow_loss=True)


def trained(base: Path, config: LoraConfig, out: Path) -> Path:
    """Return an adapter of the base with other values than zero in lora_B."""
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(str(out))
    return out


@pytest.mark.parametrize("plan_in", [reward, in_bits_of_peft, rank_files, experts, in_eight_bits, still_in_eight_bits])
def test_the_bytes_are_those_of_one_machine(
    plan_in: Callable[[Path], Plan], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    plan = plan_in(tmp_path)
    execute(plan, tmp_path / "here")
    reported: list[int] = []
    engine = RayEngine(cluster=RayCluster(address=cluster.address))
    execute(plan, tmp_path / "there", engine=engine, progress=reported.append)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert sum(reported) == plan.data_bytes + (plan.values.nbytes if plan.values else 0)


def test_relative_paths_mean_the_same_on_every_node(cluster: Cluster, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    done = typed(
        cluster, "merge", "adapter", "--base", "base", "-o", "out", "--json", *cluster.options, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "out", "what Ray prints is not on stdout"
    assert left_behind(pair) == {"out"}
    told = [typed(cluster, "verify", "out", "--json", *options, folder=tmp_path) for options in ([], cluster.options)]
    assert [each.returncode for each in told] == [0, 0], told[1].stderr
    assert told[0].stdout == told[1].stdout, "every value was compared, by whomever"


def test_each_adapter_of_a_sweep_on_its_own(cluster: Cluster, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    pair = copy_pair(tmp_path)
    for name in ("spoiled", "other"):
        shutil.copytree(pair.adapter, tmp_path / name)
    weights = tmp_path / "spoiled" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, weights, metadata={"format": "pt"})
    for out, options in (("here", []), ("there", cluster.options)):
        asked = ("adapter", "spoiled", "other", "--base", "base", "--each", "-o", out, "--ignore", "LT209", "--json")
        done = typed(cluster, "merge", *asked, *MANY_FILES, *options, folder=tmp_path)
        assert done.returncode == 3, done.stderr
        assert [one["exit_code"] for one in json.loads(done.stdout)["outputs"]] == [0, 3, 0], done.stdout
    for each in ("adapter", "other"):
        assert content(tmp_path / "there" / each) == content(tmp_path / "here" / each)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"adapter", "other"}


def test_ci_does_all_of_it_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path, "reward-qwen2")
    done = typed(cluster, "ci", str(pair.adapter), "--base", str(pair.base), "-o", str(pair.out), *cluster.options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "passed" in done.stdout


def test_a_sweep_goes_the_way_of_ci_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path, "reward-qwen2")
    for name in ("lr1", "lr2", "broken"):
        shutil.copytree(pair.adapter, tmp_path / "runs" / name)
    weights = tmp_path / "runs" / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    asked = ("ci", "runs", "--each", "--base", "base", "--json", *MANY_FILES)
    done = typed(cluster, *asked, "-o", "there", *cluster.options, folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert [run["exit_code"] for run in json.loads(done.stdout)["runs"]] == [1, 0, 0], done.stdout
    here = typed(cluster, *asked, "-o", "here", folder=tmp_path)
    assert here.returncode == 1, here.stderr
    for name in ("lr1", "lr2"):
        found = [content(tmp_path / where / name) for where in ("here", "there")]
        for each in found:
            each.pop(".lora-tool-ci.json")  # it holds the times of the files
        assert found[0] == found[1]


def test_an_error_of_the_work_is_the_one_of_one_machine(cluster: Cluster, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    pair = copy_pair(tmp_path)
    weights = pair.adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, weights, metadata={"format": "pt"})
    said = []
    for options in ([], cluster.options):
        done = typed(cluster, *pair.arguments, "--ignore", "LT209", *options)
        said.append((done.returncode, done.stderr))
        assert left_behind(pair) == set()
    (code, here), (code_there, there) = said
    assert code == code_there == 3
    error = next(line for line in here.splitlines() if line.startswith("error: "))
    assert f"{error} (on node " in there


def test_a_task_whose_process_is_killed_is_done_again(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    results: dict[int, object] = {}
    reported: list[int] = []
    folders = [tmp_path / name for name in ("killed", "stale", "always", "gone")]
    for folder in folders:
        folder.mkdir()

    def group(*tasks: Task) -> TaskGroup:
        return TaskGroup(tasks=tasks, surroundings=NOTHING, done=results.__setitem__)

    with RayCluster(address=cluster.address).connected() as connection:
        two = group(Dying(folder=folders[0], times=2), Stale(folder=folders[1], times=2))
        connection.map(two, progress=reported.append)
        assert results == {0: 2, 1: 2}
        assert sum(reported) == 3, "what a lost try had reported is not reported twice"
        with pytest.raises(ExecutionError, match=r"dying was started 4 times.*lost each time"):
            connection.map(group(Dying(folder=folders[2], times=99)), progress=reported.append)
        with pytest.raises(ExecutionError, match=r"stale was started 4 times.*Stale file handle"):
            connection.map(group(Stale(folder=folders[3], times=99)), progress=reported.append)
        full = group(Stale(folder=folders[3], times=99, number=errno.ENOSPC))
        with pytest.raises(OutOfSpace, match=r"the disk is full; nothing was kept \(on node "):
            connection.map(full, progress=reported.append)
        with pytest.raises(MissingDependency, match=r"torch is not installed \(on node ") as raised:
            connection.map(group(Lacking()), progress=reported.append)
        assert raised.value.package == "torch"
        with pytest.raises(ExecutionError, match=r"node .* has numpy .*, and this machine 0\.1"):
            connection.require_nodes(Surroundings(directory=None, inputs=(), versions={"numpy": "0.1"}))
        with pytest.raises(ExecutionError, match="the output must be on storage that all nodes share"):
            connection.require_nodes(Surroundings(directory=None, inputs=(), versions={}, mark=tmp_path / "a" / "b"))


def test_a_node_that_sees_other_storage_is_named_before_any_work(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    pair = copy_pair(tmp_path)
    plan = plan_merge(pair.base, pair.adapter, max_shard_bytes=2000)
    execute(plan, tmp_path / "here")
    weights = next(pair.base.glob("*.safetensors"))
    copied, longer, outs = (tmp_path / name for name in ("copied", "longer", "outs"))
    shutil.copyfile(weights, copied)  # at another time
    longer.write_bytes(weights.read_bytes() + b" ")
    ray_cluster = RayCluster(address=cluster.address)
    with (
        node_apart(cluster) as node,
        shared_folder(outs / "out") as folder,
        ray_cluster.connected() as connection,
    ):
        surroundings = surroundings_of(work_of(plan, folder))
        for error, words, mount in (
            (SourceChanged, "sees another .*, but was last written at another time", ("--bind", copied, weights)),
            (SourceChanged, "sees another .*: the plan saw .* bytes, now it has ", ("--bind", longer, weights)),
            (ExecutionError, "cannot read .*: No such file", ("-t", "tmpfs", "none", pair.base)),
            (ExecutionError, "does not see .*: the output must be on storage", ("-t", "tmpfs", "none", outs)),
            (ExecutionError, "cannot write to .*: Read-only file system", ("-o", "bind,ro", outs, outs)),
        ):
            with node.mounted(*mount), pytest.raises(error, match=rf"node .* \(127\.0\.0\.22\) {words}"):
                connection.require_nodes(surroundings)
        with pytest.raises(ExecutionError, match="lost the process that was asked what it has"):
            connection.require_nodes(Deadly(directory=None, inputs=(), versions={}))
        connection.require_nodes(surroundings)
        os.killpg(node.process.pid, signal.SIGKILL)
        connection.require_nodes(surroundings)  # without the node, which the cluster still takes for alive
    execute(plan, outs / "out", engine=RayEngine(cluster=ray_cluster))
    assert content(outs / "out") == content(tmp_path / "here")


def test_an_error_cancels_the_other_tasks_of_its_group_alone(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    results: dict[int, object] = {}
    (tmp_path / "tries").mkdir()
    (tmp_path / "other").mkdir()
    lingering = Lingering(folder=tmp_path / "tries", seconds=60)
    failing = TaskGroup(tasks=(lingering, Lacking(), lingering, lingering), surroundings=NOTHING, done=lambda *_: None)
    other = TaskGroup(
        tasks=(Dying(folder=tmp_path / "other", times=0),), surroundings=NOTHING, done=results.__setitem__
    )
    began = time.monotonic()
    with RayCluster(address=cluster.address, workers=2).connected() as connection:
        errors = connection.map_each([failing, other], progress=lambda _: None)
    assert [type(error) for error in errors] == [MissingDependency, type(None)]
    assert results == {0: 0}
    assert len(list((tmp_path / "tries").iterdir())) <= 1
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupt_ends_the_tasks_and_leaves_nothing(
    number: signal.Signals, cluster: Cluster, tmp_path: Path
) -> None:
    pair = copy_pair(tmp_path)
    process = slow(cluster, pair, tmp_path / "told")
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert time.monotonic() - began < 15
    time.sleep(2)  # a task that went on would have written by now
    assert left_behind(pair) == {"told"}


def test_a_lost_driver_leaves_what_is_finished_to_the_next(cluster: Cluster, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    done = typed(cluster, *pair.arguments, *MANY_FILES)
    assert done.returncode == 0
    whole = content(pair.out)
    shutil.rmtree(pair.out)
    process = slow(cluster, pair, tmp_path / "told")
    journal = tmp_path / ".out.lora-tool-partial" / ".lora-tool-journal"
    limit = time.monotonic() + 60
    while len(list(journal.glob("*.json"))) < 2 and time.monotonic() < limit:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    kept = {path.stem: (journal.parent / path.stem).stat().st_ino for path in journal.glob("*.json")}
    assert kept
    done = typed(cluster, *pair.arguments, *MANY_FILES, *cluster.options, "--resume")
    assert done.returncode == 0, done.stderr
    assert content(pair.out) == whole
    assert {name: (pair.out / name).stat().st_ino for name in kept} == kept


def test_lost_processes_and_a_lost_node_lose_no_work(cluster: Cluster, tmp_path: Path) -> None:
    """The last test of the cluster: it has one node afterwards."""
    pair = copy_pair(tmp_path)
    done = typed(cluster, *pair.arguments, *MANY_FILES)
    assert done.returncode == 0
    whole = content(pair.out)
    shutil.rmtree(pair.out)
    told = tmp_path / "told"
    process = slow(cluster, pair, told, "--json")
    limit = time.monotonic() + 60
    while len(at_work := {path.name.rpartition(".")[0] for path in told.iterdir()}) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    assert at_work == {"127.0.0.20", "127.0.0.21"}
    assert list((tmp_path / ".out.lora-tool-partial").rglob("*.attempt/*.safetensors")), "it is in the middle of a file"
    os.killpg(cluster.nodes[1].pid, signal.SIGKILL)
    for path in told.iterdir():  # also the process of the node that is left is killed in the middle of its file
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.name.rpartition(".")[2]), signal.SIGKILL)
    printed, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert json.loads(printed)["output"] == str(pair.out), "what Ray prints about lost processes is not on stdout"
    assert content(pair.out) == whole
    shutil.rmtree(told)
    assert left_behind(pair) == {"out"}
