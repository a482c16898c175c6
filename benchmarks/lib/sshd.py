"""A real sshd on each host of `hosts.py`, with keys and a configuration of their own: what ssh() needs.

The hosts are called a, b and so on. The folder that is given holds keys, the client's configuration (`config`), and for
each host its log, and a folder of its name that stands for its /tmp.
"""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

PORT = 2222
START_SECONDS = 10.0
_SERVER = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/{name}.pid
AuthorizedKeysFile {folder}/user_key.pub
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
ForceCommand echo "Welcome to {name}."; eval "$SSH_ORIGINAL_COMMAND"
SetEnv TMPDIR={folder}/{name} {environment}
"""
_CLIENT = """
Host *
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


def cannot():
    """Why there can be no sshd here, or None."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"needs {program}: apt-get install openssh-client"
    return None if _sshd() is not None else "needs sshd: apt-get install openssh-server"


@contextlib.contextmanager
def sshds(made, folder, environment):
    """Starts one on every host, of one rank each, and yields the processes by the names of the hosts. `environment`:
    what is set for whoever logs in. Each host but the first has a folder `private` that no other one sees."""
    _write(made, folder)
    text = " ".join(f"{name}={value}" for name, value in environment.items())
    servers = {}
    try:
        for number, address in enumerate(made.addresses):
            name = _name(number)
            (folder / name).mkdir()
            settings = folder / f"{name}.conf"
            given = {"port": PORT, "address": address, "folder": folder, "name": name, "environment": text}
            settings.write_text(_SERVER.format(**given))
            command = made.command(number, [_sshd(), "-D", "-e", "-f", str(settings)])
            if number:  # ip has given it mounts of its own
                own = f"mount -t tmpfs -o size=64m tmpfs {folder / 'private'}"
                at = command.index(_sshd())
                command[at:] = ["sh", "-c", f'{own} && exec "$@"', "sh", *command[at:]]
            with open(folder / f"{name}.log", "wb") as log:
                servers[name] = subprocess.Popen(command, stderr=log)
        for name in servers:
            _await(folder / f"{name}.log")
        yield servers
    finally:
        for server in servers.values():
            server.kill()
            server.wait()


def _name(number):
    return chr(ord("a") + number)


def _sshd():
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _write(made, folder):
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"[{address}]:{PORT} {key}\n" for address in made.addresses))
    names = "".join(f"Host {_name(n)}\n  HostName {address}\n" for n, address in enumerate(made.addresses))
    names += f"Host also-a\n  HostName {made.addresses[0]}\n"
    (folder / "config").write_text(names + _CLIENT.format(port=PORT, folder=folder))
    (folder / "private").mkdir()
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    program.chmod(0o755)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


def _await(log):
    end = time.monotonic() + START_SECONDS
    while "Server listening" not in log.read_text():
        if time.monotonic() > end:
            raise OSError(f"sshd does not listen: {log.read_text()}")
        time.sleep(0.01)
