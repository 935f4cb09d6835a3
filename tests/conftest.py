"""Settings of all tests."""

from __future__ import annotations

import os

# Before torch is imported: tests run small models, on which threads only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
