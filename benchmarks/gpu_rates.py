"""What a GPU reaches of the rates that its target file gives: products, memory, launches, the link
to the host, and what a process takes of its memory.

    python -m benchmarks.gpu_rates -o benchmarks/results/2026-01-31-gpu-rates-h100.json

Products and streams are measured by the profiler (``benchmarks.gpu_kernels``), copies and launches
by the clock, each the median of several. Inputs are random: products of zeros run faster. Without a
GPU it says so, and measures nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.gpu_kernels import profiled
from capture import environment

#: (rows, depth, columns): the layers of transformers of several widths on several numbers of
#: tokens, and large squares.
PRODUCTS = [
    (tokens, depth, columns)
    for width in (1024, 2048, 4096, 8192)
    for tokens in (2048, 16384)
    for depth, columns in ((width, width), (width, 4 * width), (4 * width, width))
] + [(8192, 8192, 8192), (4096, 4096, 4096), (16384, 4096, 128256), (8192, 1024, 51200)]
#: (batches, rows, depth, columns): scores of attention, and what they weigh.
BATCHED = [(128, 1024, 64, 1024), (128, 1024, 1024, 64), (64, 2048, 128, 2048)]
#: Bytes of an array.
STREAMS = [2**20, 2**23, 2**26, 2**28, 2**31]
#: Bytes of a copy.
COPIES = [2**12, 2**20, 2**24, 2**30]
REPEATS = 7


def products() -> Iterator[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    def row(shape: tuple[int, ...], dtype: str, precision: str | None) -> dict[str, Any]:
        *batches, rows, depth, columns = shape
        key = jax.random.key(0)
        given = jnp.float32 if dtype.startswith("float8") else dtype
        a = jax.random.normal(key, (*batches, rows, depth), given).astype(dtype)
        b = jax.random.normal(key, (*batches, depth, columns), given).astype(dtype)
        out = "bfloat16" if dtype.startswith("float8") else dtype
        call = jax.jit(
            lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=out)
        )
        seconds = kernel_seconds(lambda: call(a, b))
        flops = 2 * rows * depth * columns * (batches[0] if batches else 1)
        return {
            "shape": list(shape),
            "dtype": dtype,
            "precision": precision or "default",
            "seconds": seconds,
            "flops_per_second": flops / seconds,
        }

    for shape in [*PRODUCTS, *BATCHED]:
        yield row(shape, "bfloat16", None)
    for shape in [(8192, 8192, 8192), (8192, 2048, 8192), (8192, 1024, 4096)]:
        yield row(shape, "float16", None)
        yield row(shape, "float32", None)
        yield row(shape, "float32", "highest")
        yield row(shape, "float8_e4m3fn", None)


def kernel_seconds(call: Callable[[], Any]) -> float:
    """Seconds of all kernels of a call, the mean over several after it ran twice."""
    import jax

    for _ in range(2):
        jax.block_until_ready(call())

    def repeated() -> None:
        for _ in range(REPEATS):
            made = call()
        jax.block_until_ready(made)

    return sum(kernel.seconds for kernel in profiled(repeated).kernels) / REPEATS


def streams() -> Iterator[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    for nbytes in STREAMS:
        x = jax.random.normal(jax.random.key(0), (nbytes // 2,), jnp.bfloat16)
        y = jax.random.normal(jax.random.key(1), (nbytes // 2,), jnp.bfloat16)
        for name, call, moved in (
            ("scale", jax.jit(lambda x: x * 2), 2),
            ("add", partial(jax.jit(jnp.add), y), 3),
            ("sum", jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32)), 1),
        ):
            seconds = kernel_seconds(lambda call=call, x=x: call(x))
            yield {
                "name": name,
                "array_bytes": nbytes,
                "seconds": seconds,
                "bytes_per_second": moved * nbytes / seconds,
            }


def clocked(call: Callable[[], Any]) -> float:
    """Seconds of a call by the clock, the median of several after one."""
    import jax

    found = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return median(found[1:])


def launches() -> Iterator[dict[str, Any]]:
    """A chain of kernels that do next to nothing: what one more takes."""
    import jax
    import jax.numpy as jnp

    x = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)

    def chain(length: int, x: Any) -> Any:
        for _ in range(length):
            x = x @ x * 1e-2
        return x

    short, long = (jax.jit(lambda x, n=n: chain(n, x)) for n in (50, 450))
    a, b = clocked(lambda: short(x)), clocked(lambda: long(x))
    run = profiled(lambda: jax.block_until_ready(long(x)))
    yield {
        "name": "64x64 products, one after the other",
        "seconds_each": (b - a) / 400,
        "kernels_each": sum(kernel.count for kernel in run.kernels) / 450,
        "kernel_seconds_each": sum(kernel.seconds for kernel in run.kernels) / 450,
        "call_seconds": a - 50 * (b - a) / 400,
    }


def copies() -> Iterator[dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    on_host = SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = SingleDeviceSharding(device)
    for nbytes in COPIES:
        there = jax.random.normal(jax.random.key(0), (nbytes // 4,), jnp.float32)
        here = jax.block_until_ready(jax.device_put(there, on_host))
        calls: dict[str, Callable[[], Any]] = {
            "to_device": lambda here=here: jax.device_put(here, on_device),
            "to_host": lambda there=there: jax.device_put(there, on_host),
            "both": lambda here=here, there=there: (
                jax.device_put(here, on_device),
                jax.device_put(there, on_host),
            ),
        }
        for name, call in calls.items():
            seconds = clocked(call)
            yield {
                "name": name,
                "bytes_each": nbytes,
                "seconds": seconds,
                "bytes_per_second": (2 if name == "both" else 1) * nbytes / seconds,
            }


def memory() -> Iterator[dict[str, Any]]:
    """What the driver says is used, what JAX's allocator has of it, and what it may have."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    yield {
        "driver_used_bytes": _used_bytes(),
        "allocator": {key: int(value) for key, value in stats.items()},
    }


def _used_bytes() -> int:
    return int(_asked("memory.used").split()[0]) * 2**20


def driver() -> dict[str, str]:
    """What bears on speed: the driver's version, the power limit and the largest clocks."""
    names = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")
    return dict(zip(names, _asked(*names).strip().split(", "), strict=True))


def _asked(*names: str) -> str:
    query = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout


PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "memory": memory,
    "launches": launches,
    "copies": copies,
    "streams": streams,
    "products": products,
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    environment.prepare()
    import jax

    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"there is no GPU here (JAX finds {device.device_kind!r}): nothing was measured.")
        return 0
    rows = []
    for name in options.parts:
        for row in PARTS[name]():
            print(name, row, file=sys.stderr, flush=True)
            rows.append({"part": name, **row})
    return finish(
        "gpu_rates",
        rows,
        options,
        device=device.device_kind,
        driver=driver(),
        versions=environment.versions("cuda"),
    )


if __name__ == "__main__":
    sys.exit(main())
