"""mu-TWO's claims beside what was recomputed: one table of the newest results of all scripts.

    python -m benchmarks.papers.mutwo.claims -o RESULT.json

``docs/mutwo.md`` says why they differ where they do.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.mutwo.settings import finish, newest

SCRIPTS = (
    "mutwo-figure-1",
    "mutwo-figure-3",
    "mutwo-figure-6",
    "mutwo-figure-7",
    "mutwo-figure-8",
    "mutwo-figure-9",
    "mutwo-saturation",
    "mutwo-limit",
)


def row_of(name: str) -> dict[str, Any]:
    try:
        path, document = newest(name)
    except FileNotFoundError:
        return {"script": name, "missing": True}
    paper = document.get("paper", "see the script")
    ours = document.get("claims", {})
    return {"script": name, "file": path.name, "paper": paper, "ours": ours}


def main() -> int:
    options = arguments(__doc__).parse_args()
    return finish("mutwo_claims", [row_of(name) for name in SCRIPTS], options)


if __name__ == "__main__":
    sys.exit(main())
