"""A browser that reaches this machine, for pages of a server."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.browser.test_report import CHROMIUM, FLAGS, INSTALL, Page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Chromium that reaches this machine only."""
    binary = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        missing = "Chromium" if binary is None else "chromedriver"
        pytest.fail(f"{missing} is not installed and the page cannot be looked at: {INSTALL}", pytrace=False)
    try:
        from selenium import webdriver
    except ImportError:
        pytest.fail(f"selenium is not installed and the page cannot be looked at: {INSTALL}", pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    flags = [flag for flag in FLAGS if not flag.startswith("--host-resolver-rules")]
    local = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    for flag in (*flags, local, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(executable_path=chromedriver, env={**os.environ, "SE_OFFLINE": "true"})
    driver = webdriver.Chrome(options=options, service=service)
    driver.get("about:blank")  # what the browser's own start page asks for is over
    yield Page(driver)
    driver.quit()
