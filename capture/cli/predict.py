"""Predict what a plan needs on every device, from a profile; compile its stages where that would be
an extrapolation."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.output import emit, peak_line, say, stage_table
from capture.errors import PlanError, WorkloadError
from capture.measured.profile import Profile
from capture.plan.kinds import load_plan, of_stages
from profiling_runs.verify import PlanCompiler

NAME = "predict"
HELP = "predict a plan's memory from a profile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        required=True,
        metavar="FILE",
        help="measurements of the model, of capture profile",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the plan with its prediction, for capture run",
    )
    parser.add_argument(
        "--extrapolate",
        action="store_true",
        help="also predict degrees that were not profiled, with a wider interval",
    )
    shared.add(parser, shared.NO_COMPILE, *shared.STORE)


def main(options: argparse.Namespace) -> int:
    from capture.predictor import AdditivePredictor

    plan = of_stages(load_plan(options.plan))
    profile = Profile.load(options.profile)
    prediction = AdditivePredictor(profile, allow_extrapolation=options.extrapolate).predict(plan)
    plan = plan.with_(prediction=prediction)
    shown = plan.with_(verification=None)
    document: dict[str, Any] = {
        "prediction": prediction.to_json(),
        "extrapolated": prediction.extrapolated,
        "verification": None,
    }
    lines = []
    if prediction.extrapolated and not options.no_compile:
        compiler = PlanCompiler(
            profile,
            lambda: asked.plan_measurements(options, plan),
            lambda text: say(options, text),
        )
        try:
            compiler.open()
        except (WorkloadError, PlanError) as error:
            lines.append(f"not compiled: {error}")
        else:
            verification, _ = compiler(plan, profile)
            plan = shown = plan.with_(verification=verification)
            document |= {"extrapolated": False, "verification": verification.to_json()}
    lines = [stage_table(shown, prediction.stages), peak_line(shown, prediction), *lines]
    if options.output is not None:
        plan.save(options.output)
    emit(options, document, "\n".join(lines))
    return 0
