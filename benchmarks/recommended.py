"""Whether what ``capture plan`` recommends is what the compiler says: plans of the zoo, of the
examples and of the tests' models, on the default target and with default options, and ``capture
verify`` of each, which compiles its stages.

    python -m benchmarks.recommended -o benchmarks/results/DATE-recommended.json
    python -m benchmarks.recommended "models/vit.py:vit" --cluster 2x2

Without models, all of ``MODELS`` on every cluster. Per plan: the peak that was recommended, per
device, and what ``verify`` says with an empty store; the exit code is 1 if any differs, or was not
compiled.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments, finish
from capture import environment
from capture.cli.main import main as capture

_TINY = ("bert", "gpt", "gpt2", "llama", "mingpt", "mobilenet", "moe", "resnet", "unet")
_TINY += ("vgg", "vit", "wide_resnet", "deep_recommender")
MODELS = (
    *(f"models/{name}.py:{name}" for name in _TINY),
    "docs/examples/plain_jax.py:language_model",
    "docs/examples/flax_nnx.py:classifier",
    "docs/examples/flax_linen.py:mixer",
    "tests/user_models/tiny.py:model",
    "tests/user_models/chain.py:model?depth=4",
    "tests/user_models/mixed.py:model",
    "tests/user_models/widths.py:model",
)
CLUSTERS = ("1x2", "2x2")
#: Small, and as many micro-batches as make stages wait.
BATCH = ("--global-batch", "16", "--microbatches", "4")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--cluster", action="append", help=f"default: {' and '.join(CLUSTERS)}")
    options = parser.parse_args()
    environment.prepare(num_devices=8)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            for cluster in options.cluster or CLUSTERS:
                rows.append(compared(model, cluster, Path(folder)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    wrong = [row for row in rows if not row["agrees"]]
    claims = {"num_plans": len(rows), "num_that_differ": len(wrong)}
    finish("recommended", rows, options, claims=claims, versions=environment.versions())
    return 1 if wrong else 0


def compared(model: str, cluster: str, folder: Path) -> dict[str, Any]:
    """Return what is recommended, and what the compiler says of it."""
    start, processor = time.perf_counter(), time.process_time()
    path, here = str(folder / "plan.json"), ("--workers", "0", "--quiet", "--json")
    stores = [("--store", str(folder / name)) for name in ("planned", "verified")]
    question = ("plan", model, "--cluster", cluster, *BATCH)
    planned = asked(*question, "-o", path, *stores[0], *here)
    row = {
        "model": model,
        "cluster": cluster,
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }
    if planned.get("status") != "ok":
        return {**row, "agrees": False, "said": planned.get("errors") or planned["why"]["summary"]}
    recommended = planned["plan"]["verification"]
    verified = asked("verify", path, *stores[1], *here)
    peaks = recommended and recommended["peak_bytes_per_device"]
    row |= {
        "recommended_bytes_per_device": peaks,
        "within_fraction": planned["why"]["proven"]["within_fraction"],
        "num_compiled": planned["why"]["proven"]["trail"][-1]["num_compiled"],
    }
    truth = verified.get("peak_bytes_per_device", verified)
    return {**row, "verified_bytes_per_device": truth, "agrees": peaks == truth}


def asked(*words: str) -> dict[str, Any]:
    """Return the document of a command."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        capture(words)
    return json.loads(out.getvalue())


if __name__ == "__main__":
    raise SystemExit(main())
