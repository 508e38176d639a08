"""The problem that a profile poses to searches: predicted bytes and seconds of every stage."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from capture.errors import ProfileError, said_once
from capture.machine.target import Target
from capture.measured.profile import Profile
from capture.plan.choices import Remat, StageChoice, num_full_layers, with_mixtures
from capture.plan.schedule import make_schedule, occupancy_by_position, on_host_by_position
from capture.plan.stage import Stage
from capture.plan.stages import Plan
from capture.predictor import AdditivePredictor
from capture.predictor.alike import Kinds, empty_stages
from capture.predictor.mixture import Mixed
from capture.predictor.times import TimePredictor
from capture.registered import REGISTERED
from recommender.capture.problem import NEVER, SearchProblem
from recommender.fixed import FixedPlan
from recommender.question import PlanQuestion


def search_problem(
    profile: Profile,
    question: PlanQuestion,
    *,
    with_times: bool = False,
    least: bool = False,
    like: SearchProblem | None = None,
) -> SearchProblem:
    """Return the search that a profile poses: predicted bytes of every stage, at every position,
    for every choice; with ``with_times`` also its seconds.

    With ``least``, the bytes are those of the best of plans behind a stage and not of the worst:
    see ``AdditivePredictor.peaks``.

    ``like`` is what the same measurements pose without compiled stages: only choices of which
    stages are compiled are predicted again.

    Raises:
        ProfileError: ``profile-failed`` if nothing could be measured, ``profile-missing`` if every
            choice lacks a measurement, ``profile-degrees`` if no profiled choice fits a stage of
            one device, ``profile-paper`` without paper statistics, ``profile-windows`` in the
            default mode if there is nothing else, ``profile-no-times`` without times of an
            accelerator.
    """
    usable, microbatch_size = _usable(profile, question, like), question.microbatch_size
    compiled = [c for c in profile.verified if c.microbatch_size == microbatch_size]
    apart = np.zeros((profile.graph.num_layers, profile.graph.num_layers + 1), np.int64)
    for number, config in enumerate(compiled):
        apart[config.first, config.stop] = number + 1
    kinds = Kinds(apart) if like is None else Kinds(apart, like.kinds)
    anew = {config.choice for config in compiled}
    every = [choice for found in usable.values() for choice in found]
    tables = {each: _like(like, each) for each in every if like and each not in anew}
    predict = _Predicting(profile, question, kinds, least, with_times)
    tables |= predict([choice for choice in every if choice not in tables], anew)

    def put_together(row: int) -> dict[int, np.ndarray]:
        return {
            d: np.stack([kinds.renumber(tables[each][row], tables[each][-1]) for each in found])
            for d, found in usable.items()
        }

    return SearchProblem(
        question.cluster,
        profile.graph.num_layers,
        {d: tuple(found) for d, found in usable.items()},
        put_together(0),
        question.space,
        question.limit_bytes,
        put_together(1) if with_times else None,
        put_together(2) if with_times else None,
        question.num_microbatches if with_times else 1,
        kinds.of,
    )


def _usable(
    profile: Profile, question: PlanQuestion, like: SearchProblem | None
) -> dict[int, list[StageChoice]]:
    """Return the choices that stages of the question may have, by number of devices."""
    cluster, microbatch_size = question.cluster, question.microbatch_size
    degrees = question.space.all_degrees(cluster)
    usable: dict[int, list[StageChoice]] = {}
    for choice in _choices(profile, question, degrees, like):
        if choice.num_devices in degrees and microbatch_size % choice.data_parallel == 0:
            usable.setdefault(choice.num_devices, []).append(choice)
    if not usable and profile.failures:
        raise ProfileError.of(
            f"no measurement succeeded: {said_once(profile.failures)}.", "profile-failed"
        )
    if not usable:
        raise ProfileError.of(
            f"the profile has no choice for stages on {degrees} devices at "
            f"microbatch_size={microbatch_size}; "
            f"profile for cluster {cluster}.",
            "profile-degrees",
        )
    return usable


_Tables = tuple[np.ndarray, ...]
"""Of a choice: bytes (K, S), and perhaps seconds (S,) and those of an update, then the numbers of
stages (L, L + 1) that it was made with."""


def _like(problem: SearchProblem, choice: StageChoice) -> _Tables:
    d = choice.num_devices
    number = problem.choices[d].index(choice)
    times = [each[d][number] for each in (problem.seconds, problem.update_seconds) if each]
    return problem.cost[d][number], *times, problem.kinds


class _Predicting:
    """The prediction of all stages of a problem: bytes and seconds, by choice."""

    def __init__(
        self, profile: Profile, question: PlanQuestion, kinds: Kinds, least: bool, with_times: bool
    ):
        self._question, self._kinds, self._least = question, kinds, least
        self._num_layers, self._paper = profile.graph.num_layers, None
        self._is_bound = profile.is_lower_bound
        if question.mode == "default":
            self._predictor = AdditivePredictor(profile)
        else:
            self._paper = paper_predictor(profile).rows(question.num_microbatches)
        layout = question.cluster.layout
        self._times = TimePredictor(profile, layout, least) if with_times else None
        self._mixtures: dict[tuple[int, ...], tuple[np.ndarray, Mixed]] = {}
        self._may_be = ~empty_stages(self._num_layers)
        self._measured = {choice for choice, _ in profile.windows}

    def __call__(
        self, choices: Sequence[StageChoice], compiled: Collection[StageChoice]
    ) -> dict[StageChoice, _Tables]:
        """Predict the stages of every choice. Mixtures of the same two choices are predicted
        together, except where a stage of one is compiled."""
        if choices and (merge := self._question.merge_layers) is not None:
            fewest = min(choices, key=lambda choice: choice.num_devices)
            self._may_be &= ~_blocked(self._num_layers, merge, self._bytes(fewest)[0])
        self._kinds.look(self._may_be, *map(self._allowed, choices))
        found, mixtures = dict[StageChoice, _Tables](), dict[StageChoice, list[StageChoice]]()
        for choice in choices:
            first, *rest = choice.measured
            if rest and choice not in compiled and choice not in self._measured:
                mixtures.setdefault(first, []).append(choice)
            else:
                found[choice] = self._alone(choice)
        for alike in mixtures.values():
            found |= self._mixed(alike)
        return found

    def _alone(self, choice: StageChoice) -> _Tables:
        kinds, rows = self._kinds, self._bytes(choice, self._kinds)
        of, times = kinds.of, list[np.ndarray]()
        if self._times is not None:
            table = self._times.table(choice, self._question.microbatch_size)
            times = [table.forward + table.backward, table.update]
            kinds.look(*times)
        found = kinds.renumber(rows, of), *map(kinds.once, times)
        rows, *times = self._with_offload(choice, *found)
        return self._possible(choice, rows), *times, kinds.of

    def _mixed(self, choices: Sequence[StageChoice]) -> Iterator[tuple[StageChoice, _Tables]]:
        kinds, size, first = self._kinds, self._question.microbatch_size, choices[0]
        # First once more, with all parts that the mixtures have in common looked at.
        self._bytes(first.measured[-1], kinds)
        self._predictor.look_at_parts(first, size, kinds)
        if self._times is not None:
            self._times.look_at_parts(first, size, kinds)
        num_full = tuple(num_full_layers(choice.remat) for choice in choices)
        of, mixed = self._mixtures.get(num_full, (None, None))
        if mixed is None or of is not kinds.of:
            mixed = Mixed.of_kinds(kinds, np.array(num_full))
            self._mixtures[num_full] = kinds.of, mixed
        times, rows = list[np.ndarray](), self._bytes(first, kinds, mixed)
        if self._times is not None:
            table = self._times.mixtures(first, size, mixed)
            times = [table.forward + table.backward, table.update]
        rows, *times = self._with_offload(first, rows, *times, mixed=mixed)
        for n, choice in enumerate(choices):
            yield choice, (self._possible(choice, rows[:, n]), *(t[n] for t in times), kinds.of)

    def _with_offload(
        self, choice: StageChoice, rows: np.ndarray, *times: np.ndarray, mixed: Mixed | None = None
    ) -> tuple[np.ndarray, ...]:
        """Return bytes and seconds with the copies of what rests on hosts, without stages that keep
        more there than there is. Of bounds, a stage may have all of the host's memory, and its
        activations take no time, as those of the last stages never go; else its devices' share."""
        question, d = self._question, choice.num_devices
        ways, link = question.offload_of(d), Target.load(question.cluster.target).rates
        if not ways or link is None:
            return rows, *times
        size = question.microbatch_size
        state, kept = self._predictor.resting_bytes(choice, size, self._kinds, mixed)
        state, kept = state * ("optimizer" in ways), kept * ("activations" in ways)
        in_seconds, out_seconds = (
            1 / each.bytes_per_second.value for each in (link.host.to_device, link.host.to_host)
        )
        if (host := question.host_memory_bytes) is not None:
            host = host if self._is_bound else host * d // min(question.cluster.nodes)
            most = self._most_stages
            there = on_host_by_position(question.schedule, question.num_microbatches, most)
            held = np.stack([state + number * kept for number in there])
            rows = np.where(d * held > host, NEVER, rows)
        if times:
            both = (in_seconds, out_seconds)
            copies = kept * (max(both) if link.host.duplex else sum(both)) * (not self._is_bound)
            times = np.maximum(times[0], copies), times[1] + state * sum(both)
        return rows, *times

    @property
    def _most_stages(self) -> int:
        return min(self._num_layers, self._question.cluster.num_devices)

    def _possible(self, choice: StageChoice, rows: np.ndarray) -> np.ndarray:
        may_be = self._kinds.once(self._may_be & self._allowed(choice))
        return np.where(may_be, rows, NEVER)

    def _allowed(self, choice: StageChoice) -> np.ndarray:
        """Return which stages a fixed plan leaves to a choice, (L, L + 1)."""
        fixed = self._question.fixed
        return self._may_be if fixed is None else fixed.allowed(choice, self._num_layers)

    def _bytes(
        self,
        choice: StageChoice,
        kinds: Kinds | None = None,
        mixed: Mixed | None = None,
    ) -> np.ndarray:
        """Return the bytes of every stage at every position, (K, L, L + 1); with ``kinds`` (K, S),
        of mixtures (K, n, S)."""
        question = self._question
        if self._paper is None:
            resting = question.offload_of(choice.num_devices)
            positions = occupancy_by_position(
                question.schedule,
                question.num_microbatches,
                self._most_stages,
                "activations" in resting,
            )
            return self._predictor.peaks(
                choice,
                question.microbatch_size,
                positions,
                self._most_stages,
                least=self._least,
                kinds=kinds,
                mixed=mixed,
                optimizer_rests="optimizer" in resting,
            )
        rows = self._paper(choice)
        if kinds is None:
            return rows
        kinds.look(rows)
        return kinds.once(rows)


def stage_choices(
    profile: Profile, remat: Remat | None = None, fixed: FixedPlan | None = None
) -> Sequence[StageChoice]:
    """Return the choices that stages of plans may have: those measured and mixtures of them; with
    ``remat`` those that recompute so, with ``fixed`` those that the plan leaves open."""
    num_layers, measured = profile.graph.num_layers, profile.choices
    known = [*with_mixtures(measured, num_layers), *(fixed.mixtures(measured) if fixed else ())]
    if remat is not None and num_full_layers(remat):
        mixed = {replace(choice, remat=remat) for choice in measured}
        known = sorted(each for each in mixed if {*each.measured} <= {*measured})
    return [
        choice
        for choice in dict.fromkeys(known)
        if remat in (None, choice.remat)
        and (fixed is None or fixed.allowed(choice, num_layers).any())
    ]


def _choices(
    profile: Profile,
    question: PlanQuestion,
    degrees: Collection[int],
    like: SearchProblem | None = None,
) -> Sequence[StageChoice]:
    """Return the choices of a mode that the profile can predict; one that lacks a measurement is
    done without, as its warnings say."""
    microbatch_size = question.microbatch_size
    choices = stage_choices(profile, question.remat, question.fixed)
    if question.mode == "paper":
        known = paper_predictor(profile).choices(degrees)
        return (
            [choice for choice in known if choice in profile.choices]
            if profile.measurements
            else known
        )
    if not profile.measurements and profile.paper is not None:
        raise ProfileError.of(
            "the profile holds executed runs of the paper's kind alone, which the default "
            "predictor cannot use; plan with --mode paper, or "
            "profile with --backend compile.",
            "profile-windows",
        )
    if not profile.failures:
        return choices
    predictor = AdditivePredictor(profile)
    fitting = [
        choice
        for choice in choices
        if choice.num_devices in degrees and microbatch_size % choice.data_parallel == 0
    ]
    sure = {choice for known in like.choices.values() for choice in known} if like else set()
    known = tuple(
        choice
        for choice in fitting
        if choice in sure or predictor.can_predict(choice, microbatch_size)
    )
    if fitting and not known:
        predictor.table(fitting[0], microbatch_size)  # raises, and says what is missing
    return known


def plan_of(profile: Profile, question: PlanQuestion, stages: Iterable[Stage]) -> Plan:
    """Return stages as a plan that answers a question, with what the question has rest on hosts."""
    return profile.plan(
        question.cluster,
        _offloading(question, [*stages]) if question.offload else stages,
        global_batch_size=question.global_batch_size,
        num_microbatches=question.num_microbatches,
        schedule=question.schedule,
    )


def _offloading(question: PlanQuestion, stages: Sequence[Stage]) -> Iterator[Stage]:
    """Yield the stages with what rests on their hosts; activations only where some can."""
    table = make_schedule(question.schedule, len(stages), question.num_microbatches)
    resting = {s for s, _ in table.resting}
    for s, stage in enumerate(stages):
        ways = question.offload_of(stage.num_devices)
        yield replace(stage, offload=tuple(e for e in ways if e != "activations" or s in resting))


def paper_predictor(profile: Profile) -> Any:
    """Return the paper's predictor over the runs that a profile holds.

    Raises:
        ProfileError: ``profile-paper`` if it has none.
    """
    return REGISTERED["predictor of stages"]["paper"](profile)


def _blocked(num_layers: int, merge: int | None, alone: np.ndarray | None) -> np.ndarray:
    """Return which stages cannot be, (L, L + 1): empty ones, and those that cut a merged layer.

    Args:
        merge: Layers that the merger leaves.
        alone: Bytes of every stage on the fewest devices, with one micro-batch in flight: M_i and
            M_a are read from it.
    """
    blocked = empty_stages(num_layers)
    if merge is not None:
        bounds = REGISTERED["layer merger"]["paper"](alone, merge)
        inside = np.array([cut not in bounds for cut in range(num_layers + 1)])
        blocked |= inside[:num_layers, None] | inside[None, :]
    return blocked
