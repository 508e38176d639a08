"""Harmony's claims beside what was recomputed: one table of the newest results of all scripts.

    python -m benchmarks.papers.harmony.claims -o RESULT.json

``docs/harmony.md`` says why they differ where they do.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import finish

RESULTS = Path(__file__).parents[2] / "results"
SCRIPTS = (
    "harmony-models-zoo",
    "harmony-table-1",
    "harmony-search",
    "harmony-search-cnns",
    "harmony-figure-3",
    "harmony-figure-8",
    "harmony-figure-10",
    "harmony-figure-10-cnns",
    "harmony-figure-13",
    "harmony-figure-14",
    "harmony-figure-15",
    "harmony-figure-17",
)


def newest(name: str) -> Path | None:
    """Its last result by date, if there is one."""
    return max(RESULTS.glob(f"*-{name}.json"), default=None)


def row_of(name: str) -> dict[str, Any]:
    path = newest(name)
    if path is None:
        return {"script": name, "missing": True}
    document = json.loads(path.read_text())
    paper = document.get("paper", "see the script")
    return {
        "script": name,
        "file": path.name,
        "paper": paper,
        "ours": document.get("claims", {}),
    }


def main() -> int:
    options = arguments(__doc__).parse_args()
    return finish("harmony_claims", [row_of(name) for name in SCRIPTS], options)


if __name__ == "__main__":
    sys.exit(main())
