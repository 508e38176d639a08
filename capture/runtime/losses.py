"""What a training says of its losses: that they are of another step than one thinks, or no
numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from capture.model.workload import WorkloadProtocol
from capture.tracing.batch_split import check_split, split_warning


class LossWarnings:
    """The warnings of a training, each of which is told as soon as it is known."""

    def __init__(self, report: Callable[[str], None]):
        self.said: list[str] = []
        self._report, self._is_number = report, True

    def _say(self, warning: str) -> None:
        self.said.append(warning)
        self._report(f"warning: {warning}")

    def check(self, workload: WorkloadProtocol, sizes: Sequence[int]) -> None:
        """Warn of a loss that is certain not to split over the micro-batches of a step, of so many
        examples; one device that accumulates the same micro-batches does not show it.

        Its program is read; the loss is run only where that says that it does not split, as a run
        takes longer than a first step should wait.
        """
        size = max(sizes)
        if len(sizes) < 2 or check_split(workload, size, numeric_limit_parameters=0).splits is None:
            return
        check = check_split(workload, size)
        if check.splits is False and (warning := split_warning(check)) is not None:
            self._say(warning)

    def step(self, number: int, losses: Iterable[float]) -> None:
        """Warn once of a loss that is no number, or infinite."""
        wrong = [loss for loss in losses if not math.isfinite(loss)]
        if wrong and self._is_number:
            self._is_number = False
            self._say(
                f"the loss of step {number} is {wrong[0]}: nothing is learned from then on, and no "
                "comparison with one device holds. Look at the loss, its data and the learning "
                "rate. [run-loss]"
            )
