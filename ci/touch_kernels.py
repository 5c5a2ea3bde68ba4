"""Runs every kernel of the portable backend, with few heads and with the release's, for a memory checker to watch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from dsv41 import AttentionStack, Session, load_checkpoint, make_checkpoint
from dsv41.backends.portable.backend import PortableBackend
from dsv41.synthetic import small_config


class Unfused(PortableBackend):
    """With the rotations in launches of their own, as backends with another attention kernel have them."""

    fuses_rotation = False


SMALL = small_config()
WIDE = replace(SMALL, num_attention_heads=64, index_n_heads=32, o_groups=8)
RUNS = (
    (SMALL, PortableBackend, "auto", "auto", True),
    (SMALL, Unfused, "fp8_ds_mla_v4", "fp8", True),
    (SMALL, PortableBackend, "fp8_e4m3", "auto", False),
    (WIDE, PortableBackend, "auto", "auto", False),
    (WIDE, PortableBackend, "fp8_ds_mla_v4", "auto", True),
)


@torch.no_grad()
def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number, (config, kind, kv_cache_dtype, index_cache_dtype, quantize) in enumerate(RUNS):
            path = make_checkpoint(Path(folder) / str(number), config=config)
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
