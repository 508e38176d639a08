"""A function, compiled for devices that are there: what it needs while it runs, and on request what
it computes and whose bytes it holds."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from capture.compiler.buffers import read_buffers
from capture.compiler.work import NO_LOCAL_FLOPS, LocalFlops, work_of
from capture.measured.work import ProgramWork
from capture.step.attribution import Buffer

#: Leave out optimisations of machine code: half the compile time, byte-identical buffer assignment.
_MEASURING_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program and its needs.

    Attributes:
        call: Runs it on arrays of the shardings it was compiled for; refuses others.
        outputs: Structure of its results, with shardings.
        transient_bytes: Per device, temporaries + outputs - aliased inputs.
        work: What it computes, reads and sends, if asked for.
        output_bytes: Per device, of all results as they are allocated, where that is more than
            their elements (padded tiles of a TPU).
        buffers: Temporaries and results at the program's peak, if asked for.
    """

    call: Callable[..., Any]
    outputs: Any
    transient_bytes: int
    work: ProgramWork | None = None
    output_bytes: int | None = None
    buffers: tuple[Buffer, ...] = ()


#: The layer that the name of an operation or an argument in a compiled program tells of.
LayerOf = Callable[[str], "int | None"]


def compile_program(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    out_shardings: Any = None,
    fast_compile: bool = False,
    count_work: bool = False,
    options: Mapping[str, Any] | None = None,
    layer_of: LayerOf | None = None,
    local_flops: LocalFlops = NO_LOCAL_FLOPS,
) -> Executable:
    """Compile for abstract arguments; nothing is allocated.

    Args:
        function: Pure.
        args: ``ShapeDtypeStruct`` pytrees with shardings.
        donate: Positions of donated arguments.
        out_shardings: As for ``jax.jit``; None lets the compiler choose.
        fast_compile: Skip what takes the compiler long and changes no buffer: the program runs, but
            slowly.
        count_work: Also find out what the program computes, reads and sends.
        options: Of XLA.
        layer_of: Also find out what buffers the program holds at its peak, and of which layer they
            are.
        local_flops: Of the operations that run on each device's part.
    """
    jitted = jax.jit(
        function,
        donate_argnums=tuple(donate),
        **({} if out_shardings is None else {"out_shardings": out_shardings}),
    )
    with warnings.catch_warnings():
        # Residuals are donated to be freed, whether or not an output fits into them.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        lowered = jitted.lower(*args)
        chosen = {**(_MEASURING_OPTIONS if fast_compile else {}), **(options or {})}
        with (
            tempfile.TemporaryDirectory(prefix="capture-dump-")
            if layer_of
            else nullcontext("") as folder
        ):
            if layer_of is not None:
                chosen |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            compiled = lowered.compile(compiler_options=chosen or None)
            buffers = () if layer_of is None else read_buffers(Path(folder), layer_of)
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA reports the memory of a program on CPU, GPU and TPU"
    transient = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    outputs = jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )
    # A layer without parameters has nothing to update: such a program has neither arguments nor
    # results, and computes nothing.
    num_devices = max(
        (len(leaf.sharding.device_set) for leaf in jax.tree.leaves((tuple(args), outputs))),
        default=1,
    )
    work = work_of(compiled, lowered, num_devices, local_flops) if count_work else None
    return Executable(compiled, outputs, int(transient), work, buffers=buffers)
