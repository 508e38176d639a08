"""A simulation of programs that compute and send at the same time, independent of the library's:
event by event."""

from __future__ import annotations


class Events:
    """An independent simulation: every moment at which something ends is visited, and both
    resources take what they may begin then."""

    def __init__(self, order, kernels, collectives):
        self.given = self._flat(order.split(), kernels, collectives)

    def _flat(self, words, kernels, collectives):
        """The words with loops written out: ("run", seconds), ("send", name, seconds), ("wait",
        name)."""
        numbers, count = {}, 0
        for place, word in enumerate(words):
            if word[0] == "+":
                numbers[place], count = count, count + 1

        def body(first, last):
            place = first
            while place < last:
                word = words[place]
                if word[-1] == "(":
                    depth, end = 1, place + 1
                    while depth:
                        depth += (words[end][-1] == "(") - (words[end] == ")")
                        end += 1
                    for _ in range(int(word[:-1])):
                        yield from body(place + 1, end - 1)
                    place = end
                    continue
                if word[0] == "+":
                    yield "send", numbers[place], collectives[int(word[1:])]
                elif word[0] == "=":
                    yield "send", "now", collectives[int(word[1:])]
                    yield "wait", "now"
                elif word[0] == "-":
                    yield "wait", int(word[1:])
                else:
                    yield "run", kernels[int(word)]
                place += 1

        return list(body(0, len(words)))

    def seconds(self):
        now, queue, sending, done, pending = 0.0, [], None, {}, {}
        given, busy_until = iter(self.given), 0.0
        item = next(given, None)
        while item is not None or sending or queue:
            moved = False
            if sending is None and queue:
                name, length = queue.pop(0)
                sending, moved = (name, now + length), True
            if sending is not None and sending[1] <= now:
                done[sending[0]] = True
                pending[sending[0]] -= 1
                sending, moved = None, True
            if item is not None and busy_until <= now:
                if item[0] == "run":
                    busy_until, item, moved = now + item[1], next(given, None), True
                elif item[0] == "send":
                    queue.append(item[1:])
                    pending[item[1]] = pending.get(item[1], 0) + 1
                    item, moved = next(given, None), True
                elif not pending.get(item[1], 0):
                    item, moved = next(given, None), True
            if not moved:
                ends = [t for t in (busy_until, sending[1] if sending else 0.0) if t > now]
                now = min(ends)
        return max(now, busy_until)
