"""Predict what a plan needs on every device, from a profile. The model is never loaded: where a
prediction is an extrapolation, capture verify compiles the plan's stages."""

from __future__ import annotations

import argparse
from pathlib import Path

from capture.cli import options as shared
from capture.cli.output import emit, stage_lines
from capture.measured.profile import Profile
from capture.options import Option, add
from capture.plan.kinds import load_plan, of_stages
from capture.report.documents import PlanNeeds, PredictReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan_alone(parser)
    parser.add_argument(
        "--profile",
        type=Path,
        required=True,
        metavar="FILE",
        help="measurements of the model, of capture profile",
    )
    extrapolate = "also predict degrees that were not profiled, with a wider interval"
    add(
        parser,
        shared.output(None, "write the plan with its prediction, for capture run"),
        Option("extrapolate", extrapolate, False),
    )


def main(options: argparse.Namespace) -> int:
    from capture.predictor import AdditivePredictor

    plan = of_stages(load_plan(options.plan))
    profile = Profile.load(options.profile)
    prediction = AdditivePredictor(profile, allow_extrapolation=options.extrapolate).predict(plan)
    plan = plan.with_(prediction=prediction)
    shown = plan.with_(verification=None)
    lines = stage_lines(shown, prediction)
    if prediction.extrapolated:
        lines.append(
            "extrapolated: degrees or the micro-batch size were not profiled; capture verify PLAN "
            "compiles the stages of the plan"
        )
    written = {}
    if options.output is not None:
        plan.save(options.output)
        written["plan"] = str(options.output)
    report = PredictReport("stages", PlanNeeds.of(shown), prediction, written)
    emit(options, report, *lines)
    return 0
