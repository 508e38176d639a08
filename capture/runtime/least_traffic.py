"""The traffic of the least work of a program, in its parts: a kernel each, behind the products.

of what replicas split               and tensor parallelism does; and what that does not
of what is the same on all of them   the same two
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from capture.measured.work import Kernel, ProgramWork


def _changed(
    work: ProgramWork | None, change: Callable[[Sequence[Kernel]], Sequence[Kernel]]
) -> ProgramWork | None:
    """Return the work with another traffic."""
    if work is None or work.kernels is None:
        return None
    traffic = [kernel for kernel in work.kernels if not kernel.dtype]
    products = [kernel for kernel in work.kernels if kernel.dtype]
    return replace(work, kernels=(*products, *change(traffic)))


def of_examples(work: ProgramWork | None) -> ProgramWork | None:
    """Return the work without the traffic of what is the same on all replicas."""
    return _changed(work, lambda traffic: traffic[:2])


def along_sequence(work: ProgramWork | None, degree: int) -> ProgramWork | None:
    """Return the work whose traffic is also split where tensor parallelism does not split it."""

    def split(traffic: Sequence[Kernel]) -> Sequence[Kernel]:
        shares = (1, degree, 1, degree)
        return [
            replace(kernel, nbytes=kernel.nbytes // share)
            for kernel, share in zip(traffic, shares, strict=False)
        ]

    return _changed(work, split)


def together(work: ProgramWork | None) -> ProgramWork | None:
    """Return the work with one kernel for all that replicas split, and one for what is the same on
    all of them: none is sure to have more."""

    def joined(traffic: Sequence[Kernel]) -> Sequence[Kernel]:
        sums = (sum(kernel.nbytes for kernel in traffic[at : at + 2]) for at in (0, 2))
        return [Kernel(nbytes, count=int(nbytes > 0)) for nbytes in sums]

    return _changed(work, joined)
