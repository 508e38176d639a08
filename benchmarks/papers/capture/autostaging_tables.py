"""The tables of Alpa's autostaging, filled by our profiles: what ``tests/alpa_conformance`` gives
to Alpa's own search.

    python -m benchmarks.papers.capture.autostaging_tables tests/alpa_conformance/data

One file per family. The recorded ones were made before master copies were counted: with the memory
of float32 parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from benchmarks.papers.capture.scenarios import (
    CLUSTER,
    MODELS,
    arguments,
    is_chosen,
    prepare,
    profiled,
    usable_bytes,
)
from capture.papers.alpa.autostage import autostaging_tables


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("into", type=Path, metavar="FOLDER", help="where the files go")
    options = parser.parse_args()
    prepare()
    options.into.mkdir(parents=True, exist_ok=True)
    for model in (MODELS[name] for name in ("GPT-3 6.7B", "MoE 7.1B", "Wide-ResNet 1B")):
        if not is_chosen(model, options):
            continue
        size = model.global_batch // model.num_microbatches
        tables = autostaging_tables(
            profiled(model, options).profile,
            CLUSTER,
            microbatch_size=size,
            memory_limit_bytes=usable_bytes(),
            master_copy=model.master_copy,
        )
        degrees = [
            [(c.data_parallel, c.tensor_parallel) for c in choices] for choices in tables.choices
        ]
        most = max(map(len, degrees))
        np.savez_compressed(
            options.into / f"autostaging-{model.slug}.npz",
            submeshes=tables.submeshes,
            degrees=[here + [(0, 0)] * (most - len(here)) for here in degrees],
            seconds=tables.seconds.astype(np.float32),
            max_successors=np.minimum(tables.max_successors, 1 << 20).astype(np.int32),
            num_microbatches=model.num_microbatches,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
