"""Plans as Alpa runs them: the options of its ``PipeshardParallel``, its placement and its memory
habits.

Nothing here imports alpa or JAX but ``AlpaOptions.build``.
"""

from capture.alpa.options import AlpaOptions, to_alpa
from capture.alpa.placement import alpa_placement
from capture.alpa.reading import plan_from_alpa

__all__ = ["AlpaOptions", "alpa_placement", "plan_from_alpa", "to_alpa"]
