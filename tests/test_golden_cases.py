"""The golden loader itself: weights and inputs are made again bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .golden_cases import SMALL, case_dirs, expand, load_case


def test_the_small_cases_are_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV41_GOLDEN_DIR", raising=False)
    assert [path.name for path in case_dirs()] == ["short-bfloat16", "short-float32", "tiny-bfloat16", "tiny-float32"]
    assert all(path.parent == SMALL for path in case_dirs())


def test_the_wide_cases_are_found_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("wide-float32", "tiny-float32"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "case.json").write_text("{}")
    monkeypatch.setenv("DSV41_GOLDEN_DIR", str(tmp_path))
    assert case_dirs("wide-*") == [tmp_path / "wide-float32"]
    assert case_dirs("tiny-float32") == [SMALL / "tiny-float32"]


@pytest.mark.parametrize("path", case_dirs(), ids=lambda path: path.name)
def test_a_case_expands_to_its_recorded_sha256(path: Path, tmp_path: Path) -> None:
    target = expand(path, tmp_path)  # checks the SHA-256 itself
    case = load_case(path)
    io = load_file(target / "io.safetensors")
    assert io.keys() == case.io.keys()
    assert all(torch.equal(io[name], tensor) for name, tensor in case.io.items())
    assert case.hidden.shape == (case.config.num_hidden_layers, case.tokens, case.config.hidden_size)
    assert case.hidden.dtype == case.dtype


def test_a_case_that_does_not_match_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "short-float32"
    broken.mkdir()
    for name in ("config.json", "golden.safetensors"):
        (broken / name).write_bytes((SMALL / "short-float32" / name).read_bytes())
    case = json.loads((SMALL / "short-float32" / "case.json").read_text())
    (broken / "case.json").write_text(json.dumps(case | {"seed": case["seed"] + 1}))
    with pytest.raises(AssertionError, match="SHA-256"):
        expand(broken, tmp_path / "out")
