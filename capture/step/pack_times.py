"""How long the programs and copies of a step of packs take, and what it copies over which link."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType

from capture.machine.server import Server
from capture.measured.layer_profile import LayerProfile
from capture.plan.task_graph import TaskGraph
from capture.step.program import Copy, Feed, Place, Run, Step
from capture.step.timeline import Seconds

#: Programs that several devices run together, whose seconds are those of the links.
_TOGETHER = ("gather", "scatter", "reduce")


def packs_seconds(
    step: Step,
    graph: TaskGraph,
    profile: LayerProfile,
    server: Server,
    compiled: Mapping[str, float] = MappingProxyType({}),
) -> Seconds:
    """Return the times of a step's programs and copies: those of the profile, and bytes over the
    bandwidths that the devices share.

    Args:
        step: Instructions of the plan.
        graph: Tasks of the plan.
        profile: Layers, as they are streamed.
        server: Bandwidths.
        compiled: By name, the seconds of programs that were compiled, which count where one device
            runs them.
    """
    working = len({task.rank for task in graph.tasks})
    swap = server.swap_bytes_per_second.value / working
    p2p = server.p2p_bytes_per_second.value

    def of(name: str) -> float:
        kind, (first, stop), size, *_ = step.programs[name].call
        on_host = step.programs[name].place.host is not None
        if name in compiled and not on_host and kind not in _TOGETHER:
            return compiled[name]
        if kind == "update":
            return profile.update_seconds(first, stop) if on_host else 0.0
        if kind == "cast":
            return profile.cast_seconds(first, stop) / graph.num_shares
        if kind in ("gather", "scatter"):
            whole = profile.streamed_bytes if kind == "gather" else profile.weight_bytes
            return (1 - 1 / working) * whole(first, stop) / p2p
        if kind == "widen":
            return profile.widen_seconds(first, stop)
        if kind == "summarize":  # one of the seven that an update of Adam reads and writes
            return profile.update_seconds(first, stop) / 7
        if kind == "reduce":
            return 2 * (working - 1) / working * profile.weight_bytes(first, stop) / p2p
        seconds = profile.at("forward" if kind == "forward" else "backward", size).time(first, stop)
        return seconds + (profile.adding_seconds(first, stop) if kind == "accumulate" else 0.0)

    def transfer(
        instruction: Feed | Copy, nbytes: int, source: Place | None, target: Place
    ) -> float:
        over_host = source is None or source.host is not None or target.host is not None
        return nbytes / (swap if over_host else p2p)

    return Seconds({name: of(name) for name in step.programs}, transfer)


def volumes_bytes(step: Step) -> dict[str, int]:
    """Return the bytes copied over the hosts' links, by what the slots are and the direction;
    between devices it is ``p2p``, and what comes from the batch ``batch in``. What devices get of
    each other to make weights of shares is ``weights gathered``, and of gradients ``gradients
    scattered``."""
    found: defaultdict[str, int] = defaultdict(int)
    for instruction in step.instructions:
        match instruction:
            case Run(program=name, inputs=groups, outputs=made):
                given = sum(step.slots[slot].nbytes for group in groups for slot in group)
                more = sum(step.slots[slot].nbytes for slot in made) - given
                if step.programs[name].kind == "gather":
                    found["weights gathered"] += more
                elif step.programs[name].kind == "scatter":
                    found["gradients scattered"] -= more
            case Feed(slot=slot):
                found["batch in"] += step.slots[slot].nbytes
            case Copy(source=source, target=target, nbytes=nbytes):
                one, other = step.slots[source], step.slots[target]
                if one.place.host is not None:
                    found[f"{other.what} in"] += nbytes
                elif other.place.host is not None:
                    found[f"{one.what} out"] += nbytes
                else:
                    found["p2p"] += nbytes
    return dict(found)
