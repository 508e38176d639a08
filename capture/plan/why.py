"""What a search has to say about its answer."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from capture import documents
from capture.plan.prediction import Prediction, StepTime, Verified
from capture.plan.stage import Stage, StageRow
from capture.quantities import counted, format_bytes, format_seconds

#: Of a point of a front, what files always have.
_ALWAYS = ("peak_bytes", "step_seconds", "bound_fraction", "stages")


@dataclass(frozen=True)
class PlanNotes:
    """The hash, prediction, verification and step time of a front's plan, as a saved plan has them.

    Attributes:
        model_hash, prediction, verification, time: The fields of ``Plan`` with these names.
    """

    model_hash: str
    prediction: Prediction
    verification: Verified | None = None
    time: StepTime | None = None


@dataclass(frozen=True)
class FrontPoint:
    """A plan that no other one beats both in memory and in time.

    Attributes:
        peak_bytes: Peak memory per device, predicted; compiled where ``within_fraction`` is known.
        step_seconds: Seconds of a step as the search estimates them, transfers included; simulated
            if compiled.
        bound_fraction: No plan of the same peak is faster by more, by a bound that leaves transfers
            out; of a profile by the closed form without them.
        stages: Layers and degrees.
        schedule, num_microbatches: Schedule and micro-batches; where left out, those of the plan
            that has the front.
        within_fraction: Of a compiled plan, where bounds were searched: no plan that fits is below
            it by more in both, compiled bytes and seconds, these by a bound that leaves transfers
            out; 0 if none is. None where it is not known.
        name: ``fastest``, ``knee`` or ``lowest memory`` of the default answer; else empty.
        notes: Of a compiled plan, so that it can be used without another search
            (``Plan.of_front``).
    """

    peak_bytes: int
    step_seconds: float
    bound_fraction: float = 0.0
    stages: tuple[Stage, ...] = ()
    schedule: str = ""
    num_microbatches: int = 0
    within_fraction: float | None = None
    name: str = ""
    notes: PlanNotes | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return the point's fields as JSON, without those that are not said."""
        left_out = {f.name for f in fields(self) if getattr(self, f.name) == f.default} - {*_ALWAYS}
        written = documents.fields_of(self)
        return {name: value for name, value in written.items() if name not in left_out}


@dataclass(frozen=True)
class Front:
    """The plans between which one chooses.

    Attributes:
        points: Smallest peak first.
        complete: Whether every such plan is there; else they are a sample with both ends.
        extrapolated: Whether the micro-batch size was not profiled.
        seconds: Time that the search took.
    """

    points: tuple[FrontPoint, ...]
    complete: bool
    extrapolated: bool = False
    seconds: float = 0.0

    @property
    def names(self) -> dict[str, FrontPoint]:
        """The points by name; those without one by their number, where the smallest is 1."""
        return {p.name.replace(" ", "-") or str(n): p for n, p in enumerate(self.points, 1)}

    @property
    def compiled(self) -> bool:
        """Whether the points are compiled plans, with how far each is proven."""
        return all(point.within_fraction is not None for point in self.points)


@dataclass(frozen=True)
class CompiledPlans:
    """The plans that were compiled to settle an answer.

    Attributes:
        num_plans: Number of plans that were compiled.
        settled: Whether no other plan is predicted to be better; of the answer with named plans, by
            more than 1 %.
        summary: The same in words.
    """

    num_plans: int
    settled: bool
    summary: str


@dataclass(frozen=True)
class Bracket:
    """Bounds of the lowest peak memory, or of the step, as they were known at some time.

    Attributes:
        seconds: Since the search began.
        num_compiled: Stages that were compiled by then.
        least_bytes: No plan of the space needs less.
        most_bytes: The best plan so far needs no more: compiled, or as tracing expects.
        compiled: Whether it is compiled.
        least_step_seconds, most_step_seconds: Of a step, by a bound that leaves transfers out, and
            of the fastest plan so far, simulated, once one is compiled: where the fastest plan that
            fits is searched for; then the bytes are those of that plan.
        num_points: Compiled plans of a front, where that is searched for; then the bytes are of its
            smallest plan, and the seconds of its fastest.
        within_fraction: How near these are to the front, as in ``Proven``.
        expected_step_seconds: Until one is compiled, of the plan that is estimated to be fastest.
    """

    seconds: float
    num_compiled: int
    least_bytes: int
    most_bytes: int
    compiled: bool
    least_step_seconds: float | None = None
    most_step_seconds: float | None = None
    num_points: int | None = None
    within_fraction: float | None = None
    expected_step_seconds: float | None = None

    def __str__(self) -> str:
        begins = f"{self.seconds:.{1 if self.seconds < 100 else 0}f} s"
        begins += f", {self.num_compiled} compiled" if self.num_compiled else ""
        return f"{begins}: {self.words}"

    @property
    def words(self) -> str:
        """The best plan so far, and the bound that no plan is better than."""
        known = [self._peak, self._step]
        if self.num_points is None:
            known = [self._step or self._peak]
        elif self.within_fraction is not None and self.within_fraction < 1:
            known.append(f"the front is known to {self.within_fraction:.1%}")
        if self.num_points:
            known = [counted(self.num_points, "plan"), *known]
        return "; ".join(known)

    @property
    def _peak(self) -> str:
        least, most = map(format_bytes, (self.least_bytes, self.most_bytes))
        about = "" if self.compiled else "about "
        return f"peak memory: lower bound {least}, best plan so far {about}{most}"

    @property
    def _step(self) -> str:
        """The step's best time and lower bound in words; empty if peaks alone are searched for."""
        least, most = self.least_step_seconds, self.most_step_seconds
        if least is None:
            return ""
        bound = fastest_possible(least)
        if self.expected_step_seconds is not None:
            return f"best estimate {format_seconds(self.expected_step_seconds)}; {bound}"
        if most is None:
            return bound
        nbytes = f", {format_bytes(self.most_bytes)}" if self.num_points is None else ""
        return f"best so far {format_seconds(most)}{nbytes}; {bound}"

    def to_json(self) -> dict[str, Any]:
        """Return the bracket's fields as JSON, without those that were not searched for."""
        return documents.but_none(self)


#: A plan that may be larger or slower by this part than another one is not called proven.
PROVES_NOTHING = 1.0


def fastest_possible(least_seconds: float) -> str:
    """Return in words what no plan is faster than; a bound of 0 seconds proves nothing."""
    if least_seconds > 0:
        return f"no plan is faster than {format_seconds(least_seconds)}"
    return "nothing is proven of the least seconds"


def distance_text(within: float | None) -> str:
    """Return by which part a better plan may beat one, in words for a cell of a table.

    Example:
        >>> [distance_text(within) for within in (0.0, 0.17, 95.71, None)]
        ['proven', '17.0%', 'not proven', 'not proven']
    """
    if within is None or within > PROVES_NOTHING:
        return "not proven"
    return f"{within:.1%}" if within else "proven"


@dataclass(frozen=True)
class ByLayers:
    """A lower bound of the step from estimates that compiled layers correct: no proof, but nearer.

    Attributes:
        least_step_seconds: Lower bound of the step of the plans that fit.
        num_layers: Layers that were compiled alone for it, or taken from the store.
        error_fraction: Largest part by which estimates were above what was compiled: those of its
            kind are less by it.
    """

    least_step_seconds: float
    num_layers: int
    error_fraction: float

    def within_fraction(self, step_seconds: float) -> float:
        """Return by which part a step takes longer than the fastest one, at most; 0 or more."""
        return max(step_seconds / self.least_step_seconds - 1, 0.0)


@dataclass(frozen=True)
class Proven:
    """The proven distance of a compiled plan from the least peak of its space, in compiled bytes.

    Attributes:
        within_fraction: No plan of the space needs less than its peak by more; 0 if none needs
            less. Of the fastest plan the same of its step; of a front: whichever plan fits, one of
            the compiled ones is larger and slower than that by no more. None where nothing was
            compiled, so that nothing is known of that.
        trail: Every bracket, the last one last.
        ended: Why the search ended: ``proven``; ``within`` what was asked; ``memory``: nothing
            fits; ``fits``: a plan does, and any was asked for; ``compiles``, ``seconds``: so many
            were allowed; ``interrupted``; ``below``: no plan needs less than another answer;
            ``search``: it names a compiled plan again; ``missed``: plans that were expected to be
            better were not, one after the other, and others still are.
        refuted: Per lower bound that a compiled stage was below, a sentence that asks to report it.
            What is proven rests on no bound of its kind, and the trail is that from then on.
        by_layers: The same of the fastest plan by estimates; None where there is none.
    """

    within_fraction: float | None
    trail: tuple[Bracket, ...]
    ended: str = "proven"
    refuted: tuple[str, ...] = ()
    by_layers: ByLayers | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, without empty ``refuted`` and ``by_layers``."""
        return documents.but_empty(self, "refuted", "by_layers")


@dataclass(frozen=True)
class Why:
    """The reason why a plan was chosen, or why none fits.

    Attributes:
        summary: The reason in words.
        bottleneck_stage: The stage that needs most, of a plan that was found.
        bottleneck_category: The category of most of that stage's bytes.
        num_choices: Ways of using devices that were searched.
        code: A code for what is missing, where nothing fits.
        memory_limit_bytes: The limit that is missed.
        least_peak_bytes: The least limit that fits; None where none does, or it is not known.
        stage_id: The stage that needs it.
        least_state_bytes: Bytes that every plan needs for its state alone, if that is too much.
        front: Plans of the front of memory and time, if asked for.
        verified: How plans were compiled, if any were.
        proven: How near the plan is to the best, where bounds were searched.
        uncompiled: Why the plan was not compiled, where it was to be.
        endless_step_seconds: Seconds that are expected of the fastest plan if memory were endless,
            where it is faster and needs more than there is.
    """

    summary: str = ""
    bottleneck_stage: int | None = None
    bottleneck_category: str | None = None
    num_choices: int | None = None
    code: str | None = None
    memory_limit_bytes: int | None = None
    least_peak_bytes: int | None = None
    stage_id: int | None = None
    least_state_bytes: int | None = None
    front: Front | None = None
    verified: CompiledPlans | None = None
    proven: Proven | None = None
    uncompiled: str | None = None
    endless_step_seconds: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are known; of a limit that is missed, what is not as well."""
        missing = ("memory_limit_bytes", "least_peak_bytes", "stage_id") * (self.code is not None)
        written = documents.fields_of(self)
        return {n: v for n, v in written.items() if v is not None or n in missing}

    @property
    def found(self) -> str:
        """The way in which the answer was found, for people: what was compiled, and what is proven;
        empty where it is a prediction alone."""
        said = self.uncompiled or ("" if self.verified is None else self.verified.summary)
        if self.proven is None or not self.proven.trail:
            return said
        first, last = self.proven.trail[0], self.proven.trail[-1]
        trail = f"{first}." if last is first else f"First: {first}. Last: {last}."
        return f"{said} {trail}".lstrip()

    @classmethod
    def read(cls, data: object, path: str = "") -> Why:
        """Read the reason that ``to_json`` wrote.

        Raises:
            FieldError: naming the field that is wrong.
        """
        row = documents.read(data, _Why, path)
        front = None
        if row.front is not None:
            points = (point.read for point in row.front.points)
            front = Front(**{**vars(row.front), "points": tuple(points)})
        return cls(**{**vars(row), "front": front})


@dataclass(frozen=True)
class _Point(FrontPoint):
    """A point of a front, with stages as files have them."""

    stages: tuple[StageRow, ...] = ()  # type: ignore[assignment]

    @property
    def read(self) -> FrontPoint:
        return FrontPoint(**{**vars(self), "stages": tuple(row.stage for row in self.stages)})


@dataclass(frozen=True)
class _Front(Front):
    points: tuple[_Point, ...]


@dataclass(frozen=True)
class _Why(Why):
    front: _Front | None = None
