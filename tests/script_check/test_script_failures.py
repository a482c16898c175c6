"""What a script that could not be run needs, from what it ended with."""

from __future__ import annotations

from typing import Any

import pytest

from apportion.script_check import driver
from apportion.script_check.passes import PassResult
from apportion.script_check.record import RankRecord
from apportion.script_check.waiting import WaitOutcome


def raised(kind: str, message: str = "", line: str = "") -> dict[str, Any]:
    return {"how": "raised", "type": kind, "message": message, "line": line, "site": "train.py:3"}


def test_a_reason_and_its_remedy_are_two_sentences() -> None:
    ended = RankRecord(0, ({"kind": "end", "step": 0, "how": "exited", "code": 2},))
    output = "usage: train.py\ntrain.py: error: the following arguments are required: --lr\n"
    passed = PassResult([ended], [output], WaitOutcome("ended", ()), 1.0)
    reason = driver.unusable(passed, 2)
    assert reason is not None
    assert reason.endswith("required: --lr. The script needs the arguments --lr: give them after --.")
    late = driver.unusable(PassResult([ended], [output], WaitOutcome("limit", (0,)), 120.0), 2)
    assert late is not None
    assert "compare fewer steps (--steps)" in late


@pytest.mark.parametrize(
    ("outcome", "output", "wanted"),
    [
        ({"how": "exited", "code": 2}, "error: the following arguments are required: --data", "--data"),
        ({"how": "exited", "code": 2}, "usage: train.py\ntrain.py: error: unrecognized arguments: --x", "after --"),
        (raised("IndexError", "list index out of range", "kind = sys.argv[1]"), "", "needs an argument"),
        (raised("AssertionError", "", "assert dist.get_world_size() == 4"), "", "--workers 4"),
        (raised("RuntimeError", "Mesh should not be bigger than default world size 2, but found 4"), "", "--workers 4"),
        (raised("AssertionError", "", "assert len(x) == 4"), "", ""),
        (raised("FileNotFoundError", "[Errno 2] No such file or directory: 'vocab.json'"), "", "file"),
        (raised("OSError", "[Errno 28] No space left on device: 'run/last.pt'"), "", "TMPDIR"),
        (raised("LocalEntryNotFoundError"), "", "network"),
        (raised("OSError", "We couldn't connect to 'https://huggingface.co' to load the files"), "", "network"),
        (raised("URLError", "<urlopen error [Errno -3] Temporary failure in name resolution>"), "", "network"),
        (raised("ModuleNotFoundError", "No module named 'wandb'"), "", "install"),
        (raised("ZeroDivisionError", "division by zero"), "", ""),
        (None, "Killed", ""),
    ],
)  # fmt: skip
def test_a_failure_has_its_remedy(outcome: dict[str, Any] | None, output: str, wanted: str) -> None:
    sentence = driver.remedy(outcome, output, 2)
    assert wanted in sentence
    assert bool(sentence) == bool(wanted)


@pytest.mark.parametrize(
    ("outcome", "output", "wanted"),
    [
        (raised("AssertionError", "Torch not compiled with CUDA enabled"), "", True),
        (raised("RuntimeError", "Distributed package doesn't have NCCL built in"), "", True),
        (raised("AssertionError", "", "assert torch.cuda.is_available()"), "", True),
        (raised("ZeroDivisionError", "integer modulo by zero", "rank % torch.cuda.device_count()"), "", True),
        ({"how": "exited", "code": 1}, "This example needs 2 GPUs.\n", True),
        (raised("ValueError", "a row is missing", "rows = data[3]"), "", False),
        ({"how": "ended"}, "no gpu", False),
    ],
)
def test_a_missing_gpu_is_distinguished_from_other_failures(outcome: dict[str, Any], output: str, wanted: bool) -> None:
    assert driver.needs_gpu(outcome, output) == wanted


def test_a_script_that_ends_before_its_first_step_may_lack_a_gpu() -> None:
    def passed(output: str, *events: dict[str, Any]) -> PassResult:
        ended = {"kind": "end", "step": 0, "how": "ended"}
        return PassResult([RankRecord(0, (*events, ended))], [output], WaitOutcome("ended"), 1.0)

    assert driver.lacks_gpu(passed("Unable to locate sufficient 2 gpus to run this example. Exiting."))
    assert not driver.lacks_gpu(passed("Nothing to do."))
    assert not driver.lacks_gpu(passed("max GPU memory: 0", {"kind": "step", "step": 0}))
    assert "its last line was: Nothing to do." in str(driver.unusable(passed("Nothing to do.\n"), 2))


def test_a_failure_is_described_with_its_place_or_its_last_line() -> None:
    assert (
        driver.described(raised("ValueError", "a row is missing"), "") == "ValueError at train.py:3: a row is missing"
    )
    assert "status 7" in driver.described({"how": "exited", "code": 7}, "one\ntwo\n\n")
    assert driver.described(None, "one\ntwo\n\n").endswith("two")
