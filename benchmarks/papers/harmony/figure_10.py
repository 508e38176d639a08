"""Figures 10 to 12: Harmony beside training over virtual memory and ZeRO-Infinity: throughput, and
what is swapped, by minibatch.

    python -m benchmarks.papers.harmony.figure_10 -o RESULT.json [MODEL ...]

Four GTX-1080Ti, the authors' profiles, with prefetch. The managers below the baselines know the
future and swap as little as one can (Belady's rule), and their micro-batches are the fastest powers
of two; ZeRO-Infinity has Harmony PP's packs and sizes, and hides what can be hidden. So these
baselines are faster than the systems that the paper measured.

Paper: Harmony DP up to 2.4 to 7.0 times DP Swap, Harmony PP up to 2.8 to 7.6 times, and up to 1.5
times Harmony DP; swap volumes of baselines 100 to 300 times Harmony's; 2.5 times ZeRO-Infinity.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import bars, finish, problem_of
from capture.papers.harmony.baselines import all_baselines
from recommender.harmony import search

#: Minibatches of every model.
CASES = {"GPT2": (16, 32, 64), "BERT96": (16, 32, 64), "VGG416": (16,), "ResNet1K": (16,)}
PAPER = {
    "PP over DP Swap": "2.8 to 7.6",
    "DP over DP Swap": "2.4 to 7.0",
    "PP over DP": "up to 1.5",
    "PP over ZeRO-Infinity": "up to 2.5",
    "volume of DP Swap over PP": "100 to 300",
}


def rows_of(model: str, minibatch_size: int) -> list[dict[str, Any]]:
    """Of every system: throughput, volumes, memory, or why it cannot run."""
    rows = []
    best = None
    for mode in ("dp", "pp"):
        asked = problem_of(model, mode, minibatch_size)
        best = search(asked).best
        assert best is not None, "all fit"
        found = asked.estimate(best.configuration)
        volumes = found.volumes_bytes
        rows.append(
            {
                "name": f"Harmony {mode.upper()}",
                "step_seconds": found.seconds,
                "volumes_bytes": volumes,
                "swap_bytes": sum(n for name, n in volumes.items() if name != "p2p"),
                "peak_bytes": found.peak_bytes,
                "why": "",
            }
        )
    assert best is not None
    asked = problem_of(model, "pp", minibatch_size)
    rows += [row.to_json() for row in all_baselines(asked, best.configuration)]
    for row in rows:
        row |= {"model": model, "minibatch_size": minibatch_size}
        seconds = row["step_seconds"]
        row["examples_per_second"] = minibatch_size / seconds if seconds else None
    return rows


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)}; the transformers")
    options = parser.parse_args()
    cases = {model: CASES[model] for model in options.models or ("GPT2", "BERT96")}
    rows = [row for model, sizes in cases.items() for d in sizes for row in rows_of(model, d)]
    claims, throughput, volume = {}, [], []
    for model, sizes in cases.items():
        for d in sizes:
            of = {r["name"]: r for r in rows if (r["model"], r["minibatch_size"]) == (model, d)}
            speed = {name: row["examples_per_second"] for name, row in of.items()}
            swapped = {name: row["swap_bytes"] / 1e9 for name, row in of.items() if speed[name]}

            def over(one: str, other: str, speed: dict[str, Any] = speed) -> float | None:
                return speed[one] / speed[other] if speed[one] and speed[other] else None

            pp, dp = "Harmony PP", "Harmony DP"
            claims[f"{model}, minibatch {d}"] = {
                "PP over DP Swap": over(pp, "DP Swap"),
                "DP over DP Swap": over(dp, "DP Swap"),
                "PP over DP": over(pp, dp),
                "PP over GP Swap (R)": over(pp, "GP Swap (R)"),
                "PP over 2BW Swap (R)": over(pp, "2BW Swap (R)"),
                "PP over ZeRO-Infinity": over(pp, "ZeRO-Infinity"),
                "volume of DP Swap over PP": swapped.get("DP Swap", 0) / swapped[pp],
                "volume of ZeRO-Infinity over PP": swapped.get("ZeRO-Infinity", 0) / swapped[pp],
            }
            label = f"{model}\nminibatch {d}"
            shown = {
                name: value or "cannot run"
                for name, value in speed.items()
                if "Swap" in name or "Harm" in name or "ZeRO" in name
            }
            throughput.append((label, shown))
            volume.append((label, {name: swapped.get(name, "cannot run") for name in shown}))
    svg = bars(
        f"Harmony beside other systems, {' and '.join(cases)} (Figures 10 to 12)",
        "Estimated: four GTX-1080Ti, the authors' profiles; managers that know the future.",
        {
            "throughput": ("examples / s", throughput),
            "swapped over the host's links in a step": ("GB", volume),
        },
    )
    return finish("harmony_figure_10", rows, options, svg, claims=claims, paper=PAPER)


if __name__ == "__main__":
    sys.exit(main())
