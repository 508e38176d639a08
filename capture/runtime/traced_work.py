"""What a traced program computes, reads, writes and sends per device, between what nothing avoids
and what is expected.

    products    ``capture.runtime.traced_products``
    traffic     ``capture.runtime.traced_traffic``: at least, one kernel of what replicas split, and
                one of what is the same on each
    collectives ``capture.runtime.traced_sums``

The terms are in the order of the program, and each grows with the number of examples by a line, as
long as no product becomes large. They rest on what compiled programs were seen to do, term by term
(``benchmarks/bound_terms.py``), not on anything that compilers promise: a compiled program that
takes less is an error of these modules, which searches report (``recommender.capture.refuted``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from capture.measured.work import Collective, Kernel, ProgramWork
from capture.partition.tensor_parallel import DATA_AXIS
from capture.runtime.residuals import ValueSplit
from capture.runtime.traced_products import LargeProducts
from capture.runtime.traced_program import TracedProgram
from capture.runtime.traced_sums import Exchanges
from capture.runtime.traced_traffic import Traffic


class TracedWork:
    """The work of a program on a mesh.

    Args:
        computed: Bytes of values that are computed and cannot be read as anything else.
        mesh_shape: Devices by axis, in the order of the mesh.
        keeps_products, gathers_alone: As of ``Bounder``.
    """

    def __init__(
        self,
        program: TracedProgram,
        split: ValueSplit,
        computed: Mapping[object, int],
        mesh_shape: Mapping[str, int],
        keeps_products: bool,
        gathers_alone: bool = False,
    ):
        self._program, self._keeps_products = program, keeps_products
        self._products = LargeProducts(program, split, keeps_products)
        large = self._products.large
        summed = [at for at, product in large.items() if product.summed]
        self._traffic = Traffic(program, split, large, summed, computed, keeps_products)
        axes, stride = {axis.name: axis for axis in split.axes}, 1
        self._exchanges: list[Exchanges] = []
        for name, degree in reversed([*mesh_shape.items()]):
            if name in axes:
                one = Exchanges(
                    program,
                    split,
                    self._products,
                    axes[name],
                    stride,
                    name == DATA_AXIS,
                    gathers_alone,
                )
                self._exchanges.append(one)
            stride *= degree

    def least(self) -> ProgramWork:
        """Return the work that nothing avoids, a lower bound."""
        # Elsewhere, what is computed element by element may be part of a product.
        counts = self._keeps_products or not self._products.large
        others = self._traffic.least() if counts else []
        sent = [each for exchanges in self._exchanges for each in exchanges.least()]
        return _work(self._products.least(), others, sent)

    def expected(self) -> ProgramWork:
        """Return the work that is expected."""
        sent = [each for exchanges in self._exchanges for each in exchanges.expected()]
        return _work(self._products.expected(), self._traffic.expected(), sent)


def _work(
    products: Sequence[Kernel], others: Sequence[Kernel], sent: Sequence[Collective]
) -> ProgramWork:
    most = max(
        products, key=lambda kernel: kernel.flops, default=Kernel(0, 0, "float32", "default")
    )
    return ProgramWork(
        sum(kernel.flops for kernel in products),
        most.dtype,
        product_bytes=sum(kernel.nbytes for kernel in products),
        other_bytes=sum(kernel.nbytes for kernel in others),
        collectives=tuple(sent),
        precision=most.precision,
        kernels=(*products, *others),
    )
