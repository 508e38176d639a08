"""What verbs do so that no answer rests on an extrapolation: the stages of the plan in question are
compiled, when one is first needed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from capture.cli.output import say
from capture.measured.profile import Profile
from capture.plan.stages import Plan


def add_no_compile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help=(
            "where an answer is of a micro-batch size that was not profiled: extrapolate, and say "
            "so, instead of compiling its stages"
        ),
    )


class PlanCompiler:
    """Compiles plans (``recommender.capture.verified.Compile``); the workload is loaded with the
    first.

    Args:
        options: Of the verb.
        profile: That answers are asked of; the workload must be its own.
        open_measurements: Opens those of the workload.
    """

    def __init__(
        self, options: argparse.Namespace, profile: Profile, open_measurements: Callable[[], Any]
    ):
        self._options, self._profile, self._open = options, profile, open_measurements
        self._measurements: Any = None

    def open(self) -> Any:
        """The measurements.

        Raises:
            WorkloadError, TargetError: if the workload cannot be loaded.
            ProfileError: ``profile-other-model``.
        """
        if self._measurements is None:
            self._measurements = self._open()
            from profiling_runs.verify import check_profile

            check_profile(self._profile, self._measurements)
        return self._measurements

    def __call__(self, plan: Plan, known: Profile) -> tuple[Mapping[str, Any], Profile]:
        sizes = self._profile.microbatch_sizes
        if plan.microbatch_size not in sizes and self._measurements is None:
            profiled = " and ".join(map(str, sizes))
            say(
                self._options,
                f"micro-batch size {plan.microbatch_size} was not profiled ({profiled} were): "
                "compiling the stages of the best plans "
                "(--no-compile extrapolates)",
            )
        measurements = self.open()
        from profiling_runs.verify import verify, with_verified

        return verify(plan, measurements).to_json(), with_verified(known, plan, measurements)
