"""The kinds of plan that compete where ``--system`` names none: stages, and beside them those that
may be faster where memory binds, by the seconds of the same rates."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from math import inf

from capture.cli import asked
from capture.cli import options as shared
from capture.cli.options import Asks
from capture.cli.output import SearchEnd, say
from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.options import Systems, refused
from capture.plan.kinds import KINDS
from capture.quantities import format_seconds
from recommender.whole import known_host_bytes

#: The system that is asked where none is named.
FIRST = KINDS["stages"].system
#: Others are searched where a plan of endless memory would be faster by more than this factor: they
#: compute forward passes twice.
_GAINS = 1.1
#: Options of ``FIRST`` that say how long to search, or what plans cost, and not what to search.
_NARROW_NOTHING = {"seconds", "compiles", "within", "quick", "price", "mtbf", "disk_rate"}


def compete(
    options: argparse.Namespace, first: SearchEnd, by_system: Mapping[str, Asks], read: Systems
) -> SearchEnd:
    """Return the end of the search whose plan is the fastest that fits, of whichever kind, which
    also says what the others give. An interrupt of their search keeps what is known.

    Args:
        options: Options as they were typed. One that a system does not read leaves it out.
        first: End of the search of ``FIRST``.
        by_system: What is asked, by system.
        read: Options that each system reads.
    """
    if not _memory_binds(first):
        return first
    target = options.target or shared.TARGET.default
    cluster = asked.read_cluster({**vars(options), "target": target})
    if Target.load(target).rates is None:
        return first
    given = {*shared.given(options)} - _NARROW_NOTHING
    if options.objective == "throughput":
        given -= {"objective"}
    best, about, said = first, by_system[FIRST].about, list[str]()
    for system, asks in by_system.items():
        if asks.rival is None or refused(given, system, read):
            continue
        if why := _left_out(cluster, options):
            # Of a plan that fits, its own reason says what is not known.
            said += [_line(asks.about, why)] * (not first.is_ok)
            continue
        say(options, f"memory binds, so {asks.about} are searched, too")
        own, num = copy(options), shared.MICROBATCHES.default
        own.system = system
        if options.global_batch is None:
            own.global_batch, _ = asked.read_batch({**vars(options), "microbatches": num})
        try:
            found = asks.rival(own, _seconds(best))
        except CaptureError as error:
            said.append(_line(asks.about, str(error)))
            continue
        except KeyboardInterrupt:
            said.append(_line(asks.about, "not known, as the search was interrupted"))
            best = replace(best, exit_code=130, change=None)
            break
        loser, whose = found, asks.about
        if (not found.is_compiled, _seconds(found)) < (not best.is_compiled, _seconds(best)):
            best, loser, about, whose = found.on(first.accountant), best, asks.about, about
        said.append(_line(whose, _given_by(loser, _seconds(best))))
    if about != by_system[FIRST].about and _seconds(first) < inf:
        best = best.written(_kept_beside(options, first))
    return best.saying(said)


def _memory_binds(first: SearchEnd) -> bool:
    """Return whether no plan of stages fits, or one that needs more memory than there is would be
    so much faster that what moves it in and out may pay."""
    answer = first.answer
    if answer is None or first.exit_code == 130:
        return False
    if _seconds(first) == inf:
        # A plan may be shown of which no compiler says that it fits.
        return answer.why.code == "memory-limit" or answer.status == "ok"
    return _seconds(first) > _GAINS * (answer.why.endless_step_seconds or inf)


def _left_out(cluster: Cluster, options: argparse.Namespace) -> str:
    """Return why plans that need the memory of one host are not searched; empty if they are."""
    if len(cluster.nodes) > 1:
        return f"they are of one host, and {cluster} has {len(cluster.nodes)}"
    if options.quick or options.compiles == 0:
        flag = "--quick" if options.quick else "--compiles 0"
        return f"their layers are compiled, which {flag} forbids"
    if known_host_bytes(cluster, options.host_memory) is None:
        return "the host's memory is not known; say --host-memory, such as --host-memory 1TB"
    return ""


def _kept_beside(options: argparse.Namespace, first: SearchEnd) -> dict[str, str]:
    """Save the plan of a search that is not the answer, with its front, in a file beside that of
    the answer, and return what it is and where; or why it could not be saved."""
    path = options.output.with_stem(f"{options.output.stem}-{FIRST}")
    assert first.answer is not None and first.answer.plan is not None, "it fits"
    try:
        first.answer.plan.save(path)
    except OSError as error:
        return {f"plan of --system {FIRST}": f"not saved, {path}: {error.strerror}"}
    return {f"plan of --system {FIRST}": str(path)}


def _seconds(end: SearchEnd) -> float:
    """Return the seconds of a step of a plan that fits, known as it was to be; infinite without."""
    return inf if end.exit_code or end.step_seconds is None else end.step_seconds


def _given_by(end: SearchEnd, best_seconds: float) -> str:
    """Return what plans of another kind than the best give, in words."""
    seconds = _seconds(end)
    if seconds < inf:
        how = "" if end.is_compiled else ", not compiled"
        return f"{seconds / best_seconds:.2f} x slower ({format_seconds(seconds)}{how})"
    assert end.answer is not None, "it is of one question"
    return f"none fits: {end.answer.why.summary}"


def _line(about: str, said: str) -> str:
    return f"{about[0].upper()}{about[1:]}: {said.rstrip('.')}."
