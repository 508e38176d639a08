"""Questions as files: what ``capture plan`` is asked, in TOML, or a plan, which says what it was
asked.

    workload = "models/gpt.py:gpt?size=tiny"      # seen from the folder of the file
    system = "harmony"                            # keys are the options, with _ for -
    cluster = "1x4"
    target = "h100"
    global_batch = 64
    packing = ["balanced_time", "greedy"]

What the command line says beside the file counts in its place. Where this machine computes
(``--store``, ``--workers``, ``--ray``, ...) is said there alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import say
from capture.errors import PlanError, Violation
from capture.machine.target import resolved_target
from capture.model.workload import WorkloadSpec
from capture.options import Option, read_keys, read_toml
from capture.plan.files import with_paths
from capture.plan.kinds import kind_of, load_plan
from recommender.answer import Answer

A = TypeVar("A", bound=Answer[Any, Any])

#: What plans do not keep of a question.
_NOT_KEPT = {"output", "trust"}


def opened(options: argparse.Namespace, known: Collection[Option]) -> argparse.Namespace:
    """Return the options; where a question or plan file stands in the place of the workload, with
    the options of that file.

    Raises:
        PlanError: ``question-file`` for a file that is no TOML, ``question-option`` naming every
            key and value that no option takes, ``question-workload`` for two workloads, and the
            codes of ``load_plan``.
        WorkloadError: ``workload-untrusted``, as the file names code.
    """
    named, other = str(options.workload), options.other_workload
    if ":" in Path(named).name or not named.endswith((".toml", ".json")):
        if other is not None:
            raise PlanError.of(
                f"{named} and --workload {other} are two workloads; give one of them.",
                "question-workload",
            )
        return options
    given = argparse.Namespace(workload=other, trust=options.trust)
    if named.endswith(".toml"):
        values, spec = _read(Path(named), _toml(Path(named)), known), None
        own = values.pop("workload", None)
        if other is not None:
            spec = WorkloadSpec.parse(other)
        elif own is not None:
            spec = WorkloadSpec.parse(own).in_file(named).resolved_from(Path(named).parent)
            spec = spec.admitted(options.trust)
        found = _again(options, values)
    else:
        plan = load_plan(named)
        has_code = plan.workload is not None or "layers" not in plan.asked
        spec = asked.workload_of(given, plan) if has_code else None
        found = _again(options, _read(Path(named), plan.asked, known))
        if not plan.asked or found.system not in (None, kind_of(plan).system):
            devices, system = plan.cluster, kind_of(plan).system
            body: dict[str, Any] = {"global_batch": plan.step_examples, "system": system}
            if devices is not None:
                body |= {"cluster": str(devices), "target": devices.target}
            if options.batch is not None:  # per device, in its place
                del body["global_batch"]
            found = _again(options, _read(Path(named), body, known))
            say(options, f"asked again of {named}: its workload, devices and examples of a step")
    found.workload = spec
    shared.check_outputs(found)
    return found


def asked_of(options: argparse.Namespace, known: Collection[Option]) -> dict[str, Any]:
    """Return the options that were asked with other values than their defaults, as files have
    them."""
    return {
        option.name: option.written(value)
        for option in known
        if option.in_files and option.name not in _NOT_KEPT
        if (value := getattr(options, option.name)) != option.default
    }


def noted(options: argparse.Namespace, answer: A) -> A:
    """Return an answer whose plan says what was asked."""
    if answer.plan is None:
        return answer
    return replace(answer, plan=replace(answer.plan, asked=options.asked))


def _again(options: argparse.Namespace, values: Mapping[str, object]) -> argparse.Namespace:
    """Return the options parsed again, with these values where the command line says nothing."""
    found: argparse.Namespace = options.parser.parse_args(
        options.parser.typed, argparse.Namespace(**values)
    )
    return found


def _toml(path: Path) -> dict[str, Any]:
    try:
        given = read_toml(path)
    except ValueError as error:
        raise PlanError.of(f"question {str(path)!r} {error}.", "question-file") from None
    return with_paths(given, lambda name: resolved_target(name, path.parent))


def _read(path: Path, given: Mapping[str, object], known: Collection[Option]) -> dict[str, Any]:
    """Return the option values of a question's file."""
    values, wrong = read_keys(given, (Option("workload", "what to plan for"), *known))
    PlanError.check(Violation(f"{str(path)!r}: {text}", "question-option") for text in wrong)
    return values
