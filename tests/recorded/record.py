"""Write the record anew: ``python -m tests.recorded.record [CASE ...]``, of all cases or of those
that are named.

A fact per line, so that what changed can be read from the difference. Do this only where an answer
was changed on purpose.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parent / "record.json"


def load() -> dict[str, Any]:
    """``versions`` of what compiled, and ``cases``: facts by name."""
    return json.loads(RECORD.read_text())


def versions() -> dict[str, str]:
    return {package: version(package) for package in ("jax", "jaxlib")}


def as_text(cases: dict[str, dict[str, Any]]) -> str:
    def block(rows: dict[str, str], indent: int) -> str:
        return (
            "{\n"
            + ",\n".join(f"{' ' * indent}{json.dumps(key)}: {row}" for key, row in rows.items())
            + f"\n{' ' * (indent - 1)}}}"
        )

    facts = {
        name: block({key: json.dumps(value) for key, value in found.items()}, 3)
        for name, found in cases.items()
    }
    return block({"versions": json.dumps(versions()), "cases": block(facts, 2)}, 1) + "\n"


def main(names: list[str]) -> None:
    sys.path.append(str(RECORD.parent.parent))  # as for pytest
    import tests.conftest  # noqa: F401  (eight virtual devices, and the flags that the tests compile with)
    from tests.recorded.bench import apart
    from tests.recorded.cases import CASES

    recorded = load()["cases"] if names and RECORD.exists() else {}
    chosen = names or list(CASES)
    found = apart(those) if (those := [name for name in chosen if CASES[name].apart]) else {}
    for name in chosen:
        start = time.process_time()
        if name not in found:
            found[name] = CASES[name].facts()
        print(f"{time.process_time() - start:6.2f} s  {name}")
    RECORD.write_text(
        as_text(
            {
                name: {**recorded, **found}[name]
                for name in CASES
                if name in recorded or name in found
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
