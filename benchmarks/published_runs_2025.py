"""Simulated step times against published training runs of 2024 to 2026.

    python -m benchmarks.published_runs_2025 rows.json -o result.json --only v6e h200
    python -m benchmarks.published_runs_2025 rows.json -o result.json --fit v6e "JAX (Flax"

Every row that ``published_rows.py`` can express is built as a plan, its stage is compiled for the
target, which need not be there, and one step is simulated from the compiled programs, as for every
other plan. Rows that cannot be expressed are listed with the reasons. Rows whose program XLA
scheduled are the judge; those of PyTorch stand apart.

A stage of many equal layers is not compiled whole: the same model is compiled with two small
numbers of layers (``--layers``), and what a layer adds to the step, in seconds and bytes, is added
for the others. ``--whole`` compiles the chosen rows whole as well and says how far that is off.

A row from whose programs less work is read than its layers must do (products of weights, bytes of
sharded parameters) is marked (``unread``) and counts in no mean: its seconds are too low.

Programs for TPUs are compiled with the options of XLA that the run's recipe sets
(``recipe_options.py``), and with those alone.

Seconds are given at the rates of the target file, and at the same rates without the level that was
fitted to published runs (``unfitted``). ``--fit`` takes the rows already in the result whose family
contains one of the texts, finds the level that makes their mean error least, and prints how far it
is off on these and on all other rows of the same targets. Rows in the result are kept as long as
the row, the plan, the target and the compiler are the same: an interrupted run goes on.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import published_rows
from benchmarks.published_rows import Configuration, Row, options_of
from benchmarks.published_summary import LEVELS, as_text, families, fitted, picture
from capture import environment
from capture.errors import CaptureError
from capture.machine.rates import Rates, Sourced
from capture.machine.target import TARGETS_FOLDER, Target

if TYPE_CHECKING:
    from capture.measured.store import Store
    from capture.measured.work import ProgramWork
    from profiling_runs.verify import Verification

Document = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """One simulated step, or what one layer adds to it.

    Attributes:
        seconds: Of the step.
        computing_seconds, link_seconds: Of all kernels and of all collectives, each alone.
        exposed_seconds: In which a device does nothing but wait for a collective.
        peak_bytes: Largest over devices.
    """

    seconds: float
    computing_seconds: float
    link_seconds: float
    exposed_seconds: float
    peak_bytes: float

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        return Parts(
            *(
                mine + times * its
                for mine, its in zip(asdict(self).values(), asdict(other).values(), strict=True)
            )
        )


def simulated(found: Verification, rates: Rates) -> Parts:
    """Simulate one step of a compiled plan of one stage."""
    from capture.step.pipeline import plan_timeline
    from capture.step.times import TimeModel

    plan, (cost,) = found.plan, found.costs
    model = TimeModel(rates, plan.cluster.layout)
    times = model.stage_times(cost)
    assert times is not None, "programs that were compiled now have their work counted"
    seconds = plan_timeline(found.program, plan.cluster, [times], rates).step_seconds
    computing = link = exposed = 0.0
    for work, count in (
        (cost.forward_work, plan.num_microbatches),
        (cost.backward_work, plan.num_microbatches),
        (cost.update_work, 1),
    ):
        assert work is not None, "so is all of it"
        took = model.seconds_of(work)
        computing += count * took.computing
        link += count * took.sending
        exposed += count * took.exposed
    return Parts(float(seconds), computing, link, exposed, max(found.peak_bytes_per_device))


def sent_bytes(work: ProgramWork | None) -> int:
    """Return the bytes of all collectives of a program, per device."""
    assert work is not None, "programs that were compiled now have their work counted"
    return sum(one.count * one.nbytes for one in work.collectives)


def layer_bytes(configuration: Configuration) -> int:
    """Return the bytes of the weights of one layer's products in bfloat16, per device of a
    replica: what sharded parameters are gathered to."""
    given = options_of(configuration.workload)
    width, hidden, head_dim = (int(given[name]) for name in ("width", "hidden", "head_dim"))
    heads = 2 * int(given["num_heads"]) + 2 * int(given["num_key_value_heads"])
    weights = width * (heads * head_dim + 3 * hidden)
    return 2 * weights // configuration.choice.tensor_parallel


def product_flops(work: ProgramWork | None) -> int:
    """Return the FLOPs of all products of a program, per device."""
    assert work is not None and work.kernels is not None, "so are its kernels"
    return sum(one.count * one.flops for one in work.kernels)


def unread(configuration: Configuration, few: Verification, more: Verification) -> str | None:
    """Say which work is missing from what was read of the compiled programs, if any is: the seconds
    would be too low without a word.

    A layer multiplies with its weights once in the forward pass, and twice in the backward pass.
    Sharded parameters are gathered for both, and their gradients are scattered.
    """
    weights, options = layer_bytes(configuration), options_of(configuration.workload)
    examples = more.plan.microbatch_size // configuration.choice.data_parallel
    flops = weights * examples * int(options["seq_len"])  # two bytes, and two FLOPs, of a weight
    layers, said = more.plan.num_layers - few.plan.num_layers, list[str]()
    for name, times in (("forward", 1), ("backward", 2)):
        first, second = (getattr(each.costs[0], f"{name}_work") for each in (few, more))
        wanted = [("FLOPs", product_flops, flops, READ_FLOPS)]
        if configuration.choice.shard_params:
            wanted.append(("bytes sent", sent_bytes, weights, READ_BYTES))
        for what, count, least, fraction in wanted:
            found = (count(second) - count(first)) // layers
            if found < fraction * times * least:
                said.append(f"{found:.3g} {what} a layer {name}, at least {times * least:.3g}")
    return f"not all work was read: {'; '.join(said)}" if said else None


#: Of the work that must be there: a compiler may send some bytes otherwise, and computes all.
READ_FLOPS, READ_BYTES = 0.95, 0.5


def held_bytes(found: Verification) -> int:
    """Return the bytes of a plan of one stage that grow with its layers, whatever else the peak is
    of: parameters, gradients, the optimizer's state, and what is kept for the backward pass."""
    (stage,), (cost,) = found.stages, found.costs
    return 2 * stage.params_bytes + stage.optimizer_bytes + cost.residual_bytes


def at_level(rates: Rates, level: float) -> Rates:
    """Return the rates with another level than the target's."""
    return replace(rates, level=Sourced(level, "of this benchmark"))


def plan_verified(configuration: Configuration, num_layers: int, options: Options) -> Verification:
    """Compile the stage of a configuration with this many layers."""
    from capture.machine.cluster import Cluster
    from capture.model.workload import WorkloadSpec
    from capture.plan.stage import Stage
    from capture.plan.stages import Plan
    from profiling_runs.measurements import open_measurements
    from profiling_runs.pools.where import Where
    from profiling_runs.question import ProfileQuestion
    from profiling_runs.verify import verify

    cluster = Cluster(configuration.nodes, options.target_of(configuration))
    workload = WorkloadSpec.parse(f"{configuration.workload}&num_layers={num_layers}")
    stage = Stage(0, num_layers, tuple(range(cluster.num_devices)), configuration.choice)
    plan = Plan(
        cluster,
        num_layers,
        (stage,),
        configuration.global_batch,
        configuration.num_microbatches,
        "1f1b",
        workload=workload,
    )
    measurements = open_measurements(
        ProfileQuestion(workload, cluster, plan.microbatch_size),
        store=options.store,
        where=Where(options.workers),
        progress=lambda what, done, total: None,
    )
    return verify(plan, measurements)


def measure(configuration: Configuration, options: Options, whole: bool) -> Document:
    """Compile the windows of a configuration and simulate its step."""
    target = Target.load(configuration.target)
    assert target.rates is not None and target.memory is not None, "published runs had devices"
    few, more = (plan_verified(configuration, n, options) for n in options.layers)
    exact = plan_verified(configuration, configuration.num_layers, options) if whole else None

    layers = options.layers[1] - options.layers[0]
    times = (configuration.num_layers - options.layers[1]) / layers

    def step(rates: Rates) -> Parts:
        first, second = simulated(few, rates), simulated(more, rates)
        total = second.plus(second.plus(first, -1.0), times)
        # Temporaries of two windows differ by chance; what is held grows with every layer.
        held = times * (held_bytes(more) - held_bytes(few))
        return replace(total, peak_bytes=max(first.peak_bytes, second.peak_bytes) + held)

    found = step(target.rates)
    levels = {f"{level:.2f}": step(at_level(target.rates, level)).seconds for level in LEVELS}
    return {
        "simulated": asdict(found),
        "unread": unread(configuration, few, more),
        "unfitted_seconds": levels["1.00"],
        "seconds_by_level": levels,
        "usable_bytes": target.memory.usable_bytes,
        "compiled_layers": list(options.layers),
        "whole": None if exact is None else asdict(simulated(exact, target.rates)),
    }


@dataclass(frozen=True)
class Options:
    """What a run of this script was asked for, for every row.

    Attributes:
        layers: Two numbers of layers that are compiled.
        store: Of compiled stages.
        workers: Processes that compile.
        folder: For targets with the options of a run.
    """

    layers: tuple[int, int]
    store: Store
    workers: int
    folder: Path

    def target_of(self, configuration: Configuration) -> str:
        """Return the target of a configuration, of a TPU with the options that its run set alone:
        the path of a file."""
        target = Target.load(configuration.target)
        if target.platform != "tpu" or configuration.options == target.run_options:
            return configuration.target
        document = json.loads((TARGETS_FOLDER / f"{configuration.target}.json").read_text())
        document["compiler"] |= {"run_options": configuration.options}
        # The store knows it by its name, whatever its rates are.
        options = json.dumps(configuration.options, sort_keys=True).encode()
        path = self.folder / f"{target.name}-{hashlib.sha256(options).hexdigest()[:8]}.json"
        path.write_text(json.dumps(document))
        return str(path)


def published(row: Row) -> Document:
    """What the row says of the run: seconds, and memory with its kind."""
    measured = row["measured"]
    return {
        "seconds": measured.get("seconds_per_step"),
        "peak_bytes": measured.get("peak_memory_bytes"),
        "peak_kind": measured.get("peak_memory_kind"),
        "compiled_total_bytes": measured.get("compiled_total_bytes"),
        "out_of_memory": measured.get("oom"),
    }


def key_of(configuration: Configuration, layers: Sequence[int]) -> str:
    """Return a text that changes when a row in a result is no longer its answer."""
    from capture.profiler.compile import PROGRAM_VERSION, WORK_VERSIONS

    target = (TARGETS_FOLDER / f"{configuration.target}.json").read_text()
    platform = Target.load(configuration.target).platform
    compiled = [environment.versions(platform), WORK_VERSIONS[platform], PROGRAM_VERSION]
    about = asdict(configuration)
    if not configuration.options:  # as before there were any
        del about["options"]
    facts = [about, list(layers), *compiled, target]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def answered(row: Row, known: Mapping[str, Document], options: Options, whole: bool) -> Document:
    """Return the document of a row: simulated, taken from the result, or why it is neither."""
    about = {
        "id": row["id"],
        "source": row["source"],
        "family": published_rows.family_of(row),
        "is_of_jax": published_rows.is_of_jax(row),
        "published": published(row),
    }
    configuration = published_rows.express(row)
    if not isinstance(configuration, Configuration):
        return {**about, "reasons": list(configuration)}
    about |= {"configuration": asdict(configuration), "key": key_of(configuration, options.layers)}
    before = known.get(row["id"], {})
    if (
        before.get("key") == about["key"]
        and "simulated" in before
        and (before["whole"] or not whole)
    ):
        return {**before, **about}
    print(f"{row['id']} ...", file=sys.stderr, flush=True)
    try:
        found = measure(configuration, options, whole)
    except CaptureError as error:
        return {**about, "reasons": [str(error)]}
    seconds = about["published"]["seconds"]
    error = None if seconds is None else found["simulated"]["seconds"] / seconds - 1
    unfitted = None if seconds is None else found["unfitted_seconds"] / seconds - 1
    return {
        **about,
        **found,
        "error_fraction": error,
        "unfitted_error_fraction": unfitted,
        "date": date.today().isoformat(),
    }


def chosen(rows: Iterable[Row], texts: Sequence[str]) -> list[Row]:
    """Return the rows whose id or family contains one of the texts; all if there are none."""
    return [
        row
        for row in rows
        if not texts
        or any(text in row["id"] or text in published_rows.family_of(row) for text in texts)
    ]


def document_of(rows: Sequence[Document], file: Path) -> Document:
    return {
        "benchmark": "published_runs_2025",
        "date": date.today().isoformat(),
        "file": file.name,
        "simulated": True,
        "versions": {platform: environment.versions(platform) for platform in ("cuda", "tpu")},
        "families": families(rows),
        "rows": list(rows),
    }


def _asked() -> Any:
    from benchmarks.documents import arguments

    parser = arguments(__doc__)
    parser.add_argument("file", type=Path, help="the published rows")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="of ids or families")
    parser.add_argument(
        "--whole", nargs="+", default=[], metavar="TEXT", help="rows to compile whole as well"
    )
    parser.add_argument("--layers", type=int, nargs=2, default=(2, 4), metavar="N")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--store", type=Path, help="of compiled stages")
    parser.add_argument("--fit", nargs="+", metavar="TEXT", help="families to fit the level on")
    return parser.parse_args()


def main() -> int:
    asked = _asked()
    environment.prepare(platform="cuda")  # workers compile, each for the platform of its target
    from capture.measured.store import Store

    few, more = asked.layers
    if not 1 < few < more:  # a model of one layer has no mark at which layers end
        print("--layers needs two numbers, 2 or more, the smaller one first", file=sys.stderr)
        return 2
    folder = tempfile.TemporaryDirectory(prefix="capture-targets-")
    options = Options((few, more), Store(asked.store), asked.workers, Path(folder.name))
    rows = json.loads(asked.file.read_text())["rows"]
    known = {}
    if asked.output and asked.output.exists():
        known = {row["id"]: row for row in json.loads(asked.output.read_text())["rows"]}
    if asked.fit:
        print(json.dumps(fitted(list(known.values()), asked.fit), indent=1))
        return 0
    whole = {row["id"] for row in chosen(rows, asked.whole)} if asked.whole else set()
    for row in chosen(rows, asked.only):
        known[row["id"]] = answered(row, known, options, row["id"] in whole)
        if asked.output:  # an interrupted run goes on from here
            ordered = [known[each["id"]] for each in rows if each["id"] in known]
            document = document_of(ordered, asked.file)
            asked.output.write_text(json.dumps(document, indent=1) + "\n")
    ordered = [known[each["id"]] for each in rows if each["id"] in known]
    if asked.output:
        asked.output.with_suffix(".svg").write_text(picture(ordered))
    print(as_text(ordered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
