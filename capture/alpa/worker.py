"""Train two steps of a plan in Alpa's own environment, and write down what its allocators say.

A script for Alpa's Python (3.8 to 3.11), which has neither this library nor today's JAX: it imports nothing of ours.
``capture.profiler.alpa`` runs it with the path of a job:

    workload                            location, function, arguments: as in a plan; the location is absolute
    method                              source of the file that ``capture export`` writes
    num_hosts, num_devices_per_host     of the Ray cluster that ``alpa.init`` joins
    global_batch_size
    result                              where to write {"peak_bytes_per_stage"} or {"failure"}

The model's layer marks become Alpa's. Peaks are those of the second step, the largest over the devices of each mesh.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from typing import Any, Callable  # noqa: UP035  (Python 3.8)

LAYER_BOUNDARY = "layer_boundary"


def mark_layers() -> None:
    """Have ``checkpoint_name(x, "layer_boundary")`` mark a boundary of Alpa's pipeline; before the model is imported."""
    import alpa
    import jax.ad_checkpoint

    original = jax.ad_checkpoint.checkpoint_name

    def checkpoint_name(x: Any, name: str) -> Any:
        if name != LAYER_BOUNDARY:
            return original(x, name)
        alpa.mark_pipeline_boundary()
        return x

    jax.ad_checkpoint.checkpoint_name = checkpoint_name


def load_workload(spec: dict[str, Any]) -> Any:
    """Call the function that makes the workload."""
    location = spec["location"]
    if location.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(location)))
        found = importlib.util.spec_from_file_location("workload", location)
        assert found is not None and found.loader is not None, "the library has imported the same file"
        module = importlib.util.module_from_spec(found)
        sys.modules["workload"] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(location)
    return getattr(module, spec["function"])(**spec["arguments"])


def train_step(workload: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """``((params, optimizer state), batch) -> (the same, loss)``, as ``alpa.parallelize`` wants it."""
    import alpa
    import optax

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, optimizer_state = state
        loss, gradients = alpa.value_and_grad(workload.loss_fn)(params, batch)
        updates, optimizer_state = workload.optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return step


def method_of(source: str) -> Any:
    """The ``PipeshardParallel`` of an exported file, on the mesh of ``alpa.init``."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "method.py", "exec"), namespace)
    return namespace["method"]


def state_and_batch(workload: Any, global_batch_size: int) -> tuple[Any, Any]:
    """What the step is called with."""
    import jax

    params = workload.init(jax.random.PRNGKey(0))
    return (params, workload.optimizer.init(params)), workload.batch(jax.random.PRNGKey(1), global_batch_size)


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job on the Ray cluster that this machine belongs to."""
    import alpa

    mark_layers()
    workload = load_workload(job["workload"])
    alpa.init(cluster="ray", num_nodes=job["num_hosts"], num_devices_per_node=job["num_devices_per_host"])
    step = alpa.parallelize(train_step(workload), method=method_of(job["method"])(), donate_argnums=(0,))
    state, batch = state_and_batch(workload, job["global_batch_size"])
    executable = step.get_executable(state, batch)
    state, _ = step(state, batch)
    executable.sync()
    executable.mesh_group.reset_memory_stats()
    step(state, batch)
    executable.sync()
    peaks = executable.mesh_group.get_max_memory_allocated_per_mesh()
    return {"peak_bytes_per_stage": [int(peak) for peak in peaks], "meter": "max_memory_allocated of Alpa's workers"}


def main(path: str) -> int:
    with open(path) as file:
        job = json.load(file)
    try:
        found = measure(job)
    except Exception as error:
        found = {"failure": "{}: {}".format(type(error).__name__, (str(error).splitlines() or [""])[0])}
    with open(job["result"] + ".part", "w") as file:
        json.dump(found, file)
    os.replace(job["result"] + ".part", job["result"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
