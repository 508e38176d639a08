"""Recommend a plan: the fastest that fits, or the one of lowest peak memory.

In the place of WORKLOAD may stand a question (.toml), or a plan (.json), which is asked again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from capture.cli import layers
from capture.cli import options as shared
from capture.cli.options import Asks
from capture.cli.question_file import asked_of, opened
from capture.errors import PlanError, Violation
from capture.options import merged, refused
from capture.plan.kinds import KINDS

#: By system, in the order of the kinds of plans.
ASKS: Mapping[str, Asks] = {kind.system: kind.asks.load() for kind in KINDS.values()}
_ABOUT = "; ".join(f"{system}: {asks.about}" for system, asks in ASKS.items())
_OF_ALL = (
    replace(layers.SYSTEM_OPTION, help=f"{_ABOUT} (default: %(default)s)", choices=tuple(ASKS)),
    shared.output("plan.json"),
    shared.TRUST,
)
#: What each system reads.
SYSTEMS = {system: (*_OF_ALL, *asks.options) for system, asks in ASKS.items()}
#: Every option, with the systems that read it.
READ = merged(SYSTEMS)
#: The options that ``--help`` shows, some in fewer words than ``--help-all``.
EVERYDAY = {
    "workload": "",
    "system": "",
    "cluster": "",
    "target": "",
    "global_batch": "",
    "memory": "",
    "objective": "throughput: the fastest plan that fits; memory: the lowest peak; pareto: the "
    "front of both; cost: the cheapest (default: throughput where times are known)",
    "microbatches": "",
    "remat": "activation checkpointing: none, cheap, dots, full, full:K or auto (default: "
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
    for system, asks in ASKS.items():
        group = parser.add_argument_group(asks.title)
        for option, of in READ.values():
            if of == (system,):
                option.add_to(group)


def main(options: argparse.Namespace) -> int:
    known = [option for option, _ in READ.values()]
    options = opened(options, known)
    unread = refused(shared.given(options), options.system, SYSTEMS)
    PlanError.check(Violation(text, "plan-system") for text in unread)
    options.asked = asked_of(options, known)
    if options.workload is None and ASKS[options.system].needs_workload:
        options.parser.error("the following arguments are required: WORKLOAD")
    return ASKS[options.system].answer(options)
