"""Whether memory binds, and what an answer then says of offload: what it gains, or why nothing of
it was chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf

from capture.quantities import format_bytes
from recommender.capture.compiled import most_on_a_host
from recommender.capture.estimates import Ratios, fastest_of_any_size, proposed
from recommender.capture.parts import Found, OpenPart
from recommender.capture.posed import search_problem
from recommender.capture.refine import Search

#: Seconds that are nearer than this are the same.
_NEARLY = 0.01


def endless_seconds(
    search: Search, best: Found, ratios: Callable[[Search, OpenPart], Ratios]
) -> float | None:
    """Return the seconds that are expected of the fastest plan with endless memory, where memory
    binds: where that needs more than there is, and is faster; None elsewhere.

    Args:
        best: The fastest plan that fits; one that does not without any.
        ratios: Of a part's stages to the seconds that are expected of them.
    """
    fits = best.answer.status == "ok"
    seconds = (best.answer.proof.step_seconds or inf) if fits else inf
    open_parts = [part for part in search.plain_parts if part.question.may_rest]
    endless = (part.once(fastest_of_any_size, ratios(search, part)) for part in open_parts)
    limit = best.part.question.limit_bytes or inf
    faster = [each.step_seconds or inf for each in endless if each.peak_bytes > limit]
    least = min(faster, default=inf)
    if least < (1 - _NEARLY) * seconds:
        return least
    return seconds if _on_hosts(best) else None  # it is searched where memory binds


def said(search: Search, best: Found, ratios: Callable[[Search, OpenPart], Ratios]) -> str:
    """Return the line of an answer on offload where memory binds; arguments are as of
    ``endless_seconds``."""
    if (plan := best.answer.plan) is not None and (ways := _on_hosts(best)):
        held = format_bytes(most_on_a_host(plan, best.part.known))
        return f"On the host: {' and '.join(ways)}, {held}; {_without(search, best, ratios)}."
    if any(part.question.offload is None for part in search.plain_parts):
        return (
            "Offload was not searched: the host's memory is not known; say --host-memory, such as "
            "--host-memory 1TB."
        )
    host = next((part for part in search.plain_parts if part.has_offload and _is_cut(part)), None)
    if host is None:
        return ""
    memory = format_bytes(host.question.host_memory_bytes or 0)
    return f"Plans with offload that need more than the {memory} of a host were left out."


def _on_hosts(best: Found) -> Sequence[str]:
    """Return what a plan that fits keeps on its hosts."""
    plan = best.answer.plan if best.answer.status == "ok" else None
    return sorted({way for stage in (plan.stages if plan else ()) for way in stage.offload})


def _without(search: Search, best: Found, ratios: Callable[[Search, OpenPart], Ratios]) -> str:
    """Return how much slower the fastest plan without offload is."""
    seconds, about = best.answer.proof.step_seconds or inf, ""
    others = [each for each in search.fitting if not each.part.has_offload]
    if not others:
        others, about = [*_estimated(search, ratios)], "about "
    slower = min((each.answer.proof.step_seconds or inf for each in others), default=inf)
    if slower < inf:
        return f"without offload {about}{slower / seconds:.2f} x slower"
    if any(not part.has_offload for part in search.parts.values()):
        return "nothing is expected to fit without offload"
    return "nothing else was searched"


def _estimated(search: Search, ratios: Callable[[Search, OpenPart], Ratios]) -> Iterator[Found]:
    for part in search.plain_parts:
        if not part.has_offload:
            found = part.once(proposed, ratios(search, part), False)
            yield from (each for each in found if each.answer.status == "ok")


def _is_cut(part: OpenPart) -> bool:
    """Return whether some stages of a part need more of a host than it has."""
    free = search_problem(part.known, replace(part.question, host_memory_bytes=None), least=True)
    held = search_problem(part.known, part.question, least=True)
    return any((free.cost[d].min() < held.cost[d].min()) for d in free.used_degrees)
