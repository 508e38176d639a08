"""Names of all primitives that JAX can lower: other tests of a process may have loaded more."""

import jax.experimental.pallas  # noqa: F401
from jax.interpreters import mlir

tables = (mlir._lowerings, *mlir._platform_specific_lowerings.values())
print(*sorted({primitive.name for table in tables for primitive in table}), sep="\n")
