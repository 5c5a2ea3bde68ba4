"""How far each cache record is from bf16 rows, by kind of layer: the table in docs/layouts.md and docs/performance.md.

    python ci/record_errors.py [--device cuda] [--prompt 1024] [--decode 32]

The release's geometry, synthetic weights with the statistics of real ones, the same hidden states for every layer; the
index keys are the release's in all runs, so every run selects the same rows.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import torch

from dsv41 import AttentionStack, Session, load_checkpoint, make_checkpoint, select_backend
from dsv41.verify import relative_error

LAYERS = {0: "window only", 2: "ratio 2", 20: "ratio 1"}
DTYPES = ("fp8_ds_mla_v4", "fp8_ds_mla", "nvfp4_ds_mla", "fp8_e4m3")


@click.command()
@click.option("--backend", default=None)
@click.option("--device", default=None)
@click.option("--prompt", default=1024, show_default=True)
@click.option("--decode", default=32, show_default=True)
def main(backend: str | None, device: str | None, prompt: int, decode: int) -> None:
    """Print the table in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "release", layers=list(LAYERS))
        outputs = {name: _outputs(path, backend, device, name, prompt, decode) for name in ("bfloat16", *DTYPES)}
    print("| record | " + " | ".join(LAYERS.values()) + " |")
    print("| --- |" + " --- |" * len(LAYERS))
    for name in DTYPES:
        errors = [relative_error(found, exact) for found, exact in zip(outputs[name], outputs["bfloat16"], strict=True)]
        print(f"| `{name}` | " + " | ".join(f"{error:.2e}" for error in errors) + " |")


@torch.no_grad()
def _outputs(path: Path, backend: str | None, device: str | None, name: str, prompt: int, decode: int) -> torch.Tensor:
    """`[layers, tokens, hidden]` with the caches in `name`."""
    chosen = select_backend(backend, device=device, kv_cache_dtype=name)
    checkpoint = load_checkpoint(path, device=chosen.device)
    stack = AttentionStack(checkpoint, chosen, max_len=prompt + decode)
    session = Session(stack, max_requests=1, max_tokens=prompt + decode)
    generator = torch.Generator().manual_seed(0)
    shape = (len(LAYERS), prompt + decode, checkpoint.config.hidden_size)
    hidden = torch.randn(shape, generator=generator).to(chosen.device, checkpoint.dtype)
    request = session.add_request()
    parts = [session.prefill(request, hidden[:, :prompt], chunk=512)]
    parts += [session.step({request: hidden[:, t : t + 1]})[request] for t in range(prompt, prompt + decode)]
    return torch.cat(parts, dim=1).cpu()


if __name__ == "__main__":
    main()
