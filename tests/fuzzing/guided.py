"""Fuzzing guided by coverage, for hours: atheris chooses the numbers that the strategies of the tests draw from.

    pip install atheris
    PYTHONPATH=src:tests python tests/fuzzing/guided.py SUBJECT [-max_total_time=600]

A finding ends it, with its traceback; `crash-...` then holds the bytes, and the same command with that file repeats it.
The subjects are those of test_documents.py.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris
from hypothesis import HealthCheck, given, settings

with atheris.instrument_imports(include=["signalprop", "yaml", "json"]):
    from damage import outcome
    from fuzzing.test_documents import SUBJECTS


def main() -> None:
    """Command line of the module; libFuzzer reads what stands behind the subject."""
    if len(sys.argv) < 2 or sys.argv[1] not in SUBJECTS:
        raise SystemExit(f"expected one of: {', '.join(map(repr, SUBJECTS))}")
    name, content, read = SUBJECTS[sys.argv.pop(1)]
    folder, corpus = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    file = folder / name
    for seed in range(64):  # long enough for a whole document; libFuzzer by itself begins with a byte
        (corpus / str(seed)).write_bytes(random.Random(seed).randbytes(4096))

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(content)
    def run(found: bytes) -> None:
        file.write_bytes(found)
        outcome(lambda: read(file))

    atheris.Setup([*sys.argv, "-len_control=0", str(corpus)], run.hypothesis.fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
