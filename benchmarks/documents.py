"""What scripts that compute and run nothing share: their options, and results as documents with
figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import date
from pathlib import Path
from typing import Any


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the document here, and its figure beside it as .svg",
    )
    return parser


def finish(
    name: str, rows: list[Any], options: argparse.Namespace, svg: str | None = None, **more: Any
) -> int:
    """Write the document of a script, or print it."""
    document = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.machine(), "cores": os.cpu_count()},
        **more,
        "rows": rows,
    }
    text = json.dumps(document, indent=1) + "\n"
    if options.output is None:
        print(text, end="")
        return 0
    options.output.write_text(text)
    if svg is not None:
        options.output.with_suffix(".svg").write_text(svg)
    print(json.dumps(more.get("claims", {}), indent=1))
    return 0
