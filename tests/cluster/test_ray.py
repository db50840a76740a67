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
from lora_tool.core.errors import ExecutionError, MissingDependency, OutOfSpace, SourceChanged
from lora_tool.core.tasks import ClusterTask, Surroundings, TaskGroup
from lora_tool.execution.attempts import OnCluster, surroundings_of
from lora_tool.execution.folder import shared_folder
from lora_tool_ray import ray_cluster
from lora_tool_ray.ray_cluster import RayCluster
from tests.cluster.conftest import Cluster, mounted, own_mounts, ray
from tests.cluster.tasks import GO, Deadly, Dying, Failing, Lacking, Lingering, Stale
from tests.cluster.test_no_cluster import SETTINGS, listening
from tests.fuzz.commands import run
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
from lora_tool.execution import attempts
from lora_tool.cli.main import main
from tests.cluster.tasks import Slow
parts_of = attempts.parts_of
told = Path(sys.argv[1])
def slow_parts(work):
    for number, part in enumerate(parts_of(work)):
        yield part if number < int(sys.argv[2]) else Slow(task=part, told=told)
attempts.parts_of = slow_parts
main(sys.argv[3:])
"""
"""The command whose parts wait in the middle, but for the first few."""


def slow(cluster: Cluster, pair: Pair, *options: str, at_once: int = 0) -> subprocess.Popen[str]:
    """Return the slow merge, at work on a node; it does `at_once` parts before."""
    told = pair.out.parent / "told"
    told.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", SLOW, str(told), str(at_once)),
            *(*pair.arguments, *MANY_FILES, *cluster.options, *options),
        ],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread, and no lock
    )
    limit = time.monotonic() + 60
    while not at_work(pair) and process.poll() is None:
        assert time.monotonic() < limit
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    return process


def at_work(pair: Pair) -> dict[int, str]:
    """Return the processes that wait in the middle of a part, each with the address of its node."""
    names = (path.name.rpartition(".") for path in (pair.out.parent / "told").iterdir() if path.name != GO)
    return {int(process): node for node, _, process in names}


def has_ended(process: int) -> bool:
    """Return whether a process ends within some seconds."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def reward(_: Path) -> Plan:
    folder = FIXTURES / "reward-qwen2"
    return plan_merge(folder / "base", folder / "adapter", task="reward", max_shard_size=2000)


def in_bits_of_peft(_: Path) -> Plan:
    folder = FIXTURES / "causal-llama"
    return plan_merge(folder / "base", folder / "adapter", precision="peft", max_shard_size=2000)


def rank_files(_: Path) -> Plan:
    return plan_consolidate(FIXTURES / "zero" / "stage3-reward")


def experts(folder: Path) -> Plan:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**TINY, num_key_value_heads=2, num_local_experts=4)
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    return plan_merge(folder / "base", trained(folder / "base", lora, folder / "adapter"), max_shard_size=4000)


def in_eight_bits(folder: Path, **how: Any) -> Plan:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(folder / "plain")
    base, _ = quantise(folder / "plain", folder / "base", "fp8-block", lambda module: "_proj" in module)
    lora = LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    return plan_merge(base, trained(folder / "plain", lora, folder / "adapter"), max_shard_size=4000, **how)


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
def test_the_bytes_are_those_of_one_machine(plan_in: Callable[[Path], Plan], joined: Cluster, tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    execute(plan, tmp_path / "here")
    reported: list[int] = []
    engine = OnCluster(cluster=RayCluster(address=joined.address))
    execute(plan, tmp_path / "there", engine=engine, progress=reported.append)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert sum(reported) == plan.data_bytes + (plan.values.nbytes if plan.values else 0)


def test_relative_paths_mean_the_same_on_every_node(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = copy_pair(tmp_path)
    monkeypatch.chdir(tmp_path)
    merge = ("merge", "adapter", "--base", "base", "-o", "out", "--json")
    command = [sys.executable, "-m", "lora_tool", *merge, *joined.options]
    done = subprocess.run(command, env=joined.environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "out", "what Ray prints is not on stdout"
    assert left_behind(pair) == {"out"}
    told = [run(("verify", "out", "--json", *options)) for options in ([], joined.options)]
    assert [each.code for each in told] == [0, 0], told[1].err
    assert told[0].out == told[1].out, "every value was compared, by whomever"


def test_a_process_that_has_joined_a_cluster_stays_in_it(joined: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "require_node", lambda _: None)
    with RayCluster(address=joined.address).connected(), RayCluster().connected():
        pass
    assert ray.is_initialized()
    with (
        listening(SETTINGS) as other,
        pytest.raises(ExecutionError, match=f"has joined the Ray cluster at {joined.address}, expected {other}"),
        RayCluster(address=other).connected(),
    ):
        pass


def test_each_adapter_of_a_sweep_on_its_own(joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = copy_pair(tmp_path)
    for name in ("spoiled", "other"):
        shutil.copytree(pair.adapter, tmp_path / name)
    spoil(tmp_path / "spoiled")
    monkeypatch.chdir(tmp_path)
    for out, options in (("here", []), ("there", joined.options)):
        asked = ("adapter", "spoiled", "other", "--base", "base", "--each", "-o", out, "--ignore", "LT209", "--json")
        done = run(("merge", *asked, *MANY_FILES, *options))
        assert done.code == 3, done.err
        assert [one["exit_code"] for one in done.json["outputs"]] == [0, 3, 0], done.out
    for each in ("adapter", "other"):
        assert content(tmp_path / "there" / each) == content(tmp_path / "here" / each)
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"adapter", "other"}


def spoil(adapter: Path) -> None:
    """Make one tensor of the adapter NaN."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = min(tensors)
    save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, weights, metadata={"format": "pt"})


def test_a_sweep_goes_the_way_of_ci_on_the_cluster(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = copy_pair(tmp_path, "reward-qwen2")
    for name in ("lr1", "lr2", "broken"):
        shutil.copytree(pair.adapter, tmp_path / "runs" / name)
    weights = tmp_path / "runs" / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    monkeypatch.chdir(tmp_path)
    asked = ("ci", "runs", "--each", "--base", "base", "--json", *MANY_FILES)
    done = run((*asked, "-o", "there", *joined.options))
    assert done.code == 1, done.err
    assert [one["exit_code"] for one in done.json["runs"]] == [1, 0, 0], done.out
    here = run((*asked, "-o", "here"))
    assert here.code == 1, here.err
    for name in ("lr1", "lr2"):
        found = [content(tmp_path / where / name) for where in ("here", "there")]
        for each in found:
            each.pop(".lora-tool-ci.json")  # it holds the times of the files
        assert found[0] == found[1]


def test_an_error_of_the_work_is_the_one_of_one_machine(joined: Cluster, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    spoil(pair.adapter)
    said = []
    for options in ([], joined.options):
        said.append(run((*pair.arguments, "--ignore", "LT209", *options)))
        assert left_behind(pair) == set()
    here, there = said
    assert here.code == there.code == 3
    (error, hint), (error_there, hint_there) = (
        [line for line in each.err.splitlines() if line.startswith(("error: ", "hint: "))] for each in said
    )
    assert error_there.startswith(f"{error} (on node ")
    assert hint_there == hint


def test_a_task_whose_process_is_killed_is_done_again(
    joined: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "MOST_TRIES", 2)
    results: dict[int, object] = {}
    reported: list[int] = []
    folders = [tmp_path / name for name in ("killed", "stale", "always", "gone")]
    for folder in folders:
        folder.mkdir()

    def group(*tasks: ClusterTask) -> TaskGroup:
        return TaskGroup(tasks=tasks, surroundings=NOTHING, done=results.__setitem__)

    dying = Dying(folder=folders[0], times=1, was_seen=tmp_path / "seen")
    stale = Stale(folder=folders[1], times=1)

    def progress(nbytes: int) -> None:
        reported.append(nbytes)
        if sum(reported) >= dying.nbytes // 2:
            dying.was_seen.touch()

    with RayCluster(address=joined.address).connected() as connection:
        connection.map(group(dying, stale), progress=progress)
        assert results == {0: 1, 1: 1}
        assert sum(reported) == dying.nbytes + stale.nbytes, "what a lost try had reported is not reported twice"

        def ended(task: ClusterTask) -> None:
            connection.map(group(task), progress=reported.append)

        with pytest.raises(ExecutionError, match=r"dying was started 2 times.*lost each time"):
            ended(Dying(folder=folders[2], times=99))
        with pytest.raises(ExecutionError, match=r"stale was started 2 times.*Stale file handle"):
            ended(Stale(folder=folders[3], times=99))
        with pytest.raises(OutOfSpace, match=r"the disk is full; nothing was kept \(on node "):
            ended(Stale(folder=folders[3], times=99, number=errno.ENOSPC))
        with pytest.raises(MissingDependency, match=r"torch is not installed \(on node ") as raised:
            ended(Lacking())
        assert raised.value.package == "torch"
        with pytest.raises(PermissionError, match=r"Operation not permitted \(on node .*'weights'"):
            ended(Failing(error=PermissionError(errno.EPERM, os.strerror(errno.EPERM), "weights")))
        with pytest.raises(ExecutionError, match=r"out of memory \(on node "):
            ended(Failing(error=MemoryError()))
        with pytest.raises(ExecutionError, match="failing: ZeroDivisionError: by zero$"):
            ended(Failing(error=ZeroDivisionError("by zero")))
        with pytest.raises(ExecutionError, match=r"node .* has numpy .*, and this machine 0\.1"):
            connection.require_nodes(Surroundings(directory=None, inputs=(), versions={"numpy": "0.1"}))
        with pytest.raises(ExecutionError, match="the output must be on storage that all nodes share"):
            connection.require_nodes(Surroundings(directory=None, inputs=(), versions={}, mark=tmp_path / "a" / "b"))
        with pytest.raises(ExecutionError, match=r"127\.0\.0\.21.* lost the process that was asked what it has"):
            connection.require_nodes(Deadly(directory=None, inputs=(), versions={}, victim="127.0.0.21"))


@pytest.mark.skipif(not own_mounts()[0], reason="no process gets mounts of its own here: unshare --mount")
def test_a_node_that_sees_other_storage_is_named_before_any_work(joined: Cluster, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    plan = plan_merge(pair.base, pair.adapter, max_shard_size=2000)
    weights = next(pair.base.glob("*.safetensors"))
    copied, longer, outs = (tmp_path / name for name in ("copied", "longer", "outs"))
    shutil.copyfile(weights, copied)  # at another time
    longer.write_bytes(weights.read_bytes() + b" ")
    with shared_folder(outs / "out") as folder, RayCluster(address=joined.address).connected() as connection:
        surroundings = surroundings_of(work_of(plan, folder))
        for error, words, mount in (
            (SourceChanged, "sees another .*, but was last written at another time", ("--bind", copied, weights)),
            (SourceChanged, "sees another .*: the plan saw .* bytes, now it has ", ("--bind", longer, weights)),
            (ExecutionError, "cannot read .*: No such file", ("-t", "tmpfs", "none", pair.base)),
            (ExecutionError, "does not see .*: the output must be on storage", ("-t", "tmpfs", "none", outs)),
            (ExecutionError, "cannot write to .*: Read-only file system", ("-o", "bind,ro", outs, outs)),
        ):
            with (
                mounted(joined.nodes[1], *mount),
                pytest.raises(error, match=rf"node .* \(127\.0\.0\.21\) {words}"),
            ):
                connection.require_nodes(surroundings)
        connection.require_nodes(surroundings)


def test_an_error_cancels_the_other_tasks_of_its_group_alone(joined: Cluster, tmp_path: Path) -> None:
    results: dict[int, object] = {}
    (tmp_path / "tries").mkdir()
    (tmp_path / "other").mkdir()
    lingering = Lingering(folder=tmp_path / "tries", seconds=60)
    failing = TaskGroup(tasks=(lingering, Lacking(), lingering, lingering), surroundings=NOTHING, done=lambda *_: None)
    other = TaskGroup(
        tasks=(Dying(folder=tmp_path / "other", times=0),), surroundings=NOTHING, done=results.__setitem__
    )
    began = time.monotonic()
    with RayCluster(address=joined.address, workers=2).connected() as connection:
        errors = connection.map_each([failing, other], progress=lambda _: None)
    assert [type(error) for error in errors] == [MissingDependency, type(None)]
    assert results == {0: 0}
    assert len(list((tmp_path / "tries").iterdir())) <= 1
    assert time.monotonic() - began < 40


def test_an_interrupt_ends_the_tasks_and_leaves_nothing(joined: Cluster, tmp_path: Path) -> None:
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        (tmp_path / number.name).mkdir()
    pairs = [copy_pair(tmp_path / number.name) for number in signals]
    processes = [slow(joined, pair, "--workers", "1") for pair in pairs]
    began = time.monotonic()
    for process, number in zip(processes, signals, strict=True):
        process.send_signal(number)
    for process, pair in zip(processes, pairs, strict=True):
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130, errors
        assert "Traceback" not in errors
        assert all(has_ended(each) for each in at_work(pair)), "nobody goes on"
        assert left_behind(pair) == {"told"}
    assert time.monotonic() - began < 15


def test_a_lost_driver_leaves_what_is_finished_to_the_next(joined: Cluster, tmp_path: Path) -> None:
    pair, whole = pair_and_whole(tmp_path)
    process = slow(joined, pair, at_once=3)
    process.kill()
    process.communicate()
    journal = tmp_path / ".out.lora-tool-partial" / ".lora-tool-journal"
    kept = {path.stem: (journal.parent / path.stem).stat().st_ino for path in journal.glob("*.json")}
    assert kept
    done = run((*pair.arguments, *MANY_FILES, *joined.options, "--resume"))
    assert done.code == 0, done.err
    assert content(pair.out) == whole
    assert {name: (pair.out / name).stat().st_ino for name in kept} == kept


def pair_and_whole(folder: Path) -> tuple[Pair, dict[str, bytes]]:
    """Return a pair and what this machine merges it to."""
    pair = copy_pair(folder)
    assert run((*pair.arguments, *MANY_FILES)).code == 0
    whole = content(pair.out)
    shutil.rmtree(pair.out)
    return pair, whole


def test_lost_processes_and_a_lost_node_lose_no_work(joined: Cluster, tmp_path: Path) -> None:
    """The last test of the cluster: it has one node afterwards."""
    pair, whole = pair_and_whole(tmp_path)
    process = slow(joined, pair, "--json")
    limit = time.monotonic() + 60
    while len(set(at_work(pair).values())) < 2 and time.monotonic() < limit:
        time.sleep(0.02)
    assert set(at_work(pair).values()) == {"127.0.0.20", "127.0.0.21"}
    assert list((tmp_path / ".out.lora-tool-partial").rglob("*.attempt/*.safetensors")), "it is in the middle of a file"
    os.killpg(joined.nodes[1].pid, signal.SIGKILL)
    for each in at_work(pair):  # also the process of the node that is left is killed in the middle of its file
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    with RayCluster(address=joined.address).connected() as connection:
        connection.require_nodes(NOTHING)  # without the node, which the cluster may still take for alive
    (tmp_path / "told" / GO).touch()
    printed, errors = process.communicate(timeout=110)
    assert process.returncode == 0, errors
    assert json.loads(printed)["output"] == str(pair.out), "what Ray prints about lost processes is not on stdout"
    assert content(pair.out) == whole
    assert left_behind(pair) == {"out", "told"}
