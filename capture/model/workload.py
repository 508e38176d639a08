"""What to train: a loss, its parameters, its data and its optimizer, named on the command line or
built in Python.

The library imports no model framework: Flax Linen, Flax NNX, Equinox, Haiku or hand-written JAX all
reduce to ``loss_fn(params, batch)``. Nothing is allocated to plan; shapes come from
``jax.eval_shape``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeVar, runtime_checkable

from capture.errors import Violation, WorkloadError
from capture.extras import missing_extra
from capture.model.trust import is_remembered

PyTree = Any
T = TypeVar("T")

#: A function under ``functools.cache`` or ``lru_cache``.
_Cached = type(lru_cache(len))


@runtime_checkable
class WorkloadProtocol(Protocol):
    """The four members that whatever a workload function returns must have."""

    loss_fn: Callable[..., Any]
    init: Callable[[Any], PyTree]
    batch: Callable[[Any, int], PyTree]
    optimizer: Any


@dataclass(frozen=True)
class Workload:
    """A training task; any object with the same four members serves as well.

    Attributes:
        loss_fn: ``loss_fn(params, batch)`` or ``loss_fn(params, batch, key)``: a scalar, the mean
            over the examples of the batch.
        init: ``init(key)`` makes the parameters, a pytree of arrays.
        batch: ``batch(key, batch_size)`` makes a batch, a pytree whose leaves carry the examples in
            one dimension.
        optimizer: Any optax gradient transformation.
    """

    loss_fn: Callable[..., Any]
    init: Callable[[Any], PyTree]
    batch: Callable[[Any, int], PyTree]
    optimizer: Any


@dataclass(frozen=True)
class LoadedWorkload(Workload):
    """A workload that knows how it was named; it has whatever else the function returned.

    Attributes:
        name: For sentences.
        returned: By the function.
    """

    name: str = ""
    returned: Any = None

    def __getattr__(self, attribute: str) -> Any:
        # Of what is not yet made (copies, pickles) nothing is known.
        if attribute == "returned":
            raise AttributeError(attribute)
        return getattr(self.returned, attribute)


def name_of(workload: WorkloadProtocol) -> str:
    """Return the name of a workload for messages; one made in Python is ``this model``."""
    return workload.name if isinstance(workload, LoadedWorkload) else "this model"


def named_workload(
    name: str, given: Mapping[str, WorkloadProtocol], named_by: str = "", *, trust: bool = False
) -> WorkloadProtocol:
    """Return the workload of a name: one that is given, or what ``WorkloadSpec`` loads.

    Args:
        name: Of a workload.
        given: Workloads by their names.
        named_by: The file in which the name stands; empty if a program gives it.
        trust: As for ``WorkloadSpec.load``.

    Raises:
        WorkloadError: ``workload-name`` naming those that are given, and those of
            ``WorkloadSpec.load``.
    """
    if name in given:
        return given[name]
    if ":" not in name:
        raise WorkloadError.of(
            f"workload={name!r} is none of those that are given "
            f"({', '.join(filter(None, given)) or 'there are none'}); "
            "name one of them with workloads={...}, or write path/to/file.py:function?key=value.",
            "workload-name",
        )
    return replace(WorkloadSpec.parse(name), named_by=named_by).load(trust=trust)


def takes_key(workload: WorkloadProtocol) -> bool:
    """Return whether the loss has a third positional parameter: the random key of a micro-batch."""
    parameters = inspect.signature(workload.loss_fn).parameters.values()
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) >= 3


def check_workload(workload: Any, source: str) -> WorkloadProtocol:
    """Return the workload itself; refuse an object without the four members.

    Raises:
        WorkloadError: ``workload-members`` naming what is missing, ``workload-optimizer`` if the
            optimizer has no ``init`` and ``update``.
    """
    violations = [
        Violation(
            f"{source} returned {type(workload).__name__} without {name!r}; a workload has "
            "loss_fn, init, batch and optimizer.",
            "workload-members",
        )
        for name in ("loss_fn", "init", "batch", "optimizer")
        if not hasattr(workload, name)
    ]
    optimizer = getattr(workload, "optimizer", None)
    if not violations and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        violations = [
            Violation(
                f"{source} has optimizer={optimizer!r}; give an optax transformation, which has "
                "init and update.",
                "workload-optimizer",
            )
        ]
    WorkloadError.check(violations)
    return workload


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload by name: ``path/to/file.py:function?key=value&...`` or
    ``package.module:function?key=value``.

    Attributes:
        location: A path that ends in ``.py``, or a module name.
        function: Name of the function in it.
        arguments: Keyword arguments, still as given; read as bool, int or float where they look
            like one.
        named_by: The file that names it, which does not decide that it is loaded
            (``admitted``); empty where a person or a program names it. It is no part of documents.

    Example:
        >>> WorkloadSpec.parse("models/gpt.py:gpt?size=tiny&tied=true").arguments
        {'size': 'tiny', 'tied': True}
    """

    location: str
    function: str
    # A mapping has no hash; equal names still have equal ones.
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    named_by: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, text: str) -> WorkloadSpec:
        """Parse the name of a workload.

        Raises:
            WorkloadError: ``workload-name`` if it has no ``:function``, or an argument without
                ``=``.
        """
        head, _, query = text.partition("?")
        location, colon, function = head.rpartition(":")
        arguments = [item.partition("=") for item in query.split("&") if item]
        if (
            not colon
            or not location
            or not location.isprintable()
            or not function.isidentifier()
            or any(not sep or not key.isidentifier() for key, sep, _ in arguments)
        ):
            raise WorkloadError.of(
                f"workload={text!r} is no workload name; write "
                "path/to/file.py:function?key=value&key=value or module:function.",
                "workload-name",
            )
        return cls(location, function, {key: _read_value(value) for key, _, value in arguments})

    def __str__(self) -> str:
        query = "&".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.arguments.items()
        )
        return f"{self.location}:{self.function}" + (f"?{query}" if query else "")

    def to_json(self) -> dict[str, Any]:
        """Return the location, function and arguments, which are all that a document has."""
        arguments = dict(self.arguments)
        return {"location": self.location, "function": self.function, "arguments": arguments}

    @property
    def is_file(self) -> bool:
        return self.location.endswith(".py")

    def in_file(self, named_by: Path | str) -> WorkloadSpec:
        """Return the same workload, as a file names it: loading it needs trust (``admitted``)."""
        return replace(self, named_by=str(named_by))

    def admitted(self, trust: bool = False) -> WorkloadSpec:
        """Return the workload as one that may be loaded, here or by other processes of this run.

        Where a file names it that needs the user: who has named it on a command line of this
        machine before, or trusts the file.

        Args:
            trust: Whether the user trusts the file that names it.

        Raises:
            WorkloadError: ``workload-untrusted`` naming the file and what it would run,
                ``workload-arguments`` for arguments of a file that are no texts or numbers.
        """
        if not self.named_by:
            return self
        plain = all(isinstance(value, str | int | float) for value in self.arguments.values())
        if not plain:
            raise WorkloadError.of(
                _one_line(f"{self.named_by!r} has arguments of {self.function} that are no texts, ")
                + "numbers, true or false; it gives no others to a function.",
                "workload-arguments",
            )
        if not trust and not is_remembered(self.location, self.function):
            arguments = ", ".join(f"{k}={_cut(repr(v))}" for k, v in self.arguments.items())
            raise WorkloadError.of(
                _one_line(
                    f"{self.named_by!r} would run {self.function}({arguments}) of "
                    f"{self.location!r}, which was never named on a command line here"
                )
                + "; if you know what that does, add --trust (in Python trust=True) or name the "
                "workload yourself, as with --workload.",
                "workload-untrusted",
            )
        return replace(self, named_by="")

    def relative_to(self, directory: Path) -> WorkloadSpec:
        """Return the workload, its path written relative to a directory (that of the plan file)."""
        if not self.is_file:
            return self
        return replace(
            self, location=os.path.relpath(Path(self.location).resolve(), directory.resolve())
        )

    def resolved_from(self, directory: Path) -> WorkloadSpec:
        """Return the workload, its path relative to the working directory: undo ``relative_to``."""
        if not self.is_file or Path(self.location).is_absolute():
            return self
        return replace(self, location=os.path.relpath(os.path.realpath(directory / self.location)))

    def load(self, *, trust: bool = False) -> WorkloadProtocol:
        """Import the file or module and call the function.

        Args:
            trust: Whether the user trusts the file that names it, if one does (``admitted``).

        Raises:
            WorkloadError: ``workload-file``, ``workload-module``, ``workload-function`` or
                ``workload-arguments`` naming what does not exist, ``workload-extra`` naming the
                command that installs what the model imports, and the codes of ``admitted`` and
                ``check_workload``.
        """
        try:
            return self.admitted(trust)._loaded()
        except ModuleNotFoundError as error:
            if (text := missing_extra(error)) is None:
                raise
            raise WorkloadError.of(
                f"workload {str(self)!r} cannot be loaded: {text}.", "workload-extra"
            ) from None

    def _loaded(self) -> WorkloadProtocol:
        module = (
            _import_file(Path(self.location)) if self.is_file else _import_module(self.location)
        )
        function = self._function(module)
        try:
            inspect.signature(function).bind(**self.arguments)
        except TypeError as error:
            raise WorkloadError.of(
                f"{self.function}{inspect.signature(function)} does not take "
                f"{dict(self.arguments)}: {error}.",
                "workload-arguments",
            ) from None
        made = check_workload(function(**self.arguments), str(self))
        parts = made.loss_fn, made.init, made.batch, made.optimizer
        named: Any = LoadedWorkload(*parts, str(self), made)
        return named

    def _function(self, module: ModuleType) -> Callable[..., Any]:
        """Return the function, if the module itself defines it; decorated ones by what they wrap.

        Raises:
            WorkloadError: ``workload-function``.
        """
        found: Any = vars(module).get(self.function)
        if _is_own(found, module):
            return found
        own = [name for name, value in vars(module).items() if _is_own(value, module)]
        public = ", ".join(name for name in own if not name.startswith("_"))
        there = f"it has {public or 'no public function'}."
        what = f"{self.location} has no function {self.function!r}; {there}"
        if found is not None:
            what = (
                f"{self.location} does not define {self.function!r} "
                f"({_defined_in(found) or type(found).__name__}), and a workload is a function "
                f"that its own file defines with def; {there}"
            )
        raise WorkloadError.of(what, "workload-function")


def _defined_in(value: object) -> str:
    """Return the module that defines a function, also one that is cached or decorated with
    ``functools.wraps``; empty for lambdas and all else that can be called."""
    if not isinstance(value, FunctionType | _Cached):
        return ""
    inner = inspect.unwrap(value)
    is_function = isinstance(inner, FunctionType) and inner.__name__ != "<lambda>"
    return str(inner.__module__) if is_function else ""


def _is_own(value: object, module: ModuleType) -> bool:
    return _defined_in(value) == module.__name__


def spec_of(workload: WorkloadProtocol | WorkloadSpec) -> WorkloadSpec | None:
    """Return the name of a workload; None for one made from Python objects."""
    return workload if isinstance(workload, WorkloadSpec) else None


class OfWorkload:
    """A question about a workload, which may be named.

    Attributes:
        workload: The task, or its name.
    """

    workload: WorkloadProtocol | WorkloadSpec

    @property
    def spec(self) -> WorkloadSpec | None:
        """The workload by name; None for one made from Python objects."""
        return spec_of(self.workload)

    @cached_property
    def task(self) -> WorkloadProtocol:
        """The workload, loaded."""
        return loaded(self.workload)


def loaded(workload: WorkloadProtocol | WorkloadSpec) -> WorkloadProtocol:
    """Return a workload itself, loaded if it is named.

    Raises:
        WorkloadError: as ``WorkloadSpec.load``.
    """
    return workload.load() if isinstance(workload, WorkloadSpec) else workload


def of_document(read: T, named_by: Path | str = "a document") -> T:
    """Return what was read of a file with a ``workload``, which the file names and nobody else.

    Raises:
        WorkloadError: ``workload-name`` for a location that is no name of a file or module.
    """
    workload: WorkloadSpec | None = read.workload  # type: ignore[attr-defined]
    if workload is None:
        return read
    if not workload.location.isprintable():
        raise WorkloadError.of(
            f"{str(named_by)!r} has workload.location={workload.location!r}; it must be a path "
            "that ends in .py, or a module.",
            "workload-name",
        )
    return replace(read, workload=workload.in_file(named_by))  # type: ignore[type-var]


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _one_line(text: str) -> str:
    """Escape the characters of a stranger's text that a terminal would not only show."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _read_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that a user's ``models`` package is never mistaken
    for another."""
    if not path.is_file():
        raise WorkloadError.of(
            f"workload file {str(path)!r} does not exist (looked in {str(Path.cwd())!r}); a plan "
            "remembers the path relative to its own "
            "file, and --workload names another.",
            "workload-file",
        )
    path = path.resolve()
    name = f"_workload_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, f"no loader for {path}"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(path.parent))  # a model file may import its neighbours
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(str(path.parent))
    return sys.modules[name]


def _import_module(name: str) -> ModuleType:
    try:
        if name.startswith("."):
            raise ModuleNotFoundError("a module name does not begin with a dot; a path ends in .py")
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if missing_extra(error):
            raise
        raise WorkloadError.of(
            f"workload module {name!r} cannot be imported: {error}.", "workload-module"
        ) from None
