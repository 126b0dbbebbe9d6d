"""`python -m benchmarks`: every timed benchmark, one after the other.

Accuracy, and the training runs of `benchmarks.shortcuts`, have commands of their own.
"""

from __future__ import annotations

import subprocess
import sys

TIMED = ("prediction", "probe_overhead", "callback_overhead", "applied", "throughput", "attention")

for module in (f"benchmarks.{name}" for name in TIMED):
    print(f"== {module}", flush=True)
    subprocess.run([sys.executable, "-m", module], check=True)
