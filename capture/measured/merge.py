"""Several profiles of one model put together: of other batch sizes, other degrees, other targets.

What tracing says is the same for every target, and shared: the layers, the bytes of parameters at
each degree, the hashes of the model at each micro-batch size. What a compiler or a run says is of
its target, its versions and its flags alone, and never mixed.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from capture.errors import ProfileError, Violation
from capture.machine.target import same_target
from capture.measured.profile import Calibration, Profile
from capture.model.graph import agreed_value_dims

K = TypeVar("K")
V = TypeVar("V")


def merge_profiles(profiles: Sequence[Profile], target: str) -> Profile:
    """Merge several profiles of one model into one profile of a target.

    Measurements are those of the profiles of the target; of the others what does not depend on a
    target. Of two that measured the same stage config the first counts; the errors of all
    calibrations together make the interval.

    Args:
        profiles: One or more, of the same model.
        target: What the result is for.

    Raises:
        ProfileError: ``profile-mixture`` naming everything in which they differ and must not.
    """
    of_target = [profile for profile in profiles if same_target(profile.target, target)]
    ProfileError.check(_violations(profiles, of_target, target))
    widest = max(of_target, key=lambda profile: profile.graph.microbatch_size)
    papers = [profile.paper for profile in of_target if profile.paper is not None]
    calibrations = [profile.calibration for profile in of_target if profile.calibration is not None]
    return replace(
        widest,
        graph=replace(
            widest.graph, value_dims=agreed_value_dims(profile.graph for profile in profiles)
        ),
        measurements=_first_of(profile.measurements for profile in of_target),
        verified=_first_of(profile.verified for profile in of_target),
        param_bytes=_first_of(profile.param_bytes for profile in profiles),
        microbatch_sizes=tuple(
            sorted({size for profile in of_target for size in profile.microbatch_sizes})
        ),
        model_hashes=_first_of(profile.model_hashes for profile in profiles),
        paper=papers[0] if papers else None,
        calibration=_together(calibrations) if calibrations else None,
        warnings=tuple(dict.fromkeys(chain(*(profile.warnings for profile in of_target)))),
        failures=tuple(dict.fromkeys(chain(*(profile.failures for profile in of_target)))),
    )


def _first_of(mappings: Iterable[Mapping[K, V]]) -> dict[K, V]:
    """Merge mappings; of a key that several have, the first one counts."""
    return dict(ChainMap(*map(dict, mappings)))


def _together(calibrations: Sequence[Calibration]) -> Calibration:
    return Calibration(
        tuple(chain(*(calibration.errors for calibration in calibrations))),
        calibrations[0].seed,
        sum(calibration.num_plans for calibration in calibrations),
        tuple(chain(*(calibration.size_errors for calibration in calibrations))),
    )


def _violations(
    profiles: Sequence[Profile], of_target: Sequence[Profile], target: str
) -> Iterator[Violation]:
    if not of_target:
        there = ", ".join(sorted({profile.target for profile in profiles})) or "none"
        yield Violation(
            f"no profile is of target={target!r} (there is {there}); profile for it.",
            "profile-mixture",
        )
        return
    first = profiles[0]
    for number, profile in enumerate(profiles[1:], start=2):
        for what in _differences(first, profile):
            yield Violation(
                f"profile {number} is of another model than the first: {what}; plan each by "
                "itself.",
                "profile-mixture",
            )
    for profile in of_target[1:]:
        mine, theirs = (
            {k: v for k, v in p.provenance.items() if k not in ("created", "target")}
            for p in (of_target[0], profile)
        )
        different = sorted(
            key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)
        )
        if different:
            values = "; ".join(f"{key}: {mine.get(key)} and {theirs.get(key)}" for key in different)
            yield Violation(
                f"two profiles of target={target!r} were not measured alike ({values}); make one "
                "of them again.",
                "profile-mixture",
            )
    if sum(profile.paper is not None for profile in of_target) > 1:
        yield Violation(
            "two profiles hold runs of the paper's kind, which are of one batch size; leave one "
            "out.",
            "profile-mixture",
        )


def _differences(one: Profile, other: Profile) -> Iterator[str]:
    """Yield, in words, each difference that shows two profiles to be of different models."""
    for size in sorted(one.model_hashes.keys() & other.model_hashes.keys()):
        if one.model_hashes[size] != other.model_hashes[size]:
            yield (
                f"model_hash at micro-batch size {size} is {other.model_hashes[size]}, not "
                f"{one.model_hashes[size]}"
            )
    mine, theirs = one.graph, other.graph
    if mine.num_layers != theirs.num_layers:
        yield f"num_layers={theirs.num_layers}, not {mine.num_layers}"
    elif [layer.params for layer in mine.layers] != [
        layer.params for layer in theirs.layers
    ] or mine.params != theirs.params:
        yield "its layers have other parameters"
    if one.tensor_parallel_rule != other.tensor_parallel_rule:
        yield (
            f"tensor_parallel_rule={other.tensor_parallel_rule!r}, not {one.tensor_parallel_rule!r}"
        )
