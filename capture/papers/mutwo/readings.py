"""Where mu-TWO's algorithms can be read in two ways: as printed, or corrected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Readings:
    """One choice per doubtful place; false is what the paper prints. READINGS.md has the rows.

    Attributes:
        limit_first: Algorithm B tests the limit before it decides anything (M-e).
        peak_asked_anew: Of every candidate, whether the peak interval lies before its access; once
            a walk was cut by it, printed, it is reached for all that follow (M-c).
        swaps_stay_sources: What is swapped stays a source of existing recomputations, for which it
            arrives in time; printed, Algorithm E replaces it by its sources (M-d).
        prompts_move_back: The last prompt is the earliest of all (M-g).
        credit_that_runs: Recomputation hides a swap only while it runs beside it, and never more
            than all of it (M-h).
        rollback: What an unsafe forward node, or a swap that is not chosen, has changed is undone
            (M-i).
        nothing_above_limit: A forward node is safe if no operation exceeds the limit by it, or
            exceeds it by more; printed, if the peak falls (M-j).
        nodes_follow: A forward node counts with the seconds of the node that comes to stand there;
            printed, the count begins with the first one for every candidate (M-k).
        last_counted_prompt: The prompt is the earliest node that was counted, and none is counted
            that another transfer needs; printed, the one before it (M-l).
        totals_of_existing: Algorithm E updates the totals of existing recomputations (M-p).
        totals_of_all: Algorithm F has every remaining candidate's total as count x time (M-q).
        weights_once: Resident weights are counted once also while one of the two graphs has not
            run; printed, they are then subtracted all the same (M-t).
        workspace: Memory counts the workspace of operations and recomputations, and what is held
            between operations; printed, active memory alone (M-v).
        both_graphs: Both merged graphs are decided in turn, each with the hints of the other;
            printed, one after the other (M-w).
        copies_awaited: Bytes that go out are free when the copy has ended, and recomputations wait
            for what was fetched; printed, never and not (M-x).
        idle_less_swaps: Inactive time is what is left of it beside both swaps, as in the authors'
            later code; printed, all that passes (M-aa).
        sources_in_memory: Algorithm E keeps a source that is in memory at that time, as F does, and
            no recomputation takes one over that is not; printed, neither is asked (M-ba).
        prompts_anywhere: A forward node may be a prompt; printed, Algorithms G and H look for
            prompts at backward nodes only (M-bb).
        offload_when_made: A copy out begins when its tensor is made and the link is free, as in
            our executor; printed, after its last forward access (M-bc).
    """

    limit_first: bool = False
    peak_asked_anew: bool = False
    swaps_stay_sources: bool = False
    prompts_move_back: bool = False
    credit_that_runs: bool = False
    rollback: bool = False
    nothing_above_limit: bool = False
    nodes_follow: bool = False
    last_counted_prompt: bool = False
    totals_of_existing: bool = False
    totals_of_all: bool = False
    weights_once: bool = False
    workspace: bool = False
    both_graphs: bool = False
    copies_awaited: bool = False
    idle_less_swaps: bool = False
    sources_in_memory: bool = False
    prompts_anywhere: bool = False
    offload_when_made: bool = False


PAPER = Readings()
CORRECTED = Readings(*(True,) * len(Readings.__dataclass_fields__))
