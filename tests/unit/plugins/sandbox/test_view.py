"""What files take, as a warden adds them up."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from lachesis.plugins.sandbox.view import size_of


def test_files_in_a_directory_that_may_not_be_listed_count_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Code that had made a directory with the mode 0300 filled the disk unseen."""
    (tmp_path / "seen").write_bytes(bytes(4096))
    (tmp_path / "hidden").mkdir()
    listed = os.scandir

    def refuse(path: Any) -> Any:  # as for a user other than root
        if str(path).endswith("hidden"):
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert 4096 <= size_of(tmp_path) < 1 << 20
    assert size_of(tmp_path, unreadable=math.inf) == math.inf
