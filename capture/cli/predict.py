"""Predict what a plan needs on every device, from a profile."""

from __future__ import annotations

import argparse
from pathlib import Path

from capture.cli import options as shared
from capture.cli.output import emit, stage_table
from capture.plan import Plan
from capture.profile import Profile
from capture.quantities import format_bytes

NAME = "predict"
HELP = "predict a plan's memory from a profile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_plan(parser)
    parser.add_argument("--profile", type=Path, required=True, metavar="FILE", help="measurements of the model, of capture profile")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the plan with its prediction, for capture run")
    parser.add_argument("--extrapolate", action="store_true", help="predict degrees that were not profiled, with a wider interval")


def main(options: argparse.Namespace) -> int:
    from capture.predictor import AdditivePredictor

    plan, profile = Plan.load(options.plan), Profile.load(options.profile)
    prediction = AdditivePredictor(profile, allow_extrapolation=options.extrapolate).predict(plan)
    text = f"{stage_table(plan, prediction.stages)}\npeak {format_bytes(prediction.peak_bytes)} per device"
    if options.output is not None:
        plan.with_(prediction=prediction.to_json()).save(options.output)
    emit(options, {"prediction": prediction.to_json()}, text)
    return 0
