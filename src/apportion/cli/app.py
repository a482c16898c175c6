"""The command line: one function a verb. Exit status: 0 done; 1 the answer is "no"; 2 wrong use; 3 could not be done;
130 interrupted; 143 ended by SIGTERM, 129 by SIGHUP."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import apportion
from apportion.cli.begin import begin
from apportion.cli.failures import INTERRUPTED, guarded
from apportion.cli.launchers import is_first, launcher_of
from apportion.cli.script_command import (
    ScriptRequest,
    WithScriptArguments,
    check_script_command,
    script_arguments,
    workload_of,
)
from apportion.cli.strategy_command import check_strategy_command
from apportion.errors import ApportionError
from apportion.runtime.spawn.streams import outlive_terminal

if TYPE_CHECKING:
    from apportion.core.event import Event
    from apportion.planner.plan import Plan


class _Verbs(click.Group):
    """A group that lists its commands in the order of this file, each with its whole first sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list of commands into the help."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(200)) for name, command in self.commands.items()])


_AT_LEAST_ONE = click.IntRange(min=1)


@click.group(cls=_Verbs, no_args_is_help=True, context_settings={"max_content_width": 100})
@click.version_option(apportion.__version__, message="apportion %(version)s")
def app() -> None:
    """Train one network on all the devices you have, and prove that it is the same network."""


_workload = click.argument("workload", metavar="FILE:NAME")
_workers = click.option(
    "--workers", metavar="N", type=_AT_LEAST_ONE, help="processes that take batches (default: one a core or GPU)"
)
_launcher = click.option("--launcher", metavar="L", help='"local(workers=4, threads=8)", "ssh(...)", slurm, ray, env')
_hosts = click.option(
    "--hosts", metavar="A,B:4", help="hosts that ssh reaches, each with its workers: --launcher ssh(...)"
)
_trust = click.option("--trust", is_flag=True, help="run the code that a run names, whosever it is")
_json = click.option("--json", "as_json", is_flag=True, help="the answer as JSON, on standard output")


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
@_workload
@click.argument("named", metavar="[S]", required=False)
@click.option(
    "--strategy", metavar="S", help='for example "data_parallel(microbatches=2)"; without it the best is found'
)
@_workers
@_hosts
@click.option("--steps", metavar="N", type=_AT_LEAST_ONE, help="updates")
@click.option("--seed", metavar="N", type=int, help="instead of the workload's")
@click.option(
    "--members",
    metavar="N",
    type=click.IntRange(min=2),
    help="train this many members, from different seeds, in parallel: runs m1, m2, ...",
)
@click.option(
    "--grid",
    metavar="'A=[V, ...]'",
    multiple=True,
    help="train FILE:FUNCTION once for each of these values of an argument, in parallel; again for each argument",
)
@click.option("--run-dir", metavar="DIR", help="where everything is written (default: runs/...)")
@click.option("--resume", is_flag=True, help="go on with the run in --run-dir")
@_launcher
@click.option("--policy", metavar="P", help="for example \"policy(checkpoint_every='30 s', keep=3)\"")
@click.option("--no-trial", is_flag=True, help="choose by prediction alone")
@click.option("--remeasure", is_flag=True, help="forget what earlier runs have measured")
@click.option(
    "--allow-approximate", is_flag=True, help="choose an approximate strategy where it learns more in a pilot"
)
@click.option("--no-check", is_flag=True, help="train without proving first that it is the same network")
@click.option("--require-proof", is_flag=True, help="end with status 1 where that could not be proved")
@click.option("--reprove", is_flag=True, help="prove it again where an earlier run's proof is cached")
@click.option(
    "--log",
    "loggers",
    metavar="L",
    multiple=True,
    help="csv, tensorboard, mlflow, \"wandb(project='mine')\" or trackio",
)
def train(  # noqa: PLR0913 (the flags)
    workload: str,
    named: str | None,
    strategy: str | None,
    workers: int | None,
    hosts: str | None,
    steps: int | None,
    seed: int | None,
    members: int | None,
    grid: tuple[str, ...],
    run_dir: str | None,
    resume: bool,
    launcher: str | None,
    policy: str | None,
    no_trial: bool,
    remeasure: bool,
    allow_approximate: bool,
    no_check: bool,
    require_proof: bool,
    reprove: bool,
    loggers: tuple[str, ...],
) -> None:
    """Train a workload, and say how well it does.

    FILE:NAME is the workload: path/to/file.py:name or package.module:name; or a function that returns one, with
    arguments, "mine.py:make(lr=0.2)". S is the strategy, as with --strategy.
    """
    strategy = _one_of(named, strategy)
    if members is not None or grid:
        _train_several(workload, members, grid, run_dir, {
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
            loggers=loggers,
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
    from apportion.cli.flags import in_flags
    from apportion.reporting.progress.display import Display

    with closing(events), Display(in_flags) as display:
        if searches:
            display.say("finding out which strategy is fastest here")
        for event in events:
            display.show(event)
    display.summarize()


def _train_several(
    workload: str, members: int | None, grid: Sequence[str], run_dir: str | None, given: Mapping[str, object]
) -> None:
    """Trains the members of an ensemble or of a grid by this same command, with the flags that were given."""
    with guarded():
        from apportion.core.place_names import check_place

        check_place(workload)
        if members is not None and grid:
            raise ValueError(
                "--members trains one workload from several seeds, --grid several workloads: leave one out"
            )
        if given["--hosts"] is not None:
            raise ValueError(
                f"--{'grid' if grid else 'members'} trains side by side on this machine: leave --hosts out"
            )
        from apportion.api.side_by_side import train_members
        from apportion.api.train import fresh_run_dir

        if members is None:
            from apportion.api.grid import grid_members

            chosen = grid_members(workload, grid)
        else:
            from apportion.api.ensemble_members import ensemble_members

            if given["--seed"] is not None:
                raise ValueError("--members counts on from the workload's seed: leave --seed out")
            chosen = ensemble_members(workload, members)
        folder = run_dir or str(fresh_run_dir(workload))
        words = [
            word
            for name, value in given.items()
            if value is not None and value is not False
            for word in ((name,) if value is True else (name, str(value)))
        ]
        trained = train_members(chosen, folder, words, click.echo)
        done = [one for one in trained if one.status == 0]
        if grid:
            from apportion.cli.tables import show_grid

            show_grid(trained)
        elif done:
            click.echo(f"apportion serve {' '.join(str(one.run_dir) for one in done)}")
        if len(done) < len(chosen):
            failed = ", ".join(f"{one.member.name} (exit status {one.status})" for one in trained if one.status != 0)
            raise ApportionError(f"{len(chosen) - len(done)} of {len(chosen)} members were not trained: {failed}")


@app.command(cls=WithScriptArguments)
@click.argument("target", metavar="[FILE.py|FILE:NAME [-- ARGS]]", required=False)
@click.option("-m", "module", metavar="MODULE", help="instead of a file: the script that python -m runs")
@click.option(
    "--workers",
    metavar="N",
    type=_AT_LEAST_ONE,
    help="ranks of the script (default: 2; also --nproc-per-node), or workers of the strategy",
)
@click.option(
    "--steps", metavar="N", type=_AT_LEAST_ONE, help="updates to compare (default: 24 of a script, 8 of a strategy)"
)
@click.option("--accept", metavar="NAME", multiple=True, help="a finding that is intended; again for each one")
@click.option(
    "--then",
    metavar="'ARGS'",
    help="run the script a second time, with these arguments besides, by which it resumes: '--resume last.pt'",
)
@click.option("--reference", metavar="FILE.py:NAME", help="a function(model, batch) that returns a script's loss")
@click.option("--out", metavar="FILE.html", help="write what was found about a script there")
@click.option("--strategy", metavar="S", help="the strategy to prove, of a workload")
@_hosts
@_launcher
@_json
@click.pass_context
def check(  # noqa: PLR0913 (the flags)
    context: click.Context,
    target: str | None,
    module: str | None,
    workers: int | None,
    steps: int | None,
    accept: tuple[str, ...],
    then: str | None,
    reference: str | None,
    out: str | None,
    strategy: str | None,
    hosts: str | None,
    launcher: str | None,
    as_json: bool,
) -> None:
    """Prove that a training script, or a strategy, computes on several workers what one process does, after every step,
    tensor by tensor.

    The target is a script, FILE.py, whose own arguments follow --; or a workload, FILE:NAME, with --strategy.
    """
    given = {"--strategy": strategy, "--hosts": hosts, "--launcher": launcher}
    own = script_arguments(context)
    with guarded():
        if module is not None or (target is not None and ":" not in target):
            request = ScriptRequest(target, module, own, workers, steps, accept, then, reference, out, as_json)
            status = check_script_command(request, given)
        else:
            of_scripts = {"--accept": accept, "--then": then is not None, "--reference": reference, "--out": out}
            workload = workload_of(target, own, of_scripts, strategy)
            status = check_strategy_command(workload, str(strategy), steps, (launcher, workers, hosts), as_json)
    if status:
        raise click.exceptions.Exit(status)


@app.command()
@click.option("--remove", metavar="NAME|all", multiple=True, help="remove this one; again for others; all: every one")
@_json
def proofs(remove: tuple[str, ...], as_json: bool) -> None:
    """List the proofs that earlier runs have made and later ones reuse, or remove some."""
    with guarded():
        from apportion.api.proofs import list_proofs, remove_proofs

        if remove:
            many = remove_proofs(remove)
            click.echo(f"removed {many} cached proof{'' if many == 1 else 's'}")
            return
        found = list_proofs()
        if as_json:
            _print_json(found)
        else:
            from apportion.cli.tables import show_proofs

            show_proofs(found)


@app.command()
@_workload
@click.option("--strategy", metavar="S", multiple=True, help="again for each one; without it all")
@_workers
@_hosts
@click.option(
    "--steps", metavar="N", type=_AT_LEAST_ONE, default=50, show_default=True, help="updates of each, after a warm-up"
)
@click.option("--out", metavar="FILE", help="save the table there, as JSON")
@_launcher
@_json
def compare(  # noqa: PLR0913 (the flags)
    workload: str,
    strategy: tuple[str, ...],
    workers: int | None,
    hosts: str | None,
    steps: int,
    out: str | None,
    launcher: str | None,
    as_json: bool,
) -> None:
    """Measure strategies against each other, on this machine or on several hosts.

    FILE:NAME is the workload: path/to/file.py:name or package.module:name.
    """
    with guarded():
        begin(workload, strategy, launcher, hosts)
        from apportion.api.comparison import show_rows

        where = launcher_of(launcher, workers, hosts)
        rows = apportion.compare(workload, list(strategy) or None, steps=steps, path=out, launcher=where)
        if not is_first(launcher):
            pass
        elif as_json:
            _print_json([row.to_json() for row in rows])
        else:
            show_rows(rows)


@app.command()
@click.argument("workload", metavar="[FILE:NAME]", required=False)
@click.option("--network", metavar="FILE", help="instead of it, its profile")
@click.option("--cluster", metavar="FILE|NAME", help="which machines (default: this one, measured)")
@click.option("--against", metavar="FILE|NAME", help="other machines: how many of them match these?")
@_workers
@_hosts
@click.option("--no-trial", is_flag=True, help="stop at the prediction")
@click.option("--allow-approximate", is_flag=True, help="choose an approximate one if a pilot speaks for it")
@click.option("--remeasure", is_flag=True, help="measure this machine again")
@click.option("--launcher", metavar="L", help="env: for the ranks that run this, on their hosts")
@click.option("--out", metavar="FILE.html", help="write the plan there, with pictures")
@_json
def plan(  # noqa: PLR0913 (the flags)
    workload: str | None,
    network: str | None,
    cluster: str | None,
    against: str | None,
    workers: int | None,
    hosts: str | None,
    no_trial: bool,
    allow_approximate: bool,
    remeasure: bool,
    launcher: str | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Say which way to split a workload, why, and when the answer would change.

    FILE:NAME is the workload: path/to/file.py:name or package.module:name. With --network, only the commands that are
    printed name it.
    """
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
        from apportion.planner.plan_text import show_plan

        show_plan(decided)


@app.command()
@click.argument("run_dir", metavar="RUN")
@click.argument("data", metavar="DATA")
@click.option("--out", metavar="FILE.npz", required=True, help="the outputs, an array of them by name")
@click.option("--which", metavar="W", help="best, latest or a step (default: the best, where the run has one)")
@click.option("--batch-size", metavar="N", type=_AT_LEAST_ONE, default=256, show_default=True, help="examples at once")
@_trust
def predict(run_dir: str, data: str, out: str, which: str | None, batch_size: int, trust: bool) -> None:
    """Write what a run's network predicts for a data set.

    DATA is FILE:NAME, a map-style data set or a function that makes one, or FILE.npz with the inputs.
    """
    with guarded():
        found = apportion.predict(run_dir, data, out=out, which=_which(which), batch_size=batch_size, trust=trust)
        import torch

        from apportion.core import tree

        shapes = ", ".join(str(tuple(t.shape)) for t in tree.tensors(found) if isinstance(t, torch.Tensor))
        click.echo(f"{out}: outputs of shape {shapes}")


@app.command()
@click.argument("run_dir", metavar="RUN")
@click.argument("data", metavar="[DATA]", required=False)
@click.option("--which", metavar="W", help="best, latest or a step (default: the best, where the run has one)")
@_trust
@_json
def evaluate(run_dir: str, data: str | None, which: str | None, trust: bool, as_json: bool) -> None:
    """Say how well a run's network does on a data set.

    DATA is FILE:NAME, a map-style data set or a function that makes one; without it the workload's own evaluation set.
    """
    with guarded():
        metrics = apportion.evaluate(run_dir, data, which=_which(which), trust=trust)
        if as_json:
            _print_json(metrics)
        else:
            for name, value in metrics.items():
                click.echo(f"{name} {value:.6g}")


def _which(given: str | None) -> str | int | None:
    return int(given) if given is not None and given.isdigit() else given


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1, default=str))


@app.command()
@click.argument("members", metavar="MEMBER...", nargs=-1, required=True)
@click.option("--deadline", metavar="T", help='of a request that names none: 50ms, "2 s" (default: 1s)')
@click.option("--quorum", metavar="N", type=_AT_LEAST_ONE, help="members that an answer needs (default: 1)")
@click.option("--replication", metavar="R", help="auto (default), in_graph or between_graph")
@click.option(
    "--host",
    metavar="H",
    multiple=True,
    help="address to listen at (default: 127.0.0.1); again for each name that clients use for it",
)
@click.option("--port", metavar="N", type=int, help="0: any that is free (default: 8000)")
@click.option(
    "--evaluate", metavar="DATA", help="FILE:NAME or FILE.npz: say what answers without a member cost, and end"
)
@click.option("--serving", "settings", metavar="S", help="for example \"serving(most_rows=64, aggregation='vote')\"")
@_trust
def serve(  # noqa: PLR0913 (the flags)
    members: tuple[str, ...],
    deadline: str | None,
    quorum: int | None,
    replication: str | None,
    host: tuple[str, ...],
    port: int | None,
    evaluate: str | None,
    settings: str | None,
    trust: bool,
) -> None:
    """Answer with one net or an ensemble by a deadline, over the Open Inference Protocol.

    MEMBER is FILE.onnx, FILE.pt2, a run or a checkpoint, http://...; or NAME=that.
    """
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

            click.echo("\n".join(offline_evaluation.evaluate(named(list(members)), evaluate, serving).lines()))
            return
        number = apportion.serve(named(list(members)), serving=serving)
    if number == signal.SIGINT:
        raise click.exceptions.Exit(INTERRUPTED)


@app.command()
@click.argument("run", metavar="RUN")
@click.option("--target", metavar="T", default="onnx", show_default=True, help='"onnx", "onnx(precision=\'int8\')"')
@click.option("--out", metavar="FILE", help="default: model.onnx and the like, in RUN")
@_trust
@_json
def export(run: str, target: str, out: str | None, trust: bool, as_json: bool) -> None:
    """Carry a trained net to other hardware, and hold what the file computes against the net.

    RUN is a run's folder, or one of its checkpoints.
    """
    with guarded():
        from apportion.core.value import check_written

        check_written(target, "apportion.exporting.targets")
        from apportion.api.export import export_run, verified

        signal.signal(signal.SIGTERM, _end)
        made = export_run(run, target=target, path=out, trust=trust)
        if as_json:
            click.echo(json.dumps(made.to_json()))
        else:
            click.echo(f"{made.path}: {made.nbytes:,} bytes, {made.target}")
            for line in verified(made):
                click.echo(f"  {line}")
            for report in made.reports:
                click.echo(f"  report: {report}")


def _end(number: int, _: object) -> None:
    """End by a signal as by an exception, so that what was begun is cleared away."""
    raise SystemExit(128 + number)
