"""Layer profiles (``--system harmony``): what is asked by options, and how what was found is
said."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from capture.cli import asked
from capture.cli.asked import Values
from capture.machine.target import resolved_target
from capture.measured.layer_passes import INTERPOLATIONS
from capture.measured.layer_profile import LayerProfile
from capture.options import Option, options_of, taken
from capture.quantities import counted, format_bytes
from profiling_runs.batch import Progress, Watch
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import PASSES, profile_layers

SYSTEM = "harmony"
SYSTEM_OPTION = Option(
    "system",
    "capture: stages on submeshes; harmony: packs of layers, streamed from the host's memory "
    "(default: %(default)s)",
    "capture",
    choices=("capture", SYSTEM),
)
#: Those of a layer profile.
OPTIONS = options_of(LayersQuestion)
QUANTITIES: tuple[Literal["time"], Literal["memory"]] = ("time", "memory")


def layers_question(values: Values) -> LayersQuestion:
    """What a layer profile is asked for by options.

    Raises:
        ProfileError: ``layers-question`` for a batch below 1, and the codes of
            ``LayersQuestion``.
    """
    return LayersQuestion(
        asked.spec_of(values),
        resolved_target(values["target"], Path()),
        **taken(LayersQuestion, values),
    )


def make_layers(
    options: argparse.Namespace,
    question: LayersQuestion,
    progress: Progress,
    watch: Watch = lambda event: None,
) -> LayerProfile:
    """Measured as ``shared.STORE`` says."""
    return profile_layers(
        question,
        store=asked.open_store(options),
        where=asked.where_of(options),
        progress=progress,
        watch=watch,
    )


def document_of(profile: LayerProfile) -> dict[str, Any]:
    """Of a profile, what is not in its file or hard to see there."""
    return {
        "num_layers": profile.num_layers,
        "weight_bytes": profile.weight_bytes(0, profile.num_layers),
        "state_bytes": profile.state_bytes(0, profile.num_layers),
        "forward_sizes": list(profile.fwd.u),
        "backward_sizes": list(profile.bwd.u),
        "trials": profile.made["trials"],
        "largest": profile.made["largest"],
        "held_out_errors": held_out(profile),
        "coupled": profile.coupled,
        "failures": profile.made["failures"],
        "source": profile.source,
        "casts": {
            dtype: profile.as_streamed(dtype).cast_bytes(0, profile.num_layers)
            for dtype in profile.casts
        },
    }


def held_out(profile: LayerProfile) -> dict[str, Any]:
    """By direction, quantity and interpolation: the mean and the largest error of every other size,
    were it not measured; nothing of fewer than three sizes."""
    sizes = {"forward": profile.fwd.u, "backward": profile.bwd.u}
    return {
        which: {
            quantity: {
                kind: _summary(profile.held_out_errors(which, 2, kind, of=quantity))
                for kind in INTERPOLATIONS
            }
            for quantity in QUANTITIES
        }
        for which in PASSES
        if len(sizes[which]) > 2
    }


def _summary(errors: list[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"mean": sum(sizes) / len(sizes), "largest": max(sizes)}


def as_text(profile: LayerProfile) -> list[str]:
    """Lines for people."""
    facts = document_of(profile)
    lines = [
        f"{counted(profile.num_layers, 'layer')}, {format_bytes(facts['weight_bytes'])} of weights "
        f"and {format_bytes(facts['state_bytes'])} of optimizer state; {profile.source}"
    ]
    for which in PASSES:
        trials, largest = facts["trials"][which], facts["largest"][which]
        sizes = ", ".join(map(str, facts[f"{which}_sizes"]))
        if not largest:
            lines.append(f"{which}: one example is too much for a device; profiled all the same")
            continue
        lines.append(
            f"{which}: {counted(largest, 'example')} at most, found in "
            f"{counted(len(trials), 'trial')} ({', '.join(map(str, trials))}); profiled at {sizes}"
        )
        if which in facts["held_out_errors"]:
            found = facts["held_out_errors"][which]
            said = "; ".join(
                f"{quantity} "
                + ", ".join(
                    f"{kind} {error['mean']:.1%} (at most {error['largest']:.1%})"
                    for kind, error in found[quantity].items()
                )
                for quantity in QUANTITIES
            )
            lines.append(f"  every other size from those beside it is off by: {said}")
    for dtype, nbytes in facts["casts"].items():
        lines.append(
            f"read only as {dtype}: parameters of {format_bytes(nbytes)} as that (--stream {dtype})"
        )
    if profile.coupled:
        lines.append(f"both directions need micro-batches of one size: {profile.coupled}")
    return lines + [f"failed: {failure}" for failure in facts["failures"]]
