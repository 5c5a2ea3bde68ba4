"""The example of a third party's backend: installed from its folder into an environment of its own, and removed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "docs/examples/dsv41-toy"


class Environment:
    """A virtual environment with nothing in it, and the packages of this one behind it so that none is downloaded."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=False)
        self.python = folder / "env/bin/python"
        self.packages = next(folder.glob("env/lib/python*/site-packages"))
        behind = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        lines = (f"import site; site.addsitedir({path!r})\n" for path in behind)
        (self.packages / "behind.pth").write_text("".join(lines))
        # A copy, since building leaves files beside the sources.
        self.source = folder / "dsv41-toy"
        shutil.copytree(EXAMPLE, self.source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))

    def run(self, *command: str) -> str:
        """The output of `python -m command`, which must succeed."""
        done = subprocess.run(
            [self.python, "-P", "-m", *command], capture_output=True, text=True, cwd=self.source, timeout=280
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def install(self) -> None:
        offline = ("--no-deps", "--no-build-isolation", "--no-index")
        self.run("pip", "install", "-q", *offline, str(self.source))

    def files(self) -> set[Path]:
        return {path for path in self.packages.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("example"))
    environment.install()
    return environment


def test_the_probe_shows_its_device_its_library_and_its_reasons(installed: Environment) -> None:
    report = json.loads(installed.run("dsv41", "probe", "--json"))
    (device,) = (device for device in report["devices"] if device["key"] == "toy:0")
    assert (device["name"], device["arch"]) == ("Toy A1", "toy-a1")
    assert report["chosen"]["toy:0"] == "toy"
    assert report["libraries"]["toyaccel"]["features"] == ["scores"]
    ((reason,),) = (report["backends"]["toy"][key]["reasons"] for key in ("cpu",))
    assert reason["class"] == "arch"
    assert "toy:0" in installed.run("dsv41", "probe")


def test_it_passes_the_conformance_suite(installed: Environment, tmp_path: Path) -> None:
    said = installed.run("dsv41", "check", "--backend", "toy", "--quick", "--report", str(tmp_path / "report.json"))
    assert "toy" in said
    report = json.loads((tmp_path / "report.json").read_text())
    outcomes = {clause["id"]: clause["outcome"] for clause in report["results"]}
    assert "passed" in outcomes.values()
    assert set(outcomes.values()) <= {"passed", "skipped"}


def test_its_own_tests_pass(installed: Environment) -> None:
    """The suite has just run as a command, so of the class that inherits it a few clauses will do."""
    tests = ("tests/test_port.py", "tests/test_conformance.py")
    said = installed.run("pytest", "-q", "-p", "no:cacheprovider", "-k", "test_port or D2 or H1 or L4", *tests)
    assert "passed" in said
    assert "skipped" not in said


def test_its_removal_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    before = environment.files()
    environment.install()
    assert environment.files() > before
    environment.run("pip", "uninstall", "-q", "-y", "dsv41-toy")
    assert environment.files() == before
    assert "toy" not in environment.run("dsv41", "probe", "--json")
