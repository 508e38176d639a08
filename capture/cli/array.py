"""Plans of arrays of models (mu-TWO): what ``capture plan --system mutwo`` makes, and what
``capture run``, ``explain``, ``report`` and ``diff`` do with them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capture import environment
from capture.cli import asked
from capture.cli import options as shared
from capture.cli.diff import compared
from capture.cli.options import Asks
from capture.cli.output import SearchEnd, outcome_of, parts_text, say, table, write_files
from capture.cli.question_file import noted
from capture.cli.report import shown
from capture.cli.whole import close
from capture.documents import read
from capture.errors import PlanError, Violation
from capture.machine.target import Target
from capture.model.trust import remember
from capture.model.workload import WorkloadSpec
from capture.options import Option, options_of, taken
from capture.plan.array import ArrayPlan, Member
from capture.profiler.asked import ArrayShape
from capture.quantities import counted, format_bytes, format_seconds
from capture.report.documents import ExplainReport, PageReport, PeakRow, PlanNeeds, VerifyReport
from profiling_runs.arrays import array_profiles
from recommender.mutwo import ArrayQuestion, plan_array
from recommender.mutwo.problem import AllPrograms, SubArrayKind, WrittenWay
from recommender.mutwo.search import ArrayResult

if TYPE_CHECKING:
    from capture.report.array import ArrayFacts


@dataclass(frozen=True)
class Varied:
    """The values of one option in which models differ: ``learning_rate=0.001,0.0003``."""

    name: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Varied:
        """Read the values from ``NAME=V,V``."""
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier():
            raise argparse.ArgumentTypeError(f"{text!r} is not name=value,value,...")
        try:
            return cls(name, tuple(map(float, values.split(","))))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{values!r} are not numbers with commas") from None

    def __str__(self) -> str:
        return f"{self.name}={','.join(map(str, self.values))}"


#: What it reads; ``--global-batch`` is that of one model.
OPTIONS = (
    shared.TARGET,
    *options_of(ArrayQuestion),
    *shared.STORE,
    Option(
        "models",
        "how many models, which differ in their seeds unless --vary says in what, or a file "
        "(.json): a list with the seed and the hyperparameters of each, and a batch_size or "
        "workload of its own",
        metavar="N|FILE",
    ),
    Option(
        "vary",
        "values of a hyperparameter, of seed, or of batch_size; again: every combination",
        read=Varied.parse,
        metavar="NAME=V,V",
        again=True,
    ),
)
#: What models may differ in beside hyperparameters.
WHOLE = ("seed", "batch_size")


def models_of(models: str | None, given: Sequence[Varied]) -> list[Member]:
    """Return the models that the options ``--models`` and ``--vary`` name.

    Raises:
        PlanError: ``array-models`` for none, or a file that is no list of models; ``array-vary``
            where the combinations are not as many as the models, or vary models of a file.
    """
    if models is not None and models.endswith(".json"):
        if given:
            raise PlanError.of(
                f"--models {models} says what differs; leave --vary out.", "array-vary"
            )
        return _models_of_file(Path(models))
    names = [each.name for each in given]
    twice = [name for name in names if names.count(name) > 1]
    twice += [each.name for each in given if len(set(each.values)) < len(each.values)]
    errors = [
        f"--vary {name}=... is given twice, or has a value twice; give each value once, and all of "
        "a name in one --vary."
        for name in dict.fromkeys(twice)
    ]
    errors += [
        f"--vary {each.name}=... has a value that is none; give "
        f"{'whole' if each.name in WHOLE else 'finite'} numbers."
        for each in given
        if not all(isfinite(v) and (each.name not in WHOLE or v.is_integer()) for v in each.values)
    ]
    PlanError.check(Violation(text, "array-vary") for text in errors)
    values = [[int(v) if each.name in WHOLE else v for v in each.values] for each in given]
    combinations = [Member.of(dict(zip(names, row, strict=True))) for row in product(*values)]
    if models is None and not given:
        raise PlanError.of(
            "a model array needs models: give --vary NAME=V,V, or --models FILE.", "array-models"
        )
    if models is not None and models.isdigit() and int(models) and not given:
        return [Member(seed) for seed in range(int(models))]
    if models is not None and (not models.isdigit() or int(models) != len(combinations)):
        sizes = " x ".join(str(len(each.values)) for each in given) or "nothing"
        raise PlanError.of(
            f"--models {models}, and --vary makes {prod(len(each.values) for each in given)} "
            f"({sizes}); give as many, such as --vary seed=0,1,2.",
            "array-vary",
        )
    return combinations


def _models_of_file(path: Path) -> list[Member]:
    try:
        return [Member.of(row) for row in read(json.loads(path.read_text()), list[dict[str, Any]])]
    except (OSError, TypeError, ValueError) as error:
        raise PlanError.of(
            f"--models {path} cannot be read: {error}; write a list of models, such as "
            '[{"learning_rate": 0.001, "seed": 0}].',
            "array-models",
        ) from None


def plan(options: argparse.Namespace) -> SearchEnd:
    """Search what is fused, multiplexed and moved."""
    close(options, OPTIONS)
    cluster = asked.read_cluster({**vars(options), "cluster": shared.ONE_DEVICE})
    members = models_of(options.models, options.vary or ())
    spec = asked.spec_of(vars(options))
    named = {one.workload: WorkloadSpec.parse(one.workload) for one in members if one.workload}
    for one in named.values():
        one.in_file(options.models).admitted(options.trust or one == spec)
    if options.global_batch is None:
        options.global_batch = shared.DEFAULT_MICROBATCH_SIZE
    question = ArrayQuestion(spec, tuple(members), cluster, **taken(ArrayQuestion, vars(options)))
    environment.prepare(
        num_devices=1, platform="cpu" if question.executes else Target.load(cluster.target).platform
    )
    said = "executing" if question.executes else "compiling"
    say(options, f"{said} segments of {counted(len(members), 'model')} for {cluster.target}")
    with array_profiles(
        spec,
        question.trained,
        cluster,
        question.shape,
        executes=question.executes,
        **asked.told(options),
    ) as profiles:
        answer = noted(options, plan_array(question, profiles=profiles))
    lines = [f"{answer.status}: {answer.why.summary}", _ways(answer.proof)]
    if answer.plan is not None:
        lines += [*plan_lines(answer.plan), *([str(answer.headroom)] if answer.headroom else [])]
        for one in named.values() if answer.status == "ok" else ():
            remember(one.location, one.function)  # planned with, as the one that the command names
    took, beside = counted(answer.proof.num_evaluated, "simulation"), answer.proof.baselines
    return outcome_of("array", answer, lines, took, baselines=beside)


def _ways(proof: ArrayResult) -> str:
    """Return a table of the ways that were weighed, and of the baselines."""
    rows = list[list[str]]()

    def add(name: str, sizes: Iterable[object], seconds: float, nbytes: int, fits: bool) -> None:
        update, said = format_seconds(seconds) if fits else "-", "yes" if fits else "no"
        rows.append([name, " ".join(map(str, sizes)), update, format_bytes(nbytes), said])

    for one in proof.candidates:
        sizes = map(len, one.way.partition)
        add(one.way.name, sizes, one.weighed.seconds, one.weighed.peak_bytes, one.fits)
    for each in proof.baselines:
        rounds = ["in rounds"] * each.in_rounds
        add(each.name, [*each.sizes, *rounds], each.step_seconds, each.peak_bytes, each.fits)
    return table(["way", "models of each", "an update", "device", "fits"], rows)


def explain(options: argparse.Namespace, plan: ArrayPlan) -> tuple[ExplainReport, list[str]]:
    """Explain a plan of an array: what is fused and moved, and who needs the memory. A page or a
    trace needs the programs of the step, which are in the store or measured again."""
    writes = options.output is not None or options.trace is not None
    known = ("output", "trace", "workload", *(option.name for option in shared.STORE))
    asked.refuse_unread(options, "array", *(known if writes else ()))
    from capture.report.array import HEADER, decision_rows, page
    from capture.report.array import rows as rows_of

    rows, moved = decision_rows(plan), "all feature maps are retained"
    if rows:
        moved = table(["sub-array", "bundle", "is", "fetched ahead"], rows)
    report = ExplainReport(kind="array", needs=PlanNeeds.of(plan))
    lines = [*plan_lines(plan), moved]
    if not writes:
        return report, lines
    facts = _facts(options, plan)
    html = partial(page(facts, plan_lines(plan)).html, plan.headroom())
    written = write_files(options, html, lambda: facts.timeline)
    bundles = rows_of(facts)
    return replace(report, bundles=bundles, written=written), [*lines, table(HEADER, bundles)]


def verify(options: argparse.Namespace, plan: ArrayPlan) -> tuple[VerifyReport, ArrayPlan]:
    """Compile the programs of an array for its target, and replay an update of every model."""
    known = ("workload", "memory", "output", *(option.name for option in shared.STORE))
    asked.refuse_unread(options, "array", *known)
    facts = _facts(options, plan)
    ledgers, limit = facts.steps.replay(), plan.memory_limit_bytes or 0
    found = WrittenWay(
        facts.arrays, plan.decisions, facts.steps, ledgers, facts.timeline, limit
    ).prediction()
    verified = replace(plan, prediction=found)
    fullest = max((ledger.peak_of(0) for ledger in ledgers), key=lambda peak: peak.peak_bytes)
    report = VerifyReport(
        "array",
        plan.cluster.target,
        (found.peak_bytes,),
        None if plan.prediction is None else (plan.prediction.peak_bytes,),
        (PeakRow.of([0], fullest),),
        verified.headroom(options.memory),
        found.host_peak_bytes,
    )
    return report, verified


def report(options: argparse.Namespace, plan: ArrayPlan) -> tuple[PageReport, list[str]]:
    """Report what is predicted of an array, and how much memory that leaves: in lines, or as the
    page.

    Raises:
        PlanError: ``array-page`` for a trace, which needs the programs of the models.
    """
    if options.trace is not None:
        raise PlanError.of(
            "the trace of an array is of its programs, and a report loads no model; capture "
            "explain PLAN --trace FILE writes it.",
            "array-page",
        )
    from capture.report.array import plan_page

    asked.refuse_unread(options, "array", "memory", "output")
    return shown(
        options, "array", plan_page(plan, plan_lines(plan)), PlanNeeds.of(plan, options.memory)
    )


def _facts(options: argparse.Namespace, plan: ArrayPlan) -> ArrayFacts:
    """Build and simulate the step of a plan of an array."""
    from capture.report.array import array_facts

    spec, plan = asked.workload_of(options, plan), plan.admitted(options.trust)

    executes = plan.seconds_from.startswith("executions")
    platform = Target.load(plan.cluster.target).platform
    environment.prepare(num_devices=1, platform="cpu" if executes else platform)
    from capture.runtime.array_tasks import as_planned

    shape = ArrayShape(
        *(plan.batch_size, plan.num_layers, plan.shared, plan.shared_batches, plan.bundle_bytes),
        plan.remat,
    )
    told = asked.told(options)
    with array_profiles(
        spec, plan.trained, plan.cluster, shape, executes=executes, **told
    ) as profiles:
        for task, profile in profiles.items():
            as_planned(plan, task, profile.workload, partial(getattr, profile, "fuser"))
        programs, tasks = AllPrograms(tuple(profiles.values())), list(profiles)
        arrays = [
            programs.sub_array(SubArrayKind(tasks.index(plan.trained[group[0]]), len(group)))
            for group in plan.partition
        ]
        return array_facts(plan, programs, arrays, profiles[tasks[0]].host)


def _decided(plan: ArrayPlan) -> dict[str, str]:
    return {
        "models": "; ".join(plan.model_names),
        "shared": ", ".join(plan.shared) or "-",
        "batch": f"{plan.batch_size}{' shared' if plan.shared_batches else ''}",
        "sub-arrays": " ".join(str(list(group)) for group in plan.partition),
        "order": plan.order,
        "swapped": _named(plan, "swap"),
        "recomputed": _named(plan, "recompute"),
        "remat": plan.remat or "none",
        "limit": "-" if plan.memory_limit_bytes is None else format_bytes(plan.memory_limit_bytes),
    }


#: What two plans decide differently, and what each needs.
diff = partial(compared, "array", _decided)


def _named(plan: ArrayPlan, choice: str) -> str:
    named = (
        f"{a}: {decision.bundle}"
        for a, own in enumerate(plan.decisions)
        for decision in own
        if decision.choice == choice
    )
    return ", ".join(named) or "-"


def plan_lines(plan: ArrayPlan) -> list[str]:
    """Return the lines of a plan of an array: its sub-arrays, and what is predicted."""
    counts = [Counter(decision.choice for decision in own) for own in plan.decisions]
    rows = [
        [a, " ".join(map(str, group)), counts[a]["swap"], counts[a]["recompute"]]
        for a, group in enumerate(plan.partition)
    ]
    each = f"{counted(plan.batch_size, 'example')} each"
    if len(tasks := dict.fromkeys(plan.trained)) > 1:
        each = f"{len(tasks)} programs"
        for row, group in zip(rows, plan.partition, strict=True):
            row.append(str(plan.trained[group[0]]))
    lines = [
        f"{counted(len(plan.models), 'model')} of {each}, "
        f"{plan.order}" + (f"; they share {', '.join(plan.shared)}" if plan.shared else ""),
        table(["sub-array", "models", "bundles swapped", "recomputed", "of"][: len(rows[0])], rows),
    ]
    if (found := plan.prediction) is not None:
        parts = parts_text(found.parts_bytes)
        lines += [
            f"{format_seconds(found.step_seconds)} for an update of every model, simulated for "
            f"{plan.cluster.target} by {plan.seconds_from or 'its rates'}",
            f"device: {format_bytes(found.peak_bytes)} at its peak ({parts})",
            f"feature maps: {format_bytes(found.retained_bytes)} retained, "
            f"{format_bytes(found.swapped_bytes)} swapped, "
            f"{format_bytes(found.recomputed_bytes)} recomputed; the host holds "
            f"{format_bytes(found.host_peak_bytes)} at most",
        ]
    return lines


ASKS = Asks("Model arrays (--system mutwo)", "several models on one device", OPTIONS, plan)
