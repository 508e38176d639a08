"""What the scripts of mu-TWO's evaluation share: the models of its Table 1, the machines of its
Table C and of today, and arrays of models weighed on them.

Programs are compiled for their target, which need not be there, and kept in a store, so that a
script goes on where it was ended. Seconds are simulated: a roofline by kernel, and copies by the
link with the host.
"""

from __future__ import annotations

import argparse
import json
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import documents
from capture import environment
from capture.machine.cluster import Cluster
from capture.machine.rates import HostLink, Link, Sourced
from capture.machine.target import Target
from capture.measured.store import Store
from capture.measured.work import Kernel
from capture.model.workload import WorkloadSpec
from capture.step.multiplexed import HOST
from capture.step.sub_array import Uses
from recommender.mutwo.problem import ArrayProblem, Chosen, Space

if TYPE_CHECKING:
    from capture.profiler.array import ArrayProfile, Progress, What
    from capture.profiler.asked import ProgramCost

ZOO = Path(__file__).parents[3] / "models"
RESULTS = Path(__file__).parents[2] / "results"
#: Where programs are kept, unless said.
STORE = Path("mutwo.sqlite")
#: Name in the paper -> workload, and both batch sizes of Table 1.
MODELS = {
    "BERT": ("bert.py:bert?size=base", (16, 24)),
    "GPT2": ("gpt2.py:gpt2?size=small", (8, 16)),
    "ViT": ("vit.py:vit?size=60M", (8, 16)),
    "MobileNet": ("mobilenet.py:mobilenet?size=5.4M", (64, 128)),
    "ResNet101": ("resnet.py:resnet?size=101L", (48, 64)),
    "Recommender": ("deep_recommender.py:deep_recommender?size=40M", (512, 1024)),
}
#: That leave a device idle, which those of the paper do not.
SMALL = {
    "GPT of width 64": ("gpt.py:gpt?size=tiny", (8, 16)),
    "MobileNet, 32 x 32": ("mobilenet.py:mobilenet?size=tiny", (64, 128)),
}
#: Table C: PCIe 4 x16, 32 GB/s, full duplex.
_PCIE = Link(Sourced(1e-5, "one cudaMemcpyAsync launch"), Sourced(32e9, "mu-TWO, Table C"))
TABLE_C = HostLink(_PCIE, _PCIE, True, "mu-TWO, C.1: full duplex")
#: By target, the link with the host and what of its memory one device has; of others, those of the
#: target, and as much as is needed.
HOSTS = {"a100-40g": (TABLE_C, 1152 * 10**9 // 8), "v100-32g": (TABLE_C, 384 * 10**9 // 4)}
RUNS, UNLIMITED = ("forward", "backward", "recompute"), 10**15
#: Writes the document of a script.
finish = partial(documents.finish, simulated=True)


def workload_of(name: str) -> Any:
    """A model of the paper, with its optimizer: SGD (B.1.3), here with momentum."""
    import optax

    workload = WorkloadSpec.parse(f"{ZOO}/{(MODELS | SMALL)[name][0]}").load()
    return replace(workload, optimizer=optax.inject_hyperparams(optax.sgd)(1e-3, momentum=0.9))


@dataclass(eq=False)
class Compiled:
    """What was not in the store.

    Attributes:
        num_compiled, compile_seconds: Of programs.
    """

    num_compiled: int = 0
    compile_seconds: float = 0.0


def with_floor(profile: ArrayProfile, seconds: float) -> ArrayProfile:
    """As if no kernel took less."""
    floor = Sourced(seconds, "assumed")
    return replace(profile, rates=replace(profile.machine.rates, kernel_seconds=floor))


def kernels_of(profile: ArrayProfile, num_models: int) -> list[Kernel]:
    """That the programs of so many models launch, where everything is retained."""
    array = profile.sub_array(num_models)
    works = [profile.needs(num_models, issued.call).work for issued in Uses(array).issued]
    return [one for work in works if work is not None for one in work.kernels or ()]


@dataclass(frozen=True)
class Case:
    """What an array is made of, and where it runs.

    Attributes:
        model: Name in the paper.
        batch_size: Of one model.
        target: Name.
    """

    model: str
    batch_size: int
    target: str

    def profile(self, store: Store, compiled: Compiled | None = None) -> ArrayProfile:
        """Call ``prepare`` first."""
        workload = workload_of(self.model)
        return profile_of(workload, self.batch_size, self.target, store, compiled)

    def problem(self, profile: ArrayProfile, count: int) -> ArrayProblem:
        """So many models, in equal sub-arrays or as one."""
        limit = int(profile.machine.memory_limit_bytes)
        link, host_bytes = HOSTS.get(self.target, (profile.host, None))
        return ArrayProblem(profile, count, link, limit, host_bytes, rule="equal")


def profile_of(
    workload: Any, batch_size: int, target: str, store: Store, compiled: Compiled | None = None
) -> ArrayProfile:
    """Of arrays of a task, from the store or compiled in this process, which is counted; call
    ``prepare`` first."""
    from capture.profiler.array import ArrayProfile
    from capture.profiler.asked import ArrayShape

    count = Compiled() if compiled is None else compiled

    def measure(kind: str, wanted: Mapping[str, What], told: Progress) -> dict[str, ProgramCost]:
        begun = time.perf_counter()
        found = profile.backend.measured(kind, wanted, told)
        count.num_compiled += len(found)
        count.compile_seconds += time.perf_counter() - begun
        return found

    cluster = Cluster((1,), target)
    shape = ArrayShape(batch_size)
    profile = ArrayProfile(workload, cluster, shape, store=store, measure=measure)
    return profile


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Of every script that compiles."""
    parser = documents.arguments(doc)
    parser.add_argument(
        "--store", type=Path, default=STORE, help="of compiled programs (default: %(default)s)"
    )
    return parser


def prepare(targets: Iterable[str]) -> None:
    """This process compiles for these targets."""
    platforms = {Target.load(target).platform for target in targets}
    environment.prepare(num_devices=1, platform=max(platforms))


def result_of(space: Space, chosen: Chosen, limit_bytes: int) -> dict[str, Any]:
    """A step of all models, simulated: what it spends its seconds on."""
    evaluation = space.evaluate(chosen, limit_bytes)
    simulation = evaluation.timeline.simulation
    items = list(zip(simulation.work, simulation.starts, simulation.ends, strict=True))
    runs = [(start, end) for work, start, end in items if work.kind in RUNS]
    fetched = [
        (start, end)
        for work, start, end in items
        if work.kind == "transfer" and work.allocates and work.allocates[0].devices[0] != HOST
    ]
    found = evaluation.prediction()
    unlimited = space.weigh(space.retained, UNLIMITED)
    return {
        "fits": evaluation.fits(limit_bytes, space.problem.host_bytes),
        "way": space.way.name,
        "step_seconds": evaluation.seconds,
        "compute_seconds": evaluation.compute_seconds,
        "recompute_seconds": evaluation.recompute_fraction * evaluation.compute_seconds,
        "fetch_seconds": sum(end - start for start, end in fetched),
        "overlapped_seconds": overlapped(runs, fetched),
        "peak_bytes": found.peak_bytes,
        "unlimited_peak_bytes": unlimited.peak_bytes,
        "host_peak_bytes": found.host_peak_bytes,
        "retained_bytes": found.retained_bytes,
        "swapped_bytes": found.swapped_bytes,
        "recomputed_bytes": found.recomputed_bytes,
    }


def overlapped(runs: Sequence[tuple[float, float]], copies: Sequence[tuple[float, float]]) -> float:
    """Seconds of copies during which a program runs; programs come one after the other."""
    starts, total = [start for start, _ in runs], 0.0
    for begin, end in copies:
        at = max(0, bisect_right(starts, begin) - 1)
        while at < len(runs) and runs[at][0] < end:
            total += max(0.0, min(end, runs[at][1]) - max(begin, runs[at][0]))
            at += 1
    return total


def newest(name: str) -> tuple[Path, dict[str, Any]]:
    """The last result of a script, by date.

    Raises:
        FileNotFoundError: if there is none.
    """
    path = max(RESULTS.glob(f"*-{name}.json"), default=None)
    if path is None:
        raise FileNotFoundError(f"no result of {name} in {RESULTS}; run its script first")
    return path, json.loads(path.read_text())
