"""The backend ``alpa``: the paper's profiling runs in real Alpa, each a process of Alpa's own
Python on its Ray cluster.

What is run is what the backend ``run`` runs; keys, the store and the statistics are its. Only the
execution is Alpa's: the plan goes there as the file that ``capture export`` writes, and the peaks
of its workers' allocators come back.

Source: CAPTURE III-A (profiling runs of two iterations, ``get_max_memory_allocated_per_mesh``).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

from capture import environment
from capture.alpa import to_alpa
from capture.alpa.placement import physical_shape
from capture.documents import write
from capture.errors import ExecutionError
from capture.machine.cluster import Cluster
from capture.measured.store import Store
from capture.model.workload import WorkloadSpec
from capture.papers.alpa import worker
from capture.papers.capture.execution import Executed, ProfilingRun
from capture.papers.capture.run import RunBackend
from capture.profiler.compile import PROGRAM_VERSION
from capture.profiler.executing import ExecutingMachine

_VERSIONS = (
    "import json, alpa, jax, jaxlib; print(json.dumps({m.__name__: m.__version__ for m in (alpa, "
    "jax, jaxlib)}))"
)


class AlpaBackend(RunBackend):
    """The backend ``alpa``: peaks per stage of partitionings that Alpa has trained.

    Args:
        spec: The workload by name: Alpa's process imports it, so it must run in Alpa's environment
            too.
        cluster: Whose devices Alpa has; runs on fewer devices take whole nodes of it, or a part of
            one.
        alpa_python: The interpreter of Alpa's environment.
        num_layers: None for the model's marks; Alpa then cuts at the same.
        store: Where finished runs are kept.
        timeout_seconds: After which a run is given up, on an idle machine
            (``environment.patience``).
    """

    name = "alpa"

    def __init__(
        self,
        spec: WorkloadSpec,
        cluster: Cluster,
        alpa_python: str,
        num_layers: int | None = None,
        store: Store | None = None,
        *,
        timeout_seconds: float = 3600.0,
    ):
        machine = ExecutingMachine("cuda", cluster.target, cluster.num_devices)
        super().__init__(
            spec.load(), num_layers, "auto", store, machine=machine, num_devices=cluster.num_devices
        )
        self.spec, self.cluster, self.alpa_python, self.timeout_seconds = (
            spec,
            cluster,
            alpa_python,
            timeout_seconds,
        )

    @cached_property
    def provenance(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "target": self.cluster.target,
            "device_kind": self.cluster.target,
            "meter": "max_memory_allocated of Alpa's workers",
            "versions": self.versions,
            "flags": [],
            "program_version": PROGRAM_VERSION,
        }

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions of alpa and JAX in Alpa's environment.

        Raises:
            ExecutionError: ``alpa-python`` if that interpreter cannot import alpa.
        """
        try:
            done = subprocess.run(
                [self.alpa_python, "-c", _VERSIONS], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ExecutionError.of(
                f"--alpa-python {self.alpa_python!r} cannot be run: {error.strerror}.",
                "alpa-python",
            ) from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExecutionError.of(
                f"--alpa-python {self.alpa_python!r} cannot import alpa: {said}.", "alpa-python"
            )
        return json.loads(done.stdout.strip().splitlines()[-1])

    def _execute(self, run: ProfilingRun) -> Executed:
        with tempfile.TemporaryDirectory(prefix="capture-alpa-") as folder:
            job = self.job(run, Path(folder) / "result.json")
            (Path(folder) / "job.json").write_text(json.dumps(job))
            command = [
                self.alpa_python,
                worker.__file__,
                str(Path(folder) / "job.json"),
            ]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=environment.patience(self.timeout_seconds),
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                return Executed(None, "", f"Alpa did not end within {error.timeout:.0f} s")
            result = Path(job["result"])
            if not result.exists():
                said = (done.stderr.strip().splitlines() or ["no message"])[-1]
                return Executed(None, "", f"Alpa's process ended with {done.returncode}: {said}")
            found = json.loads(result.read_text())
        if "failure" in found:
            return Executed(None, "", found["failure"])
        return Executed(tuple(found["peak_bytes_per_stage"]), found["meter"])

    def job(self, run: ProfilingRun, result: Path) -> dict[str, Any]:
        """Return the job that Alpa's process is given, as the data of its file (``worker``)."""
        nodes = self.nodes_of(run.num_devices)
        plan = run.plan().with_(
            cluster=Cluster(nodes, self.cluster.target),
            auto_layers=self.compiler.num_layers is not None,
        )
        options = to_alpa(plan)
        location = (
            str(Path(self.spec.location).resolve()) if self.spec.is_file else self.spec.location
        )
        return {
            "workload": {**write(self.spec), "location": location},
            "method": options.source(f"Profiling run of {list(run.partitioning)} layers."),
            "num_hosts": options.num_hosts,
            "num_devices_per_host": options.num_devices_per_host,
            "global_batch_size": plan.global_batch_size,
            "result": str(result),
        }

    def nodes_of(self, num_devices: int) -> tuple[int, ...]:
        """Return the devices of each node that a run takes.

        Raises:
            PlanError: ``alpa-submesh`` if the devices are neither a part of a node nor whole nodes.
        """
        hosts, devices = physical_shape(num_devices, self.cluster.nodes[0])
        return (devices,) * hosts
