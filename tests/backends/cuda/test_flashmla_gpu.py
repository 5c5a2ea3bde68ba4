"""The FlashMLA backend over the library itself, beside the reference in the same records; on an SM90 or SM100 GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from dsv41.backends.cuda import prefill
from dsv41.backends.cuda.flashmla import FlashMLABackend
from dsv41.backends.cuda.layouts import record_view
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.bench import make_work, our_call, random_caches
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.config import DeepseekV41Config
from dsv41.golden import Golden
from dsv41.hal.types import AttnOutput, ForwardBatch
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint, small_config
from dsv41.verify import Trace, compare_with_reference, relative_error

from ...golden_cases import case_dirs, expand
from ...model.test_graph import RELEASE
from ...model.toys import TOY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CLOSE = 1e-2
BF16 = torch.bfloat16


@pytest.fixture(autouse=True, params=["auto", "hopper", "flashmla"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the table says, which on Hopper are our kernels; these with branches of captured steps; FlashMLA's own."""
    pytest.importorskip("flash_mla", exc_type=ImportError)
    monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", request.param)
    with torch.no_grad():
        yield request.param


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = make_checkpoint(tmp_path_factory.mktemp("flashmla") / "small", config=small_config())
    return load_checkpoint(path, device="cuda", layers=list(range(8)))


def run(stack: AttentionStack, steps: Sequence[tuple[Mapping[int, int], int]]) -> Trace:
    """Steps of so many tokens a request, the same requests in each, and so much padding; over pages of NaN."""
    session = Session(stack, max_requests=3, max_tokens=4096)
    for caches in session.caches.values():
        for cache in (caches.window, caches.compressed, caches.index):
            if cache is not None:
                cache.data.fill_(0xFF)
    for _ in steps[0][0]:
        session.add_request()
    trace, generator = Trace(), torch.Generator().manual_seed(0)
    for counts, padding in steps:
        size = (sum(counts.values()), stack.config.hidden_size)
        parts = torch.randn(size, generator=generator).to("cuda", stack.dtype).split(list(counts.values()))
        session.step(dict(zip(counts, parts, strict=True)), pad_to=size[0] + padding, tap=trace)
    return trace


STEPS: dict[str, list[tuple[Mapping[int, int], int]]] = {
    "decode": [({0: 1, 1: 1}, 0)] * 70,
    "prefill, then decode": [({0: 600, 1: 40}, 0), *[({0: 1, 1: 1}, 0)] * 3],
    "mixed": [({0: 40, 1: 0, 2: 90}, 0), ({0: 1, 1: 530, 2: 1}, 3), ({0: 560, 1: 1, 2: 5}, 0)],
    "several tokens, padded": [({0: 3, 1: 5}, 8)] * 12,
}


@pytest.mark.parametrize("fewest", [512, 4], ids=["by the rule", "gathered from 4 tokens on"])
@pytest.mark.parametrize("steps", STEPS)
def test_steps_are_those_of_the_reference(
    small: Checkpoint, steps: str, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "FEWEST_TOKENS", fewest)
    backend = FlashMLABackend(device="cuda")
    trace = run(AttentionStack(small, backend, max_len=2048), STEPS[steps])
    found = compare_with_reference(small, backend, trace, len(STEPS[steps][0][0]))
    print(f"{steps}: {found.max_relative_error:.2e} against the reference in the same records")
    assert found.failures == []
    assert found.max_relative_error <= CLOSE


@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize("tokens", [1, 16, 512])
@pytest.mark.parametrize("portable", [False, True])
def test_attention_alone_at_the_sizes_of_the_release(
    heads: int, tokens: int, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random rows, of which some tokens see fewer and one sees none."""
    if portable:
        monkeypatch.setenv("DSV41_FLASHMLA_KERNEL", "portable")
    backend = FlashMLABackend(device="cuda")
    work = make_work(backend, random_caches(backend, (64, 512), seed=1), tokens, heads, seed=2)
    rows = work.rows[0]
    rows.window[0, 40:] = -1
    rows.compressed[0, ::3] = -1
    if tokens > 1:
        rows.window[1], rows.compressed[1] = -1, -1
    outs = []
    for on in (backend, ReferenceBackend(device="cuda", kv_cache_dtype="fp8_ds_mla_v4")):
        outs.append(AttnOutput(torch.full_like(work.q, math.nan)))
        our_call(on, work, rows, outs[-1])()
    found, expected = (out.data[:, :heads] for out in outs)
    assert found.isfinite().all()
    assert relative_error(found, expected) <= CLOSE
    if tokens > 1:
        assert (found[1] == 0).all()


@pytest.mark.parametrize("sink", [-math.inf, 0.3, math.inf])
@pytest.mark.parametrize("length", [0, 128], ids=["no length", "nothing but -1"])
@pytest.mark.parametrize("tokens", [1, 200])
def test_the_library_gives_zeros_where_there_is_no_key(tokens: int, length: int, sink: float) -> None:
    """Which is why nothing here clears such rows."""
    backend = FlashMLABackend(device="cuda")
    caches = random_caches(backend, (8, 16), seed=1)
    q = torch.randn(tokens, 1, 64, 512, device="cuda").to(BF16)
    sinks = torch.full((64,), sink, device="cuda")
    indices = torch.randint(448, (tokens, 1, 640), device="cuda", dtype=torch.int32)
    lengths = [torch.full((tokens,), width, device="cuda", dtype=torch.int32) for width in (128, 512, 640)]
    indices[0] = -1
    for each in lengths:
        each[0] = min(length, int(each[0]))
    assert caches.compressed is not None
    in_place = backend.library.flash_mla_with_kvcache(
        q=q, k_cache=record_view(caches.window), block_table=None, cache_seqlens=None, head_dim_v=512,
        tile_scheduler_metadata=backend.library.get_mla_metadata()[0], softmax_scale=0.04, is_fp8_kvcache=True,
        indices=indices[..., :128].contiguous(), attn_sink=sinks, topk_length=lengths[0],
        extra_k_cache=record_view(caches.compressed), extra_indices_in_kvcache=indices[..., 128:].contiguous(),
        extra_topk_length=lengths[1],
    )[0]  # fmt: skip
    kv = torch.randn(448, 1, 512, device="cuda").to(BF16)
    gathered = backend.library.flash_mla_sparse_fwd(
        q=q[:, 0], kv=kv, indices=indices, sm_scale=0.04, d_v=512, attn_sink=sinks, topk_length=lengths[2]
    )[0]
    for out in (in_place, gathered):
        assert (out[0] == 0).all()
        assert out.isfinite().all()
        assert tokens == 1 or sink == math.inf or out[1:].any()


def test_a_draft_block_is_that_of_the_reference(tmp_path: Path) -> None:
    config = small_config()
    path = make_checkpoint(tmp_path / "draft", config=config, layers=[8])
    target, block = (torch.randn(n, config.hidden_size, device="cuda").to(BF16) for n in (41, 5))
    outputs = []
    for backend in (
        FlashMLABackend(device="cuda"),
        ReferenceBackend(device="cuda", kv_cache_dtype="fp8_ds_mla_v4"),
    ):
        stack = AttentionStack(load_checkpoint(path, layers=[8], device="cuda"), backend, max_len=256)
        session = Session(stack, max_requests=2, max_tokens=128)
        one, two = session.add_request(), session.add_request()
        session.insert_window({one: target, two: target[:2]})
        found = session.draft({one: block, two: block[:3]}, pad_to=9)
        outputs.append(torch.cat([found[one], found[two]]))
    assert relative_error(*outputs) <= CLOSE


@pytest.mark.parametrize(
    ("config", "grows"),
    [(TOY, (1, 1)), (TOY, (2, 0, 1)), (RELEASE, (13,)), (RELEASE, (10, 3))],
    ids=["small, two", "small, three", "release", "release, two"],
)
def test_replays_are_eager_steps_bit_for_bit(tmp_path: Path, config: DeepseekV41Config, grows: tuple[int, ...]) -> None:
    """Requests that grow across the window and the top-k: every replay plans for the lengths that it finds."""
    backend, steps = FlashMLABackend(device="cuda"), 100
    tokens, longest = sum(grows), steps * max(grows) + 1
    path = make_checkpoint(tmp_path / "model", config=config)
    stack = AttentionStack(load_checkpoint(path, device="cuda", dtype=BF16), backend, max_len=longest)
    limits = {"max_requests": len(grows), "max_tokens": longest * len(grows), "max_step_tokens": tokens}
    eager, captured = Session(stack, **limits), Session(stack, **limits)
    captured.capture(tokens, num_requests=len(grows), layer_inputs=True)
    for session in (eager, captured):
        for _ in grows:
            session.add_request()
    generator = torch.Generator().manual_seed(0)
    for number in range(steps):
        drawn = torch.randn(len(stack.layers), tokens, config.hidden_size, generator=generator)
        inputs = dict(enumerate(drawn.to("cuda", BF16).split(list(grows), dim=1)))
        expected, found = eager.step(inputs, pad_to=tokens), captured.step(inputs)
        assert all(torch.equal(found[r], expected[r]) for r in inputs), number
    length = eager.length(grows.index(max(grows)))
    assert length > config.sliding_window
    assert length > config.index_topk


@pytest.mark.parametrize("path", case_dirs("*bfloat16"), ids=lambda path: path.name)
def test_golden_cases_run_as_on_the_reference_in_the_same_records(path: Path, tmp_path: Path) -> None:
    """The golden outputs are in other records: how far they are is printed, and bounded by what these records cost."""
    folder = expand(path, tmp_path)
    checkpoint = load_checkpoint(folder, device="cuda")
    backend = FlashMLABackend(device="cuda")
    golden = Golden(folder / "io.safetensors", checkpoint.specs, "cuda")
    tokens = golden.tokens
    session = Session(AttentionStack(checkpoint, backend, max_len=tokens), max_requests=1, max_tokens=tokens)
    request, trace = session.add_request(), Trace()
    for start, stop in ((0, tokens - 3), (tokens - 3, tokens - 1), (tokens - 1, tokens)):
        session.step({request: golden.inputs[:, start:stop]}, tap=trace)
    found = compare_with_reference(checkpoint, backend, trace, 1)
    for spec in checkpoint.specs:
        output = golden.get(spec.layer_id, "output")
        assert output is not None
        distance = relative_error(trace.output_of(spec.layer_id, 0), output)
        print(f"{path.name} layer {spec.layer_id}: {distance:.2e} from the golden output")
        assert math.isfinite(distance)
    print(f"{path.name}: {found.max_relative_error:.2e} against the reference in the same records")
    assert found.failures == []
    assert found.max_relative_error <= CLOSE


@pytest.mark.parametrize("counts", [(1, 1), (600, 1)], ids=["decode", "gathered"])
def test_a_step_never_waits_for_the_device(small: Checkpoint, counts: tuple[int, int], kernel: str) -> None:
    stack = AttentionStack(small, FlashMLABackend(device="cuda"), max_len=2048)
    Session(stack, max_requests=2, max_tokens=8192)
    hidden = torch.randn(sum(counts), stack.config.hidden_size, device="cuda").to(BF16)
    pages = torch.arange(30, dtype=torch.int32).view(2, 15)
    batch = ForwardBatch.from_host(
        query_lens=counts,
        seq_lens=[count + 300 for count in counts],
        window_pages=pages,
        window_page_size=64,
        compressed_pages={ratio: pages for ratio in (1, 2)},
        compressed_page_size={1: 64, 2: 64},
        device="cuda",
    )
    runs = stack.backend.plan(batch, stack.specs).extra.runs
    pads = stack.backend.get_padded_num_q_heads(stack.specs[0].num_heads) > stack.specs[0].num_heads
    assert pads == (kernel == "flashmla")
    assert (pads and counts[0] >= prefill.FEWEST_TOKENS) == any(
        run.gathered for parts in runs.values() for run in parts
    )
    for _ in range(2):
        stack.forward(hidden, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stack.forward(hidden, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
