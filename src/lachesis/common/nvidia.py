"""Whether GPUs of NVIDIA's may be here, which is known without torch."""

from __future__ import annotations

from pathlib import Path

# Stands where the driver is loaded.
DRIVER = Path("/dev/nvidiactl")
