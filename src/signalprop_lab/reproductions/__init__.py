"""The papers' figures and tables: each as numbers beside the paper's, a picture, and a verdict.

from signalprop_lab.reproductions import ROWS, Settings, find, run

print(run(find("tgs-fig12"), Settings()).verdict)
"""

from __future__ import annotations

from signalprop_lab.reproductions.registry import ROWS as ROWS
from signalprop_lab.reproductions.registry import Row as Row
from signalprop_lab.reproductions.registry import find as find
from signalprop_lab.reproductions.registry import run as run
from signalprop_lab.reproductions.result import SCALES as SCALES
from signalprop_lab.reproductions.result import Check as Check
from signalprop_lab.reproductions.result import Findings as Findings
from signalprop_lab.reproductions.result import Reproduction as Reproduction
from signalprop_lab.reproductions.result import Settings as Settings
