"""A stand-in for NVIDIA's assembler that assembles nothing.

XLA makes PTX of every kernel and, where it finds a ``ptxas``, has it make machine code: half of the
time of a compile, for programs that are never run, and an error where the toolkit that happens to
be installed no longer knows the target. Where it finds none it goes on without. Buffers are
assigned long before. With this stand-in first on its path, every machine does the same, and fast.
"""

from __future__ import annotations

from pathlib import Path

#: ``ptxas --version``, and ``ptxas kernel.ptx -o kernel.cubin ...``, whose result is left empty.
_SCRIPT = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 12.9, V12.9.0"; exit 0;; esac
while [ $# -gt 0 ]; do
  [ "$1" = "-o" ] && : > "$2"
  shift
done
"""


def write_assembler(folder: Path) -> Path:
    """Write the stand-in below a folder and return the folder to name to XLA as its CUDA toolkit
    (``xla_gpu_cuda_data_dir``)."""
    toolkit = folder / "toolkit"
    (toolkit / "bin").mkdir(parents=True)
    script = toolkit / "bin" / "ptxas"
    script.write_text(_SCRIPT)
    script.chmod(0o755)
    return toolkit
