"""Dumps a program's buffer assignment, and writes the bytes of arguments, outputs and temporaries
by the compiler's own interface: ``dumped_report.py DIRECTORY``."""

import sys

from capture import environment

environment.prepare(platform="cuda")
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_compilation_cache", False)  # what it has kept writes no dump
f = jax.jit(lambda x, w, s: (jnp.tanh(x @ w) @ w.T, s + 1), donate_argnums=2)
array = jax.ShapeDtypeStruct((256, 256), jnp.float32)
compiled = f.lower(array, array, array).compile(
    compiler_options={"xla_dump_to": sys.argv[1], "xla_dump_hlo_as_text": True}
)
memory = compiled.memory_analysis()
print(
    memory.argument_size_in_bytes,
    memory.output_size_in_bytes - memory.alias_size_in_bytes,
    memory.temp_size_in_bytes,
)
