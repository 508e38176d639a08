"""Recommend a plan: the fastest that fits, or the one of lowest peak memory.

In the place of WORKLOAD may stand a question (.toml), or a plan (.json), which is asked again.
"""

from __future__ import annotations

import argparse
from copy import copy
from dataclasses import replace

from capture.cli import layers
from capture.cli import options as shared
from capture.cli.compete import FIRST, compete
from capture.cli.options import Asks
from capture.cli.question_file import asked_of, opened
from capture.errors import PlanError, Violation
from capture.options import Option, merged, refused
from capture.plan.kinds import KINDS

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


def asked_by_system() -> dict[str, Asks]:
    """Return what is asked for a plan, by system, in the order of the kinds of plans."""
    return {kind.system: kind.asks.load() for kind in KINDS.values()}


def options_by_system() -> dict[str, tuple[Option, ...]]:
    """Return what each system reads."""
    by_system = asked_by_system()
    about = "; ".join(f"{system}: {asks.about}" for system, asks in by_system.items())
    text = f"{about} (default: {FIRST}, and what competes with it)"
    system = replace(layers.SYSTEM_OPTION, help=text, default=None, choices=tuple(by_system))
    of_all = system, shared.output("plan.json"), shared.TRUST
    return {system: (*of_all, *asks.options) for system, asks in by_system.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_workload(parser, required=False)
    group, read = parser.add_argument_group("The question"), merged(options_by_system())
    for option, of in read.values():
        if len(of) > 1:
            option.add_to(group)
    parser.add_argument(
        "--workload",
        dest="other_workload",
        metavar="WORKLOAD",
        help="beside a question or a plan: that of the file, if it names none or has moved",
    )
    for system, asks in asked_by_system().items():
        group = parser.add_argument_group(asks.title)
        for option, of in read.values():
            if of == (system,):
                option.add_to(group)


def main(options: argparse.Namespace) -> int:
    by_system = options_by_system()
    known = [option for option, _ in merged(by_system).values()]
    options = opened(options, known)
    unread = refused(shared.given(options), options.system or FIRST, by_system)
    PlanError.check(Violation(text, "plan-system") for text in unread)
    options.asked = asked_of(options, known)
    every, typed = asked_by_system(), copy(options)
    asks = every[options.system or FIRST]
    if options.workload is None and asks.needs_workload:
        options.parser.error("the following arguments are required: WORKLOAD")
    found = asks.answer(options)
    if typed.system is None:
        found = compete(typed, found, every, by_system)
    return found.told(typed)
