"""Where a rank waits is read from what faulthandler prints."""

from __future__ import annotations

from apportion.process import PACKAGE
from apportion.testing.processes import before_stacks, main_stack, where_ranks_wait

LOG = f"""\
loading
epoch 1
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
Current thread 0x00007f2 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/steps.py", line 12 in step
  File "/home/u/test_steps.py", line 30 in <lambda>
  File "{PACKAGE}/testing/rank.py", line 126 in _call
  File "<frozen runpy>", line 88 in _run_code
"""


def test_the_stack_of_the_main_thread_ends_with_the_users_own_frames() -> None:
    assert main_stack(LOG) == [
        "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:5356 in barrier",
        "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py:83 in wrapper",
        "/home/u/steps.py:12 in step",
        "/home/u/test_steps.py:30 in <lambda>",
    ]
    assert main_stack("loading\n") == []
    assert before_stacks(LOG) == "loading\nepoch 1"


def test_ranks_are_shown_by_name() -> None:
    shown = where_ranks_wait({"rank 0": ("in step 2", LOG), "rank 1": ("all steps made", "")})
    assert shown.startswith("  rank 0, in step 2:\n    /venv/")
    assert shown.endswith("in <lambda>\n  rank 1, all steps made")
