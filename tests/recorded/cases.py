"""The recorded cases: what the library is asked, mostly on its command line, of tiny models whose
measurements are in ``files``.

A case is a function from a ``Bench`` to facts: numbers, short texts and hashes that no
rearrangement of the library may change. Profiles and plans in ``files`` are of schema 1, as
commands wrote them or by hand; most cases plan from them, so that little is compiled.

``python -m tests.recorded.cases NAME ...`` prints the facts of cases, for those that need a process
of their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tests.recorded.sharding_cases  # noqa: F401  (whose cases are recorded too)
from capture.cli.asked import open_store
from capture.cli.main import build_parser
from capture.cli.profile import question_of
from profiling_runs.collect import wanted_configs
from profiling_runs.measurements import open_measurements
from tests.recorded import access
from tests.recorded.access import command, workload_name
from tests.recorded.bench import CASES, FILES, Bench, case

# ---- plans from recorded profiles ----------------------------------------------------------------


UNEVEN = "uneven --cluster 2x2 --global-batch 32 --microbatches 8 --profile uneven.profile.json"
EQUAL = "equal --cluster 1x4 --global-batch 16 --microbatches 4 --profile equal.profile.json"
SHARED = "shared --cluster 1x2 --global-batch 8 --microbatches 4 --profile shared.profile.json"
H100 = "uneven?layers=4 --cluster 2x2 --target h100 --global-batch 32 --microbatches 8"
H100 += " --profile h100.profile.json"

#: Each compiles nothing.
PLANS = {
    "minmax": UNEVEN,
    "enumerate": f"{UNEVEN} --algorithm enumerate",
    "mcap": f"{UNEVEN} --algorithm mcap",
    "mcap-bf": f"{UNEVEN} --algorithm mcap-bf --schedule gpipe",
    "gpipe": f"{UNEVEN} --schedule gpipe",
    "remat full": f"{UNEVEN} --remat full",
    "remat dots": f"{UNEVEN} --remat dots --schedule gpipe",
    "remat auto": f"{UNEVEN} --remat auto",
    "shard-params": f"{UNEVEN} --shard-params --remat auto",
    "infeasible": f"{UNEVEN} --memory 60kB",
    "smallest cluster": f"{UNEVEN} --memory 150kB --smallest-cluster",
    "largest batch": f"{UNEVEN} --memory 150kB --largest-batch",
    "tried": f"{UNEVEN} --try-microbatches 8,16 --try-schedules",
    "one device": UNEVEN.replace("2x2", "1x1"),
    "extrapolated": f"{UNEVEN.replace('--global-batch 32', '--global-batch 64')} --memory 1MB",
    "paper": f"{EQUAL} --mode paper",
    "paper merged": f"{EQUAL} --mode paper --merge-layers 4 --algorithm enumerate",
    "equal": EQUAL,
    "shared": SHARED,
    "shared gpipe": f"{SHARED} --schedule gpipe --memory 25kB",
}
TIMED_PLANS = {
    "h100 memory": H100,
    "h100 throughput": f"{H100} --objective throughput",
    "h100 throughput limited": f"{H100} --objective throughput --memory 4.285MB",
    "h100 throughput gpipe": f"{H100} --objective throughput --schedule gpipe",
    "h100 pareto": f"{H100} --objective pareto",
    "h100 autostage": f"{H100} --algorithm autostage",
}


def planned(bench: Bench, arguments: str) -> dict[str, Any]:
    output = bench.folder / "plan.json"
    name, *options = arguments.split()
    code, document = command(
        "plan", workload_name(name), *options, "--no-compile", "-o", str(output), *bench.measuring
    )
    found = access.recommendation_facts(code, document)
    if output.exists():  # what is written is what was said
        assert access.plan_facts(json.loads(output.read_text())) == access.plan_facts(
            document["plan"]
        )
    return found


for _name, _arguments in PLANS.items():
    case(f"plan {_name}")(lambda bench, arguments=_arguments: planned(bench, arguments))
for _name, _arguments in TIMED_PLANS.items():
    case(f"plan {_name}", timed=True)(lambda bench, arguments=_arguments: planned(bench, arguments))


@case("predict")
def predict(bench: Bench) -> dict[str, Any]:
    """Of a plan by hand, of plans that were recommended, with the old prediction in the file beside
    the new one.
    """
    found = {}
    for plan, profile in (
        ("hand_uneven", "uneven"),
        ("uneven", "uneven"),
        ("shared", "shared"),
        ("h100", "h100"),
    ):
        output = bench.folder / f"{plan}.json"
        _, document = command(
            "predict",
            f"{plan}.plan.json",
            "--profile",
            f"{profile}.profile.json",
            "-o",
            str(output),
        )
        found[plan] = access.prediction_facts(document["prediction"])
        before, after = (
            json.loads(path.read_text()) for path in (FILES / f"{plan}.plan.json", output)
        )
        assert access.stages_text(after["stages"]) == stages_of_file(before)
        if before.get("prediction") is not None:
            found[f"{plan}, in the file"] = access.prediction_facts(before["prediction"])
    return found


def stages_of_file(plan: Mapping[str, Any]) -> str:
    """Of schema 1, in which a plan by hand leaves out what is as usual."""
    usual = {"data_parallel": 1, "tensor_parallel": 1, "remat": "none"}
    usual |= {"shard_optimizer": False, "shard_params": False}
    return access.stages_text([{**usual, **stage} for stage in plan["stages"]])


@case("report and diff", timed=True)
def report(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for plan in ("uneven", "h100"):
        trace = bench.folder / f"{plan}.trace.json"
        _, document = command(
            "report",
            f"{plan}.plan.json",
            "--profile",
            f"{plan}.profile.json",
            "--trace",
            str(trace),
        )
        found[plan] = access.report_facts(document)
        found[f"{plan} trace"] = access.json_hash(json.loads(trace.read_text()))
    _, document = command(
        "diff", "uneven.plan.json", "hand_uneven.plan.json", "--profile", "uneven.profile.json"
    )
    found["diff"] = access.report_facts(document)
    return found


@case("export")
def export(bench: Bench) -> dict[str, Any]:
    output = bench.folder / "method.py"
    _, document = command(
        "export",
        "uneven.plan.json",
        "--to",
        "alpa",
        "-o",
        str(output),
        "--profile",
        "uneven.profile.json",
    )
    return {
        "source": access.text_hash(output.read_text()),
        "alpa": document["alpa"],
        "memory": [
            document["memory"]["peak_bytes_per_device"],
            access.json_hash(document["memory"]["stages"]),
        ],
    }


# ---- searches ------------------------------------------------------------------------------------


@case("search")
def searches(bench: Bench) -> dict[str, Any]:
    return {
        algorithm: [access.searched(access.search_problem(seed), algorithm) for seed in seeds]
        for algorithm, seeds in (("minmax", range(24)), ("enumerate", range(12)))
    }


@case("search by time")
def timed_searches(bench: Bench) -> dict[str, Any]:
    problems = [access.search_problem(seed, timed=True) for seed in range(16)]
    return {
        "throughput": [access.searched(problem, "throughput") for problem in problems],
        "pareto": [access.front_of(problem) for problem in problems[:8]],
    }


# ---- steps ---------------------------------------------------------------------------------------


@case("step of formulas")
def synthetic_steps(bench: Bench) -> dict[str, Any]:
    return {
        f"{schedule} {cuts} {count}{' as Alpa' * as_alpa}": access.synthetic_step(
            cuts, schedule, count, as_alpa
        )
        for schedule in ("gpipe", "1f1b")
        for cuts in ((3,), (1, 4, 6), (1, 2, 3, 4, 5, 6, 7))
        for count in (1, 4, 9)
        for as_alpa in (False, True)
    }


@case("step shared, four stages", compiles=True)
def step_of_four(bench: Bench) -> dict[str, Any]:
    return access.step_facts(workload_name("shared"), FILES / "four.plan.json", lines=True)


@case("step shared, two stages", compiles=True)
def step_of_two(bench: Bench) -> dict[str, Any]:
    return access.step_facts(workload_name("shared"), FILES / "two.plan.json")


def step_of(
    bench: Bench, workload: str, num_layers: int, *stages: Mapping[str, Any], **question: Any
) -> dict[str, Any]:
    """Of a plan by hand."""
    num_devices = max(d for stage in stages for d in stage["devices"]) + 1
    cluster = {"nodes": [num_devices], "target_per_node": ["cpu"]}
    plan = {
        "schema_version": 1,
        "workload": None,
        "cluster": cluster,
        "num_layers": num_layers,
        "stages": stages,
        **question,
    }
    (file := bench.folder / "plan.json").write_text(json.dumps(plan))
    return access.step_facts(workload_name(workload), file)


HALVES = {"global_batch_size": 8, "num_microbatches": 2, "schedule": "1f1b"}


@case("step of the demo's GPT", compiles=True, sample=False)
def step_of_demo(bench: Bench) -> dict[str, Any]:
    stages = (
        {"layers": [0, 0], "devices": [0, 1], "data_parallel": 2},
        {"layers": [1, 1], "devices": [2, 3], "tensor_parallel": 2},
    )
    return step_of(bench, "demo?num_blocks=2", 2, *stages, **HALVES)


@case("step of the zoo's GPT", compiles=True, sample=False)
def step_of_gpt(bench: Bench) -> dict[str, Any]:
    stages = (
        {"layers": [0, 0], "devices": [0, 1], "tensor_parallel": 2, "remat": "full"},
        {"layers": [1, 1], "devices": [2]},
    )
    return step_of(bench, "gpt?size=tiny&num_layers=2&dtype=bfloat16", 2, *stages, **HALVES)


@case("step of three readers", compiles=True, sample=False)
def step_of_three_readers(bench: Bench) -> dict[str, Any]:
    stages = [{"layers": [i, i], "devices": [i]} for i in range(2)] + [
        {"layers": [2, 3], "devices": [2, 3], "data_parallel": 2}
    ]
    return step_of(
        bench, "three_readers?depth=3&vocab=64", 4, *stages, **{**HALVES, "schedule": "gpipe"}
    )


@case("step of a routed model", compiles=True, sample=False)
def step_of_routed(bench: Bench) -> dict[str, Any]:
    stages = {"layers": [0, 1], "devices": [0], "remat": "dots"}, {"layers": [2, 3], "devices": [1]}
    return step_of(bench, "routed?depth=2", 4, *stages, **HALVES)


# ---- commands that compile -----------------------------------------------------------------------


@case("verify", compiles=True)
def verify(bench: Bench) -> dict[str, Any]:
    output = bench.folder / "plan.json"
    with access.programs() as emitted:
        _, document = command(
            "verify", "hand.plan.json", "--trust", "-o", str(output), *bench.measuring
        )
    return {
        "peaks": document["peak_bytes_per_device"],
        "stages": [
            [stage["peak_bytes"], stage["instant"], stage["parts_bytes"]]
            for stage in document["peaks"]
        ],
        "headroom": document["headroom"],
        "programs": sorted(emitted),
    }


@case("plan --verify", compiles=True)
def plan_verified(bench: Bench) -> dict[str, Any]:
    name, *options = SHARED.split()
    with access.programs() as emitted:
        code, document = command(
            "plan",
            workload_name(name),
            *options,
            "--verify",
            "2",
            "-o",
            str(bench.folder / "plan.json"),
            *bench.measuring,
        )
    return {**access.recommendation_facts(code, document), "programs": sorted(emitted)}


@case("predict at another size", compiles=True, sample=False)
def predict_compiled(bench: Bench) -> dict[str, Any]:
    plan = json.loads((FILES / "hand_uneven.plan.json").read_text())
    plan |= {"num_microbatches": 4, "global_batch_size": 24, "workload": None}
    (file := bench.folder / "plan.json").write_text(json.dumps(plan))
    _, document = command("predict", str(file), "--profile", "uneven.profile.json")
    workload = ("--workload", workload_name("uneven"))
    command("verify", str(file), *workload, *bench.measuring, "-o", str(file))
    verification = json.loads(file.read_text())["verification"]
    return {
        **access.prediction_facts(document["prediction"]),
        "document": document["prediction"]["extrapolated"],
        "verification": access.verification_facts(verification),
    }


@case("profile and jobs", compiles=True, sample=False)
def profiled(bench: Bench) -> dict[str, Any]:
    """Anew, of a model that is cut without marks."""
    output = bench.folder / "profile.json"
    question = "--cluster 1x2 --global-batch 4 --microbatches 2 --num-layers 2"
    question += " --neighbours 1 --calibration-plans 1 --remat none"
    asked = (workload_name("uneven?layers=2&marked=false"), *question.split(), *bench.measuring)
    jobs = _jobs(asked)
    with access.programs() as emitted:
        command("profile", *asked, "-o", str(output))
    return {
        **access.profile_facts(output),
        "jobs": [jobs, _jobs(asked)],
        "programs": [len(emitted), access.json_hash(sorted(emitted))],
    }


def _jobs(asked: Sequence[str]) -> list[Any]:
    """How many jobs a profile has, how many of them the store has, and their kinds."""
    options = build_parser(["profile"]).parse_args(["profile", *asked])
    question, store = question_of(options), open_store(options)
    measurements = open_measurements(question, store=store)
    jobs = measurements.jobs(wanted_configs(question, measurements), question.splits_backward)
    done = store.get(job.key for job in jobs)
    return [len(jobs), len(done), sorted({job.kind for job in jobs})]


@case("evaluate", compiles=True)
def evaluate(bench: Bench) -> dict[str, Any]:
    output = bench.folder / "evaluation.json"
    question = "--cluster 1x2 --global-batch 8 --microbatches 4 --plans 4"
    question += f" --neighbours 1 --calibration-plans 1 --remat none -o {output}"
    command("evaluate", workload_name("equal?layers=3"), *question.split(), *bench.measuring)
    document = json.loads(output.read_text())
    columns = "plan schedule stage predicted_bytes interval_bytes measured_bytes compiled_before"
    columns += " paper_predicted_bytes"
    modes = "default paper default_where_paper_predicts by_schedule"
    return {
        "predictions": [access.of(row, columns) for row in document["predictions"]],
        "factors": document["interval_factors"],
        **{mode: document[mode] for mode in modes.split()},
    }


@case("explain", compiles=True, sample=False)
def explain(bench: Bench) -> dict[str, Any]:
    _, document = command("explain", "four.plan.json", "--trust", *bench.measuring)
    return {
        "peaks": document["peak_bytes_per_device"],
        "stages": [
            access.of(stage, "peak_bytes instant parts_bytes attributed_fraction")
            for stage in document["stages"]
        ],
        "layers": access.json_hash([stage["layers_bytes"] for stage in document["stages"]]),
        "buffers": access.json_hash([stage["buffers"] for stage in document["stages"]]),
        "changes": [
            access.of(change, "change peak_bytes saves_bytes") for change in document["changes"]
        ],
    }


@case("run", compiles=True, sample=False)
def run(bench: Bench) -> dict[str, Any]:
    _, document = command("run", "two.plan.json", "--trust", "--steps", "1", "--check")
    peaks = "predicted_peak_bytes_per_device replayed_peak_bytes_per_device"
    peaks += " measured_peak_bytes_per_device"
    assert document["max_relative_loss_error"] < 1e-5
    return {"peaks": access.of(document, peaks), "checks": document["ledger_checks"]}


# ---- for a GPU that is not there -----------------------------------------------------------------


@case("h100 verify", compiles=True, timed=True, apart=True, sample=False)
def verify_for_h100(bench: Bench) -> dict[str, Any]:
    plan = json.loads((FILES / "hand.plan.json").read_text())
    plan["cluster"]["target_per_node"] = ["h100", "h100"]
    plan["workload"] = None
    (file := bench.folder / "plan.json").write_text(json.dumps(plan))
    with access.programs() as emitted:
        _, document = command(
            "verify", str(file), "--workload", workload_name("uneven?layers=4"), *bench.measuring
        )
    return {
        "peaks": document["peak_bytes_per_device"],
        "stages": [
            [stage["peak_bytes"], stage["instant"], stage["parts_bytes"]]
            for stage in document["peaks"]
        ],
        "headroom": document["headroom"],
        "time": document["time"],
        "programs": sorted(emitted),
    }


if __name__ == "__main__":
    access.prepare_for_gpus()
    print(json.dumps({name: CASES[name].facts() for name in sys.argv[1:]}))
