"""What runs on a GPU: a sample of the tests, drawn by a seed, each case by itself and under a deadline.

    python benchmarks/rows/gpu.py --part a --json FILE [--seed N] [--seconds 300] [--device cuda|cpu]
                                  [--nccl libnccl.so.2] [--only id,...]

Part a holds what is computed against one process on the CPU, in float64: points of the conformance grid
(tests/helpers/grid.py: strategy, network, optimizer), whose states after each of 8 steps are compared, and tests of
tests/product. Drawn in turn, so that whatever the time allows is spread over all strategies:

one             the grid by one worker.
two             the grid by two workers that share the card, over gloo. On the CPU they share the host's memory.
nccl            the same over NCCL 2.30 or later. Left out on the CPU, and where NCCL is older.
product         tests of tests/product as they are: they start their own workers, which share the card over gloo.
product_nccl    the same over NCCL.

NCCL lets ranks share a card from 2.30 on, and torch 2.11 brings an older one. `--nccl`, or APPORTION_NCCL, names the
libnccl.so.2 that is preloaded; NCCL_MULTI_RANK_GPU_ENABLE=1, with which apportion takes NCCL for ranks that share a
card, and NCCL_NVLS_ENABLE=0 are set here. Only the first card that torch sees is used.

FILE gets an object that holds the seed, the card, the versions, what was left out and why, and a list of cases: `kind`
(grid or product), `strategy`, `network`, `optimizer`, `workers`, `transport`, `result`, `message`, `seconds`. A result
is

runs            equal to one process, or the test passed.
refuses         said by name that it cannot; `on_the_cpu` says what the same case does there. That fully_sharded refuses
                to share a card is such an answer.
fails           differs, is undecided, raised something else, died, or did not answer in time; `message` says which.

The exit status is 1 where a case failed. No new case begins once `--seconds` are over; one that is under way then is
given a little longer, and counts as unfinished. The same seed draws the same cases in the same order, as far as the
time goes.

It runs from a checkout, with src on PYTHONPATH, on Python 3.11 or newer and torch 2.9 or newer. Besides torch and numpy
it needs safetensors and cloudpickle, and without them says so. The wheels to carry to a machine that reaches no
registry are

    safetensors, cloudpickle                                    both of 0.5 MB or less
    pytest, pluggy, iniconfig, packaging, pygments, pytest-timeout, psutil      for `product`; left out without them
    scikit-learn, scipy, joblib, threadpoolctl                  for the networks of four examples; left out without them
    nvidia-nccl-cu12 or -cu13, 2.30 or later                    for `nccl`, in the version of CUDA that torch has

The command line (click, rich) is needed by those tests of tests/product that use it, and by nothing else here.
"""

import argparse
import ast
import importlib.util
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import suppress
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent
PRODUCT = ROOT / "tests" / "product"
IDS = ("one", "two", "nccl", "product", "product_nccl")
WORKERS = {"one": 1, "two": 2, "nccl": 2}
CASE_SECONDS, START_SECONDS, LAST_SECONDS = 60.0, 90.0, 15.0
"""Seconds for a case, for the first answer of a process that runs cases, and for the case under way when time is up."""
PRODUCT_EACH = 8
"""Cases of the grid for each test of tests/product."""
ACCEPTED_EACH = 3
"""Networks that a strategy accepts for each that it refuses."""
NCCL_FIRST = (2, 30)
NEEDED = ("torch", "numpy", "safetensors", "cloudpickle")
FOR_PRODUCT = ("pytest", "pytest_timeout", "psutil")
OF_EXAMPLES = {name: "sklearn" for name in ("digits", "contrastive", "gan", "lbfgs")}
"""Networks whose files import more than torch."""
PLAIN = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


# What is drawn


def mixed(accepted, refused, each=ACCEPTED_EACH):
    """The accepted ones in order, after every `each` of them a refused one; then the rest."""
    refused, found = list(refused), []
    for number, one in enumerate(accepted, 1):
        found.append(one)
        if refused and number % each == 0:
            found.append(refused.pop(0))
    return found + refused


def drawn(seed, ids, strategies, points, tests):
    """Every case, in the order of the seed: in each turn all strategies, each with one more of its points for each
    setting, and tests of tests/product between them.

    `strategies`: the names for each setting; `points(strategy, workers)`: (network, optimizer, what the CPU refuses it
    with, or None) of each point of the grid; `tests`: the names of the tests.
    """
    rng = random.Random(seed)
    queues = {}
    for setting in (each for each in ids if each in WORKERS):
        for strategy in strategies(WORKERS[setting]):
            every = points(strategy, WORKERS[setting])
            rng.shuffle(every)
            queue = mixed([p for p in every if p[2] is None], [p for p in every if p[2] is not None])
            queues[setting, strategy] = queue
    products = []
    for setting in (each for each in ids if each not in WORKERS):
        rng.shuffle(own := list(tests))
        products.append([{"kind": "product", "id": setting, "test": test} for test in own])
    products = [test for pair in itertools.zip_longest(*products) for test in pair if test is not None]
    counted = 0
    while any(queues.values()):
        names = sorted({strategy for (_, strategy), queue in queues.items() if queue})
        rng.shuffle(names)
        for strategy, setting in itertools.product(names, WORKERS):
            if not queues.get((setting, strategy)):
                continue
            network, optimizer, refused = queues[setting, strategy].pop(0)
            where = {"kind": "grid", "id": setting, "workers": WORKERS[setting]}
            yield where | {"strategy": strategy, "network": network, "optimizer": optimizer, "refused": refused}
            counted += 1
            if products and counted % PRODUCT_EACH == 0:
                yield products.pop(0)
    yield from products


def product_tests(folder=PRODUCT):
    """The tests of a folder that are not marked slow, as pytest names them, without importing anything."""
    found = []
    for file in sorted(folder.glob("test_*.py")):
        body = ast.parse(file.read_text()).body
        if any(isinstance(node, ast.Assign) and "mark.slow" in ast.unparse(node) for node in body):
            continue
        for node in body:
            slow = any("mark.slow" in ast.unparse(mark) for mark in getattr(node, "decorator_list", ()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not slow:
                found.append(f"{file.name}::{node.name}")
    return found


def grid():
    """The grid, and (strategies, points) of it for `drawn`; the networks that lack a package are left out."""
    sys.path.append(str(ROOT / "tests" / "helpers"))
    import grid

    lacking = {name: package for name, package in OF_EXAMPLES.items() if not has(package)}
    names = [name for name in grid.NETWORKS if name not in lacking]

    def strategies(workers):
        return [strategy for strategy in grid.STRATEGIES if workers in grid.workers_of(strategy)]

    def points(strategy, workers):
        return [
            (name, optimizer, grid.refusal(strategy, name, workers, optimizer))
            for name in names
            for optimizer in grid.optimizers(name)
        ]

    return strategies, points, [{"what": name, "why": f"{pkg} is not installed"} for name, pkg in lacking.items()]


def has(package):
    return importlib.util.find_spec(package) is not None


# What runs them


def write_metadata(folder):
    """Writes what an installed apportion has beside it and a run records, its name and version, where it is not
    installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = Path(folder) / f"apportion-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apportion\nVersion: {project['version']}\n")


def environment(setting, *, device, nccl, folder):
    """The variables of the processes of a setting: one thread each, caches of their own, the first card alone."""
    given = os.environ | PLAIN | {"XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder)}
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH"), str(folder)]
    given["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    given["CUDA_VISIBLE_DEVICES"] = cards[0] if device == "cuda" else ""
    if setting.endswith("nccl"):
        given |= SHARING | ({"LD_PRELOAD": str(nccl)} if nccl else {})
    else:
        given.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
    return given


class Died(Exception):
    """A process that runs cases has ended, or was ended because it gave no answer in time."""


class Server:
    """A process that runs one case of the grid after the other (gpu_case.py)."""

    def __init__(self, device, given):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, str(BENCHMARKS / "sides/gpu_case.py"), device],
            env=given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
            bufsize=0,
        )
        try:
            self.facts = self._answer(START_SECONDS)
        except Died:
            self.close()
            raise

    def ask(self, case, seconds):
        """What the process answers to a case; raises Died where it does not within so many seconds."""
        try:
            self._process.stdin.write(json.dumps(case).encode() + b"\n")
        except BrokenPipeError:
            raise Died(self._said("it had ended")) from None
        return self._answer(seconds)

    def _answer(self, seconds):
        pipe, end, line = self._process.stdout, time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                raise Died(self._said(f"no answer in {seconds:.0f} s"))
            piece = pipe.read(1 << 16)
            if not piece:
                raise Died(self._said(f"it ended with status {self._process.wait()}"))
            line += piece
        return json.loads(line)

    def _said(self, what):
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{what}: {lines[-1]}" if lines else what

    def close(self):
        end(self._process)
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()


def end(process):
    """End a process that leads a session, and what it has started there."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tested(test, given, seconds):
    """The result of a test of tests/product and what it said, by a pytest of its own."""
    command = [sys.executable, "-m", "pytest", "--confcutdir=tests/product", "-p", "no:cacheprovider", "-q", "-m", ""]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, f"tests/product/{test}"], cwd=ROOT, env=given, stdin=subprocess.DEVNULL, stdout=said,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Died(f"no answer in {seconds:.0f} s") from None
        finally:
            end(process)
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines() or [""]
    if status == 0 and "passed" not in lines[-1]:
        return "skipped", lines[-1]
    if status == 0:
        return "runs", ""
    wrong = [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))]
    message = (wrong or lines)[0].removeprefix("E").strip()
    refused = message.startswith("ValueError: ") and "use " in message  # the same rule as in gpu_case.py
    return "refuses" if refused else "fails", message


class Sample:
    """The cases of a run, as they are made, and the processes that make them."""

    def __init__(self, arguments, folder):
        self._given, self._folder, self._servers = arguments, folder, {}
        self.facts, self.left_out, self.cases, self.unfinished = {}, [], [], []

    def environment(self, setting):
        return environment(setting, device=self._given.device, nccl=self._given.nccl, folder=self._folder)

    def server(self, setting):
        """The process of a setting that runs its cases, started where there is none."""
        key = "nccl" if setting == "nccl" else "plain"
        if key not in self._servers:
            self._servers[key] = Server(self._given.device, self.environment(setting))
        return self._servers[key]

    def usable(self, names):
        """These settings, without those that cannot be on this machine, which are left out with the reason."""
        on_cpu, lacking = self._given.device == "cpu", [package for package in FOR_PRODUCT if not has(package)]
        reasons = {}
        for name in names:
            if on_cpu and name.endswith("nccl"):
                reasons[name] = "NCCL joins GPUs"
            elif name.startswith("product") and lacking:
                reasons[name] = f"{', '.join(lacking)} not installed"
        self.facts = self.server("one").facts
        if not on_cpu and self.facts["card"] is None:
            raise Died("--device cuda, and torch sees no GPU: use --device cpu")
        asked = [name for name in names if name.endswith("nccl") and name not in reasons]
        if asked:
            try:
                self.facts["nccl"] = self.server("nccl").facts["nccl"]
                why = old(self.facts["nccl"])
            except Died as died:
                why = f"a process with it did not start: {died}"
            reasons |= {name: why for name in asked} if why else {}
        self.left_out += [{"what": name, "why": why} for name, why in reasons.items()]
        return [name for name in names if name not in reasons]

    def run(self, case, left):
        """Runs a case, of which there are `left` seconds for new ones, and notes its result."""
        seconds = min(CASE_SECONDS, left + LAST_SECONDS)
        began = time.monotonic()
        try:
            make = self._grid if case["kind"] == "grid" else self._product
            result, message, rest = make(case, seconds)
        except Died as died:
            if seconds < CASE_SECONDS and time.monotonic() - began >= seconds:
                self.unfinished.append(case)
                return None
            result, message, rest = "fails", str(died), {}
        row = {k: v for k, v in case.items() if k != "refused"} | {"transport": self._transport(case), **rest}
        row |= {"result": result, "message": message, "seconds": round(time.monotonic() - began, 2)}
        if result == "skipped":
            self.left_out.append({"what": case["test"], "why": message})
            return None
        self.cases.append(row)
        return row

    def _grid(self, case, seconds):
        server = self.server(case["id"])
        try:
            answer = server.ask(case, seconds)
        except Died:
            self._servers = {key: each for key, each in self._servers.items() if each is not server}
            server.close()
            raise
        return answer["result"], answer["message"], {"on_the_cpu": "refuses" if case["refused"] else "runs"}

    def _product(self, case, seconds):
        result, message = tested(case["test"], self.environment(case["id"]), seconds)
        return result, message, {"on_the_cpu": "runs"}

    def _transport(self, case):
        if case["id"] == "one":
            return "none"
        if self._given.device == "cpu":
            return "memory"
        return "nccl" if case["id"].endswith("nccl") else "gloo"

    def close(self):
        for server in self._servers.values():
            server.close()

    def written(self, **about):
        """The object of the JSON file."""
        totals = {}
        for case in self.cases:
            of = totals.setdefault(case["id"], {"runs": 0, "refuses": 0, "fails": 0})
            of[case["result"]] += 1
        return about | {
            "machine": self.facts, "left_out": self.left_out, "totals": totals, "cases": self.cases,
            "unfinished": self.unfinished,
        }  # fmt: skip


def old(version):
    """Why ranks cannot share a card by this NCCL; None where they can."""
    if version is None:
        return "torch has no NCCL"
    said = ".".join(map(str, version))
    return f"NCCL {said} lets no ranks share a card: --nccl a libnccl.so.2 of 2.30 or later" * (
        tuple(version[:2]) < NCCL_FIRST
    )


def line(row):
    """A case in words."""
    what = f"{row['strategy']}, {row['network']}, {row['optimizer']}" if row["kind"] == "grid" else row["test"]
    return f"{row['id']:<14}{row['result']:<9}{row['seconds']:>6.1f} s  {what}  {row['message'][:200]}".rstrip()


def asked(known=IDS):
    """What the command line asks for; `ids` and `seed` are always set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("a",), required=True)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", dest="ids", default=",".join(known), metavar="id,...", help="of " + ", ".join(known))
    parser.add_argument("--seed", type=int, help="what is drawn; another one each time where it is left out")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nccl", default=os.environ.get("APPORTION_NCCL"), metavar="libnccl.so.2")
    found = parser.parse_args()
    found.ids = found.ids.split(",")
    if unknown := [name for name in found.ids if name not in known]:
        parser.error(f"unknown {', '.join(unknown)}: it is one of {', '.join(known)}")
    if lacking := [package for package in NEEDED if not has(package)]:
        parser.error(f"{', '.join(lacking)} not installed: carry the wheels that the header of this file names")
    if found.nccl and not Path(found.nccl).is_file():
        parser.error(f"--nccl {found.nccl}: there is no such file")
    if found.seed is None:
        found.seed = random.SystemRandom().randrange(10**6)
    return found


def measure(sample, given, began):
    """Runs what is drawn until the time is up, and writes the file after every case."""
    ids = sample.usable(given.ids)
    print(f"seed {given.seed}: {json.dumps(sample.facts)}")
    strategies, points, lacking = grid()
    sample.left_out += lacking
    for left_out in sample.left_out:
        print(f"left out: {left_out['what']}: {left_out['why']}")
    about = {"part": given.part, "seed": given.seed, "device": given.device, "seconds": given.seconds}
    for case in drawn(given.seed, ids, strategies, points, product_tests()):
        left = given.seconds - (time.monotonic() - began)
        if left <= 0:
            break
        if (row := sample.run(case, left)) is not None:
            print(line(row), flush=True)
        given.json.write_text(json.dumps(sample.written(**about), indent=2) + "\n")
    for name, totals in sample.written()["totals"].items():
        print(f"{name:<14}" + ", ".join(f"{many} {result}" for result, many in totals.items()))
    print(f"seed {given.seed}: {len(sample.cases)} cases in {time.monotonic() - began:.0f} s")


def main():
    given, began = asked(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        write_metadata(folder)
        sample = Sample(given, folder)
        try:
            measure(sample, given, began)
        except Died as died:
            print(f"no process to run cases in: {died}", file=sys.stderr)
            return 3
        finally:
            sample.close()
    return int(any(case["result"] == "fails" for case in sample.cases))


if __name__ == "__main__":
    sys.exit(main())
