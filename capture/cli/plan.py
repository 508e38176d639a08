"""Recommend a plan: the fastest that fits, or the one of lowest peak memory.

In the place of WORKLOAD may stand a question (.toml), or a plan (.json), which is asked again.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from capture.cli import array, layers, osdp, packs, stages
from capture.cli import options as shared
from capture.cli.question_file import asked_of, opened
from capture.errors import PlanError, Violation
from capture.options import merged, refused

_OF_ALL = (
    replace(
        layers.SYSTEM_OPTION,
        help=f"{layers.SYSTEM_OPTION.help}; mutwo: several models on one device; osdp: one "
        "program, each operator's parameters sharded, split or replicated",
        choices=(stages.SYSTEM, packs.SYSTEM, array.SYSTEM, osdp.SYSTEM),
    ),
    shared.output("plan.json"),
    shared.TRUST,
)
#: What each system reads, and what answers it.
SYSTEMS = {module.SYSTEM: (*_OF_ALL, *module.OPTIONS) for module in (stages, packs, array, osdp)}
ANSWERS = {module.SYSTEM: module.plan for module in (stages, packs, array, osdp)}
#: Every option, with the systems that read it.
READ = merged(SYSTEMS)
_TITLES = {
    stages.SYSTEM: "Pipelines (--system capture)",
    packs.SYSTEM: "Packs (--system harmony)",
    array.SYSTEM: "Model arrays (--system mutwo)",
    osdp.SYSTEM: "Sharding by operator (--system osdp; also capture osdp)",
}
#: The options that ``--help`` shows, some in fewer words than ``--help-all``.
EVERYDAY = {
    "workload": "",
    "system": "capture: stages on submeshes, FSDP among them (default); harmony: packs of layers "
    "streamed from the host; mutwo: several models on one device; osdp: sharding by operator",
    "cluster": "",
    "target": "",
    "global_batch": "",
    "memory": "",
    "objective": "throughput: the fastest plan that fits; memory: the lowest peak; pareto: the "
    "front of both (default: throughput where the target has rates)",
    "microbatches": "",
    "remat": "activation checkpointing: none, cheap, dots, full, full:K, X%% or auto (default: "
    "searched; without times cheap)",
    "shard_params": "FSDP, ZeRO-3: parameters, gradients and optimizer state split over replicas "
    "(default: searched; without times not)",
    "fix": "",
    "smallest_cluster": "",
    "largest_batch": "",
    "quick": "ask no compiler: the best plan by estimates and bounds, in less time",
    "output": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser, required=False)
    group = parser.add_argument_group("The question")
    for option, of in READ.values():
        if len(of) > 1:
            option.add_to(group)
    parser.add_argument(
        "--workload",
        dest="other_workload",
        metavar="WORKLOAD",
        help="beside a question or a plan: that of the file, if it names none or has moved",
    )
    for system, title in _TITLES.items():
        group = parser.add_argument_group(title)
        for option, of in READ.values():
            if of == (system,):
                option.add_to(group)


def main(options: argparse.Namespace) -> int:
    known = [option for option, _ in READ.values()]
    options = opened(options, known)
    default = options.parser.get_default
    given = [name for name, value in vars(options).items() if value != default(name)]
    PlanError.check(
        Violation(text, "plan-system") for text in refused(given, options.system, SYSTEMS)
    )
    options.asked = asked_of(options, known)
    if options.workload is None and options.system != packs.SYSTEM:
        options.parser.error("the following arguments are required: WORKLOAD")
    return ANSWERS[options.system](options)
