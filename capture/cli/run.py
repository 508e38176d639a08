"""Execute a plan here, on virtual CPU devices or accelerators, in one process or in one per node:
measured memory beside predicted, loss beside that of one device.

Measured is only what was executed: live arrays of this process and the buffer assignment of the
running program (on CPU), or the allocator (on GPU). On CPU, two counters that know neither ledger
nor compiler stand beside the sum: malloc during an ordinary step, and the process's resident set.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from capture import environment
from capture.cli import asked
from capture.cli import options as shared
from capture.cli.interrupted import Progress
from capture.cli.library_log import output_is_ours
from capture.cli.output import emit, say, table
from capture.cli.progress import clear_line
from capture.cli.replan import REPLAN, replanner
from capture.errors import PlanError, Violation
from capture.machine.target import Target
from capture.options import add, at_least, options_of, taken
from capture.plan.files import PlanFile
from capture.plan.kinds import kind_of, load_plan
from capture.plan.prediction import error_fractions
from capture.quantities import format_bytes, format_seconds
from capture.runtime.asked import Training
from capture.runtime.hosts.documents import joined
from capture.runtime.hosts.driver import run_on_this_machine
from capture.runtime.hosts.ray_hosts import run_on_ray
from capture.runtime.hosts.restarts import Restarts
from capture.runtime.hosts.saved import check_folders
from capture.runtime.hosts.watching import SILENT_SECONDS
from capture.runtime.run_report import RunReport
from capture.step.trace_events import from_zero, save_events


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    add(parser, *options_of(Training))
    parser.add_argument(
        "--max-restarts",
        type=at_least(0),
        metavar="N",
        help="with --hosts local or --ray: when a process is lost, start all again from the last "
        "complete checkpoint, at most N times without a new step (default: 3 with --save-every, "
        "else 0)",
    )
    parser.add_argument(
        "--on-loss",
        choices=[REPLAN],
        help="with --hosts local: a node that is lost more than --max-restarts times without a new "
        "step is gone; go on without it, under the best plan of --profile for the others",
    )
    several = "of the model, for --on-loss; again: put several together"
    add(parser, shared.file("profile", several, again=True))
    parser.add_argument(
        "--heartbeat",
        type=float,
        metavar="SECONDS",
        help="with --hosts local or --ray: a process without a sign of life for so long is lost "
        f"(default: {SILENT_SECONDS:g}; more on a busy machine)",
    )
    parser.add_argument(
        "--hosts",
        choices=["local", "none"],
        help="one process per node of the plan's cluster, each executing its part; local: started "
        "here, on virtual CPU devices; none: this is one of them, and your scheduler starts the "
        "same command on every host (Slurm, Open MPI, or CAPTURE_COORDINATOR=ADDRESS:PORT of host "
        "0, CAPTURE_NUM_HOSTS and CAPTURE_HOST in the environment; with CAPTURE_SECRET, the same "
        "text on all, if they are several machines)",
    )
    traced = "write what every device did when in the last step, for ui.perfetto.dev (.json)"
    add(parser, shared.file("trace", traced))
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="one actor of a Ray cluster per node of the plan's cluster, each on a node of its "
        "own: auto (the cluster this machine is a part of) or an address; local: all on this "
        "machine, on virtual CPU devices",
    )
    parser.add_argument(
        "--accelerator",
        metavar="TYPE",
        help="with --ray: Ray's name of the target's devices, such as A100",
    )


def main(options: argparse.Namespace) -> int:
    plan = load_plan(options.plan)
    PlanError.check(_unread(options))
    if options.ray is None and options.hosts != "none":  # which may see other folders
        check_folders(
            options.save,
            options.restore,
            options.steps,
            often=options.save_every is not None,
            num_models=plan.num_models,
        )
    progress = Progress.of(options)
    try:
        return _run(options, plan)
    except KeyboardInterrupt:
        clear_line()
        print(progress, file=sys.stderr)
        return 130


def _run(options: argparse.Namespace, plan: PlanFile) -> int:
    """Execute a plan of any kind, in this process or on several hosts."""
    if plan.memory_fraction is not None:
        environment.prepare_device_memory(plan.memory_fraction)
    if plan.cluster is not None:
        environment.prepare_tpu(Target.load(plan.cluster.target).run_options)
    if options.hosts is not None or options.ray is not None:
        return _over_hosts(options, plan)
    if plan.host_memory_bytes:
        environment.prepare_host_memory(plan.host_memory_bytes)
    environment.prepare(num_devices=plan.num_devices)
    spec, plan = asked.workload_of(options, plan), plan.admitted(options.trust)
    from capture.runtime.training import train

    training = Training(**_training(options))
    document = train(plan, spec.load(), training, partial(say, options))
    return finish(options, document, plan.model_names)


def finish(
    options: argparse.Namespace, document: dict[str, Any], models: Sequence[str] = ()
) -> int:
    """Say what was done, and write what was asked for; of several models, with what is set for
    each."""
    events, lines = document.pop("trace", None), [*as_text(document, models)]
    if events is not None:
        save_events(from_zero(events), options.trace)
        document["written"] = {"trace": str(options.trace)}
    emit(options, RunReport(**document), *lines)
    return 0


def _over_hosts(options: argparse.Namespace, plan: PlanFile) -> int:
    kind_of(plan).check("several hosts", "--ray" if options.hosts is None else "--hosts")
    spec, training = asked.workload_of(options, plan), _training(options)
    most = options.max_restarts
    if most is None:
        most = 0 if options.save_every is None else 3
    restarts = Restarts(most, replanner(options.profile, plan) if options.on_loss else None)
    report = partial(say, options)
    silent = SILENT_SECONDS if options.heartbeat is None else options.heartbeat
    if options.hosts != "none":
        document = (
            run_on_this_machine(plan, spec, training, report, restarts, silent)
            if options.ray is None
            else run_on_ray(
                plan, spec, training, options.ray, options.accelerator, report, restarts, silent
            )
        )
        return finish(options, document)
    environment.prepare(num_devices=max(plan.known_cluster.nodes))
    from capture.runtime import multihost
    from capture.runtime.training import train

    with output_is_ours():
        given = environment.host_of_run() or ()
        if given:
            report("host {2} of {1} meets the others at {0}".format(*given))
        hosts = multihost.initialize(*given, plan=plan, transport=options.transport)
        first = hosts.process == 0
        own = train(
            plan, spec.load(), Training(**training), report if first else lambda text: None, hosts
        )
        documents = hosts.exchange("document", own)
    return finish(options, joined(documents)) if first else 0


def _training(options: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ``capture.runtime.training.Training`` that are asked for."""
    return taken(Training, vars(options)) | {"trace": options.trace is not None}


def _unread(options: argparse.Namespace) -> Iterator[Violation]:
    """Yield a violation per option that only other runs read."""
    starts = options.hosts == "local" or options.ray is not None
    of_driver = {
        "--max-restarts": (options.max_restarts, starts),
        "--heartbeat": (options.heartbeat, starts),
        "--on-loss": (options.on_loss, options.hosts == "local"),
    }
    for name, (value, is_read) in of_driver.items():
        if value is not None and not is_read:
            yield Violation(
                f"{name} {value}: only --hosts local{'' if name == '--on-loss' else ' and --ray'} "
                "starts processes and watches them; elsewhere your scheduler does. Leave it out.",
                "run-restarts",
            )
    if bool(options.profile) != bool(options.on_loss):
        given = "--profile" if options.profile else f"--on-loss {REPLAN}"
        yield Violation(
            f"{given}: plans for the nodes that are left are made of a profile, and of nothing "
            f"else; give both --on-loss {REPLAN} and --profile FILE.",
            "run-restarts",
        )
    if options.ray is not None and options.hosts is not None:
        yield Violation(
            f"--ray {options.ray} has Ray start the processes, and --hosts {options.hosts} does "
            "not; give one of them.",
            "run-ray",
        )
    if options.transport is not None and options.hosts is None and options.ray is None:
        yield Violation(
            f"--transport {options.transport} is of several hosts; add --hosts or --ray.",
            "run-transport",
        )
    if options.ray is None and options.accelerator is not None:
        yield Violation(
            f"--accelerator {options.accelerator} is of a Ray cluster; add --ray.", "run-ray"
        )


def as_text(document: dict[str, Any], models: Sequence[str] = ()) -> Iterator[str]:
    """Yield a table of devices and the losses; of several models, each with what is set for it."""
    predicted = document["predicted_peak_bytes_per_device"]
    measured = document["measured_peak_bytes_per_device"] or []
    compared = error_fractions(predicted, measured) if document["is_target"] and measured else None
    rows = []
    for d, peak in enumerate(measured):
        error = None if compared is None else compared[d]
        off = "-" if error is None else f"{error:+.2%}"
        rows.append([d, format_bytes(predicted[d]) if predicted else "-", format_bytes(peak), off])
    header = ["device", "predicted peak", "measured peak", "prediction off by"]
    if hosts := document["hosts"]:
        host_of = [h for h, host in enumerate(hosts) for _ in range(host["num_devices"])]
        header = ["host", *header]
        rows = [[host_of[d], *row] for d, row in enumerate(rows)]
    yield table(header, rows)
    yield f"measured by {document['meter']}"
    yield from _beside(document)
    named = {"loss": document["losses"], "one device": document["reference_losses"]}
    for name, losses in named.items():
        if losses is not None and models:
            each = zip(*losses, strict=True)
            yield table(
                ["model", "with", name], [[m, models[m], _losses(of)] for m, of in enumerate(each)]
            )
        elif losses is not None:
            yield f"{name} {_losses(losses)}"
    yield from _errors(document)
    if document["saved"] is not None:
        yield f"state -> {document['saved']}"


def _beside(document: dict[str, Any]) -> Iterator[str]:
    """Yield what was measured beside the peaks of devices, and what those do not say."""
    if offered := max(document["offered_peak_bytes_per_device"] or [0]):
        yield (
            f"what waits until another host pulls it adds {format_bytes(offered)} to the peak of a "
            "device; predictions are of one process, without it"
        )
    if (host := document["host"]) is not None:
        said, held = host["predicted_peak_bytes"], host["measured_peak_bytes"]
        expected = "" if said is None else f", predicted {format_bytes(said)}"
        yield f"the host held {'?' if held is None else format_bytes(held)}{expected}"
    if (heap := document["allocator"]) is not None:
        yield from _of_malloc(heap)
    if (dispatch := document["dispatch_seconds"]) is not None:
        yield (
            f"issuing a step's instructions takes {format_seconds(dispatch)} of one core (median "
            "of the steps without a meter)"
        )
    if not document["is_target"]:
        where = f"target {document['target']}, measured on {document['platform']}"
        yield f"predicted for {where}: not to be compared"
    if not document["predicted_peak_bytes_per_device"] and document["host"] is None:
        yield (
            "the plan has no prediction; capture predict PLAN --profile FILE -o PLAN adds one, "
            "capture verify PLAN -o PLAN the peaks"
        )
    if any((moved := document["moved_bytes"] or {}).values()):
        out, back = (format_bytes(moved[way]) for way in ("to_host", "to_device"))
        yield f"an update copies {out} to the host and {back} back"


def _errors(document: dict[str, Any]) -> Iterator[str]:
    """Yield the largest errors beside one device, and what roundings do not explain."""
    param, gradient = document["worst_param"], document["worst_gradient"]
    about = param and (
        f"{param['leaf']} of model {param['model']}, which one rounding of its gradients moves by "
        f"{param['rounding_error']:.1e} when it is alone"
    )
    worst = {"loss": None, "gradient": gradient, "param": about}
    errors = [
        f"{what} {error:.1e}" + ("" if worst[name] is None else f" ({worst[name]})")
        for name, what in (("loss", "loss"), ("gradient", "gradients"), ("param", "parameters"))
        if (error := document[f"max_relative_{name}_error"]) is not None
    ]
    if errors:
        yield f"largest relative error: {', '.join(errors)}"
    most, error = document["gradient_rounding_error"], document["max_relative_gradient_error"]
    if most is not None and error is not None and not error <= most:  # it may be no number
        yield (
            f"roundings are taken to explain {most:.1e} of gradients: unless one of them tips a "
            "choice of the model, this step trains another function than one device "
            "(docs/limits.md names what micro-batches change)"
        )


def _losses(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.6f}" for loss in losses)


def _of_malloc(heap: dict[str, Any]) -> list[str]:
    """Return lines with what an ordinary step added to malloc's bytes, and the most that it may."""
    said = f"an ordinary step added {format_bytes(heap['step_bytes'])} to malloc's bytes; "
    parts = {
        "booked over all devices": "booked_bytes",
        "scratch of kernels": "scratch_bytes",
        "not yet given back by a program that has ended": "unreturned_bytes",
        "micro-batches on their way to devices": "fed_bytes",
        "objects of JAX": "object_bytes",
    }
    listed = [f"{format_bytes(heap[key])} {what}" for what, key in parts.items() if heap[key]]
    if heap["unbounded"]:
        unknown = ", ".join(heap["unbounded"])
        head = f"{said}how much {unknown} may allocate is not known, beside"
    else:
        head = f"{said}at most {format_bytes(heap['bound_bytes'])}:"
    return [head, *(f"  {each}" for each in listed)]
