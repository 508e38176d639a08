"""The exact memory of a plan of packs: its programs, compiled for the target that it was made for,
and the step replayed over the compiler's reports. Nothing is run."""

from __future__ import annotations

from capture.compiler.target_devices import devices_of
from capture.errors import PlanError
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.model.workload import WorkloadProtocol
from capture.plan.choices import StageChoice
from capture.plan.packs import PacksPlan
from capture.profiler.compile import CompileBackend
from capture.runtime.streamed import StreamedStep
from capture.step.ledger import Ledger
from capture.step.program import replay


def compile_packs(plan: PacksPlan, workload: WorkloadProtocol) -> Ledger:
    """The ledger of a plan's step, with what the compiler says of its programs.

    Args:
        plan: Of a target (``plan.cluster``).
        workload: Its task.

    Raises:
        PlanError: ``packs-target`` for a plan of a server that is no target, and those of
            ``streamed``; TargetError: as ``devices_of``; ExecutionError: ``step-host-memory``.
    """
    if plan.cluster is None:
        raise PlanError.of(
            f"the plan's machine {plan.machine.name!r} says nothing of how to compile for it; plan "
            "with --cluster 1xG and --target.",
            "packs-target",
        )
    target = Target.load(plan.cluster.target)
    # A compiler that is stopped at its report takes virtual CPU devices for the target's.
    stand_in = Target.load("cpu") if target.compiler.get("stop_at_report") else target
    devices = list(devices_of(stand_in, plan.machine.devices))
    size = plan.configuration.backward.microbatch_size
    compiler = CompileBackend(workload, target=target)
    chosen = compiler.compiler_of(StageConfig(0, plan.num_layers, StageChoice(), size))
    host = devices_of(Target.load("cpu"), 1)[0]
    return replay(StreamedStep(workload, plan, devices, chosen, host=host).compiled)
