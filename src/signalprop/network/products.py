"""Matrix products that stay on one thread of BLAS."""

from __future__ import annotations

import numpy as np

from signalprop.network.moments import FloatArray

_ALONE = 250_000  # multiplications up to which OpenBLAS starts no thread, whatever its version: 4 x 65,536
_WORTH = 1e8  # from which another thread is worth its wait


def product(a: FloatArray, b: FloatArray) -> FloatArray:
    """a @ b, (m, k) and (k, n), in slices of the longer side that BLAS takes no second thread for.

    A thread saves tenths of a millisecond here; on a machine whose cores are busy, waiting for it took 12 ms of
    processor time and 265 ms of the clock for two matrices of 128 x 128 (OpenBLAS 0.3.31, two cores).
    """
    (m, k), n = a.shape, b.shape[1]
    if not _ALONE < m * k * n < _WORTH:
        return np.asarray(a @ b)
    out = np.empty((m, n))
    step = max(_ALONE // (k * min(m, n)), 1)
    for i in range(0, max(m, n), step):
        part = slice(i, i + step)
        if m > n:
            np.matmul(a[part], b, out=out[part])
        else:
            np.matmul(a, b[:, part], out=out[:, part])
    return out
