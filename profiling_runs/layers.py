"""Profile the layers of a model one by one: the micro-batch sizes that fit, what every layer needs
at some of them, and what follows for the others (``capture.measured.layer_profile``).

Source: Li et al. 2022 (Harmony), 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from capture.errors import ProfileError, plain
from capture.machine.links import Layout
from capture.machine.target import Target
from capture.measured.layer_passes import Pass, PassProfile
from capture.measured.layer_profile import LayerProfile
from capture.measured.store import Store
from capture.plan.packs import PacksPlan
from capture.profiler.asked import Direction, LayerNeeds, LayerPass
from capture.step.times import TimeModel
from profiling_runs.batch import Progress, Watch
from profiling_runs.jobs import Job, Setting
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.pools.where import Where
from profiling_runs.require import Measurer, machine_of_workers
from profiling_runs.slow_start import SlowStart, slow_start

if TYPE_CHECKING:
    from capture.profiler.layers import LayerBackend

#: Kinds of jobs.
TRIALS, SIZES, UPDATES = "largest sizes", "layers", "updates on the host"
ADDS = "sums of gradients"
#: Bytes that an update on the host reads and writes in a second, where nothing is executed.
UPDATE_BYTES_PER_SECOND = 20e9
UPDATE_SOURCE = (
    "assumed: 20 GB/s, as Harmony's authors measured Adam in PyTorch on their hosts (28 bytes of "
    "each of 30.7 million parameters in 42.3 ms: the shipped profile of GPT2)"
)
PASSES: tuple[Pass, Pass] = ("forward", "backward")
NOTE = (
    "what is backward includes the forward pass that is computed again; the first layer's input is "
    "the batch; b_bytes are weights that belong to earlier layers"
)


def profile_layers(
    question: LayersQuestion,
    *,
    store: Store | None = None,
    where: Where = Where(),
    progress: Progress = lambda kind, done, total: None,
    watch: Watch = lambda event: None,
) -> LayerProfile:
    """Measure every layer alone, at micro-batch sizes up to the largest that fits.

    Args:
        question, store, where, progress, watch: As for ``profile``.

    Returns:
        The profile. Where one example is too much for a layer, it has that size alone: no plan will
        fit.

    Raises:
        ProfileError: ``layers-failed`` if a layer cannot be measured with one example.
        WorkloadError, TracingError: if the model cannot be traced.
    """
    measured = _Measured(question, _opened(question, store, where, watch), progress)
    with measured.measurer.keeping_workers():
        return measured.profile()


def _opened(
    question: LayersQuestion, store: Store | None, where: Where, watch: Watch
) -> Measurer[LayerBackend]:
    """Return what measures layers; its backend traces the model and knows keys."""
    from capture.profiler.layers import LayerBackend

    asked, machine = None, None
    if question.spec is not None:
        asked = Setting(question.spec, target=question.target, executes=question.executes)
        if question.executes and not where.here:
            machine = machine_of_workers(asked, where)
    backend = LayerBackend(
        question.task,
        question.num_layers,
        store,
        target=None if question.executes else Target.load(question.target),
        machine=machine,
        memory_limit_bytes=question.memory_limit_bytes,
        remat=question.remat,
    )
    return Measurer(backend, asked, where, watch=watch)


def with_model_hash(plan: PacksPlan, question: LayersQuestion) -> PacksPlan:
    """Return the plan with the hash of its model, traced for it where the plan has none: its sizes
    may be interpolated."""
    if plan.model_hash:
        return plan
    from capture.tracing import trace

    size = plan.configuration.backward.microbatch_size
    graph = trace(question.task, size, unmarked_layers=plan.num_layers).graph
    return replace(plan, model_hash=graph.model_hash)


@dataclass(eq=False)
class _Measured:
    """The layers of a model while they are measured, and what each needs, by key."""

    question: LayersQuestion
    measurer: Measurer[LayerBackend]
    progress: Progress
    _needs: dict[str, LayerNeeds] = field(default_factory=dict)
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.measurer.progress = self._told

    @property
    def _backend(self) -> LayerBackend:
        return self.measurer.backend

    def _told(self, kind: str, done: int, total: int) -> None:
        """Tell how far the jobs of a kind are, those of earlier batches included."""
        before, count = self._counts.get(kind, (0, 0))
        if not done:  # another batch
            before, count = self._counts[kind] = before + count, total
        self.progress(kind, before + done, before + total)

    def _require(self, kind: str, wanted: Iterable[LayerPass]) -> None:
        """Measure what neither this object nor the store has; failures are kept."""
        keys = {self._backend.key(what): what for what in wanted}
        jobs = [Job(key, what, "layer", kind) for key, what in keys.items()]
        self._needs |= self.measurer.measured(jobs, LayerNeeds)

    def _failure(self, what: LayerPass) -> str:
        """Return why a pass could not be measured."""
        return plain(self.measurer.errors[self._backend.key(what)])

    def _of(self, what: LayerPass) -> LayerNeeds | None:
        return self._needs.get(self._backend.key(what))

    # ---- sizes -----------------------------------------------------------------------------------

    def _all(self, direction: Direction, size: int) -> list[LayerPass]:
        """Return the passes of all layers in one direction at a micro-batch size."""
        return [LayerPass(i, direction, size) for i in range(self._backend.graph().num_layers)]

    def _entering(self, size: int) -> list[int]:
        from capture.profiler.layers import input_bytes

        return input_bytes(self._backend.graph(size))

    def _fits(self, which: Pass, size: int) -> bool:
        limit, entering = self.question.limit_bytes, self._entering(size)
        for what, per_example in zip(self._all(which, size), entering, strict=True):
            needs = self._of(what)
            if needs is None or needs.nbytes is None or needs.failure:
                return False
            if limit is not None and needs.nbytes + size * per_example > limit:
                return False
        return True

    def _largest(self) -> dict[Pass, SlowStart]:
        """Find the largest micro-batch size that fits, per direction. Both directions are tried
        side by side, so that all workers have work."""
        found: dict[Pass, SlowStart] = {}
        most, stride = self.question.most, self.question.step_size
        searches = {which: slow_start(most, stride) for which in PASSES}
        trials = {which: next(search) for which, search in searches.items()}
        while trials:
            wanted = [what for which, size in trials.items() for what in self._all(which, size)]
            self._require(TRIALS, wanted)
            for which, size in list(trials.items()):
                try:
                    trials[which] = searches[which].send(self._fits(which, size))
                except StopIteration as end:
                    found[which] = end.value
                    del trials[which]
        return found

    def _sizes(self, found: Mapping[Pass, SlowStart]) -> dict[Pass, list[int]]:
        """Return the micro-batch sizes to profile per direction: 1, multiples of the stride, and
        the tried ones that fit. Forward has those of backward as well."""
        sizes: dict[Pass, list[int]] = {}
        for which in ("backward", "forward"):
            largest = max(1, found[which].largest)
            tried = [size for size in found[which].trials if size <= largest]
            also = [size for size in sizes.get("backward", []) if size <= largest]
            stride = self.question.step_size
            strided = range(stride, largest + 1, stride)
            sizes[which] = sorted({1, *strided, *tried, *also})
        return sizes

    # ---- the profile -----------------------------------------------------------------------------

    def profile(self) -> LayerProfile:
        from capture.profiler.layers import REFERENCE_SIZE, cast_bytes, weight_bytes

        question, backend = self.question, self._backend
        found = self._largest()
        sizes = self._sizes(found)
        wanted = [what for which in PASSES for u in sizes[which] for what in self._all(which, u)]
        self._require(SIZES, wanted)
        every = sorted({u for which in PASSES for u in sizes[which]})
        entering = [max(of) for of in zip(*map(self._entering, every), strict=True)]
        own, others = weight_bytes(backend.graph())
        state = backend.state_bytes()
        forward = self._pass("forward", sizes["forward"], entering)
        backward = self._pass("backward", sizes["backward"], entering)
        # One example meets no other: looked at are two and more, also where no more fit.
        apart = 2, next((u for u in every if u > 2), 3)
        return LayerProfile(
            str(question.spec) if question.spec else type(question.task).__name__,
            backend.graph().num_layers,
            forward,
            _with_recompute(backward, forward),
            tuple(entering),
            tuple(own),
            tuple(others),
            tuple(state),
            self._update_seconds(own, state),
            add_seconds=self._add_seconds(own, others),
            note=NOTE,
            source=self._source,
            workload=question.spec,
            model_hashes={u: backend.graph(u).model_hash for u in every},
            coupled=backend.coupled(*apart) if every[-1] > 1 else "",
            shared=backend.shared(),
            batch=backend.batch(),
            summary_bytes=backend.summary_bytes(),
            made={
                **backend.provenance,
                "limit_bytes": question.limit_bytes,
                "stride": question.step_size,
                "trials": {which: list(found[which].trials) for which in PASSES},
                "largest": {which: found[which].largest for which in PASSES},
                **({"remat": question.remat} if question.remat else {}),
                "failures": sorted(set(map(plain, self.measurer.errors.values()))),
            },
            casts=cast_bytes(backend.layers(REFERENCE_SIZE).traced),
        )

    def _pass(self, which: Pass, sizes: Sequence[int], entering: Sequence[int]) -> PassProfile:
        kept, times, memories = [], [], []
        for size in sizes:
            rows = [self._of(what) for what in self._all(which, size)]
            known = [row for row in rows if row is not None and row.nbytes is not None]
            seconds = [self._seconds(row) for row in known]
            if len(known) < len(rows) or None in seconds:
                if size == 1:
                    self._refuse(which, rows)
                continue
            kept.append(size)
            times.append(tuple(s for s in seconds if s is not None))
            inputs = [size * nbytes for nbytes in entering]
            memories.append(tuple((r.nbytes or 0) + x for r, x in zip(known, inputs, strict=True)))
        return PassProfile(tuple(kept), tuple(times), tuple(memories))

    def _refuse(self, which: Pass, rows: Sequence[LayerNeeds | None]) -> None:
        wrong = next(i for i, row in enumerate(rows) if row is None or self._seconds(row) is None)
        row = rows[wrong]
        said = row.failure if row else self._failure(LayerPass(wrong, which, 1))
        raise ProfileError.of(
            f"layer {wrong} cannot be measured {which} with one example: {said}. Cut it into "
            "smaller ones, give the device more memory, or profile for a target (--backend "
            "compile), which executes nothing.",
            "layers-failed",
        )

    def _seconds(self, needs: LayerNeeds) -> float | None:
        if needs.work is None:
            return needs.seconds
        rates = Target.load(self.question.target).rates
        assert rates is not None, "checked"
        return TimeModel(rates, Layout(1)).program_seconds(needs.work)

    def _update_seconds(self, own: Sequence[int], state: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of each layer's update on the host: measured, or the bytes moved
        (weights, gradient and state read, weights and state written) over the rate."""
        if not self.question.executes:
            rate = self.question.update_bytes_per_second or UPDATE_BYTES_PER_SECOND
            return tuple((3 * w + 2 * k) / rate for w, k in zip(own, state, strict=True))
        return self._executed("update", UPDATES, own)

    def _add_seconds(self, own: Sequence[int], others: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds to add each layer's gradient to the sum: measured, or the bytes moved
        (gradient and sum read, sum written) over the rate."""
        read = [sum(both) for both in zip(own, others, strict=True)]
        if self.question.executes:
            return self._executed("add", ADDS, read)
        rates = Target.load(self.question.target).rates
        assert rates is not None, "checked"
        return tuple(3 * nbytes / rates.reached_bytes_per_second for nbytes in read)

    def _executed(
        self, direction: Literal["update", "add"], phase: str, params: Sequence[int]
    ) -> tuple[float, ...]:
        """Return the measured seconds of ``direction`` per layer; 0 for one without parameters."""
        asked = [what for what in self._all(direction, 1) if params[what.layer]]
        self._require(phase, asked)
        seconds = [0.0] * len(params)
        for what in asked:
            needs = self._of(what)
            if needs is None or needs.seconds is None:
                raise ProfileError.of(
                    f"the {direction} of layer {what.layer} cannot be measured: "
                    f"{self._failure(what)}.",
                    "layers-failed",
                )
            seconds[what.layer] = needs.seconds
        return tuple(seconds)

    @property
    def _source(self) -> str:
        question, facts = self.question, self._backend.provenance
        if question.executes:
            return f"executed on {facts['device_kind']}; updates on the host of the workers"
        given = question.update_bytes_per_second
        rate = UPDATE_SOURCE if given is None else f"given: {given:g} bytes/s"
        return f"compiled for {question.target}, seconds by its rates; updates on the host {rate}"


def _with_recompute(backward: PassProfile, forward: PassProfile) -> PassProfile:
    """Return the backward passes, none of them less than the forward pass that it recomputes: a
    compiler leaves out what no gradient reads, and clocks are not exact."""

    def most(rows: Any, others: Any) -> Any:
        of = dict(zip(forward.u, others, strict=True))
        return tuple(
            tuple(map(max, row, of[size])) if size in of else row
            for size, row in zip(backward.u, rows, strict=True)
        )

    return PassProfile(
        backward.u, most(backward.time, forward.time), most(backward.memory, forward.memory)
    )
