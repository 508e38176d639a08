"""Options that several verbs share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from capture.errors import OptionError
from capture.machine.target import target_names
from capture.plan.choices import REMAT_POLICIES, REMAT_TEXT, is_remat
from capture.plan.schedule import SCHEDULES
from capture.plan.stages import TENSOR_PARALLEL_RULES
from capture.profiler.windows import DEFAULT_NEIGHBOURS
from profiling_runs.question import BACKENDS, DEFAULT_CALIBRATION_PLANS

#: What the backward pass recomputes is chosen per stage, by the search.
AUTO = "auto"
#: Codes of errors of the machines, not of the input: the same command resumes.
ENDED_EARLY = {
    "store-write",
    "profile-worker",
    "ray-lost",
    "run-host-lost",
    "run-hosts-cut",
    "run-hosts-silent",
    "run-hosts-start",
}
DEFAULT_MICROBATCHES = 16
ONE_DEVICE = "1x1"
DEFAULT_MICROBATCH_SIZE = 16


def at_least(least: int) -> Callable[[str], int]:
    """The type of a whole number that has a smallest value.

    Example:
        >>> at_least(1)("0")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: '0' is no whole number of at least 1. [option-number]
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no whole number of at least {least}. [option-number]"
            )
        return int(text)

    return read


def several(least: int) -> Callable[[str], tuple[int, ...]]:
    """The type of whole numbers with commas between them.

    Example:
        >>> several(1)("2,8")
        (2, 8)
    """
    return lambda text: tuple(map(at_least(least), text.split(",")))


def remat_or(*others: str) -> Callable[[str], str]:
    """The type of what a backward pass recomputes, or of other words.

    Example:
        >>> remat_or("auto")("auto"), remat_or()("2%")
        ('auto', '2%')
    """

    def read(text: str) -> str:
        if not is_remat(text) and text not in others:
            known = ", ".join((*others, REMAT_TEXT))
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mode; choose one of {known}. [option-remat]"
            )
        return text

    return read


#: What options are added to: all of a verb, or a group of them.
Arguments = argparse.ArgumentParser | argparse._ArgumentGroup


@dataclass(frozen=True)
class Option:
    """An option of a command line, and a key of a job file.

    Attributes:
        name: In files; ``--name`` with dashes on the command line.
        help: For people.
        default: False for a switch; None for one that may be left open (``is_open``).
        read: Makes the value from its text.
        choices: Allowed texts; None for any.
        metavar: Name of its value, for people.
        short: Another name on the command line.
    """

    name: str
    help: str
    default: Any = None
    read: Callable[[str], Any] = str
    choices: Sequence[str] | None = None
    metavar: str | None = None
    short: str | None = None
    is_open: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def add_to(self, parser: Arguments) -> None:
        names = [name for name in (self.short, self.flag) if name]
        if self.default is False or self.is_open:
            either = argparse.BooleanOptionalAction if self.is_open else "store_true"
            parser.add_argument(*names, action=either, default=self.default, help=self.help)
            return
        parser.add_argument(
            *names,
            type=self.read,
            default=self.default,
            choices=self.choices,
            metavar=self.metavar,
            help=self.help,
        )

    def value(self, given: Any) -> Any:
        """A value of a job file, as the command line would read it.

        Raises:
            ValueError, argparse.ArgumentTypeError: if the option does not take it.
        """
        if self.default is False or self.is_open:
            if not isinstance(given, bool):
                raise ValueError("write true or false.")
            return given
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise ValueError("write a string or a whole number.")
        read = self.read(str(given))
        if self.choices is not None and read not in self.choices:
            raise ValueError(f"choose one of {', '.join(self.choices)}.")
        return read


def add(parser: Arguments, *options: Option) -> None:
    for option in options:
        option.add_to(parser)


NUM_LAYERS = Option(
    "num_layers",
    "cut into L layers of nearly equal work (default: at the model's marks; without marks a number "
    "is chosen, and said)",
    read=int,
    metavar="L",
)
TARGET = Option(
    "target",
    f"device kind: {', '.join(target_names())}, or a target file (.json); it need not be there "
    "(default: %(default)s)",
    "cpu",
    metavar="NAME",
)
CLUSTER = (
    Option(
        "cluster",
        "N nodes of G devices, or a list of nodes such as 4+2 (default: one device)",
        metavar="NxG",
    ),
    TARGET,
    Option("whole_nodes", "stages may span 2, 4, 8, ... whole nodes", False),
    Option("any_divisor", "degrees may be any divisor of a node, not only powers of two", False),
)
GLOBAL_BATCH = Option(
    "global_batch",
    f"examples in a step (default: {DEFAULT_MICROBATCH_SIZE} per micro-batch)",
    read=int,
    metavar="B",
)
MICROBATCHES = Option(
    "microbatches",
    "micro-batches in a step, whose gradients are accumulated (default: %(default)s)",
    DEFAULT_MICROBATCHES,
    int,
    metavar="M",
)
SCHEDULE = Option(
    "schedule",
    "pipeline schedule; those behind gpipe and 1f1b put two stages on each group of devices, split "
    "backward passes, or both (default: %(default)s)",
    "1f1b",
    choices=tuple(SCHEDULES),
)
REMAT = Option(
    "remat",
    f"activation checkpointing, what the backward pass recomputes: {', '.join(REMAT_POLICIES)}; "
    "full:K, full for the first K layers of a stage and cheap (selective recomputation) for the "
    "others; or X%%, to keep the fewest bytes for so much more time (default: cheap; none in the "
    "paper's mode)",
    read=remat_or(),
    metavar="MODE",
)
REMAT_OF_A_SEARCH = replace(
    REMAT,
    help=f"{REMAT.help}; {AUTO}: a name or full:K, chosen per stage, as capture plan does "
    "where times are known and nothing is said",
    read=remat_or(AUTO),
)
SHARD_OPTIMIZER = Option(
    "shard_optimizer", "split optimizer state over data-parallel replicas (ZeRO-1)", False
)
SHARD_PARAMS = Option(
    "shard_params",
    "let stages also split parameters, gradients and optimizer state over replicas where that is "
    "better (FSDP, ZeRO-3)",
    False,
)
SEQUENCE_PARALLEL = Option(
    "sequence_parallel",
    "let stages with tensor parallelism also split the activations between its products, along the "
    "sequence or another dimension that operations keep apart, where that is better",
    False,
)
TENSOR_PARALLEL_RULE = Option(
    "tensor_parallel_rule",
    "how parameters are split (default: %(default)s)",
    "auto",
    choices=TENSOR_PARALLEL_RULES,
)
PROFILING = (
    Option(
        "neighbours",
        "most neighbours of M_a (default: %(default)s)",
        DEFAULT_NEIGHBOURS,
        at_least(1),
        metavar="N",
    ),
    Option(
        "calibration_plans",
        "random plans that calibrate the interval (default: %(default)s)",
        DEFAULT_CALIBRATION_PLANS,
        at_least(0),
        metavar="P",
    ),
)
BACKEND = (
    Option(
        "backend",
        "compile compiles for the target and runs nothing; run executes the paper's profiling runs "
        "here, and alpa has them executed by Alpa on its Ray cluster, both with --mode paper "
        "(default: %(default)s)",
        BACKENDS[0],
        choices=BACKENDS,
    ),
    Option(
        "repeats",
        "with --backend run: steps measured in every run (default: %(default)s)",
        1,
        at_least(1),
        metavar="N",
    ),
    Option(
        "alpa_python",
        "the interpreter of Alpa's environment, for --backend alpa",
        metavar="PATH",
    ),
)
STORE = (
    Option(
        "store",
        "measurements, kept and reused (default: ~/.cache/capture/store.sqlite)",
        read=Path,
        metavar="FILE",
    ),
    Option(
        "workers",
        "worker processes that measure, at most; 0: this one (default: one per processor, on Ray "
        "all)",
        read=at_least(0),
        metavar="N",
    ),
    Option(
        "ray",
        "measure on a Ray cluster: auto (the one this machine is a part of), local, or an address",
        metavar="ADDRESS",
    ),
    Option(
        "accelerator",
        "with --ray and --backend run: Ray's name of the target's devices, such as A100",
        metavar="TYPE",
    ),
    Option(
        "job_timeout",
        "seconds after which a worker is ended that is not done, more where the machine is busy "
        "(default: 3600)",
        read=at_least(1),
        metavar="S",
    ),
)
#: Of a model and a batch that a plan is searched for.
QUESTION = (
    NUM_LAYERS,
    *CLUSTER,
    GLOBAL_BATCH,
    MICROBATCHES,
    SCHEDULE,
    REMAT_OF_A_SEARCH,
    SHARD_OPTIMIZER,
    SHARD_PARAMS,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL_RULE,
    *PROFILING,
    *BACKEND,
)
#: Of these, a search goes through all values where none is said (``capture.cli.whole``); where it
#: cannot, each has its default.
LEFT_OPEN = (
    CLUSTER[2],
    MICROBATCHES,
    SCHEDULE,
    SHARD_OPTIMIZER,
    SHARD_PARAMS,
    SEQUENCE_PARALLEL,
)
#: The same, without a value.
OPEN = tuple(
    replace(
        option,
        help=option.help.replace(
            "(default: %(default)s)", f"(default: searched; without times {option.default})"
        )
        + " (default: searched; without times not)" * (option.default is False),
        default=None,
        is_open=option.default is False,
    )
    for option in LEFT_OPEN
)
INTERACTIVE = Option(
    "interactive",
    "a page whose figures zoom, with plotly.js in it: 5 MB instead of 0.2",
    False,
)
TRUST = Option(
    "trust",
    "load the workload that the file names, though you have named it on no command line before: it "
    "is code, which runs as you",
    False,
)
NO_COMPILE = Option(
    "no_compile",
    "answer with predictions, and say so, instead of compiling the stages of what is recommended",
    False,
)


def output(default: str | None, help: str = "default: %(default)s") -> Option:
    """Where a document goes."""
    return Option(
        "output",
        help,
        None if default is None else Path(default),
        Path,
        metavar="FILE",
        short="-o",
    )


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written, before a verb does anything for them.

    Raises:
        OptionError: ``option-output``, as ``check_output``.
    """
    for name, flag in (("output", "-o"), ("trace", "--trace")):
        if (path := getattr(options, name, None)) is not None:
            check_output(path, flag)
    # Ray's hosts may have folders that this one has not.
    if getattr(options, "save", None) is not None and options.ray is None:
        check_output(options.save, "--save", makes_folders=True, is_folder=True)


def check_output(
    path: Path, flag: str = "-o", *, makes_folders: bool = False, is_folder: bool = False
) -> None:
    """Refuse a path at which nothing can be written.

    Args:
        path: Of a file, or of a folder that will hold files.
        flag: With which it was given.
        makes_folders: Whether folders that are missing are made.
        is_folder: Whether it is a folder's.

    Raises:
        OptionError: ``option-output``.
    """
    folder, why = path if is_folder else path.parent, ""
    while makes_folders and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.exists() and path.is_dir() != is_folder:
        why = "it is a file" if is_folder else "it is a folder"
    elif path.exists() and not os.access(path, os.W_OK):
        why = "it may not be written"
    elif not folder.is_dir():
        why = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
    elif not path.exists():
        try:
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            why = f"no file can be made in {folder} ({error.strerror})"
    if why:
        raise OptionError.of(
            f"{flag} {path} cannot be written: {why}. Name another one.", "option-output"
        )


def add_workload(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "workload",
        metavar="WORKLOAD",
        nargs=None if required else "?",
        help="path/to/file.py:function?key=value or module:function",
    )


def add_plan_alone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "plan", type=Path, metavar="PLAN", help="plan file, of capture plan or written by hand"
    )


def add_plan(parser: argparse.ArgumentParser) -> None:
    """A plan, and the workload that it may lack."""
    add_plan_alone(parser)
    add_plan_workload(parser)


def add_plan_workload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", metavar="WORKLOAD", help="of the plan, if it names none or the file has moved"
    )
    add(parser, TRUST)
