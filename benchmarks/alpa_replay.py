"""Live bytes of every stage in Alpa's runtime, three times: Alpa's own instruction lists, the
library's replay of Alpa's compiled stages, and the library's own account of the same plan; at the
sizes of CAPTURE's Table I, on four nodes with four devices each.

    make alpa
    python benchmarks/alpa_replay.py --alpa-python .venv-alpa/bin/python -o RESULT.json

* ``alpa``: real Alpa 0.2.3 compiles the model of the zoo with the exported plan, under jax 0.3.22
  and with the harness of ``tests/alpa_conformance`` (a process of its own per plan, by
  ``--alpa-python``); the instructions of one worker of every mesh are replayed, and the bytes of
  live buffers counted.
* ``replay``: ``capture.alpa.memory.alpa_replay``, told what Alpa's stages hold and hand over. It
  must agree byte for byte: it checks the lifetimes of buffers, not their sizes.
* ``own``: ``alpa_replay`` on what this library knows of the model, traced under today's JAX and not
  compiled: parameters, gradients, optimizer state, batch, tensors between stages, and what
  ``jax.vjp`` saves. It checks the sizes. Only for stages without tensor parallelism: what a stage
  keeps of split tensors is its compiler's choice, and for Alpa's stands a rule of the harness.

Nothing of this counts temporaries: results of a running program are counted before its inputs are
freed, and no more. Nothing is allocated.

What differs between ``alpa`` and ``own``. Without rematerialisation Alpa keeps, for every
micro-batch in flight, also what depends on parameters alone (weights cast to float16, masks), which
the library makes again; column ``casts`` has its share of ``kept``. Alpa also has Flax embed tokens
by a product with a one-hot matrix of them, which the first stage of a language model keeps.
Statistics and state of one dimension are whole on every replica in the harness, split in the
library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment

REPOSITORY = Path(__file__).resolve().parent.parent
JUDGE = REPOSITORY / "tests" / "alpa_conformance" / "full_size.py"
NODES = (4, 4, 4, 4)
GIB = 2**30

Degrees = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """One plan.

    Attributes:
        family, size: Of the zoo.
        stops: The layer at which each stage ends.
        degrees: (data, tensor) parallel per stage.
        schedule: ``1f1b`` or ``gpipe``.
        remat: Of all stages.
    """

    family: str
    size: str
    stops: tuple[int, ...]
    degrees: Degrees
    schedule: str
    remat: str

    @property
    def name(self) -> str:
        shapes = [f"{dp}x{tp}" for dp, tp in self.degrees]
        stages = f"{len(shapes)} of {shapes[0]}" if len(set(shapes)) == 1 else "+".join(shapes)
        return f"{self.family} {self.size}, {stages}, {self.schedule}, remat {self.remat}"


#: (global batch, micro-batches) of Table I.
BATCHES = {
    ("gpt", "2.6B"): (1024, 64),
    ("gpt", "6.7B"): (1024, 32),
    ("moe", "2.4B"): (1024, 32),
    ("moe", "7.1B"): (1024, 32),
    ("wide_resnet", "1B"): (768, 24),
    ("wide_resnet", "2B"): (768, 24),
}
NODES_OF_REPLICAS: Degrees = [(4, 1)] * 4
SINGLE_DEVICES: Degrees = [(1, 1)] * 16

CASES = (
    Case("wide_resnet", "1B", (4, 8, 12, 16), NODES_OF_REPLICAS, "1f1b", "none"),
    Case("wide_resnet", "1B", (4, 8, 12, 16), NODES_OF_REPLICAS, "gpipe", "full"),
    Case("wide_resnet", "1B", tuple(range(1, 17)), SINGLE_DEVICES, "1f1b", "none"),
    Case("wide_resnet", "1B", (7, 12, 16), [(4, 1), (2, 2), (8, 1)], "gpipe", "none"),
    Case("wide_resnet", "2B", (3, 7, 16), [(4, 1), (4, 1), (8, 1)], "1f1b", "full"),
    Case("moe", "7.1B", (4, 8, 12, 16), NODES_OF_REPLICAS, "1f1b", "none"),
    Case("moe", "7.1B", (5, 9, 16), [(2, 2), (4, 1), (8, 1)], "gpipe", "full"),
    Case("moe", "2.4B", tuple(range(1, 17)), SINGLE_DEVICES, "1f1b", "full"),
    Case("moe", "2.4B", (7, 12, 14, 16), [(8, 1), (2, 2), (1, 2), (2, 1)], "1f1b", "none"),
    Case("gpt", "2.6B", (8, 16, 24, 32), NODES_OF_REPLICAS, "1f1b", "none"),
    Case("gpt", "2.6B", (8, 16, 24, 32), [(1, 4)] * 4, "gpipe", "full"),
    Case("gpt", "2.6B", tuple(range(2, 33, 2)), SINGLE_DEVICES, "1f1b", "full"),
    Case("gpt", "6.7B", (14, 23, 28, 32), [(4, 2), (4, 1), (2, 1), (1, 2)], "1f1b", "full"),
)


def plan_of(case: Case) -> Any:
    """The case as a plan; replicas split the optimizer's state, as Alpa does by default."""
    from capture.machine.cluster import Cluster
    from capture.model.workload import WorkloadSpec
    from capture.plan.choices import StageChoice
    from capture.plan.stage import Stage
    from capture.plan.stages import Plan

    arguments = {
        "size": case.size,
        **({} if case.family == "wide_resnet" else {"dtype": "float16"}),
    }
    workload = WorkloadSpec(
        str(REPOSITORY / "models" / f"{case.family}.py"), case.family, arguments
    )
    global_batch, num_microbatches = BATCHES[case.family, case.size]
    first, device, stages = 0, 0, []
    for stop, (dp, tp) in zip(case.stops, case.degrees, strict=True):
        stages.append(
            Stage(
                first,
                stop,
                range(device, device + dp * tp),
                StageChoice(dp, tp, case.remat, dp > 1),
            )
        )
        first, device = stop, device + dp * tp
    return Plan(
        Cluster(NODES),
        first,
        tuple(stages),
        global_batch,
        num_microbatches,
        case.schedule,
        workload=workload,
    )


def judged_by_alpa(plan: Any, python: Path) -> dict[str, Any]:
    """What ``tests/alpa_conformance/full_size.py`` says of a plan.

    Raises:
        subprocess.CalledProcessError: with Alpa's traceback on standard error.
    """
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    variables.pop("XLA_FLAGS", None)  # those of this process are of another XLA
    found = subprocess.run(
        [str(python), str(JUDGE)],
        input=json.dumps(plan.to_json()),
        env=variables,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(found.stdout))


class Tracer:
    """What the stages of plans of one model hold, from the traced programs alone."""

    def __init__(self, workload: Any):
        from capture.profiler.compile import CompileBackend

        self._backend = CompileBackend(workload.load())
        self._known: dict[str, Any] = {}

    def interface(self, stage: Any, microbatch_size: int) -> Any:
        """Of a stage with one device per replica: every replica is traced alone, at its share of a
        micro-batch."""
        from capture.plan.choices import StageChoice
        from capture.step.interface import stage_interface

        share = microbatch_size // stage.choice.data_parallel
        traced, param_bytes = (
            self._backend.traced(share),
            self._backend.sharding(share).param_bytes((1, 1)),
        )
        found = stage_interface(
            traced.graph,
            stage.first,
            stage.stop,
            stage.devices,
            StageChoice(),
            param_bytes,
            self._cost(stage, share),
        )
        results = {
            "forward": sum(found.value_bytes[v] for v in found.outputs) + found.residual_bytes,
            "backward": sum(found.value_bytes[v] for v in found.input_gradients),
        }
        return replace(found, transient_bytes={**results, "update": 0, "summarize": 0})

    def _cost(self, stage: Any, share: int) -> Any:
        from capture.measured.profile import StageConfig
        from capture.measured.stage_cost import UpdateCost
        from capture.plan.choices import StageChoice
        from capture.runtime.layout import shard_bytes

        one = StageConfig(stage.first, stage.stop, StageChoice(1, 1, stage.choice.remat), share)
        split = replace(
            one,
            choice=StageChoice(
                stage.choice.data_parallel, 1, stage.choice.remat, stage.choice.shard_optimizer
            ),
        )
        optimizer_bytes = sum(
            map(shard_bytes, self._backend.programs(split, compiler=only_trace).state_structs())
        )
        key = self._backend.key(one)  # stages that are alike are traced once
        if key not in self._known:
            self._known[key] = self._backend.programs(one, compiler=only_trace).cost_given_update(
                UpdateCost(0, 0)
            )
        return replace(self._known[key], optimizer_bytes=optimizer_bytes)


def only_trace(function: Any, args: Sequence[Any], **options: Any) -> Any:
    """In the place of a compiler: the results of a program on one device, and nothing of what it
    needs while it runs."""
    import jax

    from capture.compiler.executable import Executable

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    results = jax.tree.map(
        lambda made: jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=here),
        jax.eval_shape(function, *args),
    )
    return Executable(function, results, 0)


def own_account(plan: Any, tracer: Tracer) -> tuple[list[dict[str, int] | None], float]:
    """Per stage, the library's peak and its parts, None under tensor parallelism; and the seconds
    that it took."""
    from capture.alpa.memory import alpa_replay
    from capture.predictor.formula import kept_of

    start = time.perf_counter()
    stages = [tracer.interface(stage, plan.microbatch_size) for stage in plan.stages]
    peaks = alpa_replay(plan, stages).stages
    found = [
        None
        if stage.choice.tensor_parallel > 1
        else {
            "peak_bytes": peak.peak_bytes,
            "params_bytes": interface.params_bytes,
            "optimizer_bytes": interface.optimizer_bytes,
            "kept_bytes_per_microbatch": kept_of(interface),
        }
        for stage, interface, peak in zip(plan.stages, stages, peaks, strict=True)
    ]
    return found, time.perf_counter() - start


def measure(case: Case, python: Path, tracer: Tracer) -> dict[str, Any]:
    plan = plan_of(case)
    judged = judged_by_alpa(plan, python)
    own, own_seconds = own_account(plan, tracer)
    rows = []
    for stage, alpa, ours in zip(plan.stages, judged["stages"], own, strict=True):
        peak = alpa["peak_bytes"]
        rows.append(
            {
                "layers": [stage.first, stage.stop - 1],
                "degrees": [stage.choice.data_parallel, stage.choice.tensor_parallel],
                "alpa": alpa,
                "own": ours,
                "replay_over_alpa": alpa["replay_bytes"] / peak,
                "own_over_alpa": None if ours is None else ours["peak_bytes"] / peak,
            }
        )
    global_batch, num_microbatches = BATCHES[case.family, case.size]
    seconds = {**judged["seconds"], "own": own_seconds}
    facts = {
        "name": case.name,
        "global_batch": global_batch,
        "num_microbatches": num_microbatches,
        "seconds": seconds,
    }
    return {**facts, "stages": rows}


def with_summary(document: dict[str, Any]) -> dict[str, Any]:
    """How many stages agree, and how far the library's own account is from Alpa's."""
    rows = document["rows"]
    stages = [stage for row in rows for stage in row["stages"]]
    ratios = [stage["own_over_alpa"] for stage in stages if stage["own_over_alpa"] is not None]
    kept = [
        stage["own"]["kept_bytes_per_microbatch"]
        / (alpa["kept_bytes_per_microbatch"] - alpa["of_parameters_bytes_per_microbatch"])
        for stage in stages
        if stage["own"] is not None and (alpa := stage["alpa"])
    ]
    found = {
        "num_plans": len(rows),
        "num_stages": len(stages),
        "num_stages_replay_equal": sum(
            stage["alpa"]["replay_bytes"] == stage["alpa"]["peak_bytes"] for stage in stages
        ),
        "num_stages_own": len(ratios),
        "min_own_over_alpa": min(ratios, default=None),
        "max_own_over_alpa": max(ratios, default=None),
        "min_own_over_alpa_kept_without_casts": min(kept, default=None),
        "max_own_over_alpa_kept_without_casts": max(kept, default=None),
    }
    return {**document, "summary": found}


def as_text(document: dict[str, Any]) -> str:
    from capture.cli.output import table

    lines = []
    for row in document["rows"]:
        for s, stage in enumerate(row["stages"]):
            alpa, own = stage["alpa"], stage["own"]
            lines.append(
                [
                    row["name"] if s == 0 else "",
                    s,
                    f"{alpa['peak_bytes'] / GIB:.3f}",
                    f"{alpa['replay_bytes'] - alpa['peak_bytes']:+d}",
                    "-" if own is None else f"{own['peak_bytes'] / GIB:.3f}",
                    "-" if own is None else f"{stage['own_over_alpa']:.3f}",
                    f"{alpa['kept_bytes_per_microbatch'] / GIB:.3f}",
                    f"{alpa['of_parameters_bytes_per_microbatch'] / GIB:.3f}",
                    "-" if own is None else f"{own['kept_bytes_per_microbatch'] / GIB:.3f}",
                    f"{sum(row['seconds'].values()):.0f}" if s == 0 else "",
                ]
            )
    heads = [
        "plan",
        "stage",
        "alpa GiB",
        "replay",
        "own GiB",
        "own/alpa",
        "kept",
        "casts",
        "own kept",
        "s",
    ]
    found = document["summary"]
    text = (
        f"{table(heads, lines)}\nreplay equal to Alpa's in {found['num_stages_replay_equal']} of "
        f"{found['num_stages']} stages"
    )
    if found["num_stages_own"]:
        text += f"\nown / alpa, {found['num_stages_own']} stages without tensor parallelism: "
        text += (
            f"peak {found['min_own_over_alpa']:.3f} to {found['max_own_over_alpa']:.3f}, kept "
            "without casts "
        )
        text += (
            f"{found['min_own_over_alpa_kept_without_casts']:.3f} to "
            f"{found['max_own_over_alpa_kept_without_casts']:.3f}"
        )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--alpa-python",
        type=Path,
        default=REPOSITORY / ".venv-alpa" / "bin" / "python",
        metavar="PATH",
    )
    parser.add_argument(
        "--cases", nargs="+", metavar="TEXT", help="only those whose names contain one of these"
    )
    parser.add_argument("--json", action="store_true", help="print the document on standard output")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="write the document here after every plan; plans that it has are kept",
    )
    options = parser.parse_args()
    environment.prepare(num_devices=sum(NODES))
    chosen = [
        case
        for case in CASES
        if not options.cases or any(text in case.name for text in options.cases)
    ]
    tracers: dict[tuple[str, str], Tracer] = {}
    order = [case.name for case in CASES]
    known = (
        json.loads(options.output.read_text())["rows"]
        if options.output and options.output.exists()
        else []
    )
    document: dict[str, Any] = {
        "benchmark": "alpa_replay",
        "date": date.today().isoformat(),
        "nodes": list(NODES),
        "alpa_versions": {"alpa": "0.2.3", "jax": "0.3.22"},
        "versions": environment.versions("cpu"),
        "rows": [row for row in known if row["name"] in order],
    }
    chosen = [case for case in chosen if case.name not in {row["name"] for row in document["rows"]}]
    for number, case in enumerate(chosen, start=1):
        print(f"[{number}/{len(chosen)}] {case.name}", file=sys.stderr, flush=True)
        if (case.family, case.size) not in tracers:
            tracers[case.family, case.size] = Tracer(plan_of(case).workload)
        document["rows"].append(measure(case, options.alpa_python, tracers[case.family, case.size]))
        document["rows"].sort(key=lambda row: order.index(row["name"]))
        if options.output:
            options.output.write_text(json.dumps(with_summary(document), indent=2) + "\n")
    document = with_summary(document)
    print(json.dumps(document, indent=2) if options.json else as_text(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
