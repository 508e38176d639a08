"""Table 1: the configurations that the search chooses, and how long that takes.

    python -m benchmarks.papers.harmony.table_1 -o RESULT.json

Harmony PP on four GPUs, minibatch 64, without prefetch, balanced time with reuse, as the authors'
scripts call the released scheduler. Seconds are of one processor, the least of three runs, without
reading the profile.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import MODELS, finish, problem_of, profile_of
from capture.measured.layer_profile import LayerProfile
from recommender.harmony import search

#: (U_F, |P_F|, U_B, |P_B|) and seconds.
PAPER = {
    "BERT96": ((16, 24, 16, 25), 1.4),
    "GPT2": ((4, 10, 4, 17), 0.7),
    "VGG416": ((8, 15, 8, 16), 17.7),
    "ResNet1K": ((32, 2, 32, 9), 31.6),
}


def row_of(model: str) -> dict[str, Any]:
    """Ours beside the paper's, by both algorithms."""
    ours: dict[str, Any] = {}
    for algorithm in ("paper", "bounded"):
        seconds = []
        for _ in range(3):
            # A profile remembers the sizes that it was asked for: each run reads a new one.
            fresh = LayerProfile.from_json(profile_of(MODELS[model][0]).to_json())
            asked = replace(problem_of(model, without=("prefetch",)), profile=fresh)
            start = time.process_time()
            found = search(asked, algorithm)
            seconds.append(time.process_time() - start)
        best = found.best
        assert best is not None, "Table 1 has a row for it"
        forward, backward = best.configuration.forward, best.configuration.backward
        ours[algorithm] = {
            "configuration": [
                forward.microbatch_size,
                len(forward.packs),
                backward.microbatch_size,
                len(backward.packs),
            ],
            "step_seconds": best.seconds,
            "task_bytes": best.task_bytes,
            "num_simulated": len(found.points),
            "search_seconds": min(seconds),
        }
    configuration, seconds_of_paper = PAPER[model]
    return {
        "model": model,
        "paper": {"configuration": list(configuration), "search_seconds": seconds_of_paper},
        **ours,
        "equal": all(row["configuration"] == list(configuration) for row in ours.values()),
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = [row_of(model) for model in PAPER]
    claims = {
        "rows_equal": sum(row["equal"] for row in rows),
        "most_seconds": {
            name: max(row[name]["search_seconds"] for row in rows) for name in ("paper", "bounded")
        },
    }
    return finish("harmony_table_1", rows, options, claims=claims)


if __name__ == "__main__":
    sys.exit(main())
