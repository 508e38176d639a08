"""What the README and the pages of docs/ show works: their blocks run, each in a directory of its
own that holds links to the model zoo and the benchmarks.

Every ```` ```python ```` block runs, unless it is opened by ```` ```python no-test ````; a ````
```bash ```` block runs if it is opened by ```` ```bash test ````; what is opened by ```` ```python
slow ```` or ```` ```bash slow ```` is a slow test. Readers see none of these words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from processes import QUICK_CODE, REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")))

#: Blocks that run, by language and mark.
MARKS = {("python", ""), ("bash", "test"), ("python", "slow"), ("bash", "slow")}


class Block(NamedTuple):
    line: int
    language: str
    code: str
    slow: bool = False


def blocks_to_run(text: str) -> list[Block]:
    """The blocks that must run, in order, each with the line (from 1) of its opening fence."""
    fenced = re.finditer(
        r"^(?P<fence>```+)(?P<language>\w*)[ \t]*(?P<mark>[^\n]*)\n(?P<code>.*?)^(?P=fence)[ \t]*$",
        text,
        re.M | re.S,
    )
    return [
        Block(text.count("\n", 0, match.start()) + 1, language, match["code"], mark == "slow")
        for match in fenced
        for language, mark in [(match["language"], match["mark"].strip())]
        if (language, mark) in MARKS
    ]


def run(block: Block, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run a block as a new user would: the package's commands on the path, and no flags of this
    test process but those that spare the compiler work."""
    for name in ("models", "benchmarks"):
        (directory / name).symlink_to(REPOSITORY / name)
    env = environment_apart(xla_flags=QUICK_CODE)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    shell = {"python": [sys.executable, "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}[
        block.language
    ]
    return subprocess.run(
        [*shell, block.code],
        cwd=directory,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(
            page,
            block,
            id=f"{page}-line-{block.line}-{block.language}",
            marks=pytest.mark.slow if block.slow else (),
        )
        for page in PAGES
        for block in blocks_to_run((REPOSITORY / page).read_text())
    ],
)
def test_block_runs(page, block, tmp_path):
    result = run(block, tmp_path)
    assert result.returncode == 0, (
        f"{page}:{block.line} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    )


def test_only_the_marked_blocks_run():
    text = (
        "a\n```python\nx = 1\n```\n```bash\nmake\n```\n```bash test\ntrue\n```\n```python "
        "no-test\nimport alpa\n```\n```\nplain\n```\n```bash slow\nmake\n```\n"
    )
    assert blocks_to_run(text) == [
        Block(2, "python", "x = 1\n"),
        Block(8, "bash", "true\n"),
        Block(17, "bash", "make\n", slow=True),
    ]


@pytest.mark.parametrize(
    "block",
    [Block(1, "python", "assert False"), Block(1, "bash", "false | cat\n")],
    ids=["python", "bash"],
)
def test_a_block_that_fails_is_seen(block, tmp_path):
    assert run(block, tmp_path).returncode != 0


def test_a_block_runs_in_its_own_directory_beside_the_models(tmp_path):
    code = 'test -d models && test "$(command -v python)" = "$EXPECTED" && touch left-here'
    result = run(Block(1, "bash", f'EXPECTED="{Path(sys.executable)}"\n{code}'), tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "left-here").is_file()
