"""The page of errors: every code with where and when it is raised, read from the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.markdown import heading, page

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("capture", "recommender", "profiling_runs", "models")
_CODE = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)+")
_CODE_AT_END = re.compile(r"\[([a-z0-9]+(?:-[a-z0-9]+)+)\]\s*$")
#: A string in a source that may end in a code: no other statement is looked at.
_MAY_END = re.compile(r"""\](?:\s|\\n)*["']""")
#: Where a docstring names the codes of errors.
_CODES_SAID = re.compile(r"^\s*(?:Raises:|code:).*?(?=^\s*$|\Z)", re.M | re.S)


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
        str(path.relative_to(REPOSITORY)): path.read_text()
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    }
    formats = [made for file, text in sources.items() for made in _formats(text, file)]
    found: dict[str, list[Said]] = {}
    for file, text in sources.items():
        for said in codes_of(text, file):
            for one in _of_formats(said, formats) if said.code.startswith("-") else [said]:
                found.setdefault(one.code, []).append(one)
    lines = [
        *heading("Error codes", "the sources of the library and of the zoo"),
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
    return page(lines)


def codes_of(text: str, file: str) -> Iterator[Said]:
    """Yield the codes of a module: arguments beside a message, ends of messages, and constants that
    a docstring of the module calls codes."""
    lines, nodes = text.splitlines(), list(ast.walk(ast.parse(text)))
    docs = " ".join(
        part
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for part in _CODES_SAID.findall(ast.get_docstring(node) or "")
    )
    said_codes = set(re.findall(r"``([a-z0-9-]+)``", docs))
    helpers = _helpers(nodes)
    seen = set[str]()
    for node in nodes:
        if isinstance(node, ast.Call):
            kind = _dotted(node.func)
            if kind == "Violation" or kind.endswith(("rror.of", "cls.of")):
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                for code in sorted(_constants(node) | _endings(arguments)):
                    seen.add(code)
                    exception = kind.removesuffix(".of") if kind.endswith("Error.of") else ""
                    yield Said(code, file, exception, _template(arguments[0]))
            elif kind in helpers:
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                for code in (code for a in arguments for code in _constants(a)):
                    seen.add(code)
                    for message in helpers[kind]:
                        yield Said(code, file, "", message)
    for block in _blocks(nodes):
        for i, statement in enumerate(block):
            if _is_docstring(statement):
                continue
            source = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
            for said in _strings(statement) if _MAY_END.search(source) else ():
                if match := _CODE_AT_END.search(said):
                    seen.add(match[1])
                    yield Said(match[1], file, "", said[: match.start()].strip())
            codes = _constants(statement) & said_codes - seen if said_codes else ()
            near = (
                [said for s in block[i : i + 2] for said in _strings(s) if " " in said]
                if codes
                else []
            )
            for code in sorted(codes):
                yield Said(code, file, "", near[0] if near else "")


def _dotted(function: ast.expr) -> str:
    """Return the names of a function with dots; what is computed has none."""
    if isinstance(function, ast.Attribute):
        return f"{_dotted(function.value)}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _formats(text: str, file: str) -> Iterator[Said]:
    """The kinds of documents (``capture.documents.Format``) that a module has: the beginning of
    their codes, their error, and in the place of a message their name."""
    for node in ast.walk(ast.parse(text)) if "documents.Format(" in text else ():
        if isinstance(node, ast.Call) and _dotted(node.func) == "documents.Format":
            name, error, code = node.args[:3]
            yield Said(_template(code), file, ast.unparse(error), _template(name))


def _of_formats(said: Said, formats: Sequence[Said]) -> Iterator[Said]:
    """What is said of documents in general, of each kind."""
    for of in formats:
        message = said.message.replace("{self.name}", of.message).replace("{named}", of.message)
        yield Said(of.code + said.code, of.file, of.kind, message)


def _helpers(nodes: Sequence[ast.AST]) -> dict[str, list[str]]:
    """Functions that are told the code of what they raise, with their messages."""
    return {
        node.name: [
            _template(call.args[0])
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            and any(isinstance(a, ast.Name) and a.id == "code" for a in call.args[1:])
        ]
        for node in nodes
        if isinstance(node, ast.FunctionDef) and any(a.arg == "code" for a in node.args.args)
    }


def _blocks(nodes: Sequence[ast.AST]) -> Iterator[list[ast.stmt]]:
    """Lists of simple statements that stand one after the other."""
    for node in nodes:
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
