"""Tasks on a Ray cluster that is running already. Only this module and `on_nodes` import Ray.

Ray carries tasks and results, never tensors: the files are on storage that all nodes share. A process, a node or a
connection that is lost costs its task another try; an error of the work is raised here as on one machine, with the
node's name after it. Whatever Ray prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from lora_tool.core.display import counted
from lora_tool.core.engines import ClusterEngine
from lora_tool.core.errors import ExecutionError, LoraToolError, require_packages
from lora_tool.core.progress import Progress, decided, told
from lora_tool.core.tasks import ClusterTask, Surroundings, TaskGroup
from lora_tool_ray.on_nodes import Meter, Place, carry_out, enter
from lora_tool_ray.reaching import JOIN, START, is_same_address, require_head, require_node

MOST_TRIES = 4
"""How often a task is begun whose process is lost, before the run is given up."""
_NODE_S = 90.0
"""How long a node may take to answer the first question: it imports numpy, perhaps from a busy network disk."""
_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_NUM_REDIS_GET_RETRIES": "5"}
"""The second: tries, a second apart, to have a cluster's head answer, where another program does; Ray makes 20."""
_POLL_S = 0.25
_CANCEL_S = 5.0

GroupError = LoraToolError | OSError
"""What ends the tasks of a group."""


class RayCluster(Struct, frozen=True, kw_only=True):
    """A cluster that runs: `address` is HOST:PORT, or "auto" for RAY_ADDRESS, else the one that this machine is part of.

    `workers` are the tasks that run at the same time, by default as many as the cluster has CPUs.
    """

    address: str = "auto"
    workers: int | None = None

    def require(self) -> None:
        """Return if Ray is installed, and a cluster's head can be reached from this machine, which is a node.

        Raises `MissingDependency`, `ExecutionError`.
        """
        require_packages(("ray",), extra="ray")
        where = (os.environ.get("RAY_ADDRESS") or "auto") if self.address == "auto" else self.address
        if where != "auto":
            require_head(where)
        require_node(where)

    @contextlib.contextmanager
    def connected(self) -> Iterator[RayConnection]:
        """Yield the connection to the cluster: this process's own, which it keeps, where it has joined one already.

        Raises as `require`, and `ExecutionError` where it cannot join the cluster.
        """
        self.require()
        with contextlib.redirect_stdout(sys.stderr):
            for name, value in _SETTINGS.items():
                os.environ.setdefault(name, value)  # before Ray is imported, which reads them then
            told("connecting to the Ray cluster")
            import ray  # a second, and only where it is asked for

            if ray.is_initialized():
                _require_joined(self.address, ray.get_runtime_context().gcs_address)
                yield RayConnection(ray, self.workers)
                return
            try:
                with _own_handler_of_sigterm():
                    ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise _not_joined(self.address, error) from error
            try:
                yield RayConnection(ray, self.workers)
            finally:
                ray.shutdown()


@contextlib.contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Keep the present handler of SIGTERM: Ray takes the signal for itself. Where it comes inside, it is an interrupt."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:  # what Ray's handler raises
        raise KeyboardInterrupt from error
    finally:
        with contextlib.suppress(ValueError):  # not the main thread: then Ray took none
            signal.signal(signal.SIGTERM, before)


def _require_joined(asked: str, joined: str) -> None:
    """Return if the address is that of the cluster which this process has joined already. Raises `ExecutionError`."""
    if asked != "auto" and not is_same_address(asked, joined):
        raise ExecutionError(
            f"this process has joined the Ray cluster at {joined}, expected {asked}",
            hint="call `ray.shutdown()` first, or leave out `address`",
        )


def _not_joined(address: str, error: Exception) -> ExecutionError:
    """Return why the cluster could not be joined."""
    text, cause = str(error), str(error.__cause__)
    if text.startswith("Version mismatch"):  # those of both sides follow, each a line of its own
        why, hint = " ".join(text.split()), "use the cluster's versions of Ray and Python here, too"
    elif cause.startswith("No node info found"):
        why, hint = "the Ray node on this machine is not one of its nodes", JOIN
    else:
        why, hint = _first_line(error), START
    return ExecutionError(f"cannot join a Ray cluster at {address!r}: {why}", hint=hint)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class _Try(Struct, frozen=True):
    """A task that is handed out, and which try it is."""

    place: Place
    count: int


class RayConnection:
    """What hands tasks to the cluster."""

    def __init__(self, module: Any, workers: int | None) -> None:
        self._ray = module
        nodes = self._alive()
        self._workers = workers or max(1, int(sum(node["Resources"]["CPU"] for node in nodes)))
        decided(f"engine: Ray, {counted(len(nodes), 'node')}, {counted(self._workers, 'task')} at a time")

    def require_nodes(self, surroundings: Surroundings) -> None:
        """Return if every node has what the tasks need. Raises the first thing that a node lacks, with its name.

        A node that is lost before it answers is left out, as those are that are lost later.
        """
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        ask = self._ray.remote(enter)
        asked = {
            ask.options(num_cpus=0, max_retries=1, scheduling_strategy=strategy(node["NodeID"], soft=False)).remote(
                surroundings
            ): node
            for node in self._alive()
        }
        answered, waiting = self._ray.wait(list(asked), num_returns=len(asked), timeout=_NODE_S)
        for answer in answered:
            fault = self._answer(answer, asked[answer])
            if fault is not None:
                raise fault
        if waiting:
            raise ExecutionError(
                f"node {_called(asked[waiting[0]])} did not answer within {_NODE_S:.0f} s",
                hint="look at it with: ray status",
            )

    def _answer(self, reference: Any, node: dict[str, Any]) -> LoraToolError | None:
        """Return what the node lacks; None for nothing, and for a node that is lost by now."""
        try:
            fault: LoraToolError | None = self._result(reference, f"node {_called(node)}")
        except self._ray.exceptions.RayError as error:
            if node["NodeID"] in {each["NodeID"] for each in self._alive()}:
                raise ExecutionError(
                    f"node {_called(node)} lost the process that was asked what it has: {_told_by(error)}",
                    hint="look at it with: ray status",
                ) from error
            decided(f"node {_called(node)} is lost: the others do the work")
            return None
        return fault

    def _alive(self) -> list[dict[str, Any]]:
        """Return the nodes that can do tasks. Raises `ExecutionError` where there is none."""
        nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if not nodes:
            raise ExecutionError(
                "the Ray cluster has no node with a CPU", hint="add one: ray start --address=HOST:PORT"
            )
        return nodes

    def _result(self, reference: Any, who: str) -> Any:
        """Return what a task returned. Raises `ExecutionError` where it ended with an error that is none of the work's."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            loaded = not isinstance(cause, ImportError | AttributeError)
            hint = None if loaded else "lora-tool must be installed on all nodes, in the same version"
            raise ExecutionError(f"{who}: {_told_by(cause)}", hint=hint) from error

    def map(self, group: TaskGroup, *, progress: Progress) -> None:
        """Do the tasks, wherever; `progress` is called with the bytes. Raises what `map_each` returns."""
        [error] = self.map_each([group], progress=progress)
        if error is not None:
            raise error

    def map_each(self, groups: Sequence[TaskGroup], *, progress: Progress) -> list[GroupError | None]:
        """Do the tasks of all groups, wherever; return the error that each group ended with, None for one that is done.

        The first error of a task ends its group, whose other tasks are cancelled, and no other. Its words are followed
        by the node's name. A task whose process was lost again and again is an `ExecutionError`. `progress` is called
        with the bytes of all groups.
        """
        return _Run(self._ray, groups, progress, self._workers, self._result).all()


class _Run(Struct):
    """The tasks of one `map_each`: waiting, running, done."""

    ray: Any
    groups: Sequence[TaskGroup]
    progress: Progress
    workers: int
    result: Callable[[Any, str], Any]
    waiting: deque[_Try] = field(default_factory=deque)
    running: dict[Any, _Try] = field(default_factory=dict)
    errors: dict[int, GroupError] = field(default_factory=dict)
    """The error of each group that failed, by its place."""
    seen: dict[Place, int] = field(default_factory=dict)
    """Task → bytes that were done of it; all of a finished one's."""
    shown: int = 0
    asked: Any = None
    """What the meter was asked and has not answered yet: it starts when the first task does."""

    def all(self) -> list[GroupError | None]:
        self.waiting += [
            _Try((number, place), 1) for number, group in enumerate(self.groups) for place in range(len(group.tasks))
        ]
        mine = self.ray.get_runtime_context().get_node_id()
        near = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(mine, soft=True)
        meter = self.ray.remote(Meter).options(num_cpus=0, scheduling_strategy=near).remote()
        on_any_node = self.ray.remote(carry_out).options(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")
        try:
            while self.waiting or self.running:
                while self.waiting and len(self.running) < self.workers:
                    one = self.waiting.popleft()
                    group, task = self._task(one)
                    self.running[on_any_node.remote(task, group.surroundings, meter, one.place)] = one
                ready, _ = self.ray.wait(list(self.running), num_returns=1, timeout=_POLL_S)
                for reference in ready:
                    self._end(reference, self.running.pop(reference))
                self._show(meter)
        finally:
            self._cancel(list(self.running))
        return [self.errors.get(number) for number in range(len(self.groups))]

    def _task(self, one: _Try) -> tuple[TaskGroup, ClusterTask]:
        number, place = one.place
        return self.groups[number], self.groups[number].tasks[place]

    def _end(self, reference: Any, one: _Try) -> None:
        """Take in how a task ended. One that failed ends its group; one that was lost is begun again."""
        try:
            again = self._ended(reference, one)
        except (LoraToolError, OSError) as error:
            failed = one.place[0]
            self.errors[failed] = error
            self.waiting = deque(each for each in self.waiting if each.place[0] != failed)
            self._cancel([running for running, each in self.running.items() if each.place[0] == failed])
            return
        if again is not None:
            self.waiting.append(again)

    def _ended(self, reference: Any, one: _Try) -> _Try | None:
        """Take in how a task ended; return it where it has to be begun again."""
        group, task = self._task(one)
        try:
            node, result, lost = self.result(reference, task.name)
        except self.ray.exceptions.RayError as error:
            node, result, lost = "", None, f"{type(error).__name__}: {_first_line(error)}"
        if isinstance(result, LoraToolError | OSError):
            raise _met_on(node, result)
        if not lost:
            self.seen[one.place] = task.nbytes
            group.done(one.place[1], result)
            return None
        self.seen.pop(one.place, None)
        if one.count == MOST_TRIES:
            where = f" on node {node}" if node else ""
            raise ExecutionError(
                f"{task.name} was started {MOST_TRIES} times, and its process was lost each time; last{where}: {lost}",
                hint="with `resume=True` a run keeps the files that it has finished when it fails; see: ray status",
            )
        decided(f"{task.name} is started again: {lost}")
        return _Try(one.place, one.count + 1)

    def _show(self, meter: Any) -> None:
        """Report the bytes of all tasks, as far as the meter has answered: those of a lost try are not reported twice."""
        if self.asked is None:
            self.asked = meter.read.remote()
        answered, _ = self.ray.wait([self.asked], timeout=0)
        if answered:
            self.asked = None
            with contextlib.suppress(self.ray.exceptions.RayError):  # its node may be lost, too
                running = {one.place for one in self.running.values()}
                now = self.ray.get(answered[0])
                self.seen.update({place: nbytes for place, nbytes in now.items() if place in running})
        total = sum(self.seen.values())
        if total > self.shown:
            self.progress(total - self.shown)
            self.shown = total

    def _cancel(self, references: Sequence[Any]) -> None:
        """End these tasks, and wait for that: the folder that they write to may be about to be removed."""
        for reference in references:
            del self.running[reference]
            with contextlib.suppress(Exception):
                self.ray.cancel(reference, force=True)
        if references:
            with contextlib.suppress(Exception):
                self.ray.wait(references, num_returns=len(references), timeout=_CANCEL_S)


def _met_on(node: str, error: GroupError) -> GroupError:
    """Return the error of a task with the node's name after its words."""
    if isinstance(error, OSError):
        error.strerror = f"{error.strerror or error} (on node {node})"
    else:
        error.args = (f"{error} (on node {node})", *error.args[1:])
    return error


def _called(node: dict[str, Any]) -> str:
    """Return what a node is called: several may have one host name."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _told_by(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


ENGINE = ClusterEngine(cluster=lambda address, workers: RayCluster(address=address or "auto", workers=workers))
"""The entry point `ray` of `lora_tool.engines`."""
