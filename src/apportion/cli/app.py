"""The command line: one function a verb. Exit status: 0 done; 1 the answer is no; 2 wrong use; 3 could not be done;
130 interrupted; 143 told to end by SIGTERM, 129 by SIGHUP."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

import apportion
from apportion.cli.begin import begin
from apportion.cli.failures import INTERRUPTED, NO, guarded
from apportion.cli.script_command import (
    ScriptRequest,
    WithScriptArguments,
    check_script_command,
    script_arguments,
    workload_of,
)
from apportion.errors import ApportionError
from apportion.runtime.spawn.streams import outlive_terminal

if TYPE_CHECKING:
    from apportion.core.event import Event
    from apportion.planner.plan import Plan

app = typer.Typer(
    help="Train one network on all the devices you have, and prove that it is the same network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Address = Annotated[
    str, typer.Argument(metavar="FILE:NAME", help="the workload: path/to/file.py:name or package.module:name")
]
Workers = Annotated[int | None, typer.Option(min=1, help="processes that take batches (default: one a core or GPU)")]
Steps = Annotated[int | None, typer.Option(min=1, help="updates")]
Launcher = Annotated[
    str | None, typer.Option(metavar="L", help='"local(workers=4, threads=8)", "ssh(...)", slurm, ray, env')
]
NamedStrategy = Annotated[
    str | None, typer.Argument(metavar="S", help="the strategy, as --strategy", show_default=False)
]
OnHosts = Annotated[
    str | None, typer.Option(metavar="A,B:4", help="hosts that ssh reaches, each with its workers: --launcher ssh(...)")
]
NoTrial = Annotated[bool, typer.Option("--no-trial", help="choose by prediction alone")]
Remeasure = Annotated[bool, typer.Option("--remeasure", help="forget what earlier runs have measured")]
AllowApproximate = Annotated[
    bool, typer.Option("--allow-approximate", help="choose an approximate strategy where it learns more in a pilot")
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="train without proving first that it is the same network")]
Reprove = Annotated[bool, typer.Option("--reprove", help="prove it again where an earlier run's proof is cached")]
RequireProof = Annotated[bool, typer.Option("--require-proof", help="end with status 1 where that could not be proved")]
Trust = Annotated[bool, typer.Option("--trust", help="run the code that a run names, whosever it is")]
Json = Annotated[bool, typer.Option("--json", help="the answer as JSON, on standard output")]


def main() -> None:
    """The program ``apportion``."""
    outlive_terminal()
    signal.signal(signal.SIGINT, _interrupted_early)
    try:
        app()
    finally:
        if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
            _leave(sys.exception())


def _leave(error: BaseException | None) -> None:
    """End this process with what is raised in it, without the wait for threads that a workload has left behind, which
    may never end."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):  # a text, which Python would print
            with suppress(Exception):
                sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _interrupted_early(number: int, frame: Any) -> None:
    """Ctrl-C before there is anything to end but this process; what it has started ends with it."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


@app.command()
def train(  # noqa: PLR0913 (the flags)
    workload: Address,
    named: NamedStrategy = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="S", help='for example "data_parallel(microbatches=2)"; without it the best is found'),
    ] = None,
    workers: Workers = None,
    hosts: OnHosts = None,
    steps: Steps = None,
    seed: Annotated[int | None, typer.Option(help="instead of the workload's")] = None,
    members: Annotated[
        int | None, typer.Option(min=2, help="train so many, from different seeds, in parallel: runs m1, m2, ...")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="where everything is written (default: runs/...)")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --run-dir")] = False,
    launcher: Launcher = None,
    policy: Annotated[
        str | None, typer.Option(metavar="P", help="for example \"policy(checkpoint_every='30 s', keep=3)\"")
    ] = None,
    no_trial: NoTrial = False,
    remeasure: Remeasure = False,
    allow_approximate: AllowApproximate = False,
    no_check: NoCheck = False,
    require_proof: RequireProof = False,
    reprove: Reprove = False,
) -> None:
    """Train a workload, and say how well it does."""
    strategy = _one_of(named, strategy)
    if members is not None:
        _train_members(workload, members, run_dir, {
            "--hosts": hosts, "--strategy": strategy, "--workers": workers, "--steps": steps, "--seed": seed,
            "--launcher": launcher, "--policy": policy, "--resume": resume, "--no-trial": no_trial,
            "--remeasure": remeasure, "--allow-approximate": allow_approximate, "--no-check": no_check,
            "--require-proof": require_proof, "--reprove": reprove,
        })  # fmt: skip
        return
    with guarded():
        begin(workload, [strategy], launcher, hosts, policy)
        from apportion.api.train import run  # torch comes with it

        events = run(
            workload,
            strategy,
            launcher=launcher_of(launcher, workers, hosts),
            run_dir=run_dir,
            resume=resume,
            policy=policy,
            steps=steps,
            seed=seed,
            trial=not no_trial,
            remeasure=remeasure,
            allow_approximate=allow_approximate,
            check=not no_check,
            require_proof=require_proof,
            reprove=reprove,
        )
        _show(events, searches=not any((strategy, workers, launcher, hosts, resume)))


def _one_of(named: str | None, strategy: str | None) -> str | None:
    """Returns the strategy, which may be given with its flag or without."""
    with guarded():
        if named is not None and strategy is not None:
            raise ValueError(f"the strategy is given twice, {named} and --strategy {strategy}: leave either out")
    return strategy or named


def _show(events: Generator[Event, None, None], *, searches: bool) -> None:
    """Shows a run while it goes on. ``searches``: whether it begins with a search for the fastest strategy."""
    from apportion.cli.run_display import Display

    with closing(events), Display() as display:
        if searches:
            display.say("finding out which strategy is fastest here")
        for event in events:
            display.show(event)
    display.summarize()


def _train_members(workload: str, members: int, run_dir: str | None, given: Mapping[str, object]) -> None:
    """Trains each member by this same command, with the flags that were given."""
    with guarded():
        from apportion.api.train import fresh_run_dir
        from apportion.api.train_ensemble import train_members

        if given["--seed"] is not None:
            raise ValueError("--members counts on from the workload's seed: leave --seed out")
        if given["--hosts"] is not None:
            raise ValueError("--members trains side by side on this machine: leave --hosts out")
        folder = run_dir or str(fresh_run_dir(workload))
        flags = [
            word
            for name, value in given.items()
            if value is not None and value is not False
            for word in ((name,) if value is True else (name, str(value)))
        ]
        trained = train_members(workload, members, folder, flags, typer.echo)
        if done := [str(one.run_dir) for one in trained if one.status == 0]:
            typer.echo(f"apportion serve {' '.join(done)}")
        if len(done) < members:
            failed = ", ".join(f"{one.name} (exit status {one.status})" for one in trained if one.status != 0)
            raise ApportionError(f"{members - len(done)} of {members} members were not trained: {failed}")


@app.command(cls=WithScriptArguments)
def check(  # noqa: PLR0913 (the flags)
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py|FILE:NAME [-- ARGS]",
            help="a script, whose own arguments follow --; or the workload, with --strategy",
            show_default=False,
        ),
    ] = None,
    module: Annotated[
        str | None, typer.Option("-m", metavar="MODULE", help="instead of a file: the script that python -m runs")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="ranks of the script (default: 2; also --nproc-per-node), or workers of the strategy",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="updates to compare (default: 24 of a script, 8 of a strategy)")
    ] = None,
    accept: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="a finding that is intended; again for each one")
    ] = None,
    then: Annotated[
        str | None,
        typer.Option(
            metavar="'ARGS'",
            help="run the script a second time, with these arguments besides, by which it resumes: '--resume last.pt'",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="a function(model, batch) that returns a script's loss")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="write what was found about a script there")
    ] = None,
    strategy: Annotated[str | None, typer.Option(metavar="S", help="the strategy to prove, of a workload")] = None,
    hosts: OnHosts = None,
    launcher: Launcher = None,
    as_json: Json = False,
) -> None:
    """Prove that a training script, or a strategy, computes on several workers what one process does, after every step,
    tensor by tensor."""
    given = {"--strategy": strategy, "--hosts": hosts, "--launcher": launcher}
    own = script_arguments(context)
    with guarded():
        if module is not None or (target is not None and ":" not in target):
            request = ScriptRequest(target, module, own, workers, steps, accept or (), then, reference, out, as_json)
            status = check_script_command(request, given)
        else:
            of_scripts = {"--accept": accept, "--then": then is not None, "--reference": reference, "--out": out}
            workload = workload_of(target, own, of_scripts, strategy)
            status = check_strategy_command(workload, str(strategy), steps, (launcher, workers, hosts), as_json)
    if status:
        raise typer.Exit(status)


@app.command()
def proofs(
    remove: Annotated[
        list[str] | None, typer.Option(metavar="NAME|all", help="remove this one; again for others; all: every one")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the proofs that earlier runs have made and later ones reuse, or remove some."""
    with guarded():
        from apportion.api.proofs import list_proofs, remove_proofs

        if remove:
            many = remove_proofs(remove)
            typer.echo(f"removed {many} cached proof{'' if many == 1 else 's'}")
            return
        found = list_proofs()
        if as_json:
            _print_json(found)
        else:
            from apportion.cli.tables import show_proofs

            show_proofs(found)


@app.command()
def compare(  # noqa: PLR0913 (the flags)
    workload: Address,
    strategy: Annotated[list[str] | None, typer.Option(metavar="S", help="again for each one; without it all")] = None,
    workers: Workers = None,
    hosts: OnHosts = None,
    steps: Annotated[int, typer.Option(min=1, help="updates of each, after a warm-up")] = 50,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="save the table there, as JSON")] = None,
    launcher: Launcher = None,
    as_json: Json = False,
) -> None:
    """Measure strategies against each other, on this machine or on several hosts."""
    with guarded():
        begin(workload, strategy or (), launcher, hosts)
        from apportion.cli.tables import show_rows

        where = launcher_of(launcher, workers, hosts)
        rows = apportion.compare(workload, strategy, steps=steps, path=out, launcher=where)
        if not is_first(launcher):
            pass
        elif as_json:
            _print_json([row.to_json() for row in rows])
        else:
            show_rows(rows)


@app.command()
def plan(  # noqa: PLR0913 (the flags)
    workload: Annotated[
        str | None, typer.Argument(metavar="FILE:NAME", help="the workload; with --network only the commands name it")
    ] = None,
    network: Annotated[str | None, typer.Option(metavar="FILE", help="instead of it, its profile")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="which machines (default: this one, measured)")
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="other machines: how many of them match these?")
    ] = None,
    workers: Workers = None,
    hosts: OnHosts = None,
    no_trial: Annotated[bool, typer.Option("--no-trial", help="stop at the prediction")] = False,
    allow_approximate: Annotated[
        bool, typer.Option("--allow-approximate", help="choose an approximate one if a pilot speaks for it")
    ] = False,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="measure this machine again")] = False,
    launcher: Annotated[
        str | None, typer.Option(metavar="L", help="env: for the ranks that run this, on their hosts")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE.html", help="write the plan there, with pictures")] = None,
    as_json: Json = False,
) -> None:
    """Say which way to split a workload, why, and when the answer would change."""
    with guarded():
        begin(workload if network is None else None, (), launcher, hosts)
        decided = apportion.plan(
            workload,
            cluster,
            network=network,
            against=against,
            workers=None if hosts else workers,
            trial=not no_trial,
            allow_approximate=allow_approximate,
            remeasure=remeasure,
            launcher=None
            if launcher is None and hosts is None
            else launcher_of(launcher, workers if hosts else None, hosts),
        )
        if is_first(launcher):
            _show_plan(decided, out, as_json)


def _show_plan(decided: Plan, out: str | None, as_json: bool) -> None:
    if out is not None:
        from apportion.reporting.html import write_plan_html

        write_plan_html(decided.to_json(), out)
    if as_json:
        _print_json(decided.to_json())
    else:
        from apportion.cli.plan_display import show_plan

        show_plan(decided)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, default=str))


@app.command()
def serve(  # noqa: PLR0913 (the flags)
    members: Annotated[
        list[str],
        typer.Argument(metavar="MEMBER...", help="FILE.onnx, FILE.pt2, a run or checkpoint, http://...; or NAME=that"),
    ],
    deadline: Annotated[
        str | None, typer.Option(metavar="T", help='of a request that names none: 50ms, "2 s" (default: 1s)')
    ] = None,
    quorum: Annotated[int | None, typer.Option(min=1, help="members that an answer needs (default: 1)")] = None,
    replication: Annotated[
        str | None, typer.Option(metavar="R", help="auto (default), in_graph or between_graph")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="address to listen at (default: 127.0.0.1); again for each name that clients use for it"),
    ] = None,
    port: Annotated[int | None, typer.Option(help="0: any that is free (default: 8000)")] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="FILE:NAME or FILE.npz: say what answers without a member cost, and end"),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option("--serving", metavar="S", help="for example \"serving(most_rows=64, aggregation='vote')\""),
    ] = None,
    trust: Trust = False,
) -> None:
    """Answer with one net or an ensemble by a deadline, over the Open Inference Protocol."""
    with guarded():
        from apportion.core.value import parse_as
        from apportion.serving.config import Serving, named, seconds_of

        given = {"quorum": quorum, "replication": replication, "port": port} | {
            "deadline": None if deadline is None else seconds_of(deadline),
            "host": host[0] if host else None,
            "names": tuple(host[1:]) if host else None,
        }
        given["trust"] = trust or None
        serving = Serving() if settings is None else parse_as(settings, Serving)
        serving = replace(serving, **{name: value for name, value in given.items() if value is not None})
        if evaluate is not None:
            from apportion.serving import offline_evaluation

            typer.echo("\n".join(offline_evaluation.evaluate(named(members), evaluate, serving).lines()))
            return
        number = apportion.serve(named(members), serving=serving)
    if number == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


@app.command()
def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run's folder, or one of its checkpoints")],
    target: Annotated[str, typer.Option(metavar="T", help='"onnx", "onnx(precision=\'int8\')"')] = "onnx",
    out: Annotated[str | None, typer.Option(metavar="FILE", help="default: model.onnx and the like, in RUN")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Carry a trained net to other hardware, and hold what the file computes against the net."""
    with guarded():
        from apportion.core.value import check_written

        check_written(target, "apportion.exporting.targets")
        from apportion.api.export import export_run, verified

        signal.signal(signal.SIGTERM, _end)
        made = export_run(run, target=target, path=out, trust=trust)
        if as_json:
            typer.echo(json.dumps(made.to_json()))
        else:
            typer.echo(f"{made.path}: {made.nbytes:,} bytes, {made.target}")
            for line in verified(made):
                typer.echo(f"  {line}")
            for report in made.reports:
                typer.echo(f"  report: {report}")


def _end(number: int, _: object) -> None:
    """End by a signal as by an exception, so that what was begun is cleared away."""
    raise SystemExit(128 + number)


# ``apportion check FILE:NAME --strategy S``: the proof of a strategy, as a command.


STEPS = 8
"""The updates after which a proof compares where their number is not given."""


def check_strategy_command(
    workload: str, strategy: str, steps: int | None, where: tuple[str | None, int | None, str | None], as_json: bool
) -> int:
    """Prove a strategy, print the proof, and return the exit status. ``where``: launcher, workers and hosts."""
    launcher, workers, hosts = where
    begin(workload, [strategy], launcher, hosts)
    from apportion.cli.tables import show_proof

    place = launcher_of(launcher, workers, hosts)
    proof = apportion.check(workload, strategy, steps=STEPS if steps is None else steps, launcher=place)
    if not is_first(launcher):
        pass
    elif as_json:
        typer.echo(json.dumps({"holds": proof.holds, **asdict(proof)}, indent=1, default=str))
    else:
        show_proof(proof)
    return 0 if proof.holds else NO


# The launcher that flags of the command line describe.


def launcher_of(text: str | None, workers: int | None, hosts: str | None = None) -> Any:
    """The launcher that --launcher, --workers and --hosts describe together. Raises ValueError where they contradict
    each other."""
    from apportion.core.value import parse
    from apportion.runtime.launch.local import Local
    from apportion.runtime.launch.ssh import Ssh

    if hosts is not None:
        if text is not None:
            raise ValueError(f"--hosts {hosts} and --launcher {text} contradict each other: leave either out")
        return Ssh(hosts=[host.strip() for host in hosts.split(",")], workers=workers)
    launcher = parse(text, "apportion.runtime.launch") if text is not None else Local()
    return launcher if workers is None else launcher.with_workers(workers)


def is_first(launcher: str | None) -> bool:
    """Tells whether this process is the one that speaks for all, of those that others may have started."""
    from apportion.comm.network.launched_ranks import given

    return launcher is None or given(os.environ).get("RANK", "0") == "0"
