"""The plan of least memory that is found on bounds beside that of a whole profile, both compiled:

    python -m benchmarks.bounds_and_profile -o benchmarks/results/2026-01-31-bounds-and-profile.json

Three families on two clusters with two schedules, for H100s that are not there. What one way
compiles the other finds in the store, so the seconds say nothing; an interrupted benchmark resumes
in its folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments, finish
from benchmarks.planning_time import NARROW, run
from capture import environment

TARGET = "h100"
MODELS = {
    "GPT 125M": ("models/gpt.py:gpt?size=125M&dtype=bfloat16", 64, 16),
    "MoE 380M": ("models/moe.py:moe?size=380M&dtype=bfloat16", 64, 16),
    "Wide-ResNet 250M": ("models/wide_resnet.py:wide_resnet?size=250M", 128, 16),
}
CLUSTERS = ("1x4", "2x4")
SCHEDULES = ("1f1b", "gpipe")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="for the store and the profiles")
    parser.add_argument("--only", metavar="TEXT", default="", help="families with this name")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bounds-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name, cluster, schedule in product(MODELS, CLUSTERS, SCHEDULES):
            if options.only in name:
                rows.append(compared(name, cluster, schedule, folder))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return finish(
        "bounds_and_profile",
        rows,
        options,
        target=TARGET,
        versions=environment.versions("cuda"),
        num_higher=sum(row["of_profile_fraction"] > 1 for row in rows),
    )


def compared(name: str, cluster: str, schedule: str, folder: Path) -> dict[str, Any]:
    """Both plans of one combination, by the commands that a user would give."""
    workload, batch, microbatches = MODELS[name]
    asked = [workload, "--cluster", cluster, "--target", TARGET, "--schedule", schedule]
    asked += ["--global-batch", str(batch), "--microbatches", str(microbatches)]
    asked += ["--store", str(folder / "store.sqlite")]
    stem = f"{name}-{cluster}-{schedule}".replace(" ", "-").lower()
    profile, plan = str(folder / f"{stem}.profile.json"), str(folder / f"{stem}.json")
    on_bounds = json.loads(
        run("plan", *asked, *NARROW, "--remat", "cheap", "-o", plan, "--json")["printed"]
    )
    run("profile", *asked, "-o", profile)
    verified = ["--profile", profile, "--verify", "3", "-o", plan, "--json"]
    from_profile = json.loads(run("plan", *asked, *verified)["printed"])
    proven = on_bounds["why"]["proven"]
    found = max(on_bounds["plan"]["prediction"]["peak_bytes_per_device"])
    other = max(from_profile["plan"]["verification"]["peak_bytes_per_device"])
    return {
        "name": name,
        "workload": workload,
        "cluster": cluster,
        "schedule": schedule,
        "global_batch": batch,
        "microbatches": microbatches,
        "bounds_peak_bytes": found,
        "bounds_ended": proven["ended"],
        "bounds_num_compiled": proven["trail"][-1]["num_compiled"],
        "profile_peak_bytes": other,
        "of_profile_fraction": found / other,
    }


if __name__ == "__main__":
    sys.exit(main())
