"""Figures 16 to 18: models of tens of billions of parameters on up to 8 and 16 GPUs, and the memory
of the host.

    python -m benchmarks.papers.harmony.figure_17 -o RESULT.json

GPT2 of 10 to 40 billion parameters on one to eight GTX-1080Ti with 750 GB (Figures 17 and 18), and
of up to 80 billion on one to sixteen V100 of a DGX-2 (Figure 16; times are still those of the
profile's GPU). No profile of 80 billion is shipped: it is derived from that of 40 billion, whose
blocks are the same, with 200 more of them, as that of 40 billion is that of 10 billion with more.
One example a micro-batch and packs of two layers,
minibatch 32, as the authors' scripts set; ZeRO-Infinity likewise.

Paper: PP scales linearly; ZeRO-Infinity fails at 40 billion on 750 GB; PP up to 3.2 times, DP up to
1.8 times ZeRO-Infinity.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.documents import arguments
from benchmarks.papers.harmony.settings import bars, by_hand, finish, problem_of
from capture.machine.server import Server
from capture.papers.harmony.baselines import zero_infinity
from capture.plan.task_graph import Mode
from capture.predictor.pack_step import step_times

SERVERS = {"gtx1080ti-x8": (1, 2, 4, 8), "dgx-2": (1, 2, 4, 8, 16)}
BILLIONS = {"gtx1080ti-x8": (10, 20, 30, 40), "dgx-2": (10, 20, 30, 40, 80)}
NOTE = "Estimated: profiles of the authors' GPU; that of 80B is derived from that of 40B."


def row_of(billions: int, server: Server, mode: Mode) -> dict[str, Any]:
    asked = problem_of(f"gpt2_{billions}b", mode, 32, server=server)
    configuration = by_hand(asked.profile.num_layers, 1, 1, 2)
    found = asked.estimate(configuration)
    row = {
        "server": server.name,
        "billions": billions,
        "profile": "derived" if asked.profile.source.startswith("derived") else "shipped",
        "devices": server.devices,
        "mode": mode,
        "step_seconds": found.seconds,
        "examples_per_second": 32 / found.seconds,
        "task_bytes": found.peak_bytes,
    }
    if server.devices == SERVERS[server.name][-1] and mode == "pp":
        step = step_times(asked.graph(configuration, None), asked.profile, server)
        other = zero_infinity(asked, configuration)
        row |= {"host_bytes": step.host_peak_bytes, "ZeRO-Infinity": other.to_json()}
    return row


def main() -> int:
    options = arguments(__doc__).parse_args()
    rows = [
        row_of(billions, Server.load(name).with_(num_devices=devices), mode)
        for name, counts in SERVERS.items()
        for billions in BILLIONS[name]
        for devices in counts
        for mode in ("dp", "pp")
    ]
    speed = {
        (r["server"], r["billions"], r["devices"], r["mode"]): r["examples_per_second"]
        for r in rows
    }
    claims = {
        f"{name}, {billions} billion": {
            f"{mode} on {counts[-1]} GPUs over one": (
                speed[name, billions, counts[-1], mode] / speed[name, billions, 1, mode]
            )
            for mode in ("dp", "pp")
        }
        for name, counts in SERVERS.items()
        for billions in BILLIONS[name]
    }
    full = [(f"{row['server']}, {row['billions']}", row) for row in rows if "host_bytes" in row]
    more = {
        "claims": claims,
        "ZeRO-Infinity": {name: row["ZeRO-Infinity"]["why"] or "runs" for name, row in full},
        "harmony_host_bytes": {name: row["host_bytes"] for name, row in full},
        "derived": "80 billion: the shipped profile of 40 billion with 200 more of its blocks",
    }
    panels = {
        f"{name}, examples / s": (
            "examples / s",
            [
                (
                    f"{billions}B\nderived" if billions == 80 else f"{billions}B",
                    {
                        f"{mode.upper()}, {devices}": speed[name, billions, devices, mode]
                        for mode in ("dp", "pp")
                        for devices in (counts[0], counts[-2], counts[-1])
                    },
                )
                for billions in BILLIONS[name]
            ],
        )
        for name, counts in SERVERS.items()
    }
    svg = bars("Tens of billions (Harmony, Figures 16 to 18)", NOTE, panels)
    return finish("harmony_figure_17", rows, options, svg, **more)


if __name__ == "__main__":
    sys.exit(main())
