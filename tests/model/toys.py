"""Small models with every role, and what a run of them did at the layers' segment borders."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv41.attention import Tap
from dsv41.backends.reference.backend import ReferenceBackend
from dsv41.checkpoint import Checkpoint, load_checkpoint
from dsv41.config import DeepseekV41Config, QuantizationConfig, YarnScaling
from dsv41.hal.types import AttnInputs, AttnOutput, LayerState, Selection, StepPlan
from dsv41.session import Session
from dsv41.stack import AttentionStack
from dsv41.synthetic import make_checkpoint
from dsv41.tensors import BLOCK, TensorInfo, layer_tensors
from dsv41.topology import layer_specs
from dsv41.verify import as_sets, pad_columns

TOY = DeepseekV41Config(
    num_hidden_layers=7,
    hidden_size=64,
    num_attention_heads=4,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=8,
    index_n_heads=2,
    index_topk=6,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 3, 4, 5),
    candidate_source_layer_id=4,
    candidate_topk_blocks=3,
    candidate_block_size=4,
    rope_scaling=YarnScaling(original_max_position_embeddings=4096),
    max_position_embeddings=65536,
    num_nextn_predict_layers=0,
    quantization_config=None,
)
"""Layer 0 is window only; 1 to 3 have ratio 2: a source, a consumer, an index source on the keys of layer 1; 4 to 6
have ratio 1: a source that publishes candidates, an index source that reads them, a consumer. The top-k leaves rows
out from 7 compressed rows on, the candidates from 13."""

MAX_LEN = 64


def plain_checkpoint(path: Path, config: DeepseekV41Config = TOY) -> Checkpoint:
    """Realistic weights in float32, nothing quantised."""
    return load_checkpoint(make_checkpoint(path, config=config, quantized=False, dtype=torch.float32))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def signs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


# Weights on which every sum is exact


def dyadic_checkpoint(path: Path, dtype: torch.dtype, config: DeepseekV41Config = TOY, seed: int = 0) -> Checkpoint:
    """fp8 block-scaled weights with which a step on inputs of +-1 rounds nothing that depends on an order of summation.

    A sum of fp32 products depends on its order only if a partial sum does not fit 24 bits. Here all fit:

    - `wq_a`, `wkv` and the compressor's `wkv` pick one input with a sign for each output, so what a norm sees is rows
      of +-1. Their mean square is 1, and the norm multiplies by its weight, a power of two.
    - The gate of a channel is +-256 times its value. In a group of two, gates are either equal, and then so are the
      values and their mean is one of them, or 512 apart, and the softmax is exactly 1 and 0: the pooled row is +-1
      too. `wk` undoes the weight of the latent's norm, so that `k_norm` sees +-1.
    - Quarter turns stand in for the rotary embedding (`quarter_turns`), since sines are not dyadic.
    - Quantised rows and keys are small integers times powers of two (an e4m3 scale has 4 significant bits), so dot
      products with queries, sums of four signed powers of two, are exact, and so are index scores.
    - Heads 1 and 2 have queries so large that scores which differ do so by over 300: softmax weights, before their
      sum divides them, are exactly 0 or 1. Heads 0 and 3 have queries of zero and see all rows alike, so nothing that
      is missing or read twice can hide.
    - Then comes one division an element; what follows, `wo_a` and `wo_b`, again pick one number each.

    Elementwise functions may round, since they give one result for one input wherever it stands.
    """
    config = replace(config, quantization_config=QuantizationConfig())
    pick = _Picker(seed)
    tensors: dict[str, Tensor] = {}
    for spec in layer_specs(config):
        infos = layer_tensors(config, spec)
        made = _dyadic_layer(config, {key: info.shape for key, info in infos.items()}, pick)
        for key, info in infos.items():
            tensors |= _stored(info, made[key])
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    return load_checkpoint(path, dtype=dtype)


class _Picker:
    """Random small matrices."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def signs(self, *shape: int) -> Tensor:
        return torch.randint(2, shape, generator=self.generator) * 2.0 - 1

    def powers(self, size: int) -> Tensor:
        return 2.0 ** torch.randint(-1, 2, (size,), generator=self.generator)

    def sparse(self, rows: int, cols: int, terms: int) -> Tensor:
        """`terms` entries of +-1 in each row, in random columns."""
        chosen = torch.rand(rows, cols, generator=self.generator).topk(terms, dim=1).indices
        return torch.zeros(rows, cols).scatter_(1, chosen, self.signs(rows, terms))


def _dyadic_layer(config: DeepseekV41Config, shapes: Mapping[str, tuple[int, ...]], pick: _Picker) -> dict[str, Tensor]:
    made = {key: pick.sparse(*shape, 1) for key, shape in shapes.items() if len(shape) == 2}
    made |= {key: pick.powers(*shape) for key, shape in shapes.items() if len(shape) == 1}
    made["wq_b"] = pick.sparse(*shapes["wq_b"], 4) * 2.0**22
    made["wq_b"].view(config.num_attention_heads, config.head_dim, -1)[[0, 3]] = 0
    made["wo_b"] *= 2.0 ** torch.randint(-2, 3, (len(made["wo_b"]), 1), generator=pick.generator)
    made["attn_sink"] = torch.tensor([0.5, -torch.inf, 3.0, 0.0])
    if "compressor.wgate" in shapes:
        made["compressor.wgate"] = made["compressor.wkv"] * 256 * pick.signs(len(made["compressor.wkv"]), 1)
    if "indexer.wk" in shapes:
        made["indexer.wk"] /= made["compressor.norm"]
    if "indexer.wq_b" in shapes:
        made["indexer.wq_b"] = pick.sparse(*shapes["indexer.wq_b"], 4)
        made["indexer.weights_proj"] = pick.sparse(*shapes["indexer.weights_proj"], 16)
    return made


def _stored(info: TensorInfo, value: Tensor) -> dict[str, Tensor]:
    """A projection as fp8 codes with a power of two a block, which take this value apart exactly."""
    if info.kind != "projection":
        return {info.name: value.float() if info.kind in ("sink", "kept") else value.bfloat16()}
    rows, cols = info.scale_shape
    amax = value.view(rows, BLOCK, cols, BLOCK).abs().amax((1, 3)).clamp(min=2.0**-60)
    scale = amax.log2().ceil()
    codes = (value / (2.0**scale).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).to(torch.float8_e4m3fn)
    return {info.name: codes, info.scale_name: (scale + 127).to(torch.uint8).view(torch.float8_e8m0fnu)}


def quarter_turns(stack: AttentionStack) -> None:
    """Replace the rotary tables: pair i of position p turns by p * (i + 1) + i quarters, which is exact."""
    table = stack.layers[0].state.cos_sin
    pair = torch.arange(table.shape[1] // 2)
    quarters = (torch.arange(len(table))[:, None] * (pair + 1) + pair) % 4
    cos, sin = torch.tensor([1.0, 0, -1, 0])[quarters], torch.tensor([0, 1.0, 0, -1])[quarters]
    for layer in stack.layers:
        layer.state.cos_sin = torch.cat((cos, sin), dim=1).to(layer.state.cos_sin.device)


# What a run did


class Watch:
    """A tap that keeps, for each request, what every layer selected, attended to and put out.

    `rows(request)` names them "<layer> topk", "<layer> candidates", "<layer> attended" and "<layer> output".
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        backend = session.stack.backend
        assert isinstance(backend, WatchedBackend)
        self._backend, self._requests = backend, list[int]()
        self._parts: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def step(self, inputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self._requests, self._backend.watch = list(inputs), self
        return self.session.step(inputs, tap=self)

    def keep(self, what: str, plan: StepPlan, rows: Tensor) -> None:
        starts = plan.batch.query_start_loc_cpu.tolist()
        for request, start, stop in zip(self._requests, starts, starts[1:], strict=False):
            self._parts[request][what].append(rows[start:stop])

    def inputs(self, layer: LayerState, plan: StepPlan, inputs: AttnInputs) -> None: ...

    def selection(self, layer: LayerState, plan: StepPlan, selection: Selection) -> Selection:
        self.keep(f"{layer.spec.layer_id} topk", plan, selection.topk_indices)
        if layer.spec.publishes_candidates and selection.candidates is not None:
            self.keep(f"{layer.spec.layer_id} candidates", plan, selection.candidates)
        return selection

    def output(self, layer: LayerState, plan: StepPlan, output: Tensor) -> None:
        self.keep(f"{layer.spec.layer_id} output", plan, output)

    def rows(self, request: int) -> dict[str, Tensor]:
        """Of all steps so far; selections as sets, bool `[T, MAX_LEN]`."""
        sets = ("topk", "candidates")
        return {
            what: as_sets(pad_columns(parts), MAX_LEN) if what.endswith(sets) else torch.cat(parts)
            for what, parts in self._parts[request].items()
        }


class WatchedBackend(ReferenceBackend):
    """The reference, showing a `Watch` its attention outputs before they are projected."""

    watch: Watch | None = None

    def project(self, out: AttnOutput, layer: LayerState, plan: StepPlan) -> Tensor:
        if self.watch is not None:
            self.watch.keep(f"{layer.spec.layer_id} attended", plan, out.data[:, : layer.spec.num_heads])
        return super().project(out, layer, plan)


def one_prefill(stack: AttentionStack, hidden: Tensor) -> dict[str, Tensor]:
    """What a whole request in one step gives."""
    tokens = hidden.shape[-2]
    watch = Watch(Session(stack, max_requests=1, max_tokens=tokens))
    watch.step({0: hidden} if watch.session.add_request() == 0 else {})
    return watch.rows(0)


class Ledger:
    """A session beside a record of what each of its requests holds: the rows that it was given, and what came out.

    Every token of every step is a row of +-1 that no one had before, so a stale row cannot pass for a new one.
    """

    def __init__(self, session: Session, straight: AttentionStack, *, seed: int = 0) -> None:
        self.session, self.straight = session, straight
        shape = (len(straight.layers), 1024, session.stack.config.hidden_size)
        self.rows = signs(*shape, seed=seed).to(straight.backend.device, straight.dtype)
        self.given: dict[int, list[int]] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        self.longest: dict[int, int] = {}
        self._next = 0

    def add(self) -> int:
        request = self.session.add_request()
        self.given[request], self.outputs[request], self.longest[request] = [], [], 0
        return request

    def fresh(self, count: int) -> list[int]:
        first, self._next = self._next, self._next + count
        return [row % self.rows.shape[1] for row in range(first, first + count)]

    def hidden(self, rows: list[int]) -> Tensor:
        return self.rows[:, rows]

    def step(self, counts: Mapping[int, int], *, padding: int | None = None, tap: Tap | None = None) -> None:
        rows = {request: self.fresh(count) for request, count in counts.items()}
        pad_to = None if padding is None else sum(counts.values()) + padding
        found = self.session.step({r: self.hidden(given) for r, given in rows.items()}, pad_to=pad_to, tap=tap)
        for request, given in rows.items():
            self.given[request] += given
            self.outputs[request] += found[request].unbind(1)
            self.longest[request] = max(self.longest[request], len(self.given[request]))

    def shortest(self, request: int) -> int:
        """What it can be cut to whatever happened to it."""
        return max(0, self.longest[request] - self.session.max_draft)

    def truncate(self, request: int, length: int) -> None:
        self.session.truncate(request, length)
        del self.given[request][length:], self.outputs[request][length:]

    def fork(self, request: int, length: int | None = None, *, replay: Tensor | None = None) -> int:
        child = self.session.fork(request, length, replay=replay)
        self.given[child] = self.given[request][:length]
        self.outputs[child] = self.outputs[request][:length]
        self.longest[child] = self.longest[request]
        if replay is not None:  # of the window, no row before the replayed ones
            self.longest[child] = len(self.given[child]) + self.session.max_draft
        return child

    def free(self, request: int) -> None:
        self.session.free(request)
        for record in (self.given, self.outputs, self.longest):
            del record[request]

    def check(self, request: int) -> None:
        """Its outputs are, bit for bit, those of a straight run over what it holds."""
        given = self.given[request]
        assert self.session.length(request) == len(given)
        if given:
            session = Session(self.straight, max_requests=1, max_tokens=len(given))
            expected = session.step({session.add_request(): self.hidden(given)})[0]
            assert torch.equal(torch.stack(self.outputs[request], dim=1), expected)


def all_free(session: Session) -> bool:
    """Whether every page is in its pool and has no holder."""
    pools = session.pages.pools.values()
    return all(pool.free_pages == pool.num_pages for pool in pools)
