"""Writes what the compiler of this environment says of a small program, and what the readers must
get from it: ``python -m tests.golden.make``, once per supported jaxlib, after its answers were
read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
FILES = {
    "report": "*-memory-usage-report.txt",
    "assignment": "*-buffer-assignment.txt",
    "live": "*-live-range.txt",
    "program": "*after_optimizations.txt",
}


def dump() -> dict[str, str]:
    """By name, the texts that XLA dumps of two layers' gradients on four devices, split in two
    ways:
    products, an all-reduce, a donated argument, name scopes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from capture.compiler.executable import not_kept
    from capture.tracing.source import layer_scope

    mesh = Mesh(jax.devices()[:4], ("data",))
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for i, weight in enumerate(weights):
            with layer_scope(i):
                x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def step(weights: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights, x))

    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=whole)] * 2
    x = jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=split)
    with not_kept(), tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        jax.jit(step, donate_argnums=0).lower(shapes, x).compile(compiler_options=options)
        return {name: _one(Path(folder), pattern) for name, pattern in FILES.items()}


def _one(folder: Path, pattern: str) -> str:
    (path,) = folder.glob(pattern)
    return path.read_text()


def answers(texts: dict[str, str], *, work: bool = True) -> dict[str, Any]:
    """What the readers get from the texts; the work only where jaxlib can read the program."""
    from capture.compiler.buffers import parse_buffers
    from capture.compiler.report import parse_report
    from capture.compiler.work import work_of_text
    from capture.documents import write

    return {
        "report": write(parse_report(texts["report"], texts["assignment"])),
        **({"work": write(work_of_text(texts["program"]))} if work else {}),
        "buffers": write(parse_buffers(texts["assignment"], texts["live"], texts["program"])),
    }


def main() -> None:
    from capture import environment

    environment.prepare(num_devices=4)
    import jaxlib.version

    folder = FOLDER / f"jaxlib-{jaxlib.version.__version__}"
    folder.mkdir(exist_ok=True)
    texts = dump()
    for name, text in texts.items():
        # Paths of the machine that made it say nothing, and would be in the file.
        (folder / f"{name}.txt").write_text(text.replace(str(FOLDER.parent.parent), "/checkout"))
    read = {name: (folder / f"{name}.txt").read_text() for name in FILES}
    (folder / "answers.json").write_text(json.dumps(answers(read), indent=1) + "\n")
    print(folder, file=sys.stderr)


if __name__ == "__main__":
    main()
