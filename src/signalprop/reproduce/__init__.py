"""The papers' figures and tables: each as numbers beside the paper's, a picture, and a verdict.

from signalprop.reproduce import ROWS, Settings, find, run

print(run(find("tgs-fig12"), Settings()).verdict)
"""

from __future__ import annotations

from signalprop.reproduce.registry import ROWS as ROWS
from signalprop.reproduce.registry import Row as Row
from signalprop.reproduce.registry import find as find
from signalprop.reproduce.registry import run as run
from signalprop.reproduce.result import SCALES as SCALES
from signalprop.reproduce.result import Check as Check
from signalprop.reproduce.result import Findings as Findings
from signalprop.reproduce.result import Reproduction as Reproduction
from signalprop.reproduce.result import Settings as Settings
