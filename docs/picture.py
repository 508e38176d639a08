"""Makes docs/images/report.png: what ``capture report`` shows of the plan that the demo recommends,
drawn by a headless Chromium (Debian's package ``chromium``): ``python -m docs.picture``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from capture.cli import demo

PICTURE = Path(__file__).resolve().parent / "images" / "report.png"
#: Figures of the page that the picture shows, in its order; all else is hidden.
SHOWN = ("stages", "treemap", "schedule")
HIDDEN = ("peaks", "memory")
WIDTH, HEIGHT = 1160, 1130


def main() -> None:
    with TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        _report(Path(folder), page)
        hide = ", ".join(
            ["h1", ".lead", ".wide", "footer"]
            + [
                part
                for name in HIDDEN
                for part in (
                    f"#{name}",
                    f"h2:has(+ .caption + #{name})",
                    f".caption:has(+ #{name})",
                )
            ]
        )
        text = page.read_text(encoding="utf-8")
        assert all(f'id="{name}"' in text for name in (*SHOWN, *HIDDEN)), "figures of other names"
        style = f"<style>{hide} {{ display: none }} h2 {{ margin-top: 8px }}</style></head>"
        page.write_text(text.replace("</head>", style, 1), encoding="utf-8")
        subprocess.run(
            [
                "chromium",
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={WIDTH},{HEIGHT}",
                "--virtual-time-budget=8000",
                f"--screenshot={PICTURE}",
                page.as_uri(),
            ],
            check=True,
        )


def _report(folder: Path, page: Path) -> None:
    """The page of the demo's plan, by the commands that a user would type."""
    model = [demo.WORKLOAD, "--cluster", demo.CLUSTER, "--microbatches", str(demo.MICROBATCHES)]
    model += ["--global-batch", str(demo.MICROBATCHES * demo.MICROBATCH_SIZE)]
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    for command in (
        ["profile", *model, "--neighbours", "1", "--calibration-plans", "4", "-o", profile],
        ["plan", *model, "--profile", profile, "-o", plan],
        ["report", plan, "--profile", profile, "-o", str(page)],
    ):
        subprocess.run([sys.executable, "-m", "capture", *command], check=True)


if __name__ == "__main__":
    main()
