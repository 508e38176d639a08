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
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_type_hints

from capture import documents
from capture.plan.kinds import KINDS

REPOSITORY = Path(__file__).resolve().parent.parent
REFERENCE = REPOSITORY / "docs" / "reference"
PACKAGES = ("capture", "recommender", "profiling_runs", "models")
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
    "Layer profiles": ("capture.measured.layer_profile:LayerProfile",),
    "Target files": ("capture.machine.target:Target",),
    "Server files": ("capture.machine.server:Server",),
    "Descriptions of operators": ("capture.model.operators:OperatorModel",),
}
#: The shape of a document that is not that of its class (``capture.documents``).
SHAPE = "_Document"

_CODE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
_CODE_AT_END = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)+)\]\s*$")
#: Where a docstring names the codes of errors.
_CODES_SAID = re.compile(r"^\s*(?:Raises:|code:).*?(?=^\s*$|\Z)", re.M | re.S)


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
        *_heading("Commands", "the parser of the command line (`capture/cli/`)"),
        "`capture VERB --help` prints the same.",
        "",
        *_table(
            ("verb", "does"), [(f"[{n}](#capture-{n})", about) for n, (about, _) in verbs.items()]
        ),
    ]
    for name, (_, sub) in verbs.items():
        common = [_flag(row[0]) for row in rows[name] if row in shared]
        lines += [f"## capture {name}", "", *_prose(sub.description or ""), ""]
        for title, actions in _groups(sub):
            if own := [row for row in map(_option, actions) if row not in shared]:
                lines += [f"{title}:", ""] if title else []
                lines += _table(("argument", "means"), own)
        lines += [f"And of [several verbs](#options-of-several-verbs): {', '.join(common)}.", ""]
        for action, about, inner in _subcommands(sub):
            more = [_option(a) for a in _actions(inner) if _option(a) not in shared]
            lines += [f"### capture {name} {action}", "", f"{about[:1].upper()}{about[1:]}.", ""]
            lines += [*_table(("argument", "means"), more)] if more else []
    lines += ["## Options of several verbs", ""]
    lines += _table(
        ("option", "means"), [row for row in dict.fromkeys(everywhere) if row in shared]
    )
    return _text(lines)


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


# ---- errors


@dataclass(frozen=True)
class Said:
    """A code in the sources: where, by which exception, and in which words (empty: computed)."""

    code: str
    file: str
    kind: str
    message: str


def errors() -> str:
    """Every code, with the sentences that it ends."""
    sources = {
        str(path.relative_to(REPOSITORY)): ast.parse(path.read_text())
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    }
    formats = [made for file, module in sources.items() for made in _formats(module, file)]
    found: dict[str, list[Said]] = {}
    for file, module in sources.items():
        for said in codes_of(module, file):
            for one in _of_formats(said, formats) if said.code.startswith("-") else [said]:
                found.setdefault(one.code, []).append(one)
    lines = [
        *_heading("Error codes", "the sources of the library and of the zoo"),
        "An error says what was given, which rule it breaks and what to change, and ends in its "
        "code in brackets; with `--json` it is `errors[].code`. All broken rules are reported at "
        "once. What stands in braces below is filled in. In Python every error is a "
        "`capture.CaptureError` with `violations` and `codes`; which class it is, and which "
        "function raises it, is in the docstrings. `exception` is the code of whatever else went "
        "wrong, in the model most likely.",
        "",
    ]
    group = ""
    for code in sorted(found):
        if (first := code.split("-")[0]) != group:
            group = first
            lines += [f"## {group}", ""]
        places = sorted({said.file for said in found[code]})
        kinds = sorted({said.kind for said in found[code]} - {"", "CaptureError"})
        of = f"*{', '.join(kinds)}*, " if kinds else ""
        lines += [f"**`{code}`** ({of}{', '.join(f'`{place}`' for place in places)})", ""]
        lines += [
            f"* {message}"
            for message in dict.fromkeys(said.message for said in found[code])
            if message
        ]
        lines += [""]
    return _text(lines)


def codes_of(module: ast.Module, file: str) -> Iterator[Said]:
    """The codes of a module: arguments beside a message, ends of messages, and constants that a
    docstring of the module calls codes."""
    docs = " ".join(
        part
        for node in ast.walk(module)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for part in _CODES_SAID.findall(ast.get_docstring(node) or "")
    )
    said_codes = set(re.findall(r"``([a-z0-9-]+)``", docs))
    helpers = _helpers(module)
    seen = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            kind = ast.unparse(node.func)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if kind == "Violation" or kind.endswith(("rror.of", "cls.of")):
                for code in sorted(_constants(node) | _endings(arguments)):
                    seen.add(code)
                    exception = kind.removesuffix(".of") if kind.endswith("Error.of") else ""
                    yield Said(code, file, exception, _template(arguments[0]))
            elif kind in helpers:
                for code in (code for a in arguments for code in _constants(a)):
                    seen.add(code)
                    for message in helpers[kind]:
                        yield Said(code, file, "", message)
    for block in _blocks(module):
        for i, statement in enumerate(block):
            if _is_docstring(statement):
                continue
            for text in _strings(statement):
                if match := _CODE_AT_END.search(text):
                    seen.add(match[1])
                    yield Said(match[1], file, "", text[: match.start()].strip())
            near = [text for s in block[i : i + 2] for text in _strings(s) if " " in text]
            for code in sorted(_constants(statement) & said_codes - seen):
                yield Said(code, file, "", near[0] if near else "")


def _formats(module: ast.Module, file: str) -> Iterator[Said]:
    """The kinds of documents (``capture.documents.Format``) that a module has: the beginning of
    their codes, their error, and in the place of a message their name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "documents.Format":
            name, error, code = node.args[:3]
            yield Said(_template(code), file, ast.unparse(error), _template(name))


def _of_formats(said: Said, formats: Sequence[Said]) -> Iterator[Said]:
    """What is said of documents in general, of each kind."""
    for of in formats:
        message = said.message.replace("{self.name}", of.message).replace("{named}", of.message)
        yield Said(of.code + said.code, of.file, of.kind, message)


def _helpers(module: ast.Module) -> dict[str, list[str]]:
    """Functions that are told the code of what they raise, with their messages."""
    return {
        node.name: [
            _template(call.args[0])
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and any(isinstance(a, ast.Name) and a.id == "code" for a in call.args[1:])
        ]
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and any(a.arg == "code" for a in node.args.args)
    }


def _blocks(module: ast.Module) -> Iterator[list[ast.stmt]]:
    """Lists of simple statements that stand one after the other."""
    for node in ast.walk(module):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield [s for s in block if not hasattr(s, "body")]


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _constants(node: ast.AST) -> set[str]:
    return {
        n.value
        for n in ast.walk(node)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and _CODE.fullmatch(n.value)
    }


def _endings(arguments: Sequence[ast.expr]) -> set[str]:
    """Codes of which only the end is said, the beginning by the kind of the document."""
    return {
        part.value
        for a in arguments
        if isinstance(a, ast.JoinedStr) and _template(a.values[0]) == ""
        for part in a.values[1:]
        if isinstance(part, ast.Constant) and re.fullmatch(r"-[a-z]+", part.value)
    }


def _strings(node: ast.AST) -> list[str]:
    """Texts of a statement, outermost first; parts of one that is put together are not told."""
    texts, inside = [], set[int]()
    for n in ast.walk(node):
        if isinstance(n, ast.JoinedStr | ast.BinOp):
            inside |= {id(part) for part in ast.walk(n) if part is not n}
        if isinstance(n, ast.JoinedStr | ast.Constant | ast.BinOp) and id(n) not in inside:
            texts.append(_template(n))
    return [text for text in texts if text]


def _template(node: ast.AST) -> str:
    """A message with the names of what is filled in, in braces; empty if there is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _template(part) if isinstance(part, ast.Constant) else _filled(part.value)
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return left + right if left and right else ""
    return ""


def _filled(value: ast.expr) -> str:
    simple = isinstance(value, ast.Name | ast.Attribute)
    return f"{{{ast.unparse(value)}}}" if simple else "{...}"


# ---- files


def files() -> str:
    """Every document with the fields of its classes, the job file, and the store's tables."""
    lines = [
        *_heading("Files", "the classes that read and write them"),
        "Units are in the keys: `_bytes`, `_seconds`, `_flops`, `_fraction` in [0, 1]. A file of "
        "an unknown `schema_version` is refused.",
        "",
    ]
    for title, names in DOCUMENTS.items():
        roots = [getattr(import_module(n.split(":")[0]), n.split(":")[1]) for n in names]
        about = inspect.getdoc(sys.modules[roots[0].__module__]) or ""
        lines += [f"## {title}", "", *_prose(about), ""]
        for cls in _reached(list(map(_shape, roots))):
            public = next((root for root in roots if _shape(root) is cls), cls)
            name = f"**{public.__name__.lstrip('_')}** (`{public.__module__}`)"
            lines += [f"{name}: {_summary(public)}".rstrip(": "), ""]
            lines += _table(("field", "type", "meaning"), _fields(cls, public))
    return _text([*lines, *_job_file(), *_store()])


def _shape(cls: type) -> type:
    """The class whose fields are the keys of a document."""
    return getattr(sys.modules[cls.__module__], SHAPE, cls) if not _keys(cls) else cls


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
    fields of the class."""
    module = sys.modules[cls.__module__]
    meaning: dict[str, str] = {}
    for other in (*cls.__mro__, public, *_dataclasses(module)):
        for name, text in _attributes(other).items() if is_dataclass(other) else ():
            meaning.setdefault(name, text)
    types = {f.name: re.sub(r"\b_", "", str(f.type)) for f in fields(cls)}
    rows = [
        (f"`{key}`", f"`{types[name]}`" if name in types else "", meaning.get(name, ""))
        for key, name in _keys(cls) or [(name, name) for name in types]
    ]
    for kind, of in KINDS.items():
        if public is of:
            rows.insert(0, ("`kind`", "`str`", f'`"{kind}"`'))
    versions = [f.versions for f in vars(module).values() if isinstance(f, documents.Format)]
    if cls is not public or (versions and "schema_version" in types):
        rows.insert(0, ("`schema_version`", "`int`", " or ".join(map(str, versions[0]))))
    return rows


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
    section = re.search(
        r"^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", inspect.getdoc(cls) or "", re.M | re.S
    )
    found: dict[str, str] = {}
    for names, text in re.findall(
        r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.M | re.S
    ):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    for name, member in vars(cls).items():
        if (
            name not in found
            and (doc := getattr(member, "__doc__", None))
            and hasattr(member, "__get__")
        ):
            found[name] = " ".join(doc.split("\n\n")[0].split())
    return found


def _summary(cls: type) -> str:
    doc = inspect.getdoc(cls) or ""
    said = " ".join(doc.split("\n\n")[0].replace("``", "`").split())
    return "" if doc.startswith(f"{cls.__name__}(") else said


def _job_file() -> list[str]:
    from capture.cli import job_file

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("workload", help="what to profile")
    for option in job_file.OPTIONS:
        option.add_to(parser)
    rows = [(f"`{action.dest}`", _option(action)[1]) for action in parser._actions]
    return [
        "## Job files",
        "",
        *_prose(inspect.getdoc(job_file) or ""),
        "",
        *_table(("key", "means"), rows),
    ]


def _store() -> list[str]:
    from capture.measured import store

    lines = ["## The store", "", *_prose(inspect.getdoc(store) or ""), ""]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite"
        store.Store(path).close()
        with closing(sqlite3.connect(path)) as database:
            tables = database.execute("SELECT sql FROM sqlite_master WHERE type = 'table'")
            for (statement,) in tables.fetchall():
                lines += ["```sql", inspect.cleandoc(statement), "```", ""]
    return lines


# ---- Markdown


def _heading(title: str, source: str) -> list[str]:
    return [f"# {title}", "", f"*Made by `make docs` from {source}; do not edit.*", ""]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [
        [" ".join(str(cell).replace("``", "`").split()).replace("|", "\\|") for cell in row]
        for row in rows
    ]
    return [
        f"| {' | '.join(head)} |",
        f"| {' | '.join('---' for _ in head)} |",
        *(f"| {' | '.join(row)} |" for row in cells),
        "",
    ]


def _prose(docstring: str) -> list[str]:
    """A docstring: its paragraphs, and what is indented or tabulated in it as it is."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        plain = not re.search(r"^ |\S  +\S", paragraph, re.M)
        said = re.sub(r"``(.+?)``", r"`\1`", paragraph)
        lines += [said, ""] if plain else ["```text", textwrap.dedent(paragraph), "```", ""]
    return "\n".join(lines[:-1]).replace("```\n\n```text\n", "\n").split("\n")


def _text(lines: Sequence[Any]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


#: What makes every generated page, by file name.
PAGES = {"commands.md": commands, "errors.md": errors, "files.md": files}

if __name__ == "__main__":
    main()
