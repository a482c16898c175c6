"""The digits, one step of them, with a note of when it was finished."""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import digits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from first_step import noting

workload = replace(digits.workload, schedule=noting, evaluation=None, steps=1)
