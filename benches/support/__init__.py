"""What the benches share: processes as the kernel counts them, requests by hand, medians."""

from __future__ import annotations

import sys
from pathlib import Path

# For `peer_wheels`.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
