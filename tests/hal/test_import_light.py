"""Importing this package touches no hardware and no vendor, whatever lies on the path."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsv41.hal.device import LIBRARIES

VENDORS = (*LIBRARIES, "amdsmi", "deep_gemm", "vllm", "cutlass")


def run(code: str, path: Path | None = None, *options: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, with `path` in front of everything else."""
    environment = {key: value for key, value in os.environ.items() if key != "DSV41_BACKEND"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


@pytest.mark.parametrize("module", ["dsv41", "dsv41.hal", "dsv41.errors", "dsv41.hal.select", "dsv41.hal.builtin"])
def test_fr_102_importing_brings_no_torch_and_no_vendor(module: str) -> None:
    done = run(f"import {module}", None, "-X", "importtime")
    assert done.returncode == 0, done.stderr
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"torch", *VENDORS}


def test_fr_14_importing_asks_no_device_anything() -> None:
    done = run("import sys, dsv41; print(sorted(m for m in sys.modules if m.startswith('dsv41')))")
    assert done.stdout.split() == ["['dsv41']"]
    assert done.stderr == ""


def test_every_name_of_the_contract_is_there_and_none_hides_a_module() -> None:
    code = """
import importlib.util, dsv41.hal
for name in dsv41.hal.__all__:
    assert importlib.util.find_spec(f"dsv41.hal.{name}") is None, name
    assert getattr(dsv41.hal, name) is not None
assert set(dsv41.hal.__all__) <= set(dir(dsv41.hal))
try:
    dsv41.hal.nonsense
except AttributeError as error:
    print(error)
"""
    done = run(code)
    assert "module 'dsv41.hal' has no attribute 'nonsense'; it has AttentionBackend" in done.stdout, done.stderr


def test_fr_101_selection_works_with_every_vendor_module_blocked() -> None:
    code = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {VENDORS!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import dsv41
print(dsv41.select_backend(device="cpu").selection.chosen)
"""
    done = run(code)
    assert done.stdout.split() == ["reference"], done.stderr


ENDINGS = {
    "ImportError": "raise ImportError('libc10_cuda.so: cannot open shared object file')",
    "OSError": "raise OSError('libcudart.so.13: cannot open shared object file')",
    "AssertionError": "assert False, 'Torch not compiled with CUDA enabled'",
    "KeyError": "{}['libamd_smi.so']",
    "exits": "import sys; sys.exit(3)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_selection_answers_beside_vendor_packages_that_break_at_import(ending: str, tmp_path: Path) -> None:
    for vendor in ("flash_mla", "flashinfer", "hip", "aiter"):
        (tmp_path / vendor / "ops").mkdir(parents=True)
        (tmp_path / vendor / "__init__.py").write_text(ENDINGS[ending] + "\n")
        (tmp_path / vendor / "ops/shuffle.py").write_text("")
    code = """
import json, dsv41
backend = dsv41.select_backend(device="cpu")
said = {c.name: [r.text for r in c.reasons] for c in backend.selection.candidates}
print(json.dumps([backend.selection.chosen, said]))
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    chosen, said = json.loads(done.stdout.splitlines()[-1])
    assert chosen == "reference"
    for backend, library in {"flashmla": "flash_mla", "flashinfer-sm100": "flashinfer", "aiter": "aiter"}.items():
        (text,) = [text for text in said[backend] if text.startswith(f"{library} cannot be used")]
        assert "importing it" in text
        assert ending in text


@pytest.mark.parametrize("ending", ENDINGS)
def test_selection_answers_beside_a_triton_that_breaks_at_import(ending: str, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(ENDINGS[ending] + "\n")
    done = run('import dsv41; print(dsv41.select_backend(device="cpu").selection.chosen)', tmp_path)
    assert done.stdout.split() == ["reference"], done.stderr


def test_a_broken_library_of_the_choice_is_found_before_it_is_loaded(tmp_path: Path) -> None:
    """The backend that would win needs a library that looks fine and exits at import."""
    (tmp_path / "flash_mla").mkdir()
    (tmp_path / "flash_mla/__init__.py").write_text("import sys; sys.exit(3)\n")
    info = tmp_path / "tokenspeed_flashmla-1.0.0.post20260924.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenspeed-flashmla\nVersion: 1.0.0.post20260924\n")
    code = """
from dataclasses import replace
import dsv41
from dsv41.hal.builtin import REFERENCE
from dsv41.hal.registry import register
from dsv41.hal.requirements import library
needs = library("flash_mla", install="`pip install -U tokenspeed-flashmla`")
register(replace(REFERENCE, name="winner", priority=99, libraries=("flash_mla",), requirements=(needs,)))
selection = dsv41.select_backend(device="cpu").selection
print(selection.chosen, selection.candidate("winner").reasons[0].text, sep="|")
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    chosen, text = done.stdout.strip().split("|")
    assert chosen == "reference"
    assert "importing it exits the process with status 3" in text
