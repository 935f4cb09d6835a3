"""Take a picture of a run's report: ``python docs/screenshot.py RUN_DIR OUT.png [--dark] [--step N]``.

Needs Chromium (``apt-get install -y chromium``); the fonts Inter and JetBrains Mono (``fonts-inter``,
``fonts-jetbrains-mono``) look best. Writes the report anew first.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lachesis.plugins.report.page import write_report

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--virtual-time-budget=2000",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Take a picture of a run's report.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--step", type=int, help="the step whose rollouts are shown")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=2760)
    parser.add_argument("--scale", type=float, default=1.0, help="device pixels a CSS pixel")
    arguments = parser.parse_args()
    binary = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
    if binary is None:
        sys.exit("Chromium is not installed: apt-get install -y chromium")
    address = write_report(arguments.run_dir).resolve().as_uri()
    if arguments.step is not None:
        address += f"#step={arguments.step}"
    with tempfile.TemporaryDirectory() as profile:
        command = [
            binary,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--window-size={arguments.width},{arguments.height}",
            f"--force-device-scale-factor={arguments.scale}",
            f"--blink-settings=preferredColorScheme={0 if arguments.dark else 1}",
            f"--screenshot={arguments.out.resolve()}",
            address,
        ]
        subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not arguments.out.exists():
        sys.exit(f"Chromium wrote no {arguments.out}")


if __name__ == "__main__":
    main()
