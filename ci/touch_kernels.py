"""Runs every kernel of the portable backend at small sizes, for a memory checker to watch."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from dsv41 import AttentionStack, Session, load_checkpoint, make_checkpoint
from dsv41.backends.portable.backend import PortableBackend
from dsv41.synthetic import small_config


class Unfused(PortableBackend):
    """With the rotations in launches of their own, as backends with another attention kernel have them."""

    fuses_rotation = False


RUNS = (
    (PortableBackend, "auto", "auto", True),
    (Unfused, "fp8_ds_mla_v4", "fp8", True),
    (PortableBackend, "fp8_e4m3", "auto", False),
)


@torch.no_grad()
def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder) / "small", config=small_config())
        for kind, kv_cache_dtype, index_cache_dtype, quantize in RUNS:
            backend = kind(device="cuda", kv_cache_dtype=kv_cache_dtype, index_cache_dtype=index_cache_dtype)
            checkpoint = load_checkpoint(path, device="cuda")
            stack = AttentionStack(checkpoint, backend, max_len=512, quantize_activations=quantize)
            session = Session(stack, max_requests=2, max_tokens=512, max_step_tokens=128)
            one, two = session.add_request(), session.add_request()
            hidden = torch.randn(90, stack.config.hidden_size, device="cuda").bfloat16()
            found = session.step({one: hidden[:83], two: hidden[:7]}, pad_to=100)
            for token in range(3):
                found = session.step({one: hidden[token : token + 1], two: hidden[token : token + 2]}, pad_to=8)
            session.insert_window({one: hidden[:2]})
            torch.cuda.synchronize()
            assert all(rows.isfinite().all() for rows in found.values())


if __name__ == "__main__":
    main()
