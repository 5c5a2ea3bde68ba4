"""The command line. Everything heavy is imported inside the command that needs it, so that `--help` answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsv41.errors import Dsv41Error

if TYPE_CHECKING:
    from rich.console import Console

    from dsv41.bench_steps import StepReport
    from dsv41.run import RunReport


def _plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn our own errors into one line and exit code 2; anything else is a bug and keeps its traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except Dsv41Error as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)

    return wrapped


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _numbers(example: str) -> Callable[..., tuple[int, ...] | None]:
    """The callback of an option that takes integers, such as `example`."""

    def parse(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        try:
            return tuple(int(part) for part in value.split(",") if part.strip())
        except ValueError:
            raise click.BadParameter(f"{value!r}: expected {example}") from None

    return parse


_layers = _numbers("layer ids such as 0,2,3,20,24")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dsv41")
def main() -> None:
    """DeepSeek-V4.1 sparse attention: what runs here, and whether it is right."""


@main.command()
@click.option(
    "--as", "platform", metavar="PLATFORM", help="Play back a described machine: a name such as h200, or a file."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def probe(platform: str | None, as_json: bool) -> None:
    """Devices, libraries, and for each backend whether it is chosen and why not."""
    from dsv41 import probe_cli
    from dsv41.hal.device import Platform
    from dsv41.hal.probe import probe as probe_machine

    machine = Platform.load(platform) if platform else probe_machine()
    if as_json:
        click.echo(json.dumps(probe_cli.probe_report(machine), indent=2))
    else:
        probe_cli.render(_console(), machine)


@main.command()
@_plain_errors
def layouts() -> None:
    """The cache records, drawn byte by byte."""
    from dsv41.layouts_cli import render_layouts

    render_layouts(_console())


@main.command()
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", "backend", required=True, metavar="BACKEND", help="The backend whose layouts OUT gets.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, metavar="D")
@click.option("--index-cache-dtype", default="auto", show_default=True, metavar="D")
@click.option(
    "--nan",
    type=click.Choice(["refuse", "scrub"]),
    default="refuse",
    show_default=True,
    help="What becomes of NaN and infinite numbers; scrub zeroes their groups.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def convert(
    source: Path, out: Path, backend: str, kv_cache_dtype: str, index_cache_dtype: str, nan: str, as_json: bool
) -> None:
    """Bring an exported request into the cache layouts of another backend, which need not run here."""
    from dsv41 import convert_cli
    from dsv41.transfer import convert_request

    layouts = convert_cli.layouts_of(backend, kv_cache_dtype, index_cache_dtype)
    report = convert_request(source, out, layouts, nan=nan)
    if as_json:
        click.echo(json.dumps(convert_cli.as_dict(report), indent=2))
    else:
        convert_cli.render(_console(), report, out)


@main.command("make-checkpoint")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--layers", callback=_layers, metavar="IDS", help="Layers to write, such as 0,2,3,20,24. [default: all]")
@click.option("--small", is_flag=True, help="A small geometry for trying things out, instead of the release's.")
@click.option("--seed", default=0, show_default=True)
@_plain_errors
def make_checkpoint(out: Path, layers: tuple[int, ...] | None, small: bool, seed: int) -> None:
    """Write a synthetic checkpoint in the release's format: fp8 with UE8M0 scales, realistic statistics."""
    from dsv41.synthetic import make_checkpoint as make
    from dsv41.synthetic import small_config

    with _progress() as progress:
        make(
            out,
            layers=layers,
            seed=seed,
            config=small_config() if small else None,
            progress=partial(progress, "writing bytes"),
        )
    click.echo(f"wrote {out}")


@main.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", type=int, help="Prompt tokens of each request. [default: 64, or all of io.safetensors]")
@click.option("--decode", default=16, show_default=True, help="Tokens that each request decodes.")
@click.option("--requests", default=1, show_default=True, help="Requests that run at once.")
@click.option("--chunk", default=256, show_default=True, help="Prompt tokens of a request in one step.")
@click.option("--layers", callback=_layers, metavar="IDS", help="Layers to load, such as 0,2,3. [default: all]")
@click.option("--backend", metavar="B", help="A backend by name. [default: the best for this machine]")
@click.option("--device", metavar="D", help="cpu, cuda, cuda:1, ... [default: the first GPU, else cpu]")
@click.option("--kv-cache-dtype", default="auto", show_default=True, metavar="D")
@click.option("--index-cache-dtype", default="auto", show_default=True, metavar="D")
@click.option(
    "--quantize-activations", is_flag=True, help="Round inputs of fp8 projections to MXFP8, as the release does."
)
@click.option("--verify", is_flag=True, help="Compare each layer with the reference, and with io.safetensors if there.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def run(as_json: bool, **options: Any) -> None:
    """Prefill and decode with a CHECKPOINT folder; with --verify, exit 1 where the result is wrong."""
    from dsv41.run import RunOptions
    from dsv41.run import run as run_checkpoint

    with _progress() as progress:
        report = run_checkpoint(RunOptions(**options), progress)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print_run(report)
    sys.exit(1 if report.failures else 0)


@main.command("compile")
@click.option(
    "--target",
    "targets",
    metavar="TARGETS",
    help="Such as sm_90,gfx942. [default: sm_80,sm_90,sm_100,sm_120,gfx942,gfx950; on request sm_103,gfx1201,gfx1250]",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Compiling processes. [default: one a core, 8 at most]"
)
@click.option(
    "--budget",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Limits to hold the figures to. [default: ci/compile-budget.json, where there is one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def compile_command(targets: str | None, jobs: int | None, budget: Path | None, as_json: bool) -> None:
    """Compile the portable kernels ahead of time, for GPUs that need not be here; exit 1 over budget.

    With another Triton: pip install --target DIR triton==3.6.0, then PYTHONPATH=DIR dsv41 compile.
    """
    from dsv41 import compile as ahead
    from dsv41 import compile_cli

    budget = budget or (ahead.BUDGET if ahead.BUDGET.exists() else None)
    limits = ahead.Budget.load(budget) if budget else None
    chosen = tuple(part.strip() for part in targets.split(",")) if targets is not None else ahead.TARGETS
    with _progress() as progress:
        report = ahead.compile_targets(chosen, jobs=jobs, budget=limits, progress=progress)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        compile_cli.render(_console(), report)
    sys.exit(1 if report.failures else 0)


@main.command()
@click.argument("source", metavar="CHECKPOINT_OR_CONFIG", type=click.Path(path_type=Path))
@click.option(
    "--jobs", type=click.IntRange(min=1), metavar="N", help="Compiling processes. [default: one a core, 8 at most]"
)
@click.option("--backend", metavar="B", help="A backend by name. [default: the best for this machine]")
@click.option("--device", metavar="D", help="cuda, cuda:1, ... [default: the first GPU]")
@click.option("--layers", callback=_layers, metavar="IDS", help="Layers that will run, such as 0,2,3. [default: all]")
@click.option("--tp-size", default=1, show_default=True, help="Ranks that share the heads.")
@click.option("--kv-cache-dtype", default="auto", show_default=True, metavar="D")
@click.option("--index-cache-dtype", default="auto", show_default=True, metavar="D")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--quantize-activations", is_flag=True, help="As in `dsv41 run`.")
@click.option("--max-tokens", default=2048, show_default=True, help="The most tokens of a step.")
@click.option("--max-requests", default=64, show_default=True, help="The most requests of a step.")
@click.option("--max-len", default=65536, show_default=True, help="The most tokens of a request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def warmup(as_json: bool, **options: Any) -> None:
    """Compile what a configuration can meet on this machine's GPU, so that no step has to."""
    from dsv41 import compile_cli
    from dsv41.warmup_cli import WarmupOptions
    from dsv41.warmup_cli import warmup as warm

    with _progress() as progress:
        report = warm(WarmupOptions(**options), progress)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        compile_cli.render_summary(_console(), report)
    sys.exit(1 if report.failures else 0)


@main.command()
@click.option(
    "--backend",
    metavar="B",
    help="A name, or module:Class. [default: what this machine would use, by its stages]",
)
@click.option("--device", metavar="D", help="cpu, cuda, cuda:1, ... [default: the first GPU, else cpu]")
@click.option("--quick/--full", "quick", default=True, help="The short form or the long one.  [default: quick]")
@click.option("--seed", default=0, show_default=True)
@click.option("--only", multiple=True, metavar="CLAUSE", help="A clause id, a contract or a stage; may be repeated.")
@click.option("--case", metavar="CASE", help="One case of the clauses, as a report gives it.")
@click.option(
    "--port", type=click.Path(path_type=Path), metavar="FILE", help="What the port does not support, as TOML."
)
@click.option("--report", type=click.Path(path_type=Path), metavar="FILE", help="Write a report, as .json or .html.")
@click.option("--list", "listed", is_flag=True, help="List the clauses and run none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def check(listed: bool, as_json: bool, **options: Any) -> None:
    """Check a backend against every clause of its contracts; exit 1 where it does not conform."""
    from dsv41.testing import check_cli

    if listed:
        check_cli.render_clauses(_console())
        return
    with _progress() as progress:
        report = check_cli.check(check_cli.CheckOptions(**options), progress)
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        check_cli.render(_console(), report)
    sys.exit(0 if report.ok else 1)


@main.group()
def bench() -> None:
    """Measure on this machine's GPU, beside the least time that the device allows."""


@bench.command("attention")
@click.option("--backend", metavar="B", help="A backend by name. [default: the best for this machine]")
@click.option("--device", metavar="D", help="cuda, cuda:1, ... [default: the first GPU]")
@click.option("--vs", type=click.Choice(["flashmla"]), help="A library to call directly, on the same bytes.")
@click.option("--record", default="fp8_ds_mla_v4", show_default=True, metavar="D", help="The KV cache dtype.")
@click.option("--heads", default="8,16,64", show_default=True, callback=_numbers("head counts such as 8,16,64"))
@click.option(
    "--tokens",
    default="1,4,16,32,64,128,256,512",
    show_default=True,
    callback=_numbers("token counts such as 1,16,512"),
    help="Decode tokens.",
)
@click.option(
    "--prefill",
    default="512,4096",
    show_default=True,
    callback=_numbers("token counts such as 512,4096"),
    help="Prefill tokens, over random rows and over those of one request's chunk.",
)
@click.option("--fused", is_flag=True, help="With the rotations that the backend does in the same launch.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the table, as .png or .svg.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def bench_attention_command(plot: Path | None, as_json: bool, **options: Any) -> None:
    """Time attention over random rows and a request's chunks; exit 1 where a result is wrong."""
    from dsv41 import bench_cli
    from dsv41.bench import BenchOptions, bench_attention

    if plot is not None:
        bench_cli.require_matplotlib()
    with _progress() as progress:
        report = bench_attention(BenchOptions(**options), progress).to_dict()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        bench_cli.render(_console(), report)
    if plot is not None:
        bench_cli.plot(report, plot)
    sys.exit(1 if report["failures"] else 0)


def _step_options(*, contexts: str, tokens: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of benches of steps."""

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            click.option("--json", "as_json", is_flag=True, help="Print JSON."),
            click.option("--seed", default=0, show_default=True),
            click.option(
                "--steps",
                default=8,
                show_default=True,
                help="Steps in a row in one graph, each with weights and caches of its own, at most 8 GiB of them.",
            ),
            click.option(
                "--context",
                default=contexts,
                show_default=True,
                callback=_numbers("token counts such as 8192"),
                help="Tokens that each request holds.",
            ),
            click.option(
                "--tokens",
                default=tokens,
                show_default=True,
                callback=_numbers("token counts such as 1,16"),
                help="Requests that decode a token each.",
            ),
            click.option("--index-cache-dtype", default="auto", show_default=True, metavar="D"),
            click.option("--kv-cache-dtype", default="auto", show_default=True, metavar="D"),
            click.option("--device", metavar="D", help="cuda, cuda:1, ... [default: the first GPU]"),
            click.option("--backend", metavar="B", help="A backend by name. [default: the best for this machine]"),
        ):
            command = option(command)
        return command

    return add


@bench.command("layer")
@_step_options(contexts="8192", tokens="1,16,64,256")
@_plain_errors
def bench_layer_command(as_json: bool, **options: Any) -> None:
    """Time a decode layer that compresses and selects, one that reads what it left, and both."""
    from dsv41.bench_steps import bench_layers

    _bench_steps(bench_layers, as_json, options)


@bench.command("index")
@_step_options(contexts="65536,262144,1048576", tokens="1,32")
@_plain_errors
def bench_index_command(as_json: bool, **options: Any) -> None:
    """Time index scoring and top-k over long contexts: among all rows, and among candidates."""
    from dsv41.bench_steps import bench_choices

    _bench_steps(bench_choices, as_json, options)


@bench.command("products")
@click.option("--backend", metavar="B", help="A backend by name. [default: the best for this machine]")
@click.option("--vs", default="portable", show_default=True, metavar="B", help="The backend to compare with.")
@click.option("--device", metavar="D", help="cuda, cuda:1, ... [default: the first GPU]")
@click.option("--tokens", default="1,16,64", show_default=True, callback=_numbers("token counts such as 1,16"))
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def bench_products_command(as_json: bool, **options: Any) -> None:
    """Time the products with a layer's large matrices one by one, on two backends."""
    from dsv41 import bench_cli
    from dsv41.bench_products import ProductOptions, bench_products

    with _progress() as progress:
        report = bench_products(ProductOptions(**options), progress).to_dict()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        bench_cli.render_products(_console(), report)


def _bench_steps(bench_them: Callable[..., StepReport], as_json: bool, options: dict[str, Any]) -> None:
    from dsv41 import bench_cli
    from dsv41.bench_steps import StepOptions

    with _progress() as progress:
        report = bench_them(StepOptions(**options), progress).to_dict()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        bench_cli.render_steps(_console(), report)


@main.group()
@_plain_errors
def ci() -> None:
    """A checkout's CI matrix: its workflow, and its jobs that need no GPU."""
    from dsv41.ci_cli import require_extra

    require_extra()


@ci.command("emit")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the workflow is not current.")
@_plain_errors
def ci_emit(check: bool) -> None:
    """Write .github/workflows/ci.yml from ci/matrix.yaml and ci/workflow.yml.j2."""
    from dsv41.ci_matrix import load_jobs
    from dsv41.ci_workflow import WORKFLOW, render, template

    jobs = load_jobs()
    text = render(jobs, template())
    if check:
        current = WORKFLOW.exists() and WORKFLOW.read_text(encoding="utf-8") == text
        click.echo(f"{WORKFLOW} is {'current' if current else 'not current: run `dsv41 ci emit`'}")
        sys.exit(0 if current else 1)
    WORKFLOW.parent.mkdir(parents=True, exist_ok=True)
    WORKFLOW.write_text(text, encoding="utf-8")
    click.echo(f"wrote {len(jobs)} jobs to {WORKFLOW}")


@ci.command("run")
@click.option("--mode", type=click.Choice(["run", "compile", "play-back"]), help="Jobs of this mode only.")
@click.option("--arch", metavar="ARCH", help="Jobs of this arch only.")
@click.option("--job", "name", metavar="JOB", help="This job only; exit 1 where it cannot run here.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_plain_errors
def ci_run(mode: str | None, arch: str | None, name: str | None, as_json: bool) -> None:
    """Run the jobs that need no GPU, here; exit 1 where one fails. Their output goes to build/ci."""
    from dsv41 import ci_cli
    from dsv41.ci_matrix import load_jobs
    from dsv41.ci_run import run_jobs
    from dsv41.errors import InputError
    from dsv41.hal.probe import probe

    every = load_jobs()
    jobs = [job for job in every if mode in (None, job.mode) and arch in (None, job.arch) and name in (None, job.name)]
    if not jobs:
        raise InputError(f"no such job: expected one of {', '.join(job.name for job in every)}; name it")
    outcomes = []
    with _progress() as progress:
        for outcome in run_jobs(jobs):
            outcomes.append(outcome)
            progress("jobs", len(outcomes), len(jobs))
    if as_json:
        click.echo(json.dumps(ci_cli.report(outcomes, probe()), indent=2))
    else:
        ci_cli.render(_console(), outcomes)
    bad = {"failed", "skipped"} if name else {"failed"}
    sys.exit(1 if any(outcome.state in bad for outcome in outcomes) else 0)


@ci.command("expect")
@click.argument("arch")
@click.option("--backend", metavar="B", help="What the first GPU must get.")
@click.option("--as", "platform", metavar="PLATFORM", help="As in `dsv41 probe`.")
@_plain_errors
def ci_expect(arch: str, backend: str | None, platform: str | None) -> None:
    """Exit 2, saying why, unless this machine's GPUs are all of ARCH."""
    from dsv41.ci_run import expect_machine
    from dsv41.hal.device import Platform
    from dsv41.hal.probe import probe as probe_machine

    machine = Platform.load(platform) if platform else probe_machine()
    expect_machine(machine, arch, backend)
    click.echo(f"{arch}: {', '.join(f'{gpu.key} {gpu.name}' for gpu in machine.gpus)}")


def _progress() -> AbstractContextManager[Callable[[str, int, int], None]]:
    """A progress bar on stderr, so that stdout stays clean; nothing where stderr is no terminal."""
    from contextlib import contextmanager

    @contextmanager
    def bar() -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        console = _console(stderr=True)
        if not console.is_terminal:  # rich would leave an empty line
            yield lambda *_: None
            return
        columns = (TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as shown:
            tasks: dict[str, Any] = {}

            def told(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = shown.add_task(what, total=total)
                shown.update(tasks[what], completed=done, total=total)

            yield told

    return bar()


def _print_run(report: RunReport) -> None:
    from rich.table import Table

    console = _console()
    layers = Table("layer", "role", title=f"{report.backend} on {report.device}, {report.dtype}")
    for layer, role in report.layers.items():
        layers.add_row(str(layer), role)
    console.print(layers)

    facts = Table(show_header=False)
    caches = ", ".join(f"{kind} {size:,.0f}" for kind, size in report.cache_bytes_per_token.items())
    rows: list[tuple[str, str]] = [
        ("caches", f"kv {report.kv_cache_dtype}, index {report.index_cache_dtype}"),
        ("cache bytes a token", caches),
        ("weights", f"{report.weight_bytes / 2**20:,.1f} MiB"),
        ("prefill", _speed(report.prefill_tokens, report.prefill_tokens_per_second)),
        ("decode", _speed(report.decode_tokens, report.decode_tokens_per_second)),
        ("peak memory", f"{report.peak_memory_bytes / 2**20:,.0f} MiB"),
    ]
    for name, found in (report.verify or {}).items():
        extra = ", ".join(
            f"{key.replace('_', ' ')} {value}"
            for key, value in found.items()
            if isinstance(value, int) and not isinstance(value, bool)
        )
        error = found["max_relative_error"]
        shown = "not finite" if error is None else f"{error:.2e}"
        rows.append((f"against {name}", f"largest relative error {shown}; {extra}"))
    for fact in rows:
        facts.add_row(*fact)
    console.print(facts)
    if report.verify is not None:
        for failure in report.failures:
            console.print(f"[bold red]wrong[/]: {failure}")
        if not report.failures:
            console.print("[bold green]verified[/]: every layer is within tolerance")
        if report.verify.get("golden", {}).get("judged") is False:
            console.print("not judged: the caches are not in the golden run's records, so its distance is only shown")


def _speed(tokens: int, rate: float | None) -> str:
    return f"{tokens} tokens, {rate:,.1f} a second" if rate else "none"
