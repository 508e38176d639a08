"""What a target's compiler makes of a loop over stacked layers of two matrices, which four devices
share and gather in their turn: ``scanned_work.py TARGET NUM_LAYERS DIM BATCH_SIZE``."""

import json
import sys

from capture import environment
from capture.machine.target import Target

target = Target.load(sys.argv[1])
environment.prepare(num_devices=4, platform=target.platform)
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.target_compiler import TargetCompiler
from capture.documents import write

num_layers, dim, batch_size = map(int, sys.argv[2:])
compiler = TargetCompiler(target, count_work=True)
mesh = Mesh(np.array(compiler.devices(4)), ("fsdp",))
whole = PartitionSpec()
specs = (PartitionSpec(None, "fsdp"), PartitionSpec(None, None, "fsdp"))


def layer(x, shards):
    up, down = (
        jax.lax.all_gather(shard.astype(jnp.bfloat16), "fsdp", axis=axis, tiled=True)
        for axis, shard in enumerate(shards)
    )
    return jnp.tanh(x @ up) @ down, None


@jax.shard_map(mesh=mesh, in_specs=(specs, whole), out_specs=whole, check_vma=False)
def forward(weights, x):
    return jax.lax.scan(layer, x, weights)[0]


def split(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


weights = tuple(split((num_layers, dim, dim), jnp.float32, spec) for spec in specs)
x = split((batch_size, dim), jnp.bfloat16, whole)
print(json.dumps(write(compiler.compiler()(forward, (weights, x)).work)))
