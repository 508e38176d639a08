"""How long Harmony's searches take, how many configurations they simulate, and what the wide one
gains.

    python -m benchmarks.harmony_search -o RESULT.json [MODEL ...]

The profiles of the paper's authors on four GTX-1080Ti, minibatch 64, both modes, with and without
prefetch. ``paper`` simulates every point; ``bounded`` those whose lower bounds leave open whether
they are the best; ``wide`` has all sizes and more packs, and holds whole tasks below the limit.
Seconds are of one processor.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import MODELS, finish, problem_of
from capture.plan.task_graph import MODES, Mode
from recommender.harmony import search


def row_of(model: str, mode: Mode, without: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "mode": mode, "without": list(without)}
    for algorithm in ("paper", "bounded", "wide"):
        asked = problem_of(model, mode, without=without)
        start = time.process_time()
        found = search(asked, algorithm)
        seconds, best = time.process_time() - start, found.best
        assert best is not None, "all fit"
        row[algorithm] = {
            "search_seconds": seconds,
            "num_simulated": len(found.points),
            "step_seconds": best.seconds,
            "task_bytes": best.task_bytes,
        }
    return row


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    options = parser.parse_args()
    rows = [
        row_of(model, mode, without)
        for model in options.models or MODELS
        for mode in MODES
        for without in ((), ("prefetch",))
    ]
    gains = {
        f"{row['model']} {row['mode']} {'without prefetch' if row['without'] else 'prefetch'}": (
            row["paper"]["step_seconds"] / row["wide"]["step_seconds"] - 1
        )
        for row in rows
    }
    same = all(row["paper"]["step_seconds"] == row["bounded"]["step_seconds"] for row in rows)
    claims = {"wide_over_paper": gains, "bounded_answers_as_paper": same}
    return finish("harmony_search", rows, options, claims=claims)


if __name__ == "__main__":
    sys.exit(main())
