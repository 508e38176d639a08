"""Time collectives on the devices of this process, or copies between the first of them and the
memory of its host, and fit alpha and beta of their link.

    python benchmarks/fit_links.py -o link.json                     # on the accelerators here
    python benchmarks/fit_links.py --host                           # copies, both ways and together
    python benchmarks/fit_links.py --virtual 8 --megabytes 1 4 16   # on virtual CPU devices

Virtual devices show the path, and say nothing of any network.

Prints the link in the form that ``links`` of a target file takes (``capture/machine/target.py``),
every timing, and how far the fit is from them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import median

from capture import environment
from capture.machine.link_fit import (
    FittedHostLink,
    FittedLink,
    MeasuredCollective,
    MeasuredCopies,
    fit_host_link,
    fit_link,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--virtual", type=int, metavar="N", help="use so many virtual CPU devices")
    parser.add_argument(
        "--megabytes",
        type=float,
        nargs="+",
        default=[0.25, 1, 4, 16, 64],
        help="of the whole arrays (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=10,
        help="timings per collective, of which the median counts (default: %(default)s)",
    )
    parser.add_argument("--host", action="store_true", help="copies to and from the host's memory")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the document here")
    options = parser.parse_args()
    if options.virtual:
        environment.prepare(num_devices=options.virtual, platform="cpu")
    import jax

    source = f"{len(jax.devices())} x {jax.devices()[0].device_kind}, {date.today().isoformat()}"
    rows: list[MeasuredCollective] | list[MeasuredCopies]
    found: FittedLink | FittedHostLink
    if options.host:
        rows = copies(options.megabytes, options.repeat)
        found = fit_host_link(rows, source)
    else:
        rows = list(measure(options.megabytes, options.repeat))
        found = fit_link(rows, source)
    document = {"benchmark": "fit_links", **asdict(found), "rows": [asdict(row) for row in rows]}
    text = json.dumps(document, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    return 0


def copies(megabytes: list[float], repeat: int) -> list[MeasuredCopies]:
    """Each way and both together, at each size."""
    from capture.profiler.timing import copies_of, copy_seconds, rows_of

    wanted = copies_of([int(size * 1e6) for size in megabytes])
    return rows_of({what: copy_seconds(what, repeat) for what in wanted})


def measure(megabytes: list[float], repeat: int) -> Iterator[MeasuredCollective]:
    """Each kind of collective at each size, over all devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((len(jax.devices()),), ("devices",))
    n, split, whole = mesh.size, PartitionSpec("devices"), PartitionSpec()
    kinds: dict[str, tuple[Callable, PartitionSpec, PartitionSpec]] = {
        "all-gather": (lambda x: jax.lax.all_gather(x, "devices", tiled=True), split, whole),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "devices", tiled=True), whole, split),
        "all-reduce": (lambda x: jax.lax.psum(x, "devices"), whole, whole),
    }
    for kind, (collective, given, made) in kinds.items():
        run = jax.jit(
            jax.shard_map(collective, mesh=mesh, in_specs=given, out_specs=made, check_vma=False)
        )
        for size in megabytes:
            elements = max(1, int(size * 1e6 / 4 / n)) * n
            array = jax.device_put(jnp.ones(elements), NamedSharding(mesh, given))
            run(array).block_until_ready()  # compiles
            seconds = []
            for _ in range(repeat):
                start = time.perf_counter()
                run(array).block_until_ready()
                seconds.append(time.perf_counter() - start)
            yield MeasuredCollective(kind, n, 4 * elements, median(seconds))  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
