"""Whether the open question is never slower than the fastest plan of narrow ones, which a user asks
who names micro-batches, remat, ZeRO and schedule.

    python -m benchmarks.open_and_narrow -o benchmarks/results/2026-01-31-open-and-narrow.json
    python -m benchmarks.open_and_narrow --only "GPT tiny" --profile -o RESULT.json

Of every question (a model, a cluster, a batch, a limit) `capture plan` is asked without an option,
with nothing in the store, and then with those of `NARROW`, from the same store. Steps are simulated
and peaks compiled. Seconds, and those of the processor, are of the open question. `--profile` asks
what needs a profile, too, which takes minutes. `--answers-alone` leaves out the second proof, by
compiled layers, which changes no answer and takes a quarter of the time of a small one.

An interrupted run goes on with what OUTPUT has. The exit code is 1 if an open answer is slower by
more than `SAME`, or a command failed.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.documents import arguments
from capture import environment
from capture.cli.main import main as capture
from recommender.capture.speed import Timed

NUM_DEVICES = 8
#: Steps that differ by no larger part are equally fast.
SAME = 0.001


@dataclass(frozen=True)
class Question:
    """A model on a cluster, perhaps with a limit of memory."""

    workload: str
    cluster: str
    target: str
    global_batch: int
    memory: str | None = None

    @property
    def words(self) -> list[str]:
        words = [self.workload, "--cluster", self.cluster, "--target", self.target]
        words += ["--global-batch", str(self.global_batch)]
        return words + (["--memory", self.memory] if self.memory else [])


_TINY, _GPT = "models/gpt.py:gpt?size=tiny", "models/gpt.py:gpt?size=125M&dtype=bfloat16"
_MOE, _WRN = (
    "models/moe.py:moe?size=380M&dtype=bfloat16",
    "models/wide_resnet.py:wide_resnet?size=250M",
)
_LLAMA = "models/llama.py:llama?size=tiny&dtype=bfloat16"
QUESTIONS = {
    "GPT tiny, 1x4": Question(_TINY, "1x4", "h100", 16),
    "GPT 125M, 1x4": Question(_GPT, "1x4", "h100", 64),
    "minGPT tiny, 1x4 a100": Question("models/mingpt.py:mingpt?size=tiny", "1x4", "a100-40g", 16),
    "tied, 1x4": Question("tests/user_models/mixed.py:model", "1x4", "h100", 32),
    "ViT tiny, 1x8 a100": Question("models/vit.py:vit?size=tiny", "1x8", "a100-80g", 32),
    "MoE tiny, 1x4": Question("models/moe.py:moe?size=tiny", "1x4", "h100", 32),
    "LLaMA tiny, 1x8 v6e": Question(_LLAMA, "1x8", "v6e", 32),
    "GPT tiny, 1x8 v5e": Question(_TINY, "1x8", "v5e", 32),
    "recommender, 1x4": Question(
        "models/deep_recommender.py:deep_recommender?size=20M", "1x4", "h100", 256
    ),
    "VGG tiny, 1x8": Question("models/vgg.py:vgg?size=tiny", "1x8", "h100", 32),
    "ResNet tiny, 1x4": Question("models/resnet.py:resnet?size=tiny", "1x4", "h100", 32),
    "MobileNet tiny, 1x4 v6e": Question(
        "models/mobilenet.py:mobilenet?size=tiny", "1x4", "v6e", 32
    ),
    "GPT tiny, 2x4, 6 MB": Question(_TINY, "2x4", "h100", 32, "6MB"),
    "recurrent, 2x4": Question("tests/kit/recurrent.py:gated_recurrent", "2x4", "h100", 32),
    "MoE tiny, 2x4 v5e": Question("models/moe.py:moe?size=tiny", "2x4", "v5e", 32),
    "LLaMA tiny, 2x4": Question(_LLAMA, "2x4", "h100", 32),
    "GPT 125M, 1x4, 4 GB": Question(_GPT, "1x4", "h100", 64, "4GB"),
    "GPT 125M, 1x8 v5e": Question(_GPT, "1x8", "v5e", 64),
    "MoE 380M, 1x4": Question(_MOE, "1x4", "h100", 32),
    "Wide-ResNet 250M, 1x4": Question(_WRN, "1x4", "h100", 64),
    "GPT 125M, 2x4 a100": Question(_GPT, "2x4", "a100-80g", 64),
    "GPT-2, 1x4 a100": Question(
        "models/gpt2.py:gpt2?size=small&dtype=bfloat16", "1x4", "a100-40g", 32
    ),
    "BERT, 2x4": Question("models/bert.py:bert?size=base&dtype=bfloat16", "2x4", "h100", 64),
    "GPT 125M, 1x4 v6e": Question(_GPT, "1x4", "v6e", 64),
    "GPT 125M, 1x8, 1.5 GB": Question(_GPT, "1x8", "h100", 64, "1.5GB"),
    "Wide-ResNet 250M, 1x4, 3 GB": Question(_WRN, "1x4", "a100-40g", 64, "3GB"),
    "GPT 125M, 1x8": Question(_GPT, "1x8", "h100", 128),
    "U-Net 31M, 1x4": Question("models/unet.py:unet?size=31M", "1x4", "h100", 16),
    "MoE 380M, 1x8 a100": Question(_MOE, "1x8", "a100-80g", 64),
    "GPT 125M, 2x4 v5e, 2 GB": Question(_GPT, "2x4", "v5e", 64, "2GB"),
}
_FASTEST = ("--objective", "throughput")
#: By name, what is said.
NARROW: dict[str, tuple[str, ...]] = {
    "defaults of before": (
        *("--microbatches", "16", "--schedule", "1f1b", "--remat", "cheap", "--no-shard-params"),
        *("--no-shard-optimizer", "--no-sequence-parallel", "--no-whole-nodes"),
    ),
    "FSDP": ("--microbatches", "1", "--shard-params", "--remat", "cheap"),
    "keep everything": ("--microbatches", "4", "--remat", "none", "--no-shard-params"),
    "auto": ("--microbatches", "2", "--remat", "auto"),
}
#: The same from a profile.
OF_PROFILES: dict[str, tuple[str, ...]] = {
    "profile": ("--microbatches", "8", "--remat", "cheap", "--algorithm", "throughput"),
    "ZB-H1": ("--microbatches", "8", "--remat", "none", "--schedule", "zb-h1"),
}


def asked(words: Sequence[str], store: Path) -> dict[str, Any]:
    """One answer: what it is, and what it cost."""
    kept = ["--store", str(store), "-o", str(store.with_suffix(".json"))]
    start, spent = time.perf_counter(), time.process_time()
    row: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = capture(["plan", *words, *kept, "--workers", "0", "--quiet", "--json"])
        row = {"exit_code": code, **told(json.loads(out.getvalue()))}
    except Exception:  # the other questions are asked all the same
        row = {"crashed": traceback.format_exc()}
    return {
        **row,
        "seconds": round(time.perf_counter() - start, 1),
        "processor_seconds": round(time.process_time() - spent, 1),
    }


def told(document: Mapping[str, Any]) -> dict[str, Any]:
    """What counts of an answer."""
    seconds = (document.get("needs") or {}).get("step_seconds")
    if document.get("status") != "ok" or seconds is None:
        why = document.get("why") or {}
        said = document.get("errors") or why.get("summary")
        return {"status": document.get("status"), "said": said}
    plan, proven = document["plan"], document["why"].get("proven") or {}
    return {
        "status": "ok",
        "step_seconds": seconds,
        "peak_bytes": max(plan["verification"]["peak_bytes_per_device"]),
        "microbatches": plan["num_microbatches"],
        "schedule": plan["schedule"],
        "stages": plan["stages"],
        "warnings": document.get("warnings", []),
        "num_compiled": (proven.get("trail") or [{}])[-1].get("num_compiled"),
        "least_step_seconds": (proven.get("trail") or [{}])[-1].get("least_step_seconds"),
        "ended": proven.get("ended"),
    }


def compared(question: Question, narrow: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The open question and narrow ones."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store.sqlite"
        whole = asked(question.words, store)
        found = {
            name: asked([*question.words, *_FASTEST, *words], store)
            for name, words in narrow.items()
        }
    return {"open": whole, "narrow": found} | judged(whole, found)


def judged(whole: Mapping[str, Any], narrow: Mapping[str, Any]) -> dict[str, Any]:
    """How fast the open answer is beside the fastest of the narrow ones."""
    steps = {name: each["step_seconds"] for name, each in narrow.items() if "step_seconds" in each}
    best = min(steps, key=lambda name: steps[name], default=None)
    crashed = [name for name, each in {"open": whole, **narrow}.items() if "crashed" in each]
    over = None
    if best is not None:
        over = whole.get("step_seconds", float("inf")) / steps[best]
    return {
        "fastest_narrow": best,
        "open_over_narrow": over,
        "is_slower": over is not None and over > 1 + SAME,
        "crashed": crashed,
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    compared = [row["open_over_narrow"] for row in rows if row["open_over_narrow"] is not None]
    return {
        "num_questions": len(rows),
        "num_slower": sum(row["is_slower"] for row in rows),
        "num_crashed": sum(len(row["crashed"]) for row in rows),
        "worst_over_narrow": max(compared, default=None),
        "best_over_narrow": min(compared, default=None),
        "most_seconds": max(row["open"]["seconds"] for row in rows),
        "most_processor_seconds": max(row["open"]["processor_seconds"] for row in rows),
    }


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="questions with this name")
    parser.add_argument("--profile", action="store_true", help="ask what needs a profile, too")
    parser.add_argument("--answers-alone", action="store_true", help="no proof by layers")
    options = parser.parse_args()
    environment.prepare(num_devices=NUM_DEVICES, platform="cuda")
    if options.answers_alone:
        Timed.by_layers = lambda self, search: None  # type: ignore[method-assign]
    document: dict[str, Any] = {"benchmark": "open_and_narrow", "rows": []}
    if options.output is not None and options.output.exists():
        document = json.loads(options.output.read_text())
    rows = document["rows"]
    narrow = {**NARROW, **(OF_PROFILES if options.profile else {})}
    for name, question in QUESTIONS.items():
        if options.only not in name or any(row["name"] == name for row in rows):
            continue
        asked_as = {"answers_alone": options.answers_alone}
        rows.append({"name": name, **asdict(question), **asked_as, **compared(question, narrow)})
        row = rows[-1]
        said = {key: row[key] for key in ("fastest_narrow", "open_over_narrow", "crashed")}
        print(name, json.dumps(said), file=sys.stderr, flush=True)
        document |= {
            "date": date.today().isoformat(),
            "versions": {p: environment.versions(p) for p in ("cuda", "tpu")},
            "narrow": {each: list(words) for each, words in narrow.items()},
            "summary": summary(rows),
        }
        if options.output is not None:
            options.output.write_text(json.dumps(document) + "\n")
    print(json.dumps(document.get("summary"), indent=1))
    return int(any(row["is_slower"] or row["crashed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
