"""What the job system costs, and that it loses nothing: jobs per minute, overhead per job, random
kills, ten thousand queued jobs.

    python benchmarks/profiling_jobs.py -o benchmarks/results/2026-01-31-profiling-jobs.json
    python benchmarks/profiling_jobs.py --only rate overhead --ray

Toy jobs compile one to three layers of a model of small matrices, no two of them alike. A busy
machine says little about rates: the load of the machine before each part stands beside its result,
and so do the processor times of this process and of its workers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from capture import environment
from profiling_runs.question import ProfileQuestion

PARTS = ("rate", "overhead", "kills", "queue", "changed")
REPOSITORY = Path(__file__).resolve().parent.parent
SEED = 7

WORKLOAD = """
from types import SimpleNamespace

import jax.numpy as jnp, optax
from jax.ad_checkpoint import checkpoint_name


def model(layers=12, odd=-1, equal=False):
    sizes = [8 + (4 if i == odd else 0 if equal else 4 * i) for i in range(layers)]

    def loss_fn(params, x):
        for i, w in enumerate(params):
            x = checkpoint_name(x, "layer_boundary") if i else x
            x = x + jnp.tanh(x @ w) @ w.T
        return (x**2).mean()

    init = lambda key: [jnp.ones((16, n)) for n in sizes]
    batch = lambda key, n: jnp.ones((n, 16))
    return SimpleNamespace(loss_fn=loss_fn, init=init, batch=batch, optimizer=optax.sgd(0.1))
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ray", action="store_true", help="also on a Ray cluster of this machine")
    parser.add_argument(
        "--jobs",
        type=int,
        default=48,
        help="of the rates and of the overhead (default: %(default)s)",
    )
    parser.add_argument(
        "--kills", type=int, default=30, help="random kills over one profile (default: %(default)s)"
    )
    parser.add_argument(
        "--queued", type=int, default=10_000, help="jobs of the long queue (default: %(default)s)"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    output = options.output and options.output.resolve()
    environment.prepare(num_devices=8)
    document: dict[str, Any] = {
        "benchmark": "profiling_jobs",
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        "versions": environment.versions(),
    }
    with tempfile.TemporaryDirectory(prefix="profiling-jobs-") as folder:
        os.chdir(folder)
        Path("model.py").write_text(WORKLOAD)
        places = [None, "local"] if options.ray else [None]
        if "rate" in options.only:
            document["rate"] = [
                rate(options.jobs, ray, fresh) for ray in places for fresh in (False, True)
            ]
        if "overhead" in options.only:
            document["overhead"] = [overhead(options.jobs, ray) for ray in places]
        if "kills" in options.only:
            document["kills"] = [kills(options.kills, ray is not None) for ray in places]
        if "queue" in options.only:
            document["queue"] = queue(options.queued)
        if "changed" in options.only:
            document["changed"] = changed()
        os.chdir(REPOSITORY)
    text = json.dumps(document, indent=2)
    if output:
        output.write_text(text + "\n")
    print(text)
    return 0


@contextmanager
def timed(row: dict[str, Any]) -> Iterator[None]:
    """Seconds of a part, those of this process's processor, and how busy the machine was."""
    row["load_before"], start, processor, workers = (
        round(os.getloadavg()[0], 1),
        time.perf_counter(),
        time.process_time(),
        of_children(),
    )
    yield
    row["seconds"], row["driver_processor_seconds"] = (
        time.perf_counter() - start,
        time.process_time() - processor,
    )
    row["ended_children_processor_seconds"] = of_children() - workers


def of_children() -> float:
    """Processor seconds of the processes that this one has started and that have ended; Ray's
    workers are none of its own."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def toy_jobs(count: int) -> tuple[Any, Any, list[Any]]:
    """A setting, the provenance and so many different jobs, without the ends of steps that they
    need."""
    from capture.model.workload import WorkloadSpec
    from capture.plan.choices import StageChoice
    from capture.profiler.windows import window_configs
    from profiling_runs.measurements import open_measurements

    spec = WorkloadSpec("model.py", "model", {"layers": 2 + count // 3})
    measurements = open_measurements(ProfileQuestion(spec, Cluster((1,)), 8))
    configs = window_configs(measurements.backend.traced(4).graph.num_layers, [StageChoice()], [4])
    jobs = [job for job in measurements.jobs({"toy": configs}) if job.part == "stage"][:count]
    return (
        measurements.setting,
        measurements.backend.provenance,
        [replace(job, needs=None) for job in jobs],
    )


def rate(count: int, ray: str | None, fresh: bool) -> dict[str, Any]:
    """Jobs per minute on two workers: all together, and from the first result on, when the workers
    are up."""
    from capture.measured.store import Store
    from profiling_runs.batch import Batch
    from profiling_runs.pools.where import Where

    setting, provenance, jobs = toy_jobs(count)
    setting, times, own = replace(setting, fresh_process=fresh), list[float](), 0.0
    row: dict[str, Any] = {
        "where": ray or "processes",
        "fresh_process": fresh,
        "num_jobs": len(jobs),
        "num_workers": 2,
    }
    with timed(row):
        for outcome in Batch(jobs, Store(Path(f"rate-{ray}-{fresh}.sqlite")), provenance).run(
            lambda: Where(2, ray).open(setting, None, len(jobs))
        ):
            assert outcome.value is not None, outcome.error
            times.append(time.perf_counter())
            own += outcome.seconds
    row["jobs_per_minute"] = 60 * len(jobs) / row["seconds"]
    row["jobs_per_minute_when_up"] = 60 * (len(times) - 1) / (times[-1] - times[0])
    row["job_seconds"] = own / len(jobs)
    return row


def overhead(count: int, ray: str | None) -> dict[str, Any]:
    """Seconds of one worker per job that are not the job's own: jobs whose result the worker is
    given, so that it has nothing to do."""
    from capture.measured.store import Store
    from profiling_runs.batch import Batch
    from profiling_runs.pools.where import Where

    setting, provenance, jobs = toy_jobs(count)
    cost = {
        "residual_bytes": 0,
        "forward_bytes": 0,
        "backward_bytes": 0,
        "update_bytes": 0,
        "optimizer_bytes": 0,
    }
    cost |= {"kept_inputs": [], "kept_outputs": [], "kept_batch": []}
    jobs = [replace(job, known={job.key: cost}) for job in jobs]
    row: dict[str, Any] = {"where": ray or "processes", "num_jobs": len(jobs), "num_workers": 1}
    times, own = list[float](), 0.0
    with timed(row):
        for outcome in Batch(jobs, Store(Path(f"overhead-{ray}.sqlite")), provenance).run(
            lambda: Where(1, ray).open(setting, None, len(jobs))
        ):
            assert outcome.value is not None, outcome.error
            own += outcome.seconds if times else 0.0  # the first one traces the model
            times.append(time.perf_counter())
    row["overhead_seconds_per_job"] = (times[-1] - times[0] - own) / (len(times) - 1)
    row["own_seconds_per_job"] = own / (len(times) - 1)
    return row


# ---- through the command line, in processes that can be killed -----------------------------------

QUESTION = [
    "--cluster",
    "1x1",
    "--global-batch",
    "8",
    "--microbatches",
    "2",
    "--calibration-plans",
    "0",
    "--quiet",
]


def start(*arguments: str) -> subprocess.Popen:
    env = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "SOURCE_DATE_EPOCH": "0",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "capture", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: subprocess.Popen) -> str:
    said = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(said)
    return said


def kills(count: int, with_ray: bool) -> dict[str, Any]:
    """Kill workers, drivers and (with Ray) nodes at random moments of one profile, and compare it
    with the undisturbed one."""
    layers = 2 + count // 2  # some nine jobs per layer
    profile = ["profile", f"model.py:model?layers={layers}", *QUESTION, "-o", "profile.json"]
    finished(start(*profile, "--store", "undisturbed.sqlite", "--workers", "2"))
    expected = Path("profile.json").read_bytes()
    cluster, where = None, ["--workers", "2"]
    if with_ray:
        cluster = Cluster()
        where = ["--ray", cluster.address]
    events, name = Path(f"kills-{with_ray}.jsonl"), f"kills-{with_ray}.sqlite"
    command = [*profile, "--store", name, "--events", str(events), *where]
    chance, killed = random.Random(SEED), Counter[str]()
    row: dict[str, Any] = {"where": "ray, 2 nodes" if with_ray else "processes"}
    with timed(row):
        driver = start(*command)
        while killed.total() < count:
            # After every few results, so that the kills are spread over the whole profile and each
            # has something to lose.
            enough = len(done(events)) + chance.randrange(1, 5)
            while driver.poll() is None and len(done(events)) < enough:
                time.sleep(0.05)
            if driver.poll() is not None:
                break
            what = chance.choice(["worker", "driver", *(["node"] if cluster else [])])
            if what == "driver":
                os.kill(driver.pid, signal.SIGKILL)
                driver.communicate()
                driver = start(*command)
            elif what == "node":
                assert cluster is not None
                cluster.replace_node(chance)
            else:
                busy = [
                    int(event["worker"].rpartition(":")[2])
                    for event in said(events, "running")[-2:]
                ]
                if not busy or not kill(chance.choice(busy)):
                    continue
            killed[what] += 1
        said_at_end = driver.communicate()[0]
    if cluster is not None:
        cluster.close()
    counts = Counter(event["key"] for event in done(events))
    return {
        **row,
        "num_kills": dict(killed),
        "exit_code": driver.returncode,
        "said": said_at_end[-500:] if driver.returncode else "",
        "identical": Path("profile.json").read_bytes() == expected,
        "num_measurements": len(counts),
        "num_repeated": sum(n > 1 for n in counts.values()),
        "num_set_aside": len(said(events, "set aside")),
    }


def kill(process: int) -> bool:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def said(events: Path, state: str) -> list[dict[str, Any]]:
    lines = events.read_text().split("\n")[:-1] if events.exists() else []
    return [
        event
        for line in lines
        if (event := json.loads(line))["event"] == "job" and event["state"] == state
    ]


def done(events: Path) -> list[dict[str, Any]]:
    return said(events, "done")


class Cluster:
    """A head without processors and two nodes of one each."""

    def __init__(self) -> None:
        os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
        from ray.cluster_utils import Cluster as RayCluster

        self._node = {"object_store_memory": 80_000_000, "include_log_monitor": False}
        self._cluster = RayCluster(
            initialize_head=True,
            head_node_args={**self._node, "num_cpus": 0, "include_dashboard": False},
        )
        self.address = self._cluster.address
        self._nodes = [self._cluster.add_node(**self._node, num_cpus=1) for _ in range(2)]

    def replace_node(self, chance: random.Random) -> None:
        self._cluster.remove_node(self._nodes.pop(chance.randrange(2)), allow_graceful=False)
        self._nodes.append(self._cluster.add_node(**self._node, num_cpus=1))

    def close(self) -> None:
        self._cluster.shutdown()


# ---- many jobs -----------------------------------------------------------------------------------


def queue(count: int) -> dict[str, Any]:
    """Queue jobs in a process of its own, end it, and queue them again: memory, and seconds until
    the first could start."""
    code = (
        "import json, resource, sys, time\nfrom pathlib import Path\nstart = time.perf_counter()\n"
        "from capture import environment\nenvironment.prepare(num_devices=8)\n"
        "from capture.machine.cluster import Cluster\nfrom capture.measured.store import Store\n"
        "from capture.model.workload import WorkloadSpec\n"
        "from profiling_runs.batch import Batch\n"
        "from profiling_runs.collect import wanted_configs\n"
        "from profiling_runs.measurements import open_measurements\n"
        "from profiling_runs.question import ProfileQuestion\n"
        f"spec = WorkloadSpec('model.py', 'model', {{'layers': {max(2, count // 77)}}})\n"
        "question = ProfileQuestion(spec, Cluster((8,)), 16, calibration_plans=0)\n"
        "measurements = open_measurements(question, store=Store(Path('queue.sqlite')))\n"
        "jobs = measurements.jobs(wanted_configs(question, measurements))\n"
        "keyed = time.perf_counter()\n"
        "known = measurements.backend.store.get(job.key for job in jobs)\n"
        "batch = Batch(jobs, measurements.backend.store, measurements.backend.provenance, spec)\n"
        "took = time.perf_counter()\n"
        "taken = [batch._queue.take(None) for _ in range(100)]\n"
        "print(json.dumps({'num_jobs': len(jobs), 'seconds': took - start, "
        "'seconds_after_tracing': took - keyed,\n"
        "  'processor_seconds': time.process_time(), 'take_seconds': (time.perf_counter() - took) "
        "/ 100,\n"
        "  'resident_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))\n"
    )
    row: dict[str, Any] = {}
    with timed(row):
        for name in ("first", "resumed"):
            env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            ran = subprocess.run(
                [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
            )
            row[name] = json.loads(ran.stdout.splitlines()[-1])
    return row


def changed() -> dict[str, Any]:
    """Jobs of a model of 24 equal layers, then of the same with one of them changed."""
    row: dict[str, Any] = {}
    with timed(row):
        finished(
            start(
                "profile",
                "model.py:model?layers=24&equal=true",
                *QUESTION,
                "--store",
                "changed.sqlite",
                "--workers",
                "2",
            )
        )
        listed = finished(
            start(
                "jobs",
                "model.py:model?layers=24&equal=true&odd=12",
                *QUESTION,
                "--store",
                "changed.sqlite",
                "--json",
            )
        )
        document = json.loads(listed[listed.index("{") :])
    row["kinds"] = document["kinds"]
    row["num_new"], row["num_jobs"] = (
        document["num_jobs"] - document["num_done"],
        document["num_jobs"],
    )
    row["resident_bytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return row


if __name__ == "__main__":
    sys.exit(main())
