"""Profiles that are given as files, for the plan that is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from capture.cli import options as shared
from capture.errors import ProfileError
from capture.measured.merge import merge_profiles
from capture.measured.profile import Profile
from capture.plan.choices import REMAT_POLICIES, StageChoice, measured_choices
from profiling_runs.question import ProfileQuestion


def read_profile(paths: Sequence[Path], question: ProfileQuestion, remat: str | None) -> Profile:
    """Read the profile of one file or several, for the workload as it is named now. Stages that
    recompute otherwise than asked are left out.

    Raises:
        ProfileError: ``profile-mixture`` if several do not belong together, ``profile-other-model``
            if it is of another workload or number of layers, ``profile-choice`` if nothing was
            profiled with the options of the stages.
    """
    profile, *others = (Profile.load(path) for path in paths)
    if others:
        profile = merge_profiles([profile, *others], question.cluster.target)
    files = ", ".join(map(str, paths))
    _check_model(profile, question, files)
    kinds = {(c.remat, c.shard_optimizer) for c in profile.choices if not c.shard_params}
    if not profile.measurements and profile.paper is not None:  # executed runs alone
        kinds = {(row["remat"], row["shard_optimizer"]) for row in profile.paper["statistics"]}
    found = {one for one, _ in kinds}
    order = (*REMAT_POLICIES, *sorted(found.difference(REMAT_POLICIES)))
    known = tuple(policy for policy in order if policy in found)
    asked = measured_choices(StageChoice(remat=policy) for policy in question.remat)
    policies = tuple(choice.remat for choice in asked)
    if remat is None and known and not set(policies) <= set(known):
        policies = known[:1]
    elif remat == shared.AUTO and len(known) > 1:
        policies = known
    measurements = {
        config: cost
        for config, cost in profile.measurements.items()
        if config.choice.remat in policies
        and (
            question.shard_params
            if config.choice.shard_params
            else config.choice.shard_optimizer == question.shard_optimizer
        )
        and (question.sequence_parallel or not config.choice.sequence_parallel)
    }
    if not {(policy, question.shard_optimizer) for policy in policies} <= kinds:
        profiled = sorted(f"remat={remat}, shard_optimizer={shard}" for remat, shard in kinds)
        named = question.remat[0] if len(question.remat) == 1 else shared.AUTO
        raise ProfileError.of(
            f"profile {files!r} has no stage with remat={named}, "
            f"shard_optimizer={question.shard_optimizer}; it has "
            f"{'; '.join(profiled) or 'none'}. Ask for those, or profile again.",
            "profile-choice",
        )
    _check_splits(profile, question, files)
    return replace(profile, workload=question.spec, measurements=measurements)


def _check_model(profile: Profile, question: ProfileQuestion, files: str) -> None:
    """Refuse a profile of another model, or one that is split otherwise."""
    named = question.spec
    assert named is not None, "the command line names workloads"
    # A file may have moved with its profile.
    one, other = (
        spec and (Path(spec.location).name, spec.function, dict(spec.arguments))
        for spec in (profile.workload, named)
    )
    if one not in (None, other):
        raise ProfileError.of(
            f"profile {files!r} is of {profile.workload}, and the workload is {named}; profile "
            "that one.",
            "profile-other-model",
        )
    if question.num_layers not in (None, profile.graph.num_layers):
        raise ProfileError.of(
            f"profile {files!r} has num_layers={profile.graph.num_layers}, and --num-layers asks "
            f"for {question.num_layers}; "
            "profile with that number.",
            "profile-other-model",
        )
    if question.tensor_parallel_rule != profile.tensor_parallel_rule:
        raise ProfileError.of(
            f"profile {files!r} has tensor_parallel_rule={profile.tensor_parallel_rule!r}, and "
            "--tensor-parallel-rule is "
            f"{question.tensor_parallel_rule!r}; ask for that of the profile, or profile again.",
            "profile-choice",
        )


def _check_splits(profile: Profile, question: ProfileQuestion, files: str) -> None:
    """Refuse a profile without the splits that are asked for."""
    for option, over, split in (
        ("shard_params", "data_parallel", "parameters over replicas"),
        ("sequence_parallel", "tensor_parallel", "activations along the sequence"),
    ):
        # Where all degrees are 1 there is nothing to split.
        if (
            getattr(question, option)
            and any(getattr(choice, over) > 1 for choice in profile.choices)
            and not any(getattr(choice, option) for choice in profile.choices)
        ):
            raise ProfileError.of(
                f"profile {files!r} has no stage that splits its {split}, and "
                f"--{option.replace('_', '-')} asks for some; profile with it.",
                "profile-choice",
            )
