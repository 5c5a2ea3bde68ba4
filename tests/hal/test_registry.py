"""Backends known by name: built in, registered, and found by entry point in any state of repair."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsv41.errors import BackendError
from dsv41.hal import registry
from dsv41.hal.backend import CONTRACT_VERSION
from dsv41.hal.builtin import BUILTIN, REFERENCE
from dsv41.hal.registry import all_specs, load, register, unregister
from dsv41.hal.select import explain_backends

TOY = replace(REFERENCE, name="toy", priority=5)
Plugin = Callable[..., None]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plugin]:
    """Install a distribution with an entry point to a module of this text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def write(name: str, text: str | None, module: str = "dsv41_toy_plugin", attribute: str = "SPEC") -> None:
        modules.append(module)
        if text is not None:
            (tmp_path / f"{module}.py").write_text(text)
        folder = tmp_path / f"{module}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[dsv41.backends]\n{name} = {module}:{attribute}\n")

    yield write
    for module in modules:
        sys.modules.pop(module, None)


GOOD = """
from dsv41.hal.registry import BackendSpec
SPEC = BackendSpec(name="toy", summary="a toy", contract_version={version}, target="toy.backend:Toy",
                   kv_cache_dtypes=("bfloat16",), packed_kv_cache_dtype="bfloat16")
"""


def test_the_built_in_ones_in_order_of_preference() -> None:
    assert [spec.name for spec in all_specs() if spec in BUILTIN] == [
        "flashmla-mega",
        "aiter",
        "flashinfer-sm120",
        "flashmla",
        "flashinfer-sm100",
        "portable",
        "reference",
    ]
    assert {spec.contract_version for spec in BUILTIN} == {CONTRACT_VERSION}


def test_a_backend_can_be_registered_and_forgotten() -> None:
    register(TOY)
    try:
        assert TOY in all_specs()
        with pytest.raises(BackendError, match="'toy' is already known"):
            register(TOY)
    finally:
        unregister("toy")
    assert TOY not in all_specs()
    with pytest.raises(BackendError, match="'toy' was not registered"):
        unregister("toy")


def test_a_built_in_name_cannot_be_taken() -> None:
    with pytest.raises(BackendError, match="'reference' is already known"):
        register(REFERENCE)
    with pytest.raises(BackendError, match="'reference' was not registered"):
        unregister("reference")


def test_the_reference_stays_last() -> None:
    register(replace(TOY, priority=-100))
    try:
        assert all_specs()[-1].name == "reference"
    finally:
        unregister("toy")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "Toy"}, "backend name 'Toy'"),
        ({"name": "auto"}, "not 'auto'"),
        ({"target": "toy"}, "write it as 'package.module:Class'"),
        ({"kv_cache_dtypes": ("auto",)}, "kv_cache_dtypes"),
        ({"kv_cache_dtypes": ()}, "kv_cache_dtypes"),
        ({"packed_kv_cache_dtype": "fp8"}, "packed_kv_cache_dtype"),
        ({"index_cache_dtypes": ("int4",)}, "index_cache_dtypes"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        replace(TOY, **fields)  # type: ignore[arg-type]


def faults(name: str) -> list[tuple[str, str]]:
    return [(reason.cls, reason.text) for reason in explain_backends(device="cpu").candidate(name).reasons]


def test_an_installed_backend_is_found(plugin: Plugin) -> None:
    plugin("toy", GOOD.format(version=CONTRACT_VERSION))
    assert [spec.target for spec in all_specs() if spec.name == "toy"] == ["toy.backend:Toy"]
    assert "toy.backend" not in sys.modules
    assert explain_backends(device="cpu").chosen == "toy"


def test_an_installed_backend_of_another_contract_is_refused(plugin: Plugin) -> None:
    plugin("toy", GOOD.format(version=CONTRACT_VERSION + 1))
    ((cls, text),) = faults("toy")
    assert cls == "library"
    assert f"contract version {CONTRACT_VERSION + 1}, this dsv41 has {CONTRACT_VERSION}" in text


@pytest.mark.parametrize(
    ("text", "cls", "words"),
    [
        (None, "library", "No module named 'dsv41_toy_plugin'): reinstall it"),
        ("import no_such_vendor_library", "library", "cannot be imported"),
        ("raise OSError('libcudart.so.13')", "bug", "OSError: libcudart.so.13"),
        ("import sys; sys.exit(1)", "bug", "SystemExit: 1"),
        ("{}['x']", "bug", "KeyError"),
        ("", "bug", "AttributeError"),
        ("SPEC = object", "bug", "is no BackendSpec"),
        (GOOD.format(version=1).replace('"toy"', '"other"'), "bug", "calls itself 'other'"),
    ],
)
def test_a_broken_plug_in_is_listed_and_never_raised(plugin: Plugin, text: str | None, cls: str, words: str) -> None:
    plugin("toy", text)
    report = explain_backends(device="cpu")
    ((found, reason),) = faults("toy")
    assert found == cls
    assert words in reason
    assert "dsv41-toy-plugin" in reason
    assert report.chosen == "reference"


def test_a_plug_in_cannot_take_a_built_in_name(plugin: Plugin) -> None:
    plugin("flashmla", GOOD.format(version=1).replace('"toy"', '"flashmla"'))
    names = [spec.name for spec in all_specs()]
    assert "flashmla" in names
    ((cls, text),) = faults("flashmla@dsv41-toy-plugin")
    assert cls == "bug"
    assert "the name 'flashmla' is taken" in text


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("dsv41_no_such_module:X", "cannot be loaded: ModuleNotFoundError"),
        ("dsv41.hal.registry:NoSuchClass", "cannot be loaded: AttributeError"),
        ("dsv41.hal.registry:BackendSpec", "is no subclass of dsv41.hal.AttentionBackend"),
        (None, "not part of this version"),
    ],
)
def test_a_target_that_is_no_backend_is_refused(target: str | None, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        load(replace(TOY, target=target))


def test_readers_are_the_backends_of_a_format() -> None:
    assert registry.readers("bfloat16", BUILTIN) == ["flashinfer-sm100", "aiter", "portable", "reference"]
    assert registry.readers("float32", BUILTIN) == ["portable", "reference"]
