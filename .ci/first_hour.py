"""Walk through README.md and docs/quickstart.md as a new user does: in a fresh clone, every command
in the order in which it stands, with nothing installed but what the first one installs.

    python3 .ci/first_hour.py [--keep FOLDER] [--page PAGE ...]

Prints each command with its seconds; where one fails, its output, and exit code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/quickstart.md")

#: Commands that this walk leaves out, each with the reason.
LEFT_OUT = {
    r"^make test\b": "the checks run it themselves",
    r"^python - <<": "the tests run it, in a folder of its own",
    r"^srun ": "needs Slurm",
    r"^pip install |^python3 -m venv |^\.venv/bin/pip install ": "another way to install",
}
_FENCE = re.compile(
    r"^```(?P<language>bash|python)(?P<mark>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S
)


def commands_of(text: str) -> list[str]:
    """Return the shell commands of a page in their order; a block of Python is one command."""
    found = []
    for block in _FENCE.finditer(text):
        if block["language"] == "python":
            if "no-test" not in block["mark"]:
                found.append(f"python - <<'END_OF_BLOCK'\n{block['code']}END_OF_BLOCK")
            continue
        lines = block["code"].replace("\\\n", " ").splitlines()
        found += [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


def left_out(command: str) -> str:
    """Return why a command is left out, or nothing."""
    return next((why for pattern, why in LEFT_OUT.items() if re.search(pattern, command)), "")


def walk(folder: Path, pages: list[str]) -> int:
    """Run the commands of the pages in one shell per page, and return how many there were.

    Raises:
        SystemExit: If a command fails.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    # A cache of packages may be shared; a store of measurements and an environment may not.
    pip_cache = os.environ.get("PIP_CACHE_DIR") or str(Path.home() / ".cache" / "pip")
    of_others = (
        *("VIRTUAL_ENV", "PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS"),
        "PYTHONDONTWRITEBYTECODE",  # which images of containers set, and few users do
    )
    environment = {name: value for name, value in os.environ.items() if name not in of_others}
    environment |= {"PIP_CACHE_DIR": pip_cache, "XDG_CACHE_HOME": str(home)}
    count, first = 0, True
    for page in pages:
        script, names = ["set -eo pipefail"], []
        for command in commands_of((folder / "clone" / page).read_text()):
            if why := left_out(command):
                print(f"left out ({why}): {command}", flush=True)
                continue
            if command.startswith("make demo") and not first:
                continue  # of README.md
            first = False
            names.append(command)
            script += [f"echo '<<{len(names) - 1}>>'", command]
        script.append(f"echo '<<{len(names)}>>'")
        _run(script, names, page, folder, environment)
        count += len(names)
    return count


def _run(
    script: list[str], names: list[str], page: str, folder: Path, environment: dict[str, str]
) -> None:
    if page != PAGES[0]:  # a reader of the second page comes from the first
        script.insert(1, "source .venv/bin/activate")
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)],
        cwd=folder / "clone",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    said: list[str] = []
    at, start = -1, time.monotonic()
    assert shell.stdout is not None, "a pipe was asked for"
    for line in shell.stdout:
        if mark := re.fullmatch(r"<<(\d+)>>\n", line):
            if at >= 0:
                print(f"{time.monotonic() - start:7.1f} s  {names[at].splitlines()[0]}", flush=True)
            at, start, said = int(mark[1]), time.monotonic(), []
        else:
            said.append(line)
    if shell.wait():
        where = names[at] if 0 <= at < len(names) else "(the shell)"
        print(f"FAILED: {page}: {where}\n{''.join(said[-60:])}")
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="walk here, and leave it")
    parser.add_argument("--page", action="append", choices=PAGES)
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="capture-first-hour-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not (folder / "clone").exists():
            clone = ["git", "clone", "--quiet", "--local", str(REPOSITORY), str(folder / "clone")]
            subprocess.run(clone, check=True)
        count = walk(folder, options.page or list(PAGES))
        print(f"first hour: {count} passed, 0 failed", flush=True)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
