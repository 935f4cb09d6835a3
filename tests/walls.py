"""Whether this machine lets a process make namespaces, as the system's own tool finds."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def _namespaces_can_be_made() -> bool:
    unshare = shutil.which("unshare")
    command = [unshare or "", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"]
    return unshare is not None and subprocess.run(command, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not _namespaces_can_be_made(), reason="no namespaces can be made here")
