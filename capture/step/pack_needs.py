"""What passes of packs and updates on devices take there, before they are issued: what is brought
early has to leave them room."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from capture.plan.task_graph import Span, Task
from capture.step.pack_sizes import PackSizes


class PackNeeds:
    """Bytes of a device.

    Args:
        sizes: Of the model.
        packs: That are updated, each by itself.
        num_lanes: Devices that make gradients of the same parameters.
        reduces: Whether devices add these.
        num_shares: Into how many weights are cut.
    """

    def __init__(
        self,
        sizes: PackSizes,
        packs: Collection[Span],
        num_lanes: int,
        *,
        reduces: bool,
        num_shares: int = 1,
    ):
        self._num_shares = num_shares
        self._sizes, self._packs, self._num_lanes, self._reduces = sizes, packs, num_lanes, reduces

    def weights(self, span: Span) -> int:
        """Parameters that layers read; sums of their gradients have as many bytes."""
        shared = sum(map(self._sizes.param_bytes, self._sizes.shared(span)))
        return self._sizes.weight_bytes(span) + shared

    def streamed(self, span: Span) -> int:
        """Of these parameters, what a device gets; of shares, until they are gathered."""
        sizes, last = self._sizes, self._num_shares - 1
        if not last:
            return self._whole(span)
        shares = sum(sizes.share_bytes(what, span, last) for what in ("whole", "casts"))
        shares += sum(sizes.share_bytes("shared", param, last) for param in sizes.shared(span))
        return shares + self.gather(span)

    def _whole(self, span: Span) -> int:
        shared = sum(map(self._sizes.streamed_bytes, self._sizes.shared(span)))
        return self._sizes.whole_bytes(span) + self._sizes.cast_bytes(span) + shared

    def gather(self, span: Span) -> int:
        """Of the program that makes weights of the shares of all devices."""
        return self._sizes.transient_bytes("gather", span, 0, self._whole(span))

    def scatter(self, span: Span) -> int:
        """Of that which gives each a share of the sum of their gradients."""
        sizes, last = self._sizes, self._num_shares - 1
        shares = sizes.share_bytes("weights", span, last)
        shares += sum(sizes.share_bytes("shared gradient", p, last) for p in sizes.shared(span))
        return sizes.transient_bytes("scatter", span, 0, shares)

    def reads(self, task: Task, size: int) -> dict[str, int]:
        """Of a micro-batch of a pass, by what it is."""
        sizes, span = self._sizes, (task.first, task.stop)
        return {
            "weights": self.streamed(span),
            "batch": sizes.batch_bytes(span, size),
            "inputs": sizes.value_bytes(task.first, size) if task.first else 0,
            "gradients": sizes.gradient_bytes(task.stop, size) if task.gradient else 0,
        }

    def hands_on(self, task: Task, size: int) -> int:
        """Results of a backward pass, but for the sum of its gradients."""
        made = self._sizes.gradient_bytes(task.first, size) if task.first else 0
        return made + 4 * task.criterion

    def running(self, task: Task, i: int) -> int:
        """Of the i-th micro-batch of a pass, beside what it reads."""
        sizes, span, size = self._sizes, (task.first, task.stop), task.sizes[i]
        if task.kind == "backward":
            made = self.hands_on(task, size)
            if not (i or task.start):
                return sizes.transient_bytes("backward", span, size, made)
            # What the task before summed comes from the host.
            summed = 0 if i else self.weights(span)
            return summed + sizes.transient_bytes("accumulate", span, size, made)
        need = held = 0
        for sub_pack in task.sub_packs:  # what is kept goes out while the next ones run
            made = sizes.value_bytes(sub_pack[1], size) + 4 * (sub_pack[1] == sizes.num_layers)
            need = max(need, held + sizes.transient_bytes("forward", sub_pack, size, made))
            held += made
        return need

    def leaves(self, task: Task, i: int) -> int:
        """What is live on a device after the i-th micro-batch of a backward pass, less what was
        when it began, weights aside."""
        size = task.sizes[i]
        read = sum(n for what, n in self.reads(task, size).items() if what != "weights")
        summed = 0 if i else self.weights((task.first, task.stop))
        return summed + self.hands_on(task, size) - read

    def update(self, span: Span) -> int:
        """Beside weights and gradients that are there: state, the gradients of other packs, and
        the programs' own."""
        sizes = self._sizes
        others = sum(
            sizes.param_bytes(param)
            for pack in self._packs
            for param in sizes.shared(pack)
            if span[0] <= sizes.owner(param) < span[1]
        )
        updating = sizes.state_bytes(span) + sizes.transient_bytes("update", span, 0, 0)
        return max(updating + self._num_lanes * others, self.reduction(span))

    def reduction(self, span: Span) -> int:
        """Of the program that adds the gradients of all devices."""
        if not self._reduces:
            return 0
        return self._sizes.transient_bytes("reduce", span, 0, self._sizes.weight_bytes(span))

    def updates(self, spans: Iterable[Span]) -> int:
        """Of the update that takes most."""
        return max(map(self.update, spans), default=0)
