"""`python -m benchmarks`: every timed benchmark, one after the other (accuracy has its own command)."""

from __future__ import annotations

import subprocess
import sys

for module in ("benchmarks.prediction", "benchmarks.probe_overhead", "benchmarks.applied", "benchmarks.built"):
    print(f"== {module}", flush=True)
    subprocess.run([sys.executable, "-m", module], check=True)
