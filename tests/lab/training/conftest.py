"""What several tests of training read."""

from __future__ import annotations

from pathlib import Path

import pytest

from preparing import documents_of, lines


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents."""
    return lines(tmp_path_factory.mktemp("corpus") / "a.jsonl", [{"text": text} for text in documents_of(40)])
