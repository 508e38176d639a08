"""Which faults the tests notice: mutants of the modules where a wrong number is worst, each against
the tests of its part.

    python benchmarks/mutation.py -o benchmarks/results/2026-01-31-mutation.json
    python benchmarks/mutation.py --only capture/step/program.py --fraction 1

A mutant is one small change: a comparison without its equality, a plus that is a minus, a number
that is one more, a loop that is not entered. It is killed if a test fails or does not end. A
survivor is a test that is missing, or an equivalent mutant, which does the same: those stand with
their reasons in ``equivalent_mutants.json``, known by their text, so that they stay known when
lines move. Annotations and decorators are left alone. Everything happens in copies of the
repository.

The mutants are made by cosmic-ray (``pip install -e '.[dev,mutation]'``). Its operators that turn
an operation into any other are left out, but for one partner each: nearly all of those mutants fail
at once, in every test.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import math
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.json"

STEP = "tests/unit/test_ledger.py tests/property/test_step.py"
TABLES = STEP + " tests/property/test_step_tables.py"
STREAMED = (
    "tests/property/test_streamed_arrays.py tests/property/test_streamed_step.py "
    "tests/unit/test_packs_plan.py"
)
PASSES = "tests/property/test_pack_passes.py " + STREAMED
PREDICTOR = (
    "tests/unit/test_predictor.py tests/unit/test_predictor_windows.py "
    "tests/unit/test_paper_predictor.py tests/unit/test_regressions.py capture/predictor"
)
SEARCH = "tests/differential/test_search.py -k 'not loads_jax and not random_plans'"
TIMED = (
    "tests/differential/test_throughput.py -k 'not front and not sampled and not (brute_force and "
    "not (0] or "
    "5]))'"
)
#: Of each module, the arguments of pytest: seconds, not minutes.
PARTS = {
    "capture/predictor/formula.py": (
        "tests/property/test_step.py tests/unit/test_predictor.py -k 'formula or parts or "
        "statistics or "
        "prediction'"
    ),
    "capture/predictor/additive.py": PREDICTOR,
    "capture/predictor/tables.py": PREDICTOR,
    "capture/predictor/statistics.py": PREDICTOR,
    "capture/predictor/fit.py": PREDICTOR,
    "capture/step/program.py": STEP,
    "capture/step/pipeline.py": TABLES,
    "capture/step/evaluation.py": "tests/property/test_evaluation.py",
    "capture/step/interface.py": STEP + " tests/unit/test_graph.py",
    "capture/step/sharded.py": "tests/property/test_osdp_step.py tests/unit/test_osdp_cost.py",
    "capture/step/packs.py": STREAMED,
    "capture/step/pack_state.py": STREAMED,
    "capture/step/room.py": PASSES,
    "capture/step/passes/transfers.py": PASSES,
    "capture/step/passes/residency.py": PASSES,
    "capture/step/passes/waits.py": PASSES,
    "capture/step/pack_order.py": "tests/unit/test_pack_order.py",
    "capture/step/pack_sizes.py": "tests/unit/test_pack_sizes.py " + STREAMED,
    "capture/alpa/step.py": STEP,
    "capture/step/ledger.py": STEP,
    "capture/plan/schedule.py": "tests/unit/test_schedule.py tests/property/test_step.py",
    "capture/runtime/meter.py": (
        "tests/multi_device/test_meter.py -k 'one-device or leak or shards or missing or resident'"
    ),
    "capture/runtime/process_memory.py": (
        "tests/multi_device/test_meter.py -k 'missing or resident or heap'"
    ),
    "capture/step/offers.py": "tests/property/test_offers.py",
    "recommender/capture/minmax.py": SEARCH,
    "recommender/capture/tie_break.py": SEARCH,
    "recommender/capture/reach.py": SEARCH,
    "capture/papers/capture/enumerate.py": SEARCH,
    "recommender/capture/throughput.py": TIMED,
    "recommender/capture/least_sum.py": TIMED,
    "recommender/capture/counted.py": "tests/unit/test_table_search.py",
}

OPERATORS = {
    *(
        f"ReplaceComparisonOperator_{change}"
        for change in ("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt")
    ),
    *(f"ReplaceComparisonOperator_{change}" for change in ("Is_IsNot", "IsNot_Is")),
    *(
        f"ReplaceBinaryOperator_{change}"
        for change in ("Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv")
    ),
    *(
        f"ReplaceBinaryOperator_{change}"
        for change in ("Pow_Mul", "LShift_RShift", "RShift_LShift", "BitAnd_BitOr", "BitOr_BitAnd")
    ),
    *(f"ReplaceUnaryOperator_{change}" for change in ("USub_UAdd", "Delete_Invert", "Delete_Not")),
    *(
        "AddNot",
        "ReplaceTrueWithFalse",
        "ReplaceFalseWithTrue",
        "ReplaceAndWithOr",
        "ReplaceOrWithAnd",
    ),
    *(
        "ReplaceBreakWithContinue",
        "ReplaceContinueWithBreak",
        "ExceptionReplacer",
        "NumberReplacer",
        "ZeroIterationForLoop",
    ),
}


@dataclass(frozen=True)
class Mutant:
    """One change of one module; ``occurrence`` counts the places where the operator applies."""

    module: str
    operator: str
    occurrence: int
    line: int


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant; ``removed`` and ``added`` are its changed lines."""

    mutant: Mutant
    killed: bool
    removed: str
    added: str


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of the operators."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    skipped, tree = (
        list(_left_alone(ast.parse(Path(module).read_text()))),
        get_ast_from_path(Path(module)),
    )
    found = []
    for name in sorted(OPERATORS):
        operator = cosmic_ray.plugins.get_operator(f"core/{name}")()
        places = (place for node in ast_nodes(tree) for place in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(places):
            if not any(first <= start < last for first, last in skipped):
                found.append(Mutant(module, name, occurrence, start[0]))
    return found


def _left_alone(tree: ast.Module) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations and decorators begin and end, as (line, column)."""
    for node in ast.walk(tree):
        for part in (
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", ()),
        ):
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def sampled(mutants: list[Mutant], fraction: float, seed: int) -> list[Mutant]:
    """A share of a module's mutants, at least 15; drawn by the name of the module, so that others
    change nothing."""
    wanted = max(15, round(fraction * len(mutants)))
    return (
        mutants
        if wanted >= len(mutants)
        else random.Random(f"{seed} {mutants[0].module}").sample(mutants, wanted)
    )


def enter_copy(folder: str) -> None:
    """Copy what git tracks, and what is new, into a folder of this process, and work there; import
    what every test needs."""
    copy = Path(folder) / str(os.getpid())
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, copy / name)
    os.chdir(copy)
    for module in ("pytest", "hypothesis", "numpy", "sklearn.linear_model"):
        importlib.import_module(module)


def passes(module: str, cpu_seconds: float, *, write_bytecode: bool = False) -> bool:
    """Whether the tests of a module pass in a process forked from this one, which has imported
    nothing of the repository.

    The limit is one of processor time, so that a busy machine changes nothing; an hour ends what
    waits for ever.
    """
    child = os.fork()
    if not child:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_seconds),) * 2)
        signal.alarm(3600)
        sys.dont_write_bytecode = not write_bytecode  # a mutant's would be taken for the module's
        sys.path.insert(0, os.getcwd())
        os.environ["PYTHONPATH"] = os.getcwd()
        with open("tests.log", "w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        arguments = [
            "-q",
            "-x",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile",
            "unshrunk",
            *shlex.split(PARTS[module]),
        ]
        os._exit(int(sys.modules["pytest"].main(arguments)))
    _, status = os.waitpid(child, 0)
    return status == 0


def baseline(module: str) -> float:
    """Processor seconds of the tests of a module as it is; an error if they fail."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not passes(module, 1800, write_bytecode=True):
        raise RuntimeError(
            f"the tests of {module} fail before anything is changed:\n"
            f"{Path('tests.log').read_text()[-3000:]}"
        )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def judge(mutant: Mutant, cpu_seconds: float) -> Outcome:
    """Run the tests of a mutant's part on it."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import use_mutation

    operator = cosmic_ray.plugins.get_operator(f"core/{mutant.operator}")()
    with use_mutation(Path(mutant.module), operator, mutant.occurrence) as (before, after):
        survived = passes(mutant.module, cpu_seconds)
    lines = [
        line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "-+"
    ]
    removed, added = (
        " ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+"
    )
    return Outcome(mutant, not survived, removed, added)


def row_of(
    module: str,
    num_possible: int,
    num_killed: int,
    outcomes: list[Outcome],
    equivalent: dict[tuple[str, str, str], str],
) -> dict[str, Any]:
    """What the record says of a module; ``num_killed`` were before."""
    survived = [o for o in outcomes if not o.killed]
    why = {o: equivalent.get((module, o.removed, o.added)) for o in survived}
    return {
        "module": module,
        "tests": PARTS[module],
        "num_possible": num_possible,
        "num_mutants": num_killed + len(outcomes),
        "num_killed": num_killed + len(outcomes) - len(survived),
        "num_equivalent": sum(reason is not None for reason in why.values()),
        "left": [_as_json(o) for o in survived if why[o] is None],
        "equivalent": [{**_as_json(o), "why": why[o]} for o in survived if why[o] is not None],
    }


def as_text(row: dict[str, Any]) -> str:
    counts = (
        f"{row['num_mutants']} of {row['num_possible']} mutants, {row['num_killed']} killed, "
        f"{row['num_equivalent']} equivalent"
    )
    left = [
        (
            f"  line {e['line']}, {e['operator']} {e['occurrence']}\n    - {e['removed']}\n    + "
            f"{e['added']}"
        )
        for e in row["left"]
    ]
    return "\n".join([f"{row['module']}: {counts}, {len(left)} left", *left])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="MODULE")
    parser.add_argument(
        "--fraction",
        type=float,
        default=0.215,
        help="of the mutants of each module, drawn (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument(
        "--again",
        action="store_true",
        help="judge again what survived in the record, and nothing else",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        help="the record; what it says of other modules stays, if their draw was the same",
    )
    options = parser.parse_args()
    output = options.output and options.output.resolve()
    os.chdir(REPOSITORY)
    document: dict[str, Any] = {
        "benchmark": "mutation",
        "date": date.today().isoformat(),
        "seed": options.seed,
    }
    document["versions"] = {
        name: metadata.version(name) for name in ("cosmic-ray", "pytest", "hypothesis")
    }
    before = json.loads(output.read_text()) if output is not None and output.exists() else {}
    if before.get("seed") != options.seed:
        before = {}
    rows = {row["module"]: row for row in before.get("rows", ())}
    equivalent = {
        (e["module"], e["removed"], e["added"]): e["why"]
        for e in json.loads(EQUIVALENT.read_text())
    }
    every = {module: mutants_of(module) for module in options.only}
    if options.again:  # what the list says of a survivor is believed
        survived = {module: _outcomes(rows[module]) for module in options.only if module in rows}
        known = {
            module: [o for o in found if (module, o.removed, o.added) in equivalent]
            for module, found in survived.items()
        }
        drawn = {
            module: [o.mutant for o in found if o not in known[module]]
            for module, found in survived.items()
        }
    else:
        drawn = {
            module: sampled(found, options.fraction, options.seed)
            for module, found in every.items()
        }
        known = {module: [] for module in drawn}
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as folder,
        ProcessPoolExecutor(options.jobs, None, enter_copy, (folder,)) as pool,
    ):
        seconds = {
            module: pool.submit(baseline, module) for module, mutants in drawn.items() if mutants
        }
        limits = {module: 10 + 5 * took.result() for module, took in seconds.items()}
        pending = {
            module: [pool.submit(judge, m, limits[module]) for m in mutants]
            for module, mutants in drawn.items()
        }
        for module, futures in pending.items():
            outcomes = [future.result() for future in futures] + known[module]
            killed_before = rows[module]["num_killed"] if options.again else 0
            rows[module] = row_of(module, len(every[module]), killed_before, outcomes, equivalent)
            print(as_text(rows[module]), flush=True)
            if output is not None:
                document["num_mutants"] = sum(row["num_mutants"] for row in rows.values())
                document["num_left"] = sum(len(row["left"]) for row in rows.values())
                document["rows"] = [rows[m] for m in PARTS if m in rows]
                output.write_text(json.dumps(document, indent=1) + "\n")
    total, left = (
        sum(row["num_mutants"] for row in rows.values()),
        sum(len(row["left"]) for row in rows.values()),
    )
    print(f"{total} mutants, {left} left ({left / total:.1%})")
    return 0 if left <= 0.05 * total else 1


def _as_json(outcome: Outcome) -> dict[str, Any]:
    mutant = outcome.mutant
    place = {"operator": mutant.operator, "occurrence": mutant.occurrence, "line": mutant.line}
    return {**place, "removed": outcome.removed, "added": outcome.added}


def _outcomes(row: dict[str, Any]) -> list[Outcome]:
    """The survivors of a module in a record."""
    found = [*row["left"], *row["equivalent"]]
    return [
        Outcome(
            Mutant(row["module"], e["operator"], e["occurrence"], e["line"]),
            False,
            e["removed"],
            e["added"],
        )
        for e in found
    ]


if __name__ == "__main__":
    sys.exit(main())
