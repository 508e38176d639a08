"""Where the recorded cases reach into the library: modules, names inside them, and the keys of
documents, which may move; answers may not.

All that a rearrangement has to change is in this file; ``cases.py`` and the record stay as they
are. Nothing here computes: it asks, and brings the answer into numbers and short texts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
REPOSITORY = FOLDER.parent.parent
#: Workloads by the name that cases give them, with the name that the command line knows them by.
WORKLOADS = {
    "demo": "capture.cli.tiny_gpt:gpt",
    "gpt": f"{REPOSITORY}/models/gpt.py:gpt",
    "three_readers": f"{REPOSITORY}/tests/kit/sequences.py:three_readers",
    "routed": f"{REPOSITORY}/tests/kit/dense.py:routed",
    "plain_gpt": f"{REPOSITORY}/benchmarks/plain_gpt.py:gpt",
}


def workload_name(name: str) -> str:
    """The WORKLOAD of the command line: of ``files/tiny_models.py`` unless it is one of the others.
    Arguments follow a question mark.
    """
    function, _, arguments = name.partition("?")
    return WORKLOADS.get(function, f"tiny_models.py:{function}") + (
        f"?{arguments}" if arguments else ""
    )


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def json_hash(document: Any) -> str:
    return text_hash(json.dumps(document, sort_keys=True))


def of(document: Any, names: str) -> list[Any]:
    """Values by keys of a mapping, or by attributes of an object."""
    if isinstance(document, Mapping):
        return [document[name] for name in names.split()]
    return [getattr(document, name) for name in names.split()]


# ---- the command line ----------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, Any]:
    """Exit code and document of a verb, run in this process with ``--json``."""
    from capture.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([*arguments, "--json", "--quiet"])
    if code > 1:
        raise AssertionError(
            f"capture {' '.join(arguments)} ended with {code}\n{out.getvalue()}\n{err.getvalue()}"
        )
    return code, json.loads(out.getvalue())


@contextlib.contextmanager
def programs() -> Iterator[set[str]]:
    """Hashes of the programs that are given to the compiler inside: lowered text, before any
    optimisation, but for the module's name.
    """
    from jax.stages import Lowered

    found: set[str] = set()
    compile_it = Lowered.compile

    def noting(self: Lowered, *args: Any, **options: Any) -> Any:
        found.add(lowered_hash(self))
        return compile_it(self, *args, **options)

    Lowered.compile = noting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Lowered.compile = compile_it  # type: ignore[method-assign]


def lowered_hash(lowered: Any) -> str:
    return text_hash(re.sub(r"module @\w+", "module @program", lowered.as_text(), count=1))


# ---- documents -----------------------------------------------------------------------------------


def stages_text(stages: Sequence[Mapping[str, Any]]) -> str:
    """Stages of a plan document in one line."""
    return "; ".join(stage_text(stage) for stage in stages)


def stage_text(s: Mapping[str, Any]) -> str:
    first, last = s["layers"]
    return (
        f"layers {first}-{last} on {','.join(map(str, s['devices']))} "
        + split_text(s["data_parallel"], s["tensor_parallel"], s["remat"])
        + sharing_text(s["shard_optimizer"], s["shard_params"])
    )


def split_text(data_parallel: int, tensor_parallel: int, remat: str) -> str:
    return f"dp {data_parallel} tp {tensor_parallel} {remat}"


def sharing_text(shard_optimizer: bool, shard_params: bool) -> str:
    return " shard_optimizer" * shard_optimizer + " shard_params" * shard_params


def plan_facts(plan: Mapping[str, Any]) -> dict[str, Any]:
    batch = of(plan, "global_batch_size num_microbatches schedule")
    cut = of(plan, "num_layers auto_layers microbatch_size tensor_parallel_rule")
    return {
        "stages": stages_text(plan["stages"]),
        "question": [*of(plan["cluster"], "nodes target_per_node"), *batch],
        "model": [plan["model_hash"], *cut],
    }


def prediction_facts(prediction: Mapping[str, Any]) -> dict[str, Any]:
    stages = prediction["stages"]
    return {
        "peaks": prediction["peak_bytes_per_device"],
        "intervals": prediction["interval_bytes_per_device"],
        "coverage": prediction["interval_coverage"],
        "extrapolated": [
            prediction["extrapolated"],
            [s["extrapolated"] for s in stages],
            [s["verified"] for s in stages],
        ],
        "instants": [s["instant"] for s in stages],
        "parts": [s["parts_bytes"] for s in stages],
        "layers": json_hash([s["layers_bytes"] for s in stages]),
    }


def verification_facts(verification: Mapping[str, Any] | None) -> Any:
    return verification and verification["peak_bytes_per_device"]


def why_facts(why: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer says of itself: sentences and numbers, plans in one line."""
    found = {key: value for key, value in why.items() if key != "front"}
    if "front" in why:
        front = why["front"]
        found["front"] = [front["complete"], front["extrapolated"]]
        found["points"] = [
            [*of(p, "peak_bytes step_seconds bound_fraction"), stages_text(p["stages"])]
            for p in front["points"]
        ]
    return found


def recommendation_facts(code: int, document: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``capture plan --json``."""
    search = document["search"]
    how = "algorithm optimal tie_break tie_break_columns step_seconds bound_fraction"
    found = {
        "answer": [code, *of(document, "status extrapolated")],
        "search": of(search, how),
        "why": why_facts(document["why"]),
        "headroom": None,
        "time": None,
    }
    if document["cheapest_change"] is not None:
        found["cheapest_change"] = document["cheapest_change"]
    if document["plan"] is not None:
        plan = document["plan"]
        found |= {"headroom": document["needs"]["headroom"], "time": plan["time"]}
        found |= plan_facts(plan) | prediction_facts(plan["prediction"])
        found["verification"] = verification_facts(document["plan"]["verification"])
    if document["attempts"]:
        found["attempts"] = document["attempts"]
    return found


def profile_facts(file: Path) -> dict[str, Any]:
    """Of a profile that was just made."""
    profile = json.loads(file.read_text())
    return {
        "graph": json_hash(
            {key: value for key, value in profile["graph"].items() if key != "schema_version"}
        ),
        "models": profile["model_hashes"],
        "measurements": [len(profile["measurements"]), json_hash(profile["measurements"])],
        "calibration": json_hash(profile["calibration"]),
        "said": [profile["warnings"], profile["failures"]],
    }


#: Keys of what files and versions are, at any depth of a report.
UNRECORDED = "written provenance source versions created schema_version workload plan kind title"


def report_facts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``capture report --json`` and of ``capture diff --json``: numbers and sentences, nothing
    of files, versions or dates.
    """

    left_out = UNRECORDED.split()

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: kept(inner) for key, inner in value.items() if key not in left_out}
        return [kept(inner) for inner in value] if isinstance(value, list) else value

    return {
        key: json_hash(value) if isinstance(value, (dict, list)) else value
        for key, value in kept(document).items()
    }


# ---- the step of a plan --------------------------------------------------------------------------


def step_facts(workload: str, plan_file: Path, *, lines: bool = False) -> dict[str, Any]:
    """The step program of a plan on the devices of this process, its replay, and the programs of
    its stages.
    """
    from capture import Plan, WorkloadSpec, pipeshard

    with programs() as emitted:
        step = pipeshard(
            WorkloadSpec.parse(workload).load(), Plan.load(plan_file), fast_compile=True
        )
        program = step.program
    ledger = step.replay(record_timeline=True)
    text = step_lines(program)
    slots = [
        f"{slot.name} {slot.category} {slot.nbytes} on {slot.place.name}" for slot in program.slots
    ]
    return {
        "step": text if lines else [len(text), text_hash("\n".join(text))],
        "slots": [len(slots), text_hash("\n".join(slots))],
        "peaks": [of(peak, "peak_bytes instant parts") for peak in ledger.peaks],
        "timeline": json_hash(ledger.timeline),
        "programs": sorted(emitted),
    }


def step_lines(program: Any) -> list[str]:
    """One line per instruction; also the golden text of ``tests/property/test_step.py``."""
    from capture.step.program import Copy, Feed, Free, Run

    def names(slots: Sequence[int]) -> str:
        return " ".join(program.slots[slot].name for slot in slots)

    lines = []
    for instruction in program.instructions:
        match instruction:
            case Feed():
                lines.append(f"feed {names([instruction.slot])}")
            case Run():
                groups = " | ".join(names(group) for group in instruction.inputs)
                kind = program.programs[instruction.program].kind
                lines.append(f"{kind}({groups}) -> {names(instruction.outputs)}")
            case Copy():
                index = "" if instruction.index is None else f"[{instruction.index}]"
                lines.append(
                    f"{names([instruction.source])}{index} => {names([instruction.target])}"
                )
            case Free() if instruction.slots:
                lines.append(f"free {names(instruction.slots)}")
    return lines


def synthetic_step(
    cuts: Sequence[int], schedule: str, num_microbatches: int, as_alpa: bool
) -> list[Any]:
    """The step over eight layers with skips and parameters that several of them read, with costs by
    formula: text and peaks.
    """
    from itertools import pairwise

    from capture.alpa.step import build_alpa_step
    from capture.measured.stage_cost import StageCost
    from capture.plan.choices import StageChoice
    from capture.plan.schedule import make_schedule
    from capture.step.interface import stage_interface
    from capture.step.pipeline import build_step
    from capture.step.program import replay
    from tests.synthetic_graphs import chain

    graph = chain(8, skips=[(0, 3), (2, 7), (1, 5)], shared=[(0, 7), (1, 4, 6)])
    stages = []
    for s, (first, stop) in enumerate(pairwise([0, *cuts, 8])):
        sizes = [(37 * s + 11 * i) % 97 for i in range(5)]
        cost = StageCost(
            sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            sizes[4],
            (),
            (),
            (),
            summary_bytes=4,
            summarize_bytes=8,
        )
        stages.append(
            stage_interface(
                graph,
                first,
                stop,
                [2 * s, 2 * s + 1],
                StageChoice(2),
                [p.nbytes for p in graph.params],
                cost,
            )
        )
    build = build_alpa_step if as_alpa else build_step
    program = build(stages, make_schedule(schedule, len(stages), num_microbatches))
    lines = step_lines(program)
    return [
        len(lines),
        text_hash("\n".join(lines)),
        list(replay(program).peak_bytes_per_device),
    ]


# ---- searches ------------------------------------------------------------------------------------


def search_problem(seed: int, timed: bool = False) -> Any:
    from tests.search_kit import random_problem, timed_problem

    return (timed_problem if timed else random_problem)(seed)


def placed_text(stage: Any) -> str:
    """Of a stage as searches place it."""
    c = stage.choice
    how = split_text(c.data_parallel, c.tensor_parallel, c.remat)
    where = f"{stage.first}-{stage.stop} on {stage.devices[0]}+{c.num_devices}"
    return f"{where} {how}{sharing_text(c.shard_optimizer, c.shard_params)}"


def searched(problem: Any, algorithm: str) -> str:
    """The answer of a search in one line."""
    from recommender import search
    from recommender.capture.throughput import throughput

    result = throughput(problem) if algorithm == "throughput" else search(problem, algorithm)
    stages = "; ".join(map(placed_text, result.stages))
    how = f"{result.step_seconds} {result.optimal} {result.tie_break}"
    return f"{result.status} {result.peak_bytes_per_device} {how} {stages}"


def front_of(problem: Any) -> str:
    from recommender.capture.pareto import pareto

    front = pareto(problem)
    points = [(p.peak_bytes_per_device, p.step_seconds) for p in front.points]
    return f"{points} {front.complete} {front.optimal}"


# ---- sharded data parallelism, operator by operator ----------------------------------------------


def sharding_problems() -> dict[str, Any]:
    """The paper's families on its cost model and on the one that counts a step, each with little
    memory and with more.
    """
    from tests.osdp_problems import paper_problem, step_problem

    gib = 2**30
    return {
        "paper N&D 8 GiB": paper_problem("N&D", 8 * gib),
        "paper W&S 16 GiB": paper_problem("W&S", 16 * gib, (1, 4)),
        "paper I&C 16 GiB": paper_problem("I&C", 16 * gib, (1, 4), remat=True),
        "step N&D 16 GiB": step_problem("N&D", 16 * gib),
        "step W&S 16 GiB": step_problem("W&S", 16 * gib, partly=True),
        "step I&C 16 GiB": step_problem("I&C", 16 * gib, (1, 4), overlap_fraction=0.5),
        "step N&D 1 GiB": step_problem("N&D", gib),
    }


def small_sharding_problem(seed: int) -> Any:
    from tests.osdp_problems import random_problem

    return random_problem(seed)


def sharding_searched(problem: Any, algorithm: str) -> Any:
    from recommender.osdp import search

    result = search(problem, algorithm)
    said = of(result, "status optimal bound_fraction num_batch_sizes why")
    return [*said, sharding_facts(result.plan)]


def sharding_facts(plan: Any) -> Any:
    """A plan as data."""
    if plan is None:
        return None
    modes = [
        "/".join(map(str, of(mode, "num_slices num_sharded group_size"))) for mode in plan.modes
    ]
    names = json_hash([list(plan.names), [list(p) for p in plan.params]])
    numbers = of(plan, "batch_size step_seconds peak_bytes examples_per_second compiled_peak_bytes")
    return [*numbers, modes if len(modes) < 20 else json_hash(modes), names]


def strategies(model: str, limit_gib: int, nodes: int) -> dict[str, Any]:
    """Every strategy that OSDP is compared with: status, speed and setting."""
    from benchmarks.papers.osdp.strategies import STRATEGIES
    from capture.step.operator_cost import StepCost
    from tests.osdp_problems import family, machine

    costs = StepCost(family(model), machine(limit_gib * 2**30, nodes), (1, 4))
    found = {name: strategy(costs) for name, strategy in STRATEGIES.items()}
    return {name: of(o, "status examples_per_second setting") for name, o in found.items()}


def sharded(
    workload: str, where: str, limit: str | float | None, *, emit: bool = True, **options: Any
) -> dict[str, Any]:
    """The plan of ``osdp`` for a workload on "1x8 h100" or on this process's devices, and with
    ``emit`` what it hands out to train with.
    """
    import jax
    import optax

    from capture import Cluster, WorkloadSpec, shard
    from recommender.osdp import ShardingQuestion, osdp

    task = WorkloadSpec.parse(workload_name(workload)).load()
    cluster = Cluster.parse(*where.split())
    with programs() as emitted:
        verify = options.pop("verify", True)
        result = osdp(ShardingQuestion(task, cluster, limit, **options), verify=verify)
    found = {
        "answer": [
            *of(result, "status compiled"),
            result.why.uncompiled,
            None if result.plan else result.why.summary,
        ],
        "peaks": of(result.plan, "peak_bytes compiled_peak_bytes") if result.plan else [None] * 2,
        "plan": sharding_facts(result.plan),
    }
    if emitted:
        found["compiled"] = sorted(emitted)
    if result.plan is None:
        return found
    numbers = "parameter_bytes resident_bytes transient_bytes seconds"
    plan = result.plan
    rows = [
        [name, str(mode), *of(cost, numbers)]
        for name, mode, cost in zip(plan.names, plan.modes, plan.costs, strict=True)
    ]
    found["rows"] = json_hash(rows)
    if not emit:
        return found
    own = shard(task, result.plan, cluster)
    trees = [own.shardings(), own.opt_state_shardings]
    found["replicated"] = list(own.replicated)
    params, optimizers = (
        [f"{jax.tree_util.keystr(p)} {s.spec}" for p, s in jax.tree.leaves_with_path(tree)]
        for tree in trees
    )
    found["shardings"] = [params, json_hash(optimizers), str(own.batch_sharding.spec)]

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(own.transform(task.loss_fn))(params, batch)
        updates, state = task.optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.eval_shape(own.split, jax.eval_shape(task.init, jax.random.key(0)))
    batch = jax.eval_shape(
        lambda key: task.batch(key, result.plan.batch_size * cluster.num_devices), jax.random.key(0)
    )
    placed = (*trees, jax.tree.map(lambda _: own.batch_sharding, batch))
    structs = [
        jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, place)
        for tree, place in zip(
            (params, jax.eval_shape(task.optimizer.init, params), batch), placed, strict=True
        )
    ]
    found["program"] = lowered_hash(jax.jit(step, out_shardings=(*trees, None)).lower(*structs))
    return found


def sharding_document_facts(plan: Mapping[str, Any]) -> list[Any]:
    """Of a sharding plan in JSON."""
    modes = [
        [o["name"], *of(o["mode"], "num_slices num_sharded group_size"), o["params"]]
        for o in plan["operators"]
    ]
    numbers = "batch_size step_seconds peak_bytes examples_per_second"
    return [*of(plan, f"{numbers} remat smallest_bytes look_ahead"), json_hash(modes)]


def sharding_file_facts(file: Path) -> list[Any]:
    """Of a sharding plan as the library reads it."""
    from capture.plan.sharding import ShardingPlan

    plan = ShardingPlan.load(file)
    return [*sharding_facts(plan), *of(plan, "remat smallest_bytes look_ahead")]


def prepare_for_gpus() -> None:
    """Make this process one that compiles for absent GPUs; before JAX is imported."""
    from capture import environment

    environment.prepare(num_devices=8, platform="cuda")
