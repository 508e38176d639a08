"""What a step of a plan comes to: tokens per second and MFU; at a user's price what it costs; with
failures how often to save, and what is left.

    dollars of a step             price of a device and hour x devices x seconds / 3600
    dollars of a million tokens   dollars of a step / tokens of a step x 10^6 / goodput

The library ships no price and no failure rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated

from capture.errors import PlanError, Violation
from capture.machine.cluster import Cluster
from capture.machine.target import Target, known_name
from capture.model.graph import LayerGraph
from capture.options import Asked, parsed
from capture.plan.prediction import StepTime
from capture.plan.step_work import Casts, StepWork
from capture.quantities import counted, format_rate, format_seconds, parse_bytes
from recommender.answer import StageAnswer
from recommender.saving import Saving

HOUR_SECONDS = 3600.0


def number_of(text: str, unit: str = "h") -> float:
    """Read a number above 0, with its unit or without.

    Raises:
        PlanError: ``money-number``.

    Example:
        >>> number_of("50000h"), number_of("50000"), number_of("2.5/h", "/h")
        (50000.0, 50000.0, 2.5)
    """
    try:
        number = float(text.strip().removesuffix(unit))
    except ValueError:
        number = 0.0
    if not 0 < number < inf:
        raise PlanError.of(
            f"{text!r} is no number above 0; write one such as 2.5{unit}.", "money-number"
        )
    return number


def rate_of(text: str) -> int:
    """Read bytes per second.

    Example:
        >>> rate_of("2GB/s")
        2000000000
    """
    return parse_bytes(text.strip().removesuffix("/s"))


@dataclass(frozen=True)
class Prices:
    """The prices of one device for an hour, in dollars.

    Attributes:
        by_target: Price by target; that of ``""`` holds for targets that have none of their own.

    Example:
        >>> prices = Prices.parse("2.5/h,H200=3.1/h")
        >>> prices.of("h200"), prices.of("v6e"), str(prices)
        (3.1, 2.5, '2.5,h200=3.1')
    """

    by_target: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Read ``2.5/h``, or prices by target with commas between them.

        Raises:
            PlanError: ``money-number`` for a price that is no number above 0, ``money-price`` for
                two prices of one target.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            target, _, price = part.rpartition("=")
            name = known_name(target.strip())
            if name in found:
                raise PlanError.of(
                    f"price={text!r} has two prices of {name or 'every target'}; leave out one.",
                    "money-price",
                )
            found[name] = number_of(price, "/h")
        return cls(found)

    def of(self, target: str) -> float | None:
        """Return the price of a target's device; None where nobody said it."""
        return self.by_target.get(known_name(target), self.by_target.get(""))

    def __str__(self) -> str:
        return ",".join(f"{name}={price!r}".lstrip("=") for name, price in self.by_target.items())


@dataclass(frozen=True)
class Terms:
    """A user's terms: prices, failures and disks.

    Attributes:
        prices: Dollars for one device and hour, such as 2.5/h, or by target: h100=2.5,v6e=2.7; the
            answer says what a step and a million tokens cost.
        targets: Compare targets, such as h100,h200,v6e: of each the smallest cluster that fits, and
            on the cluster that is asked for seconds and, with --price, cost.
        max_step_seconds: With --objective cost: plans with longer steps do not count.
        mtbf_hours: Mean time between failures of one device, such as 50000h; with --disk-rate the
            answer says how often to save, and what part of the time is kept (goodput).
        disk_bytes_per_second: Bytes that one node saves per second, such as 2GB/s, while the others
            save as many.

    Raises:
        PlanError: ``money-number`` for numbers that are not above 0, ``money-terms`` for failures
            without the rate of a disk, or the rate alone; all at once.
    """

    prices: Annotated[Prices | None, Asked("price", "PRICE", read=parsed(Prices.parse))] = None
    targets: Annotated[tuple[str, ...], Asked()] = ()
    max_step_seconds: Annotated[float | None, Asked(metavar="S")] = None
    mtbf_hours: Annotated[float | None, Asked("mtbf", "TIME", read=parsed(number_of))] = None
    disk_bytes_per_second: Annotated[
        int | None, Asked("disk_rate", "RATE", read=parsed(rate_of))
    ] = None

    def __post_init__(self) -> None:
        PlanError.check(self._violations())

    def _violations(self) -> Iterator[Violation]:
        numbers = {
            "--max-step-seconds": self.max_step_seconds,
            "--mtbf": self.mtbf_hours,
            "--disk-rate": self.disk_bytes_per_second,
            **{f"--price {name}".strip(): price for name, price in self._by_target.items()},
        }
        for name, number in numbers.items():
            if number is not None and not 0 < number < inf:
                yield Violation(f"{name} {number:g} must be above 0.", "money-number")
        if (self.mtbf_hours is None) != (self.disk_bytes_per_second is None):
            yield Violation(
                "--mtbf and --disk-rate together say how often to save; give both, or neither.",
                "money-terms",
            )

    @property
    def _by_target(self) -> Mapping[str, float]:
        return {} if self.prices is None else self.prices.by_target

    def check(self, targets: Sequence[str], objective: str | None) -> None:
        """Refuse terms that do not go with what is asked, before anything is searched.

        Args:
            targets: Targets that are asked about.
            objective: Goal of the search; None for the usual one.

        Raises:
            PlanError: ``money-price`` for a price of another target, or a price that is missing;
                ``money-terms`` for a longest step without ``--objective cost``, and for a target
                without rates.
            TargetError: the codes of ``Target.load``.
        """
        asked = {known_name(target): Target.load(target) for target in targets}
        PlanError.check(self._beside(asked, objective))

    def _beside(self, asked: Mapping[str, Target], objective: str | None) -> Iterator[Violation]:
        for name in self._by_target:
            if name and name not in asked:
                yield Violation(
                    f"--price names {name}, and {', '.join(asked)} is asked about; leave its price "
                    "out, or ask about it with --target or --targets.",
                    "money-price",
                )
        for name, target in asked.items():
            if self.prices is not None and self.prices.of(name) is None:
                yield Violation(f"--price has none of {name}; add {name}=PRICE.", "money-price")
            if target.rates is None and self != Terms():
                yield Violation(
                    f"money and failures count seconds, and the target {name!r} has no rates; name "
                    "an accelerator, such as --target h100.",
                    "money-terms",
                )
        if objective == "cost" and self.prices is None:
            yield Violation(
                "--objective cost needs the price of a device and hour; add --price, such as "
                "--price 2.5/h.",
                "money-price",
            )
        if objective != "cost" and self.max_step_seconds is not None:
            yield Violation(
                f"--max-step-seconds {self.max_step_seconds:g} is of --objective cost; add that, "
                "or leave it out.",
                "money-terms",
            )


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
        known = self.dollars_per_million
        return self.step_seconds if known is None else known

    def cells(self) -> dict[str, str]:
        """Return what is known in words, by name: cells of a table."""
        found = dict[str, str]()
        if self.tokens_per_second is not None:
            found["tokens/s"] = format_rate(self.tokens_per_second)
        if self.model_flops_utilization is not None:
            found["MFU"] = f"{self.model_flops_utilization:.1%}"
        if self.dollars_per_million is not None:
            found[f"$/M {self.per}"] = format_rate(self.dollars_per_million)
        return found

    def lines(self, is_estimate: bool = False) -> Iterator[str]:
        """Yield cost and failures in words, a line each; and the step, where it is an estimate."""
        if is_estimate:
            rates = [f"{said} {name}" for name, said in self.cells().items() if "$" not in name]
            yield ", ".join([f"step {format_seconds(self.step_seconds)} (estimated)", *rates])
        if self.dollars_per_million is not None and self.dollars_per_step is not None:
            least = self.least_dollars_per_million
            bound = f"; no plan on these costs less than ${format_rate(least)}" if least else ""
            yield (
                f"${format_rate(self.dollars_per_step)} per step, "
                f"${format_rate(self.dollars_per_million)} per million {self.per}"
                f"{' that failures leave' if self.saving else ''} "
                f"({counted(self.num_devices, 'device')}{bound})"
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
        state_bytes: Bytes of its parameters and optimizer state, each once; None if unknown, which
            is then of no failures.
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
        plan, proven = answer.plan, answer.why.proven
        seconds = answer.proof.step_seconds if time is None else time.step_seconds
        if plan is None or seconds is None:
            return None
        least = proven.trail[-1].least_step_seconds if proven and proven.trail else None
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
        found = Account(
            num,
            step_seconds,
            work.tokens_per_second(step_seconds),
            work.utilization(step_seconds),
            per="tokens" if work.tokens else "examples",
        )
        if (saving := self._saving(cluster)) is not None:
            steps = max(1, round(saving.interval_seconds / step_seconds))
            found = replace(found, saving=saving, save_every_steps=steps)
        price = None if self.terms.prices is None else self.terms.prices.of(cluster.target)
        if price is None:
            return found
        kept = 1.0 if saving is None else saving.goodput_fraction
        per_second = price * num / HOUR_SECONDS
        million = per_second / (work.tokens or examples) * 1e6 / kept if kept else inf
        return replace(
            found,
            dollars_per_step=per_second * step_seconds,
            dollars_per_million=million * step_seconds,
            least_dollars_per_million=None if least_seconds is None else million * least_seconds,
        )

    def _saving(self, cluster: Cluster) -> Saving | None:
        terms = self.terms
        if terms.mtbf_hours is None or terms.disk_bytes_per_second is None:
            return None
        assert self.state_bytes is not None, "who asks about failures knows the state"
        rate = terms.disk_bytes_per_second * len(cluster.nodes)
        mtbf_seconds = terms.mtbf_hours * HOUR_SECONDS / cluster.num_devices
        return Saving.of(mtbf_seconds, self.state_bytes, rate)

    def rank(self, answer: StageAnswer) -> tuple[bool, float]:
        """Return the key by which answers are sorted, the cheapest first: those whose step is too
        long last, by seconds."""
        account, most = self.account(answer), self.terms.max_step_seconds
        if account is None:
            return True, inf
        if most is not None and account.step_seconds > most:
            return True, account.step_seconds
        return False, account.rank

    def judged(self, answer: StageAnswer) -> StageAnswer:
        """Return the cheapest answer, which is infeasible if its step is too long, too."""
        most, (is_too_long, seconds) = self.terms.max_step_seconds, self.rank(answer)
        if answer.status != "ok" or not is_too_long or most is None:
            return answer
        text = (
            f"No plan that fits has a step of at most {format_seconds(most)}; the fastest takes "
            f"{format_seconds(seconds)}. Raise --max-step-seconds, or ask for more devices. "
            "[step-limit]"
        )
        why = replace(answer.why, summary=text, code="step-limit")
        return replace(answer, status="infeasible", why=why)
