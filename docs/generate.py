"""Makes docs/reference/ from the code: ``make docs``, or ``python -m docs.generate``.

Nothing is written by hand there: the commands are read from the parser, the codes of errors from
the sources, the fields of files from the classes that read and write them.
``tests/command_line/test_docs.py`` holds the committed pages equal to what this makes.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sqlite3
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

from capture import documents
from capture.options import described, merged
from capture.plan.files import PlanFile
from capture.plan.kinds import KINDS
from docs.error_codes import errors
from docs.markdown import heading, page, prose, table

REFERENCE = Path(__file__).resolve().parent / "reference"
#: An option that so many verbs have is described once.
SHARED_BY = 3
#: What is in a file: the classes that read and write it, and those of its notes.
DOCUMENTS: dict[str, tuple[str, ...]] = {
    "plan.json, of kind stages": (
        "capture.plan.stages:Plan",
        "capture.plan.prediction:Prediction",
        "profiling_runs.verify:Verification",
    ),
    "plan.json, of kind sharding": ("capture.plan.sharding:ShardingPlan",),
    "profile.json": ("capture.measured.profile:Profile",),
    "plan.json, of kind packs": ("capture.plan.packs:PacksPlan",),
    "plan.json, of kind array": (
        "capture.plan.array:ArrayPlan",
        "capture.plan.array:Member",
        "capture.plan.array:Decision",
        "capture.plan.array:ArrayPrediction",
    ),
    "capture plan --json": ("recommender.plan_report:PlanReport",),
    "capture plan --targets --json": ("recommender.plan_report:TargetsReport",),
    "capture explain --json": ("capture.report.documents:ExplainReport",),
    "capture report --json": ("capture.report.documents:PageReport",),
    "capture verify --json": ("capture.report.documents:VerifyReport",),
    "capture predict --json": ("capture.report.documents:PredictReport",),
    "capture run --json": (
        "capture.runtime.run_report:RunReport",
        "capture.runtime.step_record:StepRecord",
    ),
    "capture diff --json": ("capture.report.difference:DiffReport",),
    "capture profile --json": ("profiling_runs.profile_report:ProfileReport",),
    "capture estimate --json": ("capture.cli.estimate:EstimateReport",),
    "capture evaluate --json": ("profiling_runs.evaluate:EvaluateReport",),
    "capture export --json": ("capture.cli.export:ExportReport",),
    "capture store --json": ("capture.cli.store:StoreReport",),
    "capture demo --json": ("capture.cli.demo:DemoReport",),
    "Layer profiles": ("capture.measured.layer_profile:LayerProfile",),
    "Target files": ("capture.machine.target:Target",),
    "Server files": ("capture.machine.server:Server",),
    "Descriptions of operators": ("capture.model.operators:OperatorModel",),
}
#: The shape of a document that is not that of its class (``capture.documents``).
SHAPE = "_{}File"


def main() -> None:
    for name, make in PAGES.items():
        (REFERENCE / name).write_text(make(), encoding="utf-8")


# ---- commands


def commands() -> str:
    """Every verb with its arguments, read from the parser of the command line."""
    from capture.cli.main import build_parser

    verbs = {name: (about, sub) for name, about, sub in _subcommands(build_parser())}
    rows = {name: [_option(action) for action in _actions(sub)] for name, (_, sub) in verbs.items()}
    everywhere = [row for of_verb in rows.values() for row in of_verb]
    shared = {row for row in everywhere if everywhere.count(row) >= SHARED_BY}
    lines = [
        *heading("Commands", "the parser of the command line (`capture/cli/`)"),
        "`capture VERB --help` prints the same; of `plan`, `--help-all` does.",
        "",
        *table(
            ("verb", "does"), [(f"[{n}](#capture-{n})", about) for n, (about, _) in verbs.items()]
        ),
    ]
    for name, (_, sub) in verbs.items():
        common = [_flag(row[0]) for row in rows[name] if row in shared]
        lines += [f"## capture {name}", "", *prose(sub.description or ""), ""]
        for title, actions in _groups(sub):
            if own := [row for row in map(_option, actions) if row not in shared]:
                lines += [f"{title}:", ""] if title else []
                lines += table(("argument", "means"), own)
        lines += [f"And of [several verbs](#options-of-several-verbs): {', '.join(common)}.", ""]
        for action, about, inner in _subcommands(sub):
            more = [_option(a) for a in _actions(inner) if _option(a) not in shared]
            lines += [f"### capture {name} {action}", "", f"{about[:1].upper()}{about[1:]}.", ""]
            lines += [*table(("argument", "means"), more)] if more else []
    lines += ["## Options of several verbs", ""]
    lines += table(("option", "means"), [row for row in dict.fromkeys(everywhere) if row in shared])
    return page(lines)


def _subcommands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, sub in action.choices.items():
                yield name, helps.get(name, ""), sub


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction, argparse._SubParsersAction)
    return [
        action
        for action in parser._actions
        if not isinstance(action, hidden) and action.help != argparse.SUPPRESS
    ]


def _groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[argparse.Action]]]:
    """(title, arguments) as ``--help`` has them; without a title what is in none of ours."""
    known = _actions(parser)
    for group in parser._action_groups:
        title = "" if group.title in ("positional arguments", "options") else group.title or ""
        yield title, [action for action in group._group_actions if action in known]


def _option(action: argparse.Action) -> tuple[str, str]:
    """(how it is written, what it means)."""
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if not action.option_strings:
        written = str(value)
    else:
        written = ", ".join(action.option_strings) + (f" {value}" if value else "")
    return f"`{written}`", (action.help or "") % {**vars(action), "prog": "capture"}


def _flag(written: str) -> str:
    return "`" + written.strip("`").split(", ")[-1].split(" ")[0] + "`"


# ---- files


def files() -> str:
    """Every document with the fields of its classes, and the store's tables."""
    lines = [
        *heading("Files", "the classes that read and write them"),
        "Units are in the keys: `_bytes`, `_seconds`, `_flops`, `_fraction` in [0, 1]. A file of "
        "an unknown `schema_version` is refused.",
        "",
    ]
    documents = {
        title: [getattr(import_module(n.split(":")[0]), n.split(":")[1]) for n in names]
        for title, names in DOCUMENTS.items()
    }
    where = {_shape(root): (title, root) for title, roots in documents.items() for root in roots}
    for title, roots in documents.items():
        about = inspect.getdoc(sys.modules[roots[0].__module__]) or ""
        lines += [f"## {title}", "", *prose(about), ""]
        elsewhere = dict[str, list[str]]()
        for cls in _reached(list(map(_shape, roots))):
            of, public = where.setdefault(cls, (title, cls))
            if of != title:
                elsewhere.setdefault(of, []).append(f"`{public.__name__.lstrip('_')}`")
                continue
            name = f"**{public.__name__.lstrip('_')}** (`{public.__module__}`)"
            lines += [f"{name}: {_summary(public)}".rstrip(": "), ""]
            lines += table(("field", "type", "meaning"), _fields(cls, public))
        for of, classes in elsewhere.items():
            anchor = re.sub(r"[^\w -]", "", of.lower()).replace(" ", "-")
            lines += [f"Of [{of}](#{anchor}): {', '.join(classes)}.", ""]
    return page([*lines, *_question_file(), *_store()])


def _shape(cls: type) -> type:
    """The class whose fields are the keys of a document."""
    if issubclass(cls, PlanFile):
        return cls.document()
    own = getattr(sys.modules[cls.__module__], SHAPE.format(cls.__name__), cls)
    return cls if _keys(cls) else own


def _reached(roots: Sequence[type]) -> list[type]:
    """Dataclasses, and those that their written fields are of."""
    found = list(roots)
    for cls in found:
        keys, hints = _keys(cls), get_type_hints(cls)
        for name in [attribute for _, attribute in keys] if keys else [f.name for f in fields(cls)]:
            for other in _parts(hints.get(name)):
                if is_dataclass(other) and other not in found:
                    found.append(_shape(other) if _shape(other) not in found else other)
    return list(dict.fromkeys(found))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    for argument in get_args(hint):
        yield from _parts(argument)


def _fields(cls: type, public: type) -> list[tuple[str, str, str]]:
    """(key, type, meaning) of every key that is written: what ``to_json`` spells out, else the
    fields of the class. One without a text has that of a field of another class of the module: of
    the same name and type, or of the same name where the class is the form of another in files."""
    module = sys.modules[public.__module__]
    meaning: dict[str, str] = {}
    types = {f.name: _type(f.type) for f in fields(cls)}
    for other in (*cls.__mro__, public):
        for name, text in _attributes(other).items() if is_dataclass(other) else ():
            meaning.setdefault(name, text)
    for other in _dataclasses(module):
        for name, text in described(other).items():
            same = types.get(name) in [_type(f.type) for f in fields(other) if f.name == name]
            if same or cls.__name__.startswith("_"):
                meaning.setdefault(name, text)
    rows = [
        (f"`{key}`", f"`{types[name]}`" if name in types else "", meaning.get(name, ""))
        for key, name in _keys(cls) or [(name, name) for name in types]
    ]
    for kind, of in KINDS.items():
        if cls is of.plan.document():
            rows.insert(0, ("`kind`", "`str`", f'`"{kind}"`'))
    versions = [f.versions for f in vars(module).values() if isinstance(f, documents.Format)]
    if cls is not public or (versions and "schema_version" in types):
        rows.insert(0, ("`schema_version`", "`int`", " or ".join(map(str, versions[0]))))
    return rows


def _type(hint: Any) -> str:
    """Return a type as it is written, without modules."""
    written = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    return re.sub(r"\b_", "", re.sub(r"\b(\w+\.)+(?=\w)", "", written))


def _dataclasses(module: Any) -> list[type]:
    return [c for c in vars(module).values() if isinstance(c, type) and is_dataclass(c)]


def _keys(cls: type) -> list[tuple[str, str]]:
    """(key, attribute that it is of) of the object that ``to_json`` returns, where it is spelled
    out."""
    if "to_json" not in vars(cls):
        return []
    source = ast.parse(textwrap.dedent(inspect.getsource(cls.to_json)))
    found = []
    for node in ast.walk(source):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                if not isinstance(key, ast.Constant):
                    return []  # spread from elsewhere: the fields say more
                own = [
                    n.attr
                    for n in ast.walk(value)
                    if isinstance(n, ast.Attribute)
                    and isinstance(n.value, ast.Name)
                    and n.value.id == "self"
                ]
                found.append((str(key.value), own[0] if own else str(key.value)))
    return found


def _attributes(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of its properties say of each attribute."""
    found = described(cls)
    for name, member in vars(cls).items():
        if (
            name not in found
            and (doc := getattr(member, "__doc__", None))
            and isinstance(member, (property, cached_property))
        ):
            found[name] = " ".join(doc.split("\n\n")[0].split())
    return found


def _summary(cls: type) -> str:
    doc = inspect.getdoc(cls) or ""
    said = " ".join(doc.split("\n\n")[0].replace("``", "`").split())
    return "" if doc.startswith(f"{cls.__name__}(") else said


def _question_file() -> list[str]:
    from capture.cli import question_file
    from capture.cli.plan import options_by_system

    workload = ("`workload`", "", "what to plan for")
    rows = [
        (f"`{option.name}`", ", ".join(of), option.help.replace("%%", "%"))
        for option, of in merged(options_by_system()).values()
        if option.in_files
    ]
    return [
        "## Questions",
        "",
        *prose(inspect.getdoc(question_file) or ""),
        "",
        *table(("key", "systems", "means"), [workload, *rows]),
    ]


def _store() -> list[str]:
    from capture.measured import store

    lines = ["## The store", "", *prose(inspect.getdoc(store) or ""), ""]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        store.Store(path).close()
        with closing(sqlite3.connect(path)) as database:
            tables = database.execute("SELECT sql FROM sqlite_master WHERE type = 'table'")
            for (statement,) in tables.fetchall():
                lines += ["```sql", inspect.cleandoc(statement), "```", ""]
    return lines


#: What makes every generated page, by file name.
PAGES = {"commands.md": commands, "errors.md": errors, "files.md": files}

if __name__ == "__main__":
    main()
