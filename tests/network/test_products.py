"""Products in slices: the same numbers, on one thread."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from signalprop.network.products import product

# what other threads work while this one runs the action
OTHERS = """
import time
import numpy as np
{setup}
before = time.process_time() - time.thread_time()
for _ in range({times}):
    {action}
print(time.process_time() - time.thread_time() - before)
"""
PRODUCT = {
    "setup": "from signalprop.network.products import product; a, b = np.ones((24, 12)), np.ones((12, 9000))",
    "times": 100,
    "action": "product(a, b)",
}
PREDICTION = {
    "setup": "import signalprop as sp; a = sp.Architecture.preset('olmo2-7b', n_layers=4)",
    "times": 3,
    "action": "sp.predict(a)",
}


@pytest.mark.parametrize(("m", "k", "n"), [(3, 4, 5), (130, 127, 131), (24, 12, 9001), (9001, 12, 24), (700, 1, 2000)])
def test_the_same_as_matmul(m: int, k: int, n: int) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)), rng.standard_normal((n, k)).T
    np.testing.assert_allclose(product(a, b), a @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", [PRODUCT, PREDICTION], ids=["product", "prediction"])
def test_no_other_thread_works(what: dict[str, object]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHERS.format(**what)],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) < 0.1
