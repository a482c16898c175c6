"""The secret of a run, and the file that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from apportion.comm.network.handshake import secret_of_run
from apportion.errors import ApportionError


def file_of(tmp_path: Path, data: bytes, mode: int = 0o600) -> dict[str, str]:
    path = tmp_path / "secret"
    path.write_bytes(data)
    path.chmod(mode)
    return {"APPORTION_SECRET_FILE": str(path)}


def test_the_secret_is_what_the_file_holds_without_the_line_end(tmp_path: Path) -> None:
    assert secret_of_run(file_of(tmp_path, b"0123456789abcdef\n")) == b"0123456789abcdef"
    assert secret_of_run(file_of(tmp_path, b"0123456789abcdef\n", 0o440)) == b"0123456789abcdef", "a Kubernetes Secret"
    assert secret_of_run({}) is None
    assert secret_of_run({"APPORTION_SECRET_FILE": ""}) is None


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o622])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=f"has mode {mode:o}, .*chmod 600"):
        secret_of_run(file_of(tmp_path, b"0123456789abcdef", mode))


@pytest.mark.parametrize("length", [0, 15, 4097, 100_000])
def test_a_secret_that_could_be_guessed_or_is_none_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ValueError, match=r"and a secret has 16 to 4096: make one with .umask 077"):
        secret_of_run(file_of(tmp_path, b"x" * length))


def test_a_file_that_is_not_there_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ApportionError, match=r"cannot be read .No such file or directory.: .*umask 077"):
        secret_of_run({"APPORTION_SECRET_FILE": str(tmp_path / "none")})
