"""Figure 8: packs as large as fit against smaller ones with larger micro-batches.

    python -m benchmarks.papers.harmony.figure_8 -o RESULT.json

BERT-Large, minibatch 600, four GTX-1080Ti, Harmony PP: packs of four layers with U_F = 30 and U_B =
15, and of seven with 20 and 10. Idle is what a GPU does not compute in the whole step (H-r); the
released scheduler's is the tail alone, given beside.

Paper: the larger packs idle up to twice as long.
"""

from __future__ import annotations

import sys

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import bars, by_hand, finish, problem_of

CASES = {"every 4 layers, 30/15": (30, 15, 4), "every 7 layers, 20/10": (20, 10, 7)}


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = []
    for prefetch in (True, False):
        asked = problem_of("bert_large", "pp", 600, without=() if prefetch else ("prefetch",))
        for name, (u_f, u_b, length) in CASES.items():
            found = asked.estimate(by_hand(asked.profile.num_layers, u_f, u_b, length))
            rows.append(
                {
                    "case": name,
                    "prefetch": prefetch,
                    "step_seconds": found.seconds,
                    "gap_fractions": found.gap_fractions,
                    "gap_seconds": [found.seconds * gap for gap in found.gap_fractions],
                    "tail_fractions": found.idle_fractions,
                    "task_bytes": found.peak_bytes,
                }
            )
    claims = {
        f"larger packs idle, {'prefetch' if small['prefetch'] else 'no prefetch'}": (
            max(large["gap_seconds"]) / max(small["gap_seconds"])
        )
        for small, large in (rows[:2], rows[2:])
    }
    groups = [
        (f"GPU {gpu}", {row["case"]: row["gap_fractions"][gpu] for row in rows[:2]})
        for gpu in range(4)
    ]
    title, note = "Idle parts of a step (Harmony, Figure 8)", "Estimated, with prefetch."
    svg = bars(title, note, {"BERT-Large, minibatch 600": ("part of the step", groups)})
    paper = {"larger packs idle": 2.0}
    return finish("harmony_figure_8", rows, options, svg, claims=claims, paper=paper)


if __name__ == "__main__":
    sys.exit(main())
