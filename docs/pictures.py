"""Takes the pictures of live page and comparison: ``python docs/pictures.py [WORK_DIR]``.

It trains the quickstart's model three times for the comparison, and once more over two engines, of which it stops one,
so that the page has something to show; that takes some minutes on two cores. Needs Chromium with its driver (``apt-get
install -y chromium chromium-driver``) and what is installed for the tests; the fonts Inter and JetBrains Mono
(``fonts-inter``, ``fonts-jetbrains-mono``) look best. What is in WORK_DIR already is not trained again.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from selenium import webdriver

from lachesis.metrics.sinks.jsonl import read_metrics
from lachesis.plugins.report.compare import write_compare
from lachesis.run.status import read_status

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "pictures"
QUICKSTART = ROOT / "examples" / "quickstart"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
WIDE, PHONE = (1280, 900), (390, 844)
# Runs of the comparison: two seeds of one rate, and another rate.
COMPARED = {"seed-1": (1, 1e-4), "seed-2": (2, 1e-4), "slow": (1, 2e-5)}
COMPARED_STEPS, LIVE_STEPS, SHOWN_AFTER = 60, 400, 40
COLOURS = 200
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Camera:
    """A browser that reaches this machine only."""

    driver: Any

    def take(
        self,
        name: str,
        address: str,
        *,
        size: tuple[int, int],
        dark: bool = False,
        until: str = "true",
        at: str | None = None,
    ) -> None:
        """A picture of a page as it is once ``until``, a JavaScript expression, holds: its top, or from ``at`` on."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get("about:blank")
        self.driver.get(address)
        wait(lambda: self.driver.execute_script(f"return {until}"), until)
        if at is not None:
            self.driver.execute_script(f"document.querySelector('{at}').scrollIntoView({{behavior: 'instant'}})")
        picture = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        path = OUT / f"{name}.png"
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
        sys.stdout.write(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} KB\n")


@contextmanager
def camera() -> Iterator[Camera]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    with tempfile.TemporaryDirectory() as profile:
        local = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        for flag in (*FLAGS, local, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(shutil.which("chromedriver"), env={**os.environ, "SE_OFFLINE": "true"})
        driver = webdriver.Chrome(options=options, service=service)
        try:
            yield Camera(driver)
        finally:
            driver.quit()


def wait(condition: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited {_LIMIT_S:g} s in vain: {what}")
        time.sleep(0.2)


def write_config(work: Path, name: str, **sections: dict[str, Any]) -> Path:
    """The quickstart's configuration, changed; its model is made in WORK_DIR, once for all."""
    for file in QUICKSTART.glob("*.py"):
        shutil.copy(file, work)
    config = yaml.safe_load((QUICKSTART / "config.yaml").read_text())
    for section, keys in sections.items():
        config[section] = config.get(section, {}) | keys
    config["run"] |= {"name": name, "dir": "runs"}
    path = work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def lachesis(*words: str | Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        # From where the paths that the pictures show begin.
        command = [sys.executable, "-m", "lachesis", *map(str, words)]
        return subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)


def train_compared(work: Path) -> list[Path]:
    """The run directories of the comparison."""
    for name, (seed, rate) in COMPARED.items():
        run = {"seed": seed, "steps": COMPARED_STEPS}
        config = write_config(work, name, run=run, optimizer={"learning_rate": rate}, evaluation={"every_steps": 15})
        if (work / "runs" / name / "final").is_dir():
            continue
        if lachesis("train", config, "--overwrite", log=work / f"{name}.log").wait(_LIMIT_S):
            sys.exit((work / f"{name}.log").read_text())
    return [work / "runs" / name for name in COMPARED]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def live_run(work: Path) -> Iterator[tuple[str, Path]]:
    """A run over two engines that generates ahead; one engine is stopped. Yields the page's address and the run."""
    ports, log, run_dir = [free_port(), free_port()], work / "live.log", work / "runs" / "live"
    shutil.rmtree(run_dir, ignore_errors=True)  # its steps would be taken for this run's
    config = write_config(
        work,
        "live",
        run={"steps": LIVE_STEPS},
        engine={"kind": "http", "urls": [f"http://127.0.0.1:{port}" for port in ports], "wait_s": 300},
        bridge={"kind": "reload"},
        pipeline={"async_prefetch": True},
        deadlines={"progress_s": 8.0, "batch_s": 60.0},
    )
    common = ("serve", "--engine", "embedded", "--device", "cpu", "--model", work / ".cache" / "model")
    engines = [
        lachesis(*common, "--port", str(port), "--adapter-root", work, log=work / f"engine-{port}.log")
        for port in ports
    ]
    trainer = lachesis("train", config, "--overwrite", "--ui", log=log)
    try:
        wait(
            lambda: trainer.poll() is not None or _steps(run_dir) >= SHOWN_AFTER, f"step {SHOWN_AFTER} of the live run"
        )
        engines[1].send_signal(signal.SIGSTOP)
        wait(lambda: trainer.poll() is not None or _is_stopped(run_dir), "the engine's being suspected")
        found = re.search(r"live page: (\S+)", log.read_text())
        if trainer.poll() is not None or found is None:
            sys.exit(log.read_text())
        yield found[1], run_dir
    finally:
        for process in (trainer, *engines):
            process.kill()
            process.wait()


def _steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(read_metrics(path).steps) if path.exists() else 0


def _is_stopped(run_dir: Path) -> bool:
    status = read_status(run_dir)
    return any(engine.state == "suspect" for engine in status.engines) and bool(status.waits)


def main() -> None:
    work = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(tempfile.mkdtemp(), "quickstart")
    work.mkdir(parents=True, exist_ok=True)
    OUT.mkdir(exist_ok=True)
    compared = train_compared(work)
    drawn = "document.querySelectorAll('[data-chart=reward] path.line').length > 0"
    with camera() as taking:
        page = write_compare(compared, work / "compare.html").resolve().as_uri()
        taking.take("compare", page, size=(WIDE[0], 1100), until=drawn)
        with live_run(work) as (address, _):
            taking.take("live", address, size=WIDE, until=drawn)
            taking.take("live-course", address, size=(WIDE[0], 1360), until=drawn, at="#course")
            taking.take("live-rollouts", address, size=(WIDE[0], 760), until=drawn, at="#rollouts")
            taking.take("live-dark", address, size=WIDE, dark=True, until=drawn)
            taking.take("live-phone", address, size=PHONE, until=drawn)


if __name__ == "__main__":
    main()
