"""`make deploy-demo` as somebody types it who has just checked the repository out."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.numpy import load_file
from stack import COMPOSE, ROOT, docker

from coterie.deploy.app_bundle import bundle

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(1800)]


def test_the_demo_of_a_clean_checkout(image, tmp_path):
    checkout, secrets = tmp_path / "checkout", {"ca.key", "server.key", "superexec.secret"}
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    checkout.mkdir()
    packed = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"], cwd=ROOT, input=tracked, capture_output=True, check=True
    )
    subprocess.run(["tar", "--extract"], cwd=checkout, input=packed.stdout, check=True)

    def demo():
        words = ["make", "deploy-demo"]
        return subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=600)

    said = demo()
    assert said.returncode == 0, said.stdout + said.stderr
    out = checkout / "docker" / "demo" / "out"
    assert secrets <= {path.name for path in (out / "pki").iterdir()}
    assert f"delete them with: rm -rf '{out}/pki'" in said.stdout
    assert len(list((out / "data").iterdir())) == 3
    folder = out / "runs" / "demo"
    result = json.loads((folder / "result.json").read_text())
    assert result["rounds"] == 3
    assert result["certified"]
    assert 0 < result["epsilon"] <= 8
    assert "accuracy" not in result
    exact = json.loads((folder / "diagnostics.json").read_text())
    assert exact["accuracy"] > 0.5  # 50 runs: mean 0.795, deviation 0.027, so 11 deviations below the mean
    assert {path.stat().st_mode & 0o077 for path in [out, folder, *folder.rglob("*")]} == {0}
    assert f"{exact['accuracy']:.1%}".replace("%", " %") in said.stdout
    assert load_file(folder / "models" / "cluster-0.safetensors")
    assert (folder / "report.html").stat().st_size > 10_000
    subprocess.run([sys.executable, "-m", "coterie.cli", "privacy", "check", folder], check=True)
    assert docker("ps", "--all", "--quiet", "--filter", "label=com.docker.compose.project=coterie-demo").stdout == ""
    assert docker("volume", "ls", "--quiet", "--filter", "name=coterie-demo").stdout == ""

    again = demo()
    assert again.returncode != 0
    assert "is there: move it away" in again.stderr


def test_the_image_installs_nothing_writes_in_private_and_sends_the_app_of_the_checkout(image):
    def asked(*words, **options):
        return docker("run", "--rm", "--network", "none", image, *words, **options)

    assert "No module named pip" in asked("python3", "-m", "pip", "list", check=False).stderr
    assert asked("sh", "-c", "umask").stdout == "0077\n"
    assert asked("coterie", "fab-hash", "/app").stdout.strip() == bundle(ROOT).hash


def test_the_overlay_for_gpus_gives_every_client_one(image):
    environment = {**os.environ, "SERVER_DIR": "/"}
    files = ("-f", COMPOSE, "-f", COMPOSE.with_name("compose.gpu.yml"))
    whole = json.loads(docker("compose", *files, "config", "--format", "json", env=environment).stdout)["services"]
    gpus = {name for name, service in whole.items() if "deploy" in service}
    assert gpus == {"client-0", "client-1", "client-2"}
    for name in gpus:
        (device,) = whole[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    assert whole["server"]["build"]["args"]["DEVICE"] == "cuda"
