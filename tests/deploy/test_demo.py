"""What becomes of the demo's keys, with a stand-in for Docker; the demo itself runs in tests/deployment."""

import contextlib
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# It does for the demo what its containers do: makes secrets, and leaves a result.
DOCKER = """#!/bin/sh
out=$(dirname "$0")/../docker/demo/out
case "$*" in
  *"compose"*" logs"*) echo "the reason of a container" ;;
  *"flwr run"*) [ -z "$FAIL" ] || exit 3; mkdir -p "$out/runs/demo"; echo '{}' > "$out/runs/demo/result.json" ;;
  *"certs /server/pki --nodes"*) mkdir -p "$out/pki"; echo key > "$out/pki/ca.key" ;;
esac
"""


@pytest.fixture
def demo(tmp_path):
    """Runs demo.sh; what is typed is typed at a terminal."""
    shutil.copytree(ROOT / "docker", tmp_path / "docker", ignore=shutil.ignore_patterns("out", "*.whl"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(DOCKER)
    (tmp_path / "bin" / "docker").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    script = tmp_path / "docker" / "demo.sh"

    def run(*words, typed=None, **more):
        if typed is None:
            options = {"stdin": subprocess.DEVNULL, "capture_output": True}
            done = subprocess.run(["sh", script, *words], env=environment | more, text=True, timeout=30, **options)
            return done.returncode, done.stdout + done.stderr
        ours, theirs = pty.openpty()
        with subprocess.Popen(["sh", script, *words], env=environment | more, stdin=theirs, stdout=theirs) as process:
            os.close(theirs)
            os.write(ours, typed)
            status = process.wait(30)
        said = b""
        with contextlib.suppress(OSError):  # the end: no process has the other side open
            while part := os.read(ours, 65536):  # a terminal returns a line or more at a time
                said += part
        os.close(ours)
        return status, said.decode()

    run.out = tmp_path / "docker" / "demo" / "out"
    return run


@pytest.mark.parametrize(
    ("words", "more", "typed", "kept"),
    [
        ((), {}, None, True),
        (("--keep-keys",), {"KEYS": "delete"}, None, True),
        (("--delete-keys",), {}, None, False),
        ((), {"KEYS": "delete"}, None, False),
        ((), {}, b"y\n", False),
        ((), {}, b"n\n", True),
        ((), {}, b"\n", True),
        ((), {}, b"\x04", True),
        (("--keep-keys",), {}, b"y\n", True),
    ],
)
def test_keys_are_kept_or_deleted(demo, words, more, typed, kept):
    status, said = demo(*words, typed=typed, **more)
    assert status == 0, said
    assert f"private keys of this demo are in {demo.out}/pki" in said
    assert ("delete them? [y/N]" in said) == (typed is not None and not words)
    assert (demo.out / "pki" / "ca.key").exists() == kept
    assert (f"rm -rf '{demo.out}/pki'" in said) == kept
    assert (demo.out / "runs" / "demo" / "result.json").exists()
    assert demo.out.stat().st_mode & 0o777 == 0o700


def test_options_that_there_are_not(demo):
    assert demo("--drop-keys") == (2, "--drop-keys: the options are --keep-keys and --delete-keys\n")
    assert demo(KEYS="yes") == (2, "KEYS=yes: must be keep or delete\n")
    assert not demo.out.exists()


def test_a_demo_that_failed_shows_why_and_does_not_block_the_next_try(demo):
    status, said = demo(FAIL="1")
    assert status == 3
    assert "the reason of a container" in said
    assert (demo.out / "pki").exists()
    status, said = demo()
    assert status == 0, said
    assert "the reason of a container" not in said
    status, said = demo()
    assert (status, said) == (1, f"{demo.out} is there: move it away, or remove it with its secrets\n")
