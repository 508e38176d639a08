"""Whether answers to the whole question are those of brute force: small spaces of unlike layers
(``tests/small_spaces.py``), every plan of them compiled, asked for the lowest peak memory, the
fastest plan, the front and the named plans, to the end and less far (``tests/brute_force.py``).

    python -m benchmarks.brute_force 0 200 -o RESULT

The exit code is 1 if an answer is another one, or a proof does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int, help="seed of the first space")
    parser.add_argument("stop", type=int, help="seed behind the last one")
    parser.add_argument("-o", "--output", type=Path, help="write the document here")
    options = parser.parse_args()
    spaces = []
    for seed in range(options.first, options.stop):
        spaces.append(measured(seed))
        print(json.dumps(spaces[-1]), file=sys.stderr, flush=True)
    found = summary(spaces)
    if options.output is not None:
        document = {"benchmark": "brute_force", "date": date.today().isoformat(), **found}
        options.output.write_text(json.dumps({**document, "spaces": spaces}) + "\n")
    print(json.dumps(found))
    return 1 if found["num_wrong"] else 0


def measured(seed: int) -> dict[str, Any]:
    """What of the answers about one space is not so."""
    from tests.brute_force import EFFORTS, POLICIES, Asked, wrong

    asked = Asked.of(seed)
    return {
        "seed": seed,
        "num_plans": len(asked.space.every),
        "num_fitting": len(asked.fitting),
        "wrong": [
            f"{name}, {effort}: {said}"
            for name in POLICIES
            for effort in EFFORTS
            for said in wrong(asked, name, effort)
        ],
    }


def summary(spaces: list[dict[str, Any]]) -> dict[str, int]:
    """How many spaces are answered as by brute force."""
    return {
        "num_spaces": len(spaces),
        "num_plans": sum(space["num_plans"] for space in spaces),
        "num_without_fit": sum(not space["num_fitting"] for space in spaces),
        "num_wrong": sum(bool(space["wrong"]) for space in spaces),
    }


if __name__ == "__main__":
    sys.exit(main())
