"""LoRA checkpoints: open, judge, plan, merge, prove, push.

    merge("adapter", out="merged", task="reward")  # validate, plan, write and verify, as the command does

    validate("adapter", base="base").raise_for_errors()
    execute(plan_merge("base", "adapter", task="reward"), "merged")
    verify("merged").raise_for_errors()

Wherever a function takes a checkpoint, it accepts a path, a Hub id or an opened checkpoint. Every error that lora-tool
raises deliberately is a `LoraToolError`; its `hint` says what to do, and `lora_tool.core.errors` draws the tree of its
classes, which are all names of this module, too. Names are loaded when they are first used, so the import is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_tool.checkpoints import AdapterDir as AdapterDir
    from lora_tool.checkpoints import Checkpoint as Checkpoint
    from lora_tool.checkpoints import ModelDir as ModelDir
    from lora_tool.checkpoints import RunDir as RunDir
    from lora_tool.checkpoints import ShardedDir as ShardedDir
    from lora_tool.checkpoints import open_checkpoint as open_checkpoint
    from lora_tool.checkpoints import open_sharded as open_sharded
    from lora_tool.core.errors import BadConfig as BadConfig
    from lora_tool.core.errors import BrokenFile as BrokenFile
    from lora_tool.core.errors import BrokenPlugin as BrokenPlugin
    from lora_tool.core.errors import CheckpointError as CheckpointError
    from lora_tool.core.errors import CorruptFile as CorruptFile
    from lora_tool.core.errors import ExecutionError as ExecutionError
    from lora_tool.core.errors import FindingsFound as FindingsFound
    from lora_tool.core.errors import HubConflict as HubConflict
    from lora_tool.core.errors import HubError as HubError
    from lora_tool.core.errors import HubRefused as HubRefused
    from lora_tool.core.errors import HubUnreachable as HubUnreachable
    from lora_tool.core.errors import IncompatibleBase as IncompatibleBase
    from lora_tool.core.errors import IncompleteCheckpoint as IncompleteCheckpoint
    from lora_tool.core.errors import LoraToolError as LoraToolError
    from lora_tool.core.errors import MissingDependency as MissingDependency
    from lora_tool.core.errors import NotACheckpoint as NotACheckpoint
    from lora_tool.core.errors import OnlyInMemory as OnlyInMemory
    from lora_tool.core.errors import OutOfSpace as OutOfSpace
    from lora_tool.core.errors import OutputExists as OutputExists
    from lora_tool.core.errors import PlanError as PlanError
    from lora_tool.core.errors import ServerError as ServerError
    from lora_tool.core.errors import ServerUnreachable as ServerUnreachable
    from lora_tool.core.errors import SourceChanged as SourceChanged
    from lora_tool.core.errors import UnknownRule as UnknownRule
    from lora_tool.core.errors import UnsupportedAdapter as UnsupportedAdapter
    from lora_tool.core.errors import UnsupportedCheckpoint as UnsupportedCheckpoint
    from lora_tool.core.errors import VerificationFailed as VerificationFailed
    from lora_tool.core.errors import WrongCall as WrongCall
    from lora_tool.core.errors import WrongValue as WrongValue
    from lora_tool.core.progress import Progress as Progress
    from lora_tool.core.progress import StageWatch as StageWatch
    from lora_tool.core.report.findings import Finding as Finding
    from lora_tool.core.report.findings import Severity as Severity
    from lora_tool.core.report.model import Report as Report
    from lora_tool.core.share import Share as Share
    from lora_tool.core.tensors import DType as DType
    from lora_tool.core.version import __version__ as __version__
    from lora_tool.execution.attempts import OnCluster as OnCluster
    from lora_tool.execution.attempts import ShareWritten as ShareWritten
    from lora_tool.execution.attempts import execute_share as execute_share
    from lora_tool.execution.engine import execute as execute
    from lora_tool.execution.work import Engine as Engine
    from lora_tool.formats.adapter_config import ExpertLayout as ExpertLayout
    from lora_tool.formats.quantised.four_bits import TrainedAs as TrainedAs
    from lora_tool.hub.library import plan_push as plan_push
    from lora_tool.hub.model import Pushed as Pushed
    from lora_tool.hub.model import PushPlan as PushPlan
    from lora_tool.hub.options import PushCheck as PushCheck
    from lora_tool.hub.options import Readme as Readme
    from lora_tool.hub.pushing import push as push
    from lora_tool.plans.algebra.plan_combine import plan_combine as plan_combine
    from lora_tool.plans.algebra.plan_combine import plan_resize as plan_resize
    from lora_tool.plans.algebra.plan_prepare import plan_prepare as plan_prepare
    from lora_tool.plans.algebra.spool import Spool as Spool
    from lora_tool.plans.base.task import Task as Task
    from lora_tool.plans.consolidate.library import plan_consolidate as plan_consolidate
    from lora_tool.plans.consolidate.plan_consolidate import What as What
    from lora_tool.plans.convert.forms import AdapterForm as AdapterForm
    from lora_tool.plans.core.ops import Precision as Precision
    from lora_tool.plans.core.plan import Plan as Plan
    from lora_tool.plans.merge.library import plan_merge as plan_merge
    from lora_tool.plans.merge.storages import Storage as Storage
    from lora_tool.rules.engine.subjects import Server as Server
    from lora_tool.rules.training.value_check import ValueCheck as ValueCheck
    from lora_tool.verification.levels import Level as Level
    from lora_tool.verification.validating import Criteria as Criteria
    from lora_tool.verification.verified import Verification as Verification
    from lora_tool.workflows.diff import diff as diff
    from lora_tool.workflows.inspection.comparison import Comparison as Comparison
    from lora_tool.workflows.inspection.model import Inspection as Inspection
    from lora_tool.workflows.inventory import Inventory as Inventory
    from lora_tool.workflows.library import combine as combine
    from lora_tool.workflows.library import consolidate as consolidate
    from lora_tool.workflows.library import convert as convert
    from lora_tool.workflows.library import extract as extract
    from lora_tool.workflows.library import inspect as inspect
    from lora_tool.workflows.library import merge as merge
    from lora_tool.workflows.library import merge_each as merge_each
    from lora_tool.workflows.library import prepare as prepare
    from lora_tool.workflows.library import resize as resize
    from lora_tool.workflows.library import validate as validate
    from lora_tool.workflows.library import verify as verify
    from lora_tool.workflows.ls import Listing as Listing
    from lora_tool.workflows.ls import ls as ls
    from lora_tool.workflows.merge_each import MergedOne as MergedOne
    from lora_tool.workflows.written import Written as Written

_HOMES = {
    "checkpoints": "AdapterDir Checkpoint ModelDir NamedAdapters RunDir ShardedDir open_checkpoint open_sharded",
    "core.errors": """BadConfig BrokenFile BrokenPlugin CheckpointError CorruptFile ExecutionError FindingsFound
        HubConflict HubError HubRefused HubUnreachable IncompatibleBase IncompleteCheckpoint
        LoraToolError MissingDependency NotACheckpoint OnlyInMemory OutOfSpace OutputExists PlanError
        ServerError ServerUnreachable SourceChanged UnknownRule UnsupportedAdapter UnsupportedCheckpoint VerificationFailed
        WrongCall WrongValue""",
    "core.progress": "Progress StageWatch",
    "core.report.findings": "Finding Severity",
    "core.report.model": "Report",
    "core.share": "Share",
    "core.tensors": "DType",
    "core.version": "__version__",
    "execution.attempts": "OnCluster ShareWritten execute_share",
    "execution.engine": "execute",
    "execution.work": "Engine",
    "formats.adapter_config": "ExpertLayout",
    "formats.quantised.four_bits": "TrainedAs",
    "hub.library": "plan_push",
    "hub.model": "PushPlan Pushed",
    "hub.options": "PushCheck Readme",
    "hub.pushing": "push",
    "plans.algebra.plan_combine": "plan_combine plan_resize",
    "plans.algebra.plan_prepare": "plan_prepare",
    "plans.algebra.spool": "Spool",
    "plans.base.task": "Task",
    "plans.consolidate.library": "plan_consolidate",
    "plans.consolidate.plan_consolidate": "What",
    "plans.convert.forms": "AdapterForm",
    "plans.core.ops": "Precision",
    "plans.core.plan": "Plan",
    "plans.merge.library": "plan_merge",
    "plans.merge.storages": "Storage",
    "rules.engine.subjects": "Server",
    "rules.training.value_check": "ValueCheck",
    "verification.levels": "Level",
    "verification.validating": "Criteria",
    "verification.verified": "Verification",
    "workflows.diff": "diff",
    "workflows.inspection.comparison": "Comparison",
    "workflows.inspection.model": "Inspection",
    "workflows.inventory": "Inventory",
    "workflows.library": "combine consolidate convert extract inspect merge merge_each prepare resize validate verify",
    "workflows.ls": "Listing ls",
    "workflows.merge_each": "MergedOne",
    "workflows.written": "Written",
}
"""Module below `lora_tool` → the public names in it."""
_MODULES = {name: f"lora_tool.{module}" for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_MODULES)  # noqa: PLE0605 - the names above, without a second list of them


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562: whatever the name is
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
