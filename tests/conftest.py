"""Settings of the whole suite: one thread per process, so that results do not depend on the machine's load."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch

from signalprop.data import load_text, word_ids

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def word_stream() -> np.ndarray:
    """The default text as ids below 5,000."""
    return word_ids(load_text(), 5000)
