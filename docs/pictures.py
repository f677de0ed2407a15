"""Makes the README's pictures of a finished run: `python docs/pictures.py runs/ID` (needs chromium for the
report).

docs/live.svg      the live display, as `launch.py up` shows it
docs/report.png    the top of the report
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from trainer.config.run_folder import read_progress
from trainer.observe import live
from trainer.observe.history import read_history
from trainer.observe.report import write_report

DOCS = Path(__file__).parent
COLUMNS = 80
LINES = 24
"""A terminal that nobody has resized."""
WIDTH = 1200
HEIGHT = 985
"""The browser window's pixels."""
COLORS = 64


def picture_of_display(run_dir: Path) -> Path:
    """SVG of the display at three quarters of the run, without rich's web fonts."""
    history, progress = read_history(run_dir), read_progress(run_dir)
    at = 3 * len(history) // 4
    progress |= {"step": history[at - 1]["step"], "phase": "rollout", "status": "running"}
    console = Console(width=COLUMNS, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(live.render_display(run_dir, progress, history[:at], COLUMNS, height=LINES))
    out = DOCS / "live.svg"
    svg = console.export_svg(title="python3 launch.py demo")
    out.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.S))  # no fonts from elsewhere
    return out


def picture_of_report(run_dir: Path) -> Path:
    """PNG of the report's top in a headless browser, with few colors so that it stays small."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if not browser:
        sys.exit("no chromium here: apt install chromium")
    page, out = Path(write_report(run_dir)).resolve(), DOCS / "report.png"
    with tempfile.TemporaryDirectory() as scratch:
        shot = Path(scratch) / "report.png"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={scratch}/profile",
        ]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        Image.open(shot).convert("RGB").quantize(COLORS).save(out, optimize=True)
    return out


if __name__ == "__main__":
    for made in (picture_of_display(Path(sys.argv[1])), picture_of_report(Path(sys.argv[1]))):
        print(f"{made.relative_to(DOCS.parent)}: {made.stat().st_size / 1024:.0f} KiB")
