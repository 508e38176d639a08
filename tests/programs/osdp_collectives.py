"""The collectives of sharding plans, compiled for an H100 that is not there."""

import json

from capture import environment
from capture.machine.target import Target

environment.prepare(num_devices=8, platform="cuda")
import jax.numpy as jnp
import optax

from benchmarks.osdp_memory import sent
from capture.machine.cluster import Cluster
from capture.model.workload import Workload
from capture.plan.sharding import DP, ZDP, Mode, ShardingPlan
from capture.profiler.sharded_step import StepCompiler
from capture.runtime.sharded import Sharded
from capture.tracing.operators import traced_operators


def loss(p, batch):
    x = batch["x"]
    for w in p:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


def init(key):
    return [jnp.zeros((4096, 4096))] * 3


# Three square products whose weights are larger than what XLA joins in one collective, with the
# optimizer's update.
workload = Workload(loss, init, lambda key, n: {"x": jnp.zeros((n, 4096))}, optax.sgd(1e-2))
operators, rows = traced_operators(workload, "chain"), {}
compiler = StepCompiler(Target.load("h100"), Cluster((8,), "h100"), count_work=True)
mesh = compiler.mesh


def beside_products(text):
    flying, found = {}, []
    for line in text[text.index("ENTRY") :].splitlines():
        name = line.split(" = ")[0].split("%")[-1]
        if " all-gather-start(" in line:
            flying[name] = 0
        elif " all-gather-done(" in line:
            found.append(flying.pop(line.split("-done(%")[1].split(")")[0]))
        elif "__cublas" in line:
            flying = {name: count + 1 for name, count in flying.items()}
    return found


modes = (DP, False), (ZDP, False), (ZDP, True), (Mode(4, 4), False), (Mode(16, 16), False)
for mode, look_ahead in modes:
    names = ("a", "b", "c"), operators.names
    plan = ShardingPlan(8, (mode,) * 3, 1.0, 1, 1.0, *names, look_ahead=look_ahead)
    nbytes, program = compiler.measure(Sharded(workload, plan, mesh, operators.traced))
    products = beside_products(program.call.as_text())
    row = {"bytes": nbytes, "sent": sent(program.work), "products": products}
    rows[str(mode) + look_ahead * " ahead"] = row
print(json.dumps(rows))
