"""What a step of a plan comes to: tokens per second and MFU; at a user's price what it costs; with
failures how often to save, and what is left.

    dollars of a step             price of a device and hour x devices x seconds / 3600
    dollars of a million tokens   dollars of a step / tokens of a step x 10^6 / goodput

The library ships no price and no failure rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Annotated

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target, known_name, target_names
from capture.model.graph import LayerGraph
from capture.options import Asked
from capture.plan.prediction import StepTime
from capture.plan.stages import Plan
from capture.plan.step_work import Casts, StepWork
from capture.plan.why import Proven
from capture.quantities import counted, format_rate, format_seconds, nearest, parse_bytes
from recommender.answer import StageAnswer
from recommender.saving import Saving

HOUR_SECONDS = 3600.0


@dataclass(frozen=True)
class Terms:
    """A user's terms: prices, failures and disks, as they are typed.

    Attributes:
        price: Dollars for one device and hour, such as 2.5/h, or by target: h100=2.5,v6e=2.7; the
            answer says what a step and a million tokens cost.
        targets: Compare targets, such as h100,h200,v6e: of each the smallest cluster that fits, and
            on the cluster that is asked for seconds and, with --price, cost.
        mtbf: Mean time between failures of one device, such as 50000h; with --disk-rate the answer
            says how often to save, and what part of the time is kept (goodput).
        disk_rate: Bytes that one node saves per second, such as 2GB/s, while the others save as
            many.

    Raises:
        PlanError: ``money-number`` for what is no number above 0 or has another unit,
            ``money-price`` for two prices of one target.

    Example:
        >>> terms = Terms("2.5/h,H200=3.1", mtbf="50000h", disk_rate="2GB/s")
        >>> terms.price_of("h200"), terms.price_of("v6e"), terms.mtbf_seconds
        (3.1, 2.5, 180000000.0)
    """

    price: Annotated[str | None, Asked(metavar="PRICE")] = None
    targets: Annotated[tuple[str, ...], Asked()] = ()
    mtbf: Annotated[str | None, Asked(metavar="TIME")] = None
    disk_rate: Annotated[str | None, Asked(metavar="RATE")] = None

    def __post_init__(self) -> None:
        _ = self.prices, self.mtbf_seconds, self.disk_bytes_per_second

    @cached_property
    def prices(self) -> Mapping[str, float]:
        """Dollars for a device and hour by target; that of ``""`` is of targets without another."""
        found: dict[str, float] = {}
        for part in self.price.split(",") if self.price is not None else ():
            target, _, price = part.rpartition("=")
            name = known_name(target.strip())
            if name in found:
                raise PlanError.of(
                    f"--price {self.price} has two prices of {name or 'every target'}; leave out "
                    "one.",
                    "money-price",
                )
            found[name] = _number("--price", price, "/h", "dollars per device and hour")
        return found

    def price_of(self, target: str) -> float | None:
        """Return dollars for a target's device and hour; None where nobody said it."""
        return self.prices.get(known_name(target), self.prices.get(""))

    def saving(self, cluster: Cluster, state_bytes: int | None) -> Saving | None:
        """Return how often a training on a cluster saves its state; None where failures are not
        asked about, or nobody knows the state."""
        mtbf, rate = self.mtbf_seconds, self.disk_bytes_per_second
        if mtbf is None or rate is None or state_bytes is None:
            return None
        return Saving.of(mtbf / cluster.num_devices, state_bytes, rate * len(cluster.nodes))

    @cached_property
    def mtbf_seconds(self) -> float | None:
        """The mean time between failures of one device; None where it was not given."""
        if self.mtbf is None:
            return None
        return _number("--mtbf", self.mtbf, "h", "hours") * HOUR_SECONDS

    @cached_property
    def disk_bytes_per_second(self) -> float | None:
        """The bytes per second that one node saves; None where they were not given."""
        if self.disk_rate is None:
            return None
        nbytes = 0
        with suppress(PlanError):
            nbytes = parse_bytes(self.disk_rate.strip().removesuffix("/s"))
        if not nbytes:
            raise PlanError.of(
                f"--disk-rate {self.disk_rate}: write bytes per second above 0, such as 2GB/s, "
                "with KB, MB, GB, TB, KiB, MiB, GiB or TiB; there is no other unit of time.",
                "money-number",
            )
        return float(nbytes)

    def check(self, targets: Sequence[str], objective: str | None) -> None:
        """Refuse terms that do not go with what is asked, before anything is searched.

        Args:
            targets: Targets that are asked about.
            objective: Goal of the search; None for the usual one.

        Raises:
            PlanError: ``money-price`` for a price of another target, and for one that is missing;
                ``money-terms`` for failures without the rate of a disk, the rate alone, and a
                target without rates; all at once.
            TargetError: the codes of ``Target.load``.
        """
        asked = {known_name(target): Target.load(target) for target in targets}
        PlanError.check(self._violations(asked, objective))

    def _violations(
        self, asked: Mapping[str, Target], objective: str | None
    ) -> Iterator[Violation]:
        if (self.mtbf is None) != (self.disk_rate is None):
            yield Violation(
                "--mtbf and --disk-rate together say how often to save; give both, or neither.",
                "money-terms",
            )
        if objective == "cost" and self.price is None:
            yield Violation(
                "--objective cost needs a device's price per hour; add --price, such as 2.5/h.",
                "money-price",
            )
        meant = set[str]()
        for name in sorted(self.prices.keys() - asked.keys() - {""}):
            near = "" if name in target_names() else nearest(name, asked)
            meant |= {target for target in asked if near.endswith(f" {target}?")}
            yield Violation(
                f"--price names {name}, and what is asked about is {', '.join(asked)}"
                + (f".{near}" if near else "; leave it out."),
                "money-price",
            )
        for name, target in asked.items():
            if self.price is not None and self.price_of(name) is None and name not in meant:
                yield Violation(f"--price has none of {name}; add {name}=PRICE.", "money-price")
            if target.rates is None and self != Terms():
                yield Violation(
                    f"money and failures count seconds, and the target {name!r} has no rates; name "
                    "an accelerator, such as --target h100.",
                    "money-terms",
                )


def _number(flag: str, text: str, unit: str, what: str) -> float:
    """Read a number above 0, with its unit or without."""
    try:
        number = float(text.strip().removesuffix(unit))
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise PlanError.of(
            f"{flag} {text or repr(text)}: write {what}, a number above 0, such as 2.5{unit} or "
            f"2.5; there is no other unit than {unit}.",
            "money-number",
        )
    return number


@dataclass(frozen=True)
class Account:
    """The account of a step of a plan.

    Attributes:
        num_devices: Devices of the plan.
        step_seconds: Seconds of the step, simulated or estimated.
        tokens_per_second: Tokens per second on all devices; None of a batch without tokens.
        model_flops_utilization: Model FLOPs over what the devices are specified to reach (MFU);
            None where it is not known.
        dollars_per_step: Price of all devices for the step, without failures; None without a price.
        per: What a million is counted of: tokens, or examples where a batch has no tokens.
        dollars_per_million: Dollars of a million tokens or examples; with failures, of those that
            are kept.
        least_dollars_per_million: What no plan of the space on this cluster is below; None where
            no bound of the step is known.
        saving: How often to save; None where failures are not asked about.
        save_every_steps: The same in steps.
    """

    num_devices: int
    step_seconds: float
    tokens_per_second: float | None
    model_flops_utilization: float | None
    dollars_per_step: float | None = None
    per: str = "tokens"
    dollars_per_million: float | None = None
    least_dollars_per_million: float | None = None
    saving: Saving | None = None
    save_every_steps: int | None = None

    @property
    def rank(self) -> float:
        """Dollars of a million; without a price seconds of the step."""
        dollars = self.dollars_per_million
        return self.step_seconds if dollars is None else dollars

    def cells(self) -> dict[str, str]:
        """Return what is known in words, by name: cells of a table."""
        known = {
            "tokens/s": (self.tokens_per_second, format_rate),
            "MFU": (self.model_flops_utilization, "{:.1%}".format),
            f"$/M {self.per}": (self.dollars_per_million, format_rate),
        }
        return {name: said(value) for name, (value, said) in known.items() if value is not None}

    def priced(
        self,
        price: float | None,
        saving: Saving | None,
        counted: float | None,
        least_seconds: float | None,
    ) -> Account:
        """Return the account with what a step costs, and how often to save.

        Args:
            price: Dollars for a device and hour; None without a price.
            saving: How often to save; None where failures are not asked about.
            counted: Tokens, or examples without tokens, in a step; None if unknown.
            least_seconds: What no plan's step is below; None if unknown.
        """
        found = self
        if saving is not None:
            steps = max(1, round(saving.interval_seconds / self.step_seconds))
            found = replace(found, saving=saving, save_every_steps=steps)
        if price is None:
            return found
        per_second = price * self.num_devices / HOUR_SECONDS
        found = replace(found, dollars_per_step=per_second * self.step_seconds)
        if counted is None:
            return found
        kept = 1.0 if saving is None else saving.goodput_fraction
        million = per_second / counted * 1e6 / kept if kept else inf
        return replace(
            found,
            dollars_per_million=million * self.step_seconds,
            least_dollars_per_million=None if least_seconds is None else million * least_seconds,
        )

    def lines(self, is_estimate: bool = False) -> Iterator[str]:
        """Yield cost and failures in words, a line each; and the step, where it is an estimate."""
        if is_estimate:
            rates = [f"{said} {name}" for name, said in self.cells().items() if "$" not in name]
            yield ", ".join([f"step {format_seconds(self.step_seconds)} (estimated)", *rates])
        if self.dollars_per_step is not None:
            million, least = self.dollars_per_million, self.least_dollars_per_million
            kept = ", failures included" if self.saving else ""
            yield (
                f"${format_rate(self.dollars_per_step)} per step"
                + (f", ${format_rate(million)} per million {self.per}{kept}" if million else "")
                + f" ({counted(self.num_devices, 'device')}"
                + (f"; no plan on these costs less than ${format_rate(least)})" if least else ")")
            )
        if self.saving is not None:
            yield f"{self.saving} (--save-every {self.save_every_steps})"


@dataclass(frozen=True)
class Accountant:
    """The maker of accounts of one model's plans, on a user's terms.

    Attributes:
        terms: The user's prices and failures.
        graph: Layers of the model, at any micro-batch size.
        casts: Casts of its parameters, where they are known.
        state_bytes: Bytes of its parameters and optimizer state, each once; None if unknown, and
            accounts then leave failures out.
    """

    terms: Terms
    graph: LayerGraph
    casts: Casts = None
    state_bytes: int | None = None

    def account(self, answer: StageAnswer, time: StepTime | None = None) -> Account | None:
        """Return the account of an answer's plan; None without a plan, or without its seconds.

        Args:
            answer: With the proven bound of the step, if the search has one.
            time: Simulated step; None for the seconds of the search.
        """
        plan = answer.plan
        seconds = answer.proof.step_seconds if time is None else time.step_seconds
        if plan is None or seconds is None:
            return None
        least = _least_seconds(answer.why.proven)
        return self.of(plan.cluster, plan.global_batch_size, seconds, least)

    def of(
        self,
        cluster: Cluster,
        examples: int,
        step_seconds: float,
        least_seconds: float | None = None,
    ) -> Account:
        """Return the account of a step.

        Args:
            cluster: Devices of the plan.
            examples: Examples in the step.
            step_seconds: Seconds of the step.
            least_seconds: What no plan's step is below; None if unknown.
        """
        num, rates = cluster.num_devices, Target.load(cluster.target).rates
        work = StepWork.of([(self.graph, self.casts, examples)], num, rates)
        tokens, used = work.tokens_per_second(step_seconds), work.utilization(step_seconds)
        found = Account(num, step_seconds, tokens, used, per="tokens" if tokens else "examples")
        saving = self.terms.saving(cluster, self.state_bytes)
        return found.priced(
            self.terms.price_of(cluster.target), saving, work.tokens or examples, least_seconds
        )

    def rank(self, answer: StageAnswer) -> float:
        """Return the key by which answers with a plan are sorted, the cheapest first."""
        account = self.account(answer)
        return inf if account is None else account.rank


def account_of(
    plan: Plan, time: StepTime | None = None, state_bytes: int | None = None
) -> Account | None:
    """Return the account of a plan on the terms that ``capture plan`` was asked with; None where
    these say nothing of money or failures, or nobody knows seconds.

    Args:
        plan: With what was asked, and the bound that its search has proven.
        time: Its simulated step; None for the one of the plan, or else the seconds that its search
            estimated, of which no tokens are known.
        state_bytes: Bytes of parameters and optimizer state, each once; None if unknown: where
            failures were asked about, only the cost of a step is then said.
    """
    price, mtbf, rate = (
        None if (given := plan.asked.get(name)) is None else str(given)
        for name in ("price", "mtbf", "disk_rate")
    )
    terms = Terms(price, mtbf=mtbf, disk_rate=rate)
    time = time or plan.time
    known = plan.step_estimate if time is None else (time.step_seconds, "simulated")
    if known is None or terms == Terms():
        return None
    tokens = None if time is None else time.tokens_per_second
    used = None if time is None else time.model_flops_utilization
    num, saving = plan.cluster.num_devices, terms.saving(plan.cluster, state_bytes)
    per = "tokens" if tokens else "examples"
    in_step = tokens * known[0] if tokens else plan.global_batch_size
    is_known = time is not None and (saving is not None or terms.mtbf is None)
    return Account(num, known[0], tokens, used, per=per).priced(
        terms.price_of(plan.cluster.target),
        saving,
        in_step if is_known else None,
        _least_seconds(None if plan.why is None else plan.why.proven),
    )


def _least_seconds(proven: Proven | None) -> float | None:
    return proven.trail[-1].least_step_seconds if proven and proven.trail else None
