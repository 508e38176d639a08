"""What tracing alone says of every stage that a plan may have: two profiles, of which no compiler
was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from capture.environment import without_collecting
from capture.errors import ProfileError
from capture.measured.profile import Profile, StageConfig
from capture.measured.stage_cost import StageBounds
from capture.plan.choices import remat_time_fraction
from capture.profiler.windows import window_configs
from profiling_runs.batch import Progress
from profiling_runs.measurements import Measurements, unmeasured
from profiling_runs.question import ProfileQuestion

BOUNDS = "bounds from tracing"


@dataclass(frozen=True)
class Bounds:
    """The stages of a model between two bounds, at one micro-batch size.

    Attributes:
        least: No stage of a plan needs less, once it is compiled.
        most: As much as compilers were seen to need.
    """

    least: Profile
    most: Profile


@without_collecting()
def bounds(
    question: ProfileQuestion,
    measurements: Measurements,
    progress: Progress = lambda kind, done, total: None,
    begin: Callable[[], None] = lambda: None,
) -> Bounds:
    """Trace the windows of layers that predictions are built from, at the question's micro-batch
    size; nothing is compiled.

    Args:
        question: What is asked.
        measurements: Of its workload; the store keeps the bounds.
        progress: Told how far it is.
        begin: Called before the first stage is traced, where the store does not have them.

    Raises:
        ProfileError: ``profile-remat`` for a part of the time, whose bounds are not known.
    """
    from capture.profiler.bounds import BoundsBackend

    size, choices = question.microbatch_size, question.profiled_choices
    if timed := [choice.remat for choice in choices if remat_time_fraction(choice.remat)]:
        raise ProfileError.of(
            f"remat={timed[0]!r}: what a longer stage recomputes in so much time does not follow "
            "from what its layers do, so it has no bounds; name another, or leave out --algorithm "
            "bounds-first.",
            "profile-remat",
        )
    num_layers = measurements.backend.traced(size).graph.num_layers
    configs = [
        config
        for config in window_configs(num_layers, choices, [size], question.num_neighbours)
        # Longer ones correct sums of what is not additive, which bounds do not add up.
        if config.num_layers <= question.num_neighbours + 1
    ]
    backend = BoundsBackend(measurements.backend)
    # Those that differ in degrees alone one after the other: they share their traces.
    configs.sort(key=lambda c: (c.num_layers, c.first, c.choice.remat))
    if configs and not backend.knows(configs[-1]):
        begin()
    found: dict[StageConfig, StageBounds] = {}
    for done, config in enumerate(configs, start=1):
        found[config] = backend.measure(config)
        progress(BOUNDS, done, len(configs))
    facts = unmeasured(question, measurements, (size,))

    def profile(name: str) -> Profile:
        return replace(
            facts,
            measurements={config: getattr(each, name) for config, each in found.items()},
            provenance={**facts.provenance, "bounds": name},
        )

    return Bounds(profile("least"), profile("most"))
