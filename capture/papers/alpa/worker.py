"""Train two steps of a plan in Alpa's own environment, and write down what its allocators say.

A script for Alpa's Python (3.8 to 3.11), which has neither this library nor today's JAX: it imports
nothing of ours. ``backend`` runs it with the path of a job:

    workload                            location, function, arguments: as in a plan; the location is
                                        absolute
    method                              source of the file that ``capture export`` writes
    num_hosts, num_devices_per_host     of the Ray cluster that ``alpa.init`` joins
    global_batch_size
    result                              where to write {"peak_bytes_per_stage"} or {"failure"}

The model's layer marks become Alpa's. Peaks are those of the second step, the largest over the
devices of each mesh.
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
    """Make ``checkpoint_name(x, "layer_boundary")`` mark a boundary of Alpa's pipeline; before the
    model is imported."""
    import alpa
    import jax.ad_checkpoint

    original = jax.ad_checkpoint.checkpoint_name

    def checkpoint_name(x: object, name: str) -> Any:
        if name != LAYER_BOUNDARY:
            return original(x, name)
        alpa.mark_pipeline_boundary()
        return x

    jax.ad_checkpoint.checkpoint_name = checkpoint_name


def let_scalars_cross() -> None:
    """Make scalars that one layer makes and another reads travel as arrays of one element.

    Alpa cannot plan the transfer of a scalar between meshes ("'numpy.float64' object cannot be
    interpreted as an integer"); the load-balancing loss of a mixture of experts is one.
    """
    from alpa.pipeline_parallel import layer_construction

    original = layer_construction.add_pipeline_marks_for_sliced_eqns
    layer_construction.add_pipeline_marks_for_sliced_eqns = lambda jaxpr, layers: original(
        jaxpr, _arrays_for_scalars(layers)
    )


def _arrays_for_scalars(layers: Any) -> Any:
    """Return the equations of all layers, in which every scalar that crosses is reshaped where it
    is made and in each layer that reads it."""
    core: Any = importlib.import_module("jax.core")  # of jax 0.3.22: today's has lost half of it
    from jax import lax

    new_variable = core.gensym(suffix="_crossing")

    def reshaped(source: object, target: Any) -> Any:
        return core.new_jaxpr_eqn(
            [source],
            [target],
            lax.reshape_p,
            {"new_sizes": target.aval.shape, "dimensions": None},
            set(),
        )

    def read_by(equation: Any) -> Any:
        return [v for v in equation.invars if isinstance(v, core.Var)]

    made_in = {
        v: i
        for i, layer in enumerate(layers)
        for equation in layer
        for v in equation.outvars
        if v.aval.shape == ()
    }
    arrays = {
        v: new_variable(core.ShapedArray((1,), v.aval.dtype))
        for i, layer in enumerate(layers)
        for equation in layer
        for v in read_by(equation)
        if made_in.get(v, i) != i
    }
    changed = []
    for i, layer in enumerate(layers):
        here: dict[Any, Any] = {}
        equations: list[Any] = []
        for equation in layer:
            for v in read_by(equation):
                if v in arrays and made_in[v] != i and v not in here:
                    here[v] = new_variable(v.aval)
                    equations.append(reshaped(arrays[v], here[v]))
            invars = [here.get(v, v) if isinstance(v, core.Var) else v for v in equation.invars]
            equations.append(equation.replace(invars=invars))
            equations += [reshaped(v, arrays[v]) for v in equation.outvars if v in arrays]
        changed.append(equations)
    return changed


def load_workload(spec: dict[str, Any]) -> Any:
    """Call the function that makes the workload."""
    location = spec["location"]
    if location.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(location)))
        found = importlib.util.spec_from_file_location("workload", location)
        assert found is not None and found.loader is not None, (
            "the library has imported the same file"
        )
        module = importlib.util.module_from_spec(found)
        sys.modules["workload"] = module
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(location)
    return getattr(module, spec["function"])(**spec["arguments"])


def train_step(workload: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return ``((params, optimizer state), batch) -> (the same, loss)``, as ``alpa.parallelize``
    wants it."""
    import alpa
    import optax

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, optimizer_state = state
        loss, gradients = alpa.value_and_grad(workload.loss_fn)(params, batch)
        updates, optimizer_state = workload.optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), loss

    return step


def method_of(source: str) -> Any:
    """Return the maker of ``PipeshardParallel`` of an exported file, for the mesh of alpa.init."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "method.py", "exec"), namespace)
    return namespace["method"]


def state_and_batch(workload: Any, global_batch_size: int) -> tuple[Any, Any]:
    """Return the state (parameters, optimizer state) and the batch that the step is called with."""
    import jax

    params = workload.init(jax.random.PRNGKey(0))
    return (params, workload.optimizer.init(params)), workload.batch(
        jax.random.PRNGKey(1), global_batch_size
    )


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job on the Ray cluster that this machine belongs to."""
    import alpa

    mark_layers()
    let_scalars_cross()
    workload = load_workload(job["workload"])
    alpa.init(
        cluster="ray", num_nodes=job["num_hosts"], num_devices_per_node=job["num_devices_per_host"]
    )
    step = alpa.parallelize(
        train_step(workload), method=method_of(job["method"])(), donate_argnums=(0,)
    )
    state, batch = state_and_batch(workload, job["global_batch_size"])
    executable = step.get_executable(state, batch)
    state, _ = step(state, batch)
    executable.sync()
    executable.mesh_group.reset_memory_stats()
    step(state, batch)
    executable.sync()
    peaks = executable.mesh_group.get_max_memory_allocated_per_mesh()
    return {
        "peak_bytes_per_stage": [int(peak) for peak in peaks],
        "meter": "max_memory_allocated of Alpa's workers",
    }


def main(path: str) -> int:
    with open(path) as file:
        job = json.load(file)
    try:
        found = measure(job)
    except Exception as error:
        found = {
            "failure": "{}: {}".format(type(error).__name__, (str(error).splitlines() or [""])[0])
        }
    with open(job["result"] + ".part", "w") as file:
        json.dump(found, file)
    os.replace(job["result"] + ".part", job["result"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
