"""What every verb does with models that are not of transformers: records/code-bases.json and code-bases.md.

    python -m benchmarks.code_bases               # those that are not stored of this commit: ten minutes of one core
    python -m benchmarks.code_bases --anew        # all of them
    python -m benchmarks.code_bases NAME ...      # these, which are printed too
    python -m benchmarks.code_bases --page        # only the page, of what is stored

Every model is small and random, written for this in the shape of a public code base, and runs in a process of its own.
Two need packages: pip install x-transformers lightning peft.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import warnings

import torch

from benchmarks.code_bases import callings, frameworks, language, series, variations, vision, wrappers
from benchmarks.code_bases.page import FILE, write
from benchmarks.code_bases.verbs import VERBS, examined
from benchmarks.reach import in_a_process
from signalprop.files.storage import read_json, write_json

ROOMS = (language, frameworks, variations, callings, series, vision, wrappers)
CASES = {name: case for room in ROOMS for name, case in room.CASES.items()}


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", action="store_true", help="run nothing; write the page of what is stored")
    parser.add_argument("--anew", action="store_true", help="also what is stored of this commit")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in CASES]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)} among {', '.join(CASES)}")
    if given.page:
        write(read_json(FILE))
        return
    import transformers
    import transformers.models.gpt2.modeling_gpt2  # once for all processes

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # in evaluation nn.TransformerEncoder would pass over its modules
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True).stdout.strip()
    stored = read_json(FILE)["models"] if FILE.is_file() else {}
    todo = given.names or [name for name in CASES if given.anew or stored.get(name, {}).get("commit") != commit]
    for i, name in enumerate(todo):
        record = in_a_process(name, lambda name: examined(CASES[name])) | {"commit": commit}
        how = {verb: record[verb]["how"] for verb in VERBS} if record["ran"] else record["reason"]
        print(f"{i + 1}/{len(todo)} {name}: {how}", flush=True)
        if given.names:
            print(json.dumps(record, indent=1))
        stored[name] = record
        models = {name: stored[name] for name in CASES if name in stored}
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        write_json(FILE, {"versions": versions, "models": models})
        write(read_json(FILE))


if __name__ == "__main__":
    main()
