"""What a script that could not be run needs: a sentence for each kind of failure, and whether a GPU would help."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from apportion.script_check.hangs import report
from apportion.script_check.hangs.sentences import list_ranks
from apportion.script_check.passes import PassResult
from apportion.script_check.record import RankRecord

_GPU = re.compile(r"cuda|\bgpus?\b|nccl|nvidia|accelerator|device_count", re.IGNORECASE)
_REQUIRED = re.compile(r"error: the following arguments are required: (.+)")
_WORLD = re.compile(r"world.?size|\bmesh\b|nproc|num_replicas|\branks?\b|processes", re.IGNORECASE)
_FULL = re.compile(r"no space left|quota exceeded", re.IGNORECASE)
_NETWORK = re.compile(
    r"name resolution|couldn't connect|connection|max retries|offline|urlopen|network is unreachable|huggingface\.co|"
    r"cannot find the requested files in the (local|disk) cache",
    re.IGNORECASE,
)
_FILE = (
    "The script reads a file that is not there: give its path after --, or, where another rank writes it, have the "
    "ranks wait for that (torch.distributed.barrier) and the writer be rank 0."
)
_NETWORK_TYPES = {"URLError", "ConnectionError", "ConnectTimeout", "LocalEntryNotFoundError", "gaierror", "HTTPError"}


def unusable(passed: PassResult, ranks: int) -> str | None:
    """Returns why a pass says nothing, and the remedy; None where it does."""
    again = _of_second_run(passed)
    if passed.waited.how == "limit":
        late = list_ranks(passed.unfinished)
        return (
            f"{late}{again} did not end within {passed.seconds:.0f} s: compare fewer steps (--steps), or give the "
            f"script arguments with which a step is shorter"
        )
    if passed.waited.how == "hang":
        found = report.hang(passed.records, passed.waited.stacks, died=passed.waited.died)
        return "its ranks wait for each other" if found is None else found.finding.sentence
    if failed := passed.failed:
        first = next((r for r in failed if r.outcome is not None), failed[0])
        output = passed.outputs[first.rank]
        reason = f"the script{again} failed on rank {first.rank}: {described(first.outcome, output)}"
        help_ = _saved_late(first) if again else ""
        return ". ".join(filter(None, (reason.rstrip(". "), help_ or remedy(first.outcome, output, ranks))))
    last = next((line for line in map(last_line, passed.outputs) if line), "")
    if again and not any(record.runs[1].steps for record in passed.records):
        ending = f"; its last line was: {last}" if last else ""
        return (
            f"the script{again} made no optimizer step{ending}. Give it arguments with --then with which it goes on "
            f"after its first run, such as more epochs."
        )
    if not any(record.steps for record in passed.records):
        ending = f"; its last line was: {last}" if last else ""
        return (
            f"the script made no optimizer step{ending}. Give it arguments, after --, with which it trains; a step is "
            f"seen where an optimizer of torch's kind, an object with step and zero_grad, or an update of tensors in "
            f"place makes it."
        )
    return None


def _of_second_run(passed: PassResult) -> str:
    """What a second run was, as a clause between commas; empty where the script was run once."""
    if passed.then is None:
        return ""
    return f", run again with {shlex.join(passed.then)}," if passed.then else ", run again,"


def _saved_late(record: RankRecord) -> str:
    """What a second run needs that does not find a file; empty where it failed for another reason."""
    if record.outcome is None or record.outcome.get("type") not in ("FileNotFoundError", "CheckpointException"):
        return ""
    saved = list(dict.fromkeys(event["path"] for event in record.events_of("save") if event["path"]))
    steps = len(record.runs[0].steps)
    wrote = f"saved {', '.join(saved[:3])}" if saved else "saved nothing"
    return (
        f"In {steps} steps of its first run rank {record.rank} {wrote}: give the script arguments, after --, with "
        f"which it saves within them, and with --then those that name this file."
    )


def lacks_gpu(passed: PassResult) -> bool:
    """Whether a script failed, or ended before its first step, for lack of a GPU for each rank."""
    failed = next((record for record in passed.failed if record.outcome is not None), None)
    if failed is not None and failed.outcome is not None:
        return needs_gpu(failed.outcome, passed.outputs[failed.rank])
    ended = all(record.outcome is not None for record in passed.records)
    if not ended or any(record.steps for record in passed.records):
        return False
    return any(_GPU.search(output[-500:]) for output in passed.outputs)


def needs_gpu(outcome: Mapping[str, Any], output: str) -> bool:
    """Whether a script failed for lack of a GPU for each rank."""
    if outcome["how"] == "exited":
        return bool(_GPU.search(output[-500:]))
    return outcome["how"] == "raised" and bool(
        _GPU.search(f"{outcome.get('type', '')} {outcome.get('message', '')} {outcome.get('line', '')}")
    )


def may_need_own_precision(outcome: Mapping[str, Any]) -> bool:
    """Whether a failure may come from computing in float64: an error of torch or a check of the script, but not one of
    the failures that have a remedy of their own."""
    if outcome["how"] != "raised":
        return False
    if outcome.get("type") == "TooLargeForFloat64":
        return True
    kind, message = str(outcome.get("type", "")), str(outcome.get("message", ""))
    return kind in ("RuntimeError", "TypeError", "AssertionError", "ValueError", "NotImplementedError") and bool(
        re.search(
            r"dtype|double|float|scalar type|precision|c10::", f"{message} {outcome.get('line', '')}", re.IGNORECASE
        )
    )


def described(outcome: Mapping[str, Any] | None, output: str) -> str:
    """Returns what happened to a rank, in one clause."""
    if outcome is None:
        return f"its process died; its last line was: {last_line(output)}"
    if outcome["how"] == "exited":
        return f"it ended with status {outcome.get('code')}; its last line was: {last_line(output)}"
    where = f" at {outcome['site']}" if outcome.get("site") else ""
    return f"{outcome.get('type', 'an error')}{where}: {outcome.get('message', '')}"


def last_line(output: str) -> str:
    """Returns the last line of an output that is not empty."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")


def remedy(outcome: Mapping[str, Any] | None, output: str, ranks: int) -> str:
    """Returns the sentence that says what a script that failed needs; empty where nothing is known of it."""
    if outcome is None:
        return ""
    return next((sentence for rule in _RULES if (sentence := rule(outcome, output, ranks))), "")


def _arguments(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    if found := _REQUIRED.search(output):
        return f"The script needs the arguments {found[1].strip()}: give them after --."
    if outcome["how"] == "exited" and outcome.get("code") == 2 and "usage:" in output:
        return "The script does not accept these arguments: its own follow after --."
    if outcome.get("type") == "IndexError" and "sys.argv" in str(outcome.get("line", "")):
        return "The script needs an argument: give its own after --."
    return ""


def _world(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    text = f"{outcome.get('message', '')} {outcome.get('line', '')}"
    if outcome.get("type") not in ("AssertionError", "RuntimeError", "ValueError") or not _WORLD.search(text):
        return ""
    asked = [int(number) for number in re.findall(r"\b\d{1,3}\b", text) if int(number) not in (0, 1, ranks)]
    number = str(max(asked)) if asked else "N"
    return (
        f"The script asks for another number of ranks than {ranks}: run the check with --workers {number}, or make the "
        f"number that it asks for an argument."
    )


def _network(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    if outcome.get("type") in _NETWORK_TYPES or (
        outcome.get("type") in ("OSError", "RuntimeError", "ValueError")
        and _NETWORK.search(str(outcome.get("message")))
    ):
        return (
            "The script downloads data or weights, and the check runs without a network: run the script once by "
            "itself so that they are in its cache, or give it local files."
        )
    return ""


_BY_TYPE = {
    "FileNotFoundError": _FILE,
    "NotADirectoryError": _FILE,
    "ModuleNotFoundError": "The script imports a package that this Python does not have: install it, or use the "
    "script's own Python.",
}
"""What a script needs that raised an error of a type."""


def _by_type(outcome: Mapping[str, Any], output: str, ranks: int) -> str:
    if outcome.get("type") == "OSError" and _FULL.search(str(outcome.get("message"))):
        return (
            "What the script writes is held in temporary files until the end of the check: set TMPDIR to a folder of a "
            "file system with more room, or have the script save less."
        )
    return _BY_TYPE.get(str(outcome.get("type")), "")


_RULES: tuple[Callable[[Mapping[str, Any], str, int], str], ...] = (_arguments, _by_type, _network, _world)
