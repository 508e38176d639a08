"""Plans of stages (CAPTURE): what ``capture plan --system capture`` does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

from capture.cli import asked, bounds_first
from capture.cli import options as shared
from capture.cli.fitting import least_state_of, measuring
from capture.cli.options import Asks
from capture.cli.output import Beyond, SearchEnd, say, told
from capture.cli.profile_file import read_profile
from capture.cli.question_file import noted
from capture.cli.targets import compare
from capture.cli.whole import FIXED, OFFLOAD, close, of_whole, take_plan, whole_question
from capture.errors import PlanError, ProfileError
from capture.machine.cluster import Cluster
from capture.machine.target import Target, check_compiler
from capture.measured.profile import Profile
from capture.options import Option, at_least, options_of, several, taken
from capture.plan.choices import num_full_layers
from capture.plan.schedule import PLAIN_SCHEDULES, SCHEDULES
from capture.plan.space import StageSpace
from capture.predictor.step_time import has_times, predicted_timeline, time_summary
from capture.quantities import counted, format_bytes
from profiling_runs.collect import jobs_left
from profiling_runs.collect import profile as make_profile
from profiling_runs.measurements import Measurements
from profiling_runs.pools.where import DEFAULT_LOCAL_WORKERS
from profiling_runs.question import ProfileQuestion
from profiling_runs.verify import PlanCompiler
from recommender.answer import StageAnswer
from recommender.capture.changes import Measuring, cheapest_change
from recommender.capture.extent import (
    Attempt,
    best_of,
    check_limited,
    front_of,
    largest_batch,
    smallest_cluster,
)
from recommender.capture.knowledge import MOST_PLANS, Knowledge
from recommender.capture.least_state import beyond_memory
from recommender.capture.recommendation import recommend
from recommender.money import Accountant, Terms
from recommender.plan_report import PlanReport
from recommender.question import AUTOSTAGE, PlanQuestion

#: What takes longer is said before it is begun.
LONG_SECONDS = 300.0
_TARGET = replace(
    shared.TARGET,
    help=shared.TARGET.help.replace("cpu)", "cpu, or that of the plan of --fix)"),
    default=None,
)
#: Of these, one is asked.
EXTENT = (
    Option("smallest_cluster", "the fewest devices of the cluster on which a plan fits", False),
    Option("largest_batch", "the largest global batch that fits with so many micro-batches", False),
    Option(
        "try_microbatches",
        "numbers of micro-batches to choose the best of",
        read=several(1),
        metavar="M,M,...",
    ),
)
#: What it reads.
OPTIONS = (
    shared.CLUSTER,
    _TARGET,
    shared.GLOBAL_BATCH,
    shared.NUM_LAYERS,
    *options_of(PlanQuestion)[3:],
    *shared.OPEN,
    *options_of(StageSpace)[1:],
    shared.REMAT_OF_A_SEARCH,
    *shared.CHOICES[3:],
    Option(
        "verify",
        f"compile at most K plans, ranked again after each, for the answer (default: {MOST_PLANS})",
        0,
        at_least(0),
        metavar="K",
    ),
    shared.NO_COMPILE,
    Option(
        "try_schedules",
        "choose the best of all schedules that the profile, and --algorithm, --mode and "
        "--merge-layers where they are given, know",
        False,
    ),
    Option(
        "profile",
        "use this profile instead of measuring; again: put several together",
        read=Path,
        metavar="FILE",
        again=True,
    ),
    *EXTENT,
    *options_of(Terms),
    *FIXED,
    *OFFLOAD,
    *bounds_first.OPTIONS,
    *shared.PROFILING,
    *shared.BACKEND,
    *shared.STORE,
)
#: What a search goes through where it is not said.
_OPEN = {option.name for option in shared.OPEN}


def plan(options: argparse.Namespace) -> SearchEnd:
    """Search stages.

    Raises:
        PlanError: ``plan-extent`` for several extents; and the codes of the questions.
    """
    _check_extents(options)
    close(options, [option for option in OPTIONS if option.name not in {*_OPEN, "target"}])
    terms = asked.terms_of(vars(options))
    asked.say_one_device(options)
    if options.targets:
        return compare(options, terms)
    fixed = take_plan(options)
    given = copy(options)
    close(options, (*shared.LEFT_OPEN, shared.TARGET))
    given.target = options.target
    # Any number of micro-batches may do where none is said.
    num = 1 if given.microbatches is None else given.microbatches
    of_profile = asked.profile_question({**vars(options), "microbatches": num})
    of_a_profile = bounds_first.of_a_profile(options)
    whole = None if of_a_profile else whole_question(given, fixed)
    if whole is None:
        of_profile = asked.profile_question(vars(options))
    else:
        of_profile = of_whole(of_profile, whole)
    question = _question(options, of_profile, given) if whole is None else whole.question()
    terms.check([question.cluster.target], options.objective)
    _check_times(question)
    if not (options.quick or options.no_compile or options.compiles == 0 or of_profile.executes):
        check_compiler(Target.load(question.cluster.target))
    measurements = None
    if options.profile is not None:
        asked.check_profiles_nothing(vars(options))
        profile = read_profile(options.profile, of_profile, options.remat)
    else:
        if not of_profile.executes:
            measurements = asked.open_measurements(options, of_profile)
            with nullcontext() if of_a_profile else measurements.keeping_workers():
                if not of_a_profile:
                    asking = bounds_first.Asking(options, of_profile, measurements, whole)
                    asking.start_workers()
                asked.say_layers(options, of_profile, measurements)
                if fixed is not None:
                    fixed.check_model(of_profile.spec, measurements)
                    say(options, str(fixed))
                if question.mode == "default":
                    refused = _refused(options, question, of_profile, measurements)
                    if refused is not None:
                        return refused
                if not of_a_profile:
                    whole = whole and whole.of_sizes(measurements.backend.takes)
                    return bounds_first.plan(options, question, of_profile, measurements, whole)
        if measurements is not None and of_a_profile:
            _say_profile(options, of_a_profile, of_profile, measurements)
        asked.prepare(of_profile)
        profile = make_profile(of_profile, measurements=measurements, **asked.told(options))
    return _from_profile(options, question, of_profile, profile, measurements)


def _check_extents(options: argparse.Namespace) -> None:
    """Refuse several questions about the number of devices or micro-batches, or the batch."""
    extents = [each.flag for each in EXTENT if getattr(options, each.name)]
    if options.objective == "cost" and not options.try_microbatches:
        extents.append("--objective cost")
    if len(extents) > 1:
        raise PlanError.of(f"{' and '.join(extents)}: give one of them.", "plan-extent")


def _from_profile(
    options: argparse.Namespace,
    question: PlanQuestion,
    of_profile: ProfileQuestion,
    profile: Profile,
    measurements: Measurements | None,
) -> SearchEnd:
    """Answer the question from a profile, and from what is measured beside it."""
    knowledge = _knowledge(options, profile, question.cluster)
    chosen, attempts, found = _chosen(options, knowledge, question)
    result = noted(options, knowledge.answer(chosen, known=found))
    if result.plan is not None and (front := front_of(attempts)) is not None:
        why = replace(result.why, front=front)
        result = replace(result, why=why, plan=result.plan.with_(why=why))
    time = None
    accountant = Accountant(asked.terms_of(vars(options)), profile.graph)
    if result.plan is not None and result.prediction is not None and has_times(profile):
        timeline = predicted_timeline(result.plan, knowledge.profile)
        graph = profile.graph_at(result.plan.microbatch_size)
        time = time_summary(timeline, result.plan, graph)
    notes = asked.layers_note(of_profile, profile.cut_into)
    beyond = Beyond(profile.warnings, profile.failures, of_profile=True)
    outcome = told(options, result, time, attempts, notes, beyond, accountant)
    may_ask_on = question.mode == "default" and question.algorithm != AUTOSTAGE
    if result.status == "infeasible" and result.memory_limit_bytes is not None and may_ask_on:
        most = max([attempt.question.num_microbatches for attempt in attempts], default=None)
        tried = replace(
            chosen,
            num_microbatches=most or question.num_microbatches,
            schedule=question.schedule,
        )
        measure = None if measurements is None else _measuring(of_profile, measurements)
        asking = partial(cheapest_change, tried, profile.graph.num_layers, knowledge, measure)
        outcome = replace(outcome, change=asking)
    return outcome


def _check_times(question: PlanQuestion) -> None:
    """Refuse to search for speed on a target whose speed is not known, before any work.

    Raises:
        ProfileError: ``profile-no-times``.
    """
    objective, target = question.search[0], question.cluster.target
    if objective != "memory" and Target.load(target).rates is None:
        raise ProfileError.of(
            f"--objective {objective} searches for speed, and the target {target!r} has no rates; "
            "name an accelerator, such as --target h100, or leave out the objective.",
            "profile-no-times",
        )


def _say_profile(
    options: argparse.Namespace,
    asked_by: Sequence[str],
    of_profile: ProfileQuestion,
    measurements: Measurements,
) -> None:
    """Say why a profile is made; and how long that takes, with the quicker way, if it is more than
    a few minutes."""
    left, seconds = jobs_left(of_profile, measurements)
    seconds /= options.workers or DEFAULT_LOCAL_WORKERS
    missing = counted(left, "program")
    text = f"{' '.join(asked_by)}: a profile is made first, {missing} to compile"
    if seconds > LONG_SECONDS:
        text += (
            f", about {seconds / 60:.0f} min; without {' '.join(asked_by)} the plan is found by "
            "bounds and a few compiles"
        )
    say(options, f"{text}.")


def _question(
    options: argparse.Namespace, of_profile: ProfileQuestion, given: argparse.Namespace
) -> PlanQuestion:
    """Return the question that the options ask; ``given`` is as the user typed them."""
    global_batch, num_microbatches = asked.read_batch(vars(options))
    batch = {"global_batch": global_batch, "microbatches": num_microbatches}
    return PlanQuestion(
        of_profile.cluster,
        space=of_profile.space,
        remat=options.remat if num_full_layers(options.remat or "") else None,
        chosen=tuple(shared.given(given)),
        **taken(PlanQuestion, vars(options) | batch),
    )


def _measuring(of_profile: ProfileQuestion, measurements: Measurements) -> Measuring:
    """Return the functions that measure changes of the question by making profiles."""
    return measuring(
        of_profile, measurements, lambda changed: make_profile(changed, measurements=measurements)
    )


def _refused(
    options: argparse.Namespace,
    question: PlanQuestion,
    of_profile: ProfileQuestion,
    measurements: Measurements,
) -> SearchEnd | None:
    """Return the outcome where no plan can exist or fit; None if one may, and is worth measuring
    for."""
    names = SCHEDULES if options.try_schedules else (question.schedule,)
    if any(SCHEDULES[name].stages_per_group > 1 for name in names):
        return None  # a device with several stages may hold less than any stage in one piece
    limit = question.limit_bytes
    found = least_state_of(of_profile, measurements, of_profile.microbatch_size, limit)
    if found.stages and limit is not None:
        needs = (
            "parameters, gradients and optimizer state alone need at least "
            f"{format_bytes(found.peak_bytes)} per device"
        )
        say(options, f"{needs}; limit {format_bytes(limit)}")
    # On fewer devices a plan may exist.
    on_fewer = options.smallest_cluster or options.objective == "cost"
    if found.status == "ok" or (not found.stages and on_fewer):
        return None
    result = beyond_memory(found)
    report, lines = PlanReport.of("stages", result), [f"infeasible: {result.why.summary}"]
    change = None
    if found.stages and limit is not None:
        num_layers = measurements.backend.traced(of_profile.microbatch_size).graph.num_layers
        measure = _measuring(of_profile, measurements)
        change = partial(cheapest_change, question, num_layers, None, measure)
    return SearchEnd(
        report,
        lines,
        1,
        result,
        accountant=bounds_first.accountant_of(options, measurements, of_profile.microbatch_size),
        change=change,
        change_does="can fit",
    )


def _knowledge(options: argparse.Namespace, profile: Profile, cluster: Cluster) -> Knowledge:
    """Return what is known of the model's stages, with what compiles the rest
    (``recommender.capture.knowledge.Knowledge``).

    Raises:
        ProfileError: ``verify-mode`` for ``--verify`` with the paper's predictor, or with
            ``--no-compile``.
    """
    if options.verify and options.mode != "default":
        raise ProfileError.of(
            "--verify looks compiled stages up in the default predictor; leave out --mode paper.",
            "verify-mode",
        )
    if options.verify and options.no_compile:
        raise ProfileError.of(
            "--verify compiles what --no-compile does not; leave out one of them.", "verify-mode"
        )
    # Executed runs alone: what a compiler says is not what they measure.
    if options.no_compile or not profile.measurements:
        return Knowledge(profile)
    compiler = PlanCompiler(
        profile,
        lambda: asked.profile_measurements(options, profile, cluster),
        lambda text: say(options, text),
    )
    return Knowledge(profile, compiler, options.verify or MOST_PLANS)


def _chosen(
    options: argparse.Namespace, knowledge: Knowledge, question: PlanQuestion
) -> tuple[PlanQuestion, Sequence[Attempt], StageAnswer | None]:
    """Return the question to plan for, the attempts to find it, and the answer that it was chosen
    for.

    Raises:
        PlanError: ``plan-extent`` for the largest batch without a limit.
    """

    def ask(question: PlanQuestion) -> StageAnswer:
        return recommend(knowledge.profile, question)

    settled = partial(knowledge.answer, any_that_fits=True)
    best: Attempt | None
    if options.smallest_cluster:
        best, attempts = smallest_cluster(settled, question)
    elif options.largest_batch:
        check_limited(question)
        step = min(knowledge.profile.microbatch_sizes)
        best, attempts = largest_batch(
            ask, settled, question, step, is_settled=knowledge.is_settled
        )
    elif options.try_microbatches or options.try_schedules:
        counts = options.try_microbatches or (question.num_microbatches,)
        # Of a profile that was made without split backward passes, the schedules that have none.
        known = [
            name
            for name, kind in SCHEDULES.items()
            if knowledge.profile.splits_backward or not kind.splits_backward
        ]
        if question.mode != "default" or question.algorithm is not None or question.merge_layers:
            known = list(PLAIN_SCHEDULES)
        schedules = tuple(known) if options.try_schedules else (question.schedule,)
        best, attempts = best_of(ask, settled, question, counts, schedules, knowledge.is_settled)
    else:
        return question, (), None
    return (question, attempts, None) if best is None else (best.question, attempts, best.result)


ASKS = Asks("Pipelines (--system capture)", "stages on submeshes, FSDP among them", OPTIONS, plan)
