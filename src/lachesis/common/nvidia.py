"""The mark of NVIDIA's driver, which shows without torch that GPUs may be here."""

from __future__ import annotations

from pathlib import Path

# Stands where the driver is loaded.
DRIVER = Path("/dev/nvidiactl")
