"""Options that several verbs share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile

from capture.cli.output import SearchEnd
from capture.errors import CaptureError, OptionError
from capture.machine.target import target_names
from capture.options import Option, add, options_of, size
from capture.plan.choices import REMAT_POLICIES, REMAT_TEXT, is_remat
from capture.plan.space import StageSpace
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion
from recommender.question import PlanQuestion

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


@dataclass(frozen=True)
class Asks:
    """The options and the search of ``capture plan`` for one kind of plan.

    Attributes:
        title: Title of the options in ``--help-all``.
        about: Words on the plans, for ``--system``.
        options: Options that it reads.
        answer: Function that searches.
        needs_workload: Whether nothing can be asked without one.
        rival: Function that searches such plans beside another of a step of so many seconds, where
            memory binds; None where they do not compete.
    """

    title: str
    about: str
    options: Sequence[Option]
    answer: Callable[[argparse.Namespace], SearchEnd]
    needs_workload: bool = True
    rival: Callable[[argparse.Namespace, float], SearchEnd] | None = None


def remat_or(*others: str) -> Callable[[str], str]:
    """Return the type of the option for activation checkpointing, which also takes other words.

    Example:
        >>> remat_or("auto")("auto"), remat_or()("full:2")
        ('auto', 'full:2')
    """

    def read(text: str) -> str:
        if not is_remat(text) and text not in others:
            known = ", ".join((*others, REMAT_TEXT))
            raise argparse.ArgumentTypeError(
                f"{text!r} is no mode; choose one of {known}. [option-remat]"
            )
        return text

    return read


#: Of pipelines, by name.
_OF = {option.name: option for option in options_of(PlanQuestion, StageSpace, ProfileQuestion)}
NUM_LAYERS, MEMORY, SCHEDULE = _OF["num_layers"], _OF["memory"], _OF["schedule"]
TARGET = Option(
    "target",
    f"device kind: {', '.join(target_names())}, or a target file (.json); it need not be there "
    "(default: cpu)",
    "cpu",
    metavar="NAME",
)
CLUSTER = Option(
    "cluster",
    "N nodes of G devices, a list such as 4+2, or a TPU's torus of chips: 4x4x4, 2x(16x16) "
    "(default: one device)",
    metavar="NxG",
)
GLOBAL_BATCH = replace(
    _OF["global_batch"],
    help=f"examples in a step (default: {DEFAULT_MICROBATCH_SIZE} per micro-batch)",
)
MICROBATCHES = replace(
    _OF["microbatches"],
    help=f"{_OF['microbatches'].help} (default: {DEFAULT_MICROBATCHES})",
    default=DEFAULT_MICROBATCHES,
)
REMAT = Option(
    "remat",
    f"activation checkpointing, what the backward pass recomputes: {', '.join(REMAT_POLICIES)}; "
    "or full:K, full for the first K layers of a stage and cheap (selective recomputation) for the "
    "others (default: cheap; none in the paper's mode)",
    read=remat_or(),
    metavar="MODE",
)
REMAT_OF_A_SEARCH = replace(
    REMAT,
    help=f"{REMAT.help}; {AUTO}: a name or full:K, chosen per stage, as capture plan does "
    "where times are known and nothing is said",
    read=remat_or(AUTO),
)
PROFILING = _OF["neighbours"], _OF["calibration_plans"]
BACKEND = _OF["backend"], _OF["repeats"], _OF["alpa_python"]
STORE = (
    Option(
        "store",
        "measurements, kept and reused (default: ~/.cache/capture/store.sqlite)",
        read=Path,
        metavar="FILE",
        in_files=False,
    ),
    *options_of(Where),
)
#: What stages may have.
CHOICES = tuple(
    _OF[name]
    for name in ("shard_optimizer", "shard_params", "sequence_parallel", "tensor_parallel_rule")
)
#: Of a model and a batch that a plan is searched for.
QUESTION = (
    NUM_LAYERS,
    CLUSTER,
    TARGET,
    *options_of(StageSpace),
    GLOBAL_BATCH,
    MICROBATCHES,
    SCHEDULE,
    REMAT_OF_A_SEARCH,
    *CHOICES,
    *PROFILING,
    *BACKEND,
)
#: Of these, a search goes through all values where none is said (``capture.cli.whole``); where it
#: cannot, each has its default.
LEFT_OPEN = (_OF["whole_nodes"], MICROBATCHES, SCHEDULE, *CHOICES[:3])
#: The same, without a value.
OPEN = tuple(
    replace(
        option,
        help=option.help.partition(" (default")[0]
        + f" (default: searched; without times {option.default or 'not'})",
        default=None,
        is_open=option.default is False,
    )
    for option in LEFT_OPEN
)
HOST_MEMORY = Option("host_memory", "memory of the host, such as 1TB", read=size, metavar="SIZE")
TRUST = Option(
    "trust",
    "load the workload that the file names, though you have named it on no command line before: it "
    "is code, which runs as you",
    False,
)
LIMIT = replace(MEMORY, help="limit per device (default: what the target can use)")
NO_VERIFY = Option(
    "no_verify",
    "do not compile the plan for the target: faster, and memory is an estimate",
    False,
)
NO_COMPILE = Option(
    "no_compile",
    "answer with predictions, and say so, instead of compiling the stages of what is recommended",
    False,
)


def given(options: argparse.Namespace) -> list[str]:
    """Return the names of the options of a command that have other values than their defaults."""
    default = options.parser.get_default
    return [name for name, value in vars(options).items() if value != default(name)]


def exit_code(error: BaseException) -> int:
    """Return the exit code of a command that an error ends."""
    match error:
        case CaptureError():
            return 3 if ENDED_EARLY & set(error.codes) else 2
        case KeyboardInterrupt():
            return 130
        case SystemExit():
            return int(error.code or 0)
    return 2


def file(name: str, help: str, again: bool = False) -> Option:
    """Return the option for a file that is read or written."""
    return Option(name, help, None, Path, metavar="FILE", again=again)


def output(default: str | None, help: str = "default: %(default)s") -> Option:
    """Return the option for the file that a document is written to."""
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
    for name, flag in (("output", "-o"), ("trace", "--trace"), ("metrics", "--metrics")):
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
        path: Path of a file, or of a folder that will hold files.
        flag: Option with which the path was given.
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
    """Add the plan, and the workload that its file may lack."""
    add_plan_alone(parser)
    parser.add_argument(
        "--workload", metavar="WORKLOAD", help="of the plan, if it names none or the file has moved"
    )
    add(parser, TRUST)
