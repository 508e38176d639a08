"""What every list of a step has to keep, whatever its kind of plan: the judge of builders and passes.
It knows the language, and neither stages, packs, arrays nor operators."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from capture.step.holds import Summary
from capture.step.program import Copy, Feed, Free, Instruction, Run, Step, Wait, replay


def judge(step: Step, limit_bytes: int | None = None) -> None:
    """All of it: lifetimes, copies that are waited for, current state, nothing that idles, and the
    limit of every device where there is one."""
    check_lifetimes(step)
    peak = max(replay(step).peak_bytes_per_device)
    assert limit_bytes is None or peak <= limit_bytes, f"{peak} bytes are above the limit"
    check_current(step)
    found = idle(step)
    assert not found, f"{found} stay through a program of their memory that does not read them"


def check_lifetimes(step: Step) -> None:
    """Every slot is written before it is read, read where it is, and freed once; what is left is
    what outlives the step."""
    alive, created = set(step.persistent.values()), Counter(step.persistent.values())

    def create(slot: int) -> None:
        assert slot not in alive, f"{step.slots[slot]} is overwritten"
        alive.add(slot)
        created[slot] += 1

    def end(slots: tuple[int, ...]) -> None:
        assert len(set(slots)) == len(slots) and alive.issuperset(slots), (
            f"{[step.slots[x] for x in slots]} freed twice"
        )
        alive.difference_update(slots)

    for instruction in step.instructions:
        match instruction:
            case Feed():
                create(instruction.slot)
            case Copy():
                assert instruction.source in alive, f"{instruction.label}: nothing to copy"
                create(instruction.target)
            case Run():
                read = [slot for group in instruction.inputs for slot in group]
                assert alive.issuperset(read) and len(set(read)) == len(read), instruction.label
                assert set(instruction.donated) <= set(read)
                place = step.programs[instruction.program].place
                used = [step.slots[slot].place for slot in (*instruction.outputs, *read)]
                assert {memory for at in used for memory in at.memories} <= {*place.memories}
                end(instruction.donated)
                for slot in instruction.outputs:
                    create(slot)
                    created[slot] -= slot in instruction.donated  # changed, not made
            case Wait():
                assert instruction.slot in alive
            case Free():
                end(instruction.slots)
    assert alive == {*step.persistent.values(), *step.made.values()}, "something is left, or lost"
    assert all(count == 1 for slot, count in created.items() if slot not in alive)
    assert set(created) == set(range(len(step.slots))), "a slot that nothing uses"


def check_current(step: Step) -> None:
    """Parameters and optimizer state are all changed once, and so are their copies: a pass reads
    one version of what it reads, and the step leaves the next one everywhere."""
    state = {n for n in step.persistent.values() if _is_state(step, n)}
    version = dict.fromkeys(state, 0)
    for each in step.instructions:
        match each:
            case Copy(source=source, target=target) if source in version:
                version[target] = version[source]
            case Run(inputs=inputs, outputs=outputs):
                read = [slot for group in inputs for slot in group if slot in version]
                changed = [slot for slot in outputs if slot in version and slot in each.donated]
                versions = {version[slot] for slot in read if slot not in changed}
                # What follows other state, as casts do, is as new as that.
                follows = bool(versions) and bool(changed)
                assert len(versions) <= 1, f"{each.label} reads state of before and after an update"
                for slot in changed:
                    version[slot] = versions.copy().pop() if follows else version[slot] + 1
                made = [slot for slot in outputs if _is_state(step, slot) and slot not in changed]
                version |= {slot: min(map(version.get, read), default=0) for slot in made}
    old = [step.slots[slot].name for slot in state if version[slot] != 1]
    assert not old, f"{old} are not those of after the update"


def idle(step: Step) -> list[str]:
    """Slots that stay while a program runs in their memory, after everything that uses them has
    been issued: but for what a copy between a host and a device uses, which waits for that, what
    the step reports, and parameters, which stay for all micro-batches of a task."""
    last, frees = dict[int, int](), dict[int, int]()
    over_host = set[int]()
    for number, each in enumerate(step.instructions):
        if isinstance(each, Free):
            frees |= dict.fromkeys(each.slots, number)
            continue
        last |= dict.fromkeys(each.used, number)
        if isinstance(each, Copy):
            pair = each.source, each.target
            if any(step.slots[slot].place.host for slot in pair):
                over_host |= {*pair}
    held = set(frees) - over_host - _resting(step)
    runs = defaultdict[int | str, list[int]](list)
    for number, each in enumerate(step.instructions[: _passes(step)]):
        if isinstance(each, Run):
            for memory in step.programs[each.program].place.memories:
                runs[memory].append(number)
    return [
        step.slots[slot].name
        for slot in held
        if any(
            last[slot] < number < frees[slot]
            for memory in step.slots[slot].place.memories
            for number in runs[memory]
        )
    ]


def _passes(step: Step) -> int:
    return step.num_passes or len(step.instructions)  # arrays have no end that is for updates alone


def _resting(step: Step) -> set[int]:
    state = {slot for slot in range(len(step.slots)) if _is_state(step, slot)}
    return state | {*step.reported, *step.persistent.values()}


def _is_state(step: Step, slot: int) -> bool:
    held = step.slots[slot]
    state = held.category in ("parameters", "optimizer", "optimizer state", "shared")
    return state and not isinstance(held.holds, Summary)


# ---- faults --------------------------------------------------------------------------------------

Fault = Callable[[Step], Iterator[list[Instruction]]]


def without(kind: type[Instruction]) -> Fault:
    """Each of a kind in turn is forgotten."""

    def planted(step: Step) -> Iterator[list[Instruction]]:
        for number, each in enumerate(step.instructions):
            if isinstance(each, kind) and (not isinstance(each, Free) or each.slots):
                yield [*step.instructions[:number], *step.instructions[number + 1 :]]

    return planted


def late_frees(step: Step) -> Iterator[list[Instruction]]:
    """Slots that a program of their memory ends, or that are freed behind it, stay through the next
    one there."""
    exempt = {s for s in range(len(step.slots)) if step.slots[s].place.host}
    exempt |= _resting(step)
    for each in step.instructions:
        if isinstance(each, Copy) and {each.source, each.target} & exempt:
            exempt |= {each.source, each.target}
    for number, each in enumerate(step.instructions[: _passes(step)]):
        if not isinstance(each, Free) or not each.slots or set(each.slots) & exempt:
            continue
        memories = {m for slot in each.slots for m in step.slots[slot].place.memories}
        for later in range(number + 1, _passes(step)):
            run = step.instructions[later]
            if isinstance(run, Run) and memories & {*step.programs[run.program].place.memories}:
                rest = [*step.instructions[number + 1 : later + 1], each]
                yield [*step.instructions[:number], *rest, *step.instructions[later + 1 :]]
                break


def early_donation(step: Step) -> Iterator[list[Instruction]]:
    """A program writes over what is read again, or outlives the step."""
    for number, each in enumerate(step.instructions):
        if isinstance(each, Run):
            for slot in {slot for group in each.inputs for slot in group} - {*each.donated}:
                run = Run(
                    each.program, each.inputs, each.outputs, (*each.donated, slot), each.label
                )
                yield [*step.instructions[:number], run, *step.instructions[number + 1 :]]


def early_copies(step: Step) -> Iterator[list[Instruction]]:
    """Copies from a host come up to four programs earlier."""
    for number, each in enumerate(step.instructions):
        if isinstance(each, Copy) and step.slots[each.source].place.host:
            runs = [n for n, one in enumerate(step.instructions[:number]) if isinstance(one, Run)]
            for at in runs[-4:]:
                rest = [each, *step.instructions[at:number], *step.instructions[number + 1 :]]
                yield [*step.instructions[:at], *rest]


def stale_copies(step: Step) -> Iterator[list[Instruction]]:
    """A copy of state, or what follows it, comes before the program that changes that."""
    for number, each in enumerate(step.instructions):
        if not isinstance(each, Run):
            continue
        changed = {s for s in each.outputs if s in each.donated and _is_state(step, s)}
        for later in range(number + 1, len(step.instructions)):
            reader = step.instructions[later]
            of_state = isinstance(reader, Copy) and reader.source in changed
            follows = isinstance(reader, Run) and step.programs[reader.program].kind == "cast"
            if of_state or (follows and changed & {*reader.used}):
                before = [*step.instructions[:number], reader, *step.instructions[number:later]]
                yield [*before, *step.instructions[later + 1 :]]
