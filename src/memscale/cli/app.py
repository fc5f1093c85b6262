"""The subcommands of `memscale`. torch is imported by those that need it, so that `--help` answers at once."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from memscale._util import terminal
from memscale.config import OptimizationMode as Mode

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from memscale.cli.target import Target
    from memscale.config import Config
    from memscale.execution_plan import Plan
    from memscale.hardware import GpuSpec, Hardware

FAILED, WRONG_ARGUMENTS, DOES_NOT_FIT, INTERRUPTED = 1, 2, 3, 130

COMMON_GPUS = ("RTX 3060", "RTX 4060 Ti 16GB", "RTX 3090", "RTX 4090", "RTX 5090", "A100-40GB", "H100")
"""What `fit` tries unless it is told which."""

_LEFT_OUT = {"nvidia", "geforce", "amd", "radeon", "instinct", "generation", "gpu", "with", "design"}

OPTIMIZERS = ("adamw", "adam", "sgd", "adagrad", "rmsprop", "adafactor", "adamax", "nadam", "radam")

app = typer.Typer(
    name="memscale",
    help="Make PyTorch training fit the device you have. MODEL is a model of the registry (gpt2-xl, bert-base, ...), "
    "a Hugging Face config.json or its directory, or package.module:factory.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 nothing fits the device, 130 interrupted.",
)


def _version(is_asked: bool) -> None:
    if is_asked:
        from memscale.version import __version__

        print(f"memscale {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


class _Command(TyperCommand):
    """A command whose usage names arguments as its help does."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class _Bench(TyperCommand):
    """`bench`, whose options are argparse's: typer is told what completes them."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        from memscale.benchmarks.__main__ import option_names

        last = ctx.args[-1] if ctx.args else ""
        complete = {"--on": _gpus, "--models": _models}.get(last)
        found = option_names() if complete is None else complete(incomplete)
        return [
            SimpleNamespace(value=each, type="plain", help=None)
            for each in found
            if each.startswith(incomplete)
        ]


def _models(incomplete: str) -> list[str]:
    from memscale.benchmarks.models import MODELS

    return _completed(incomplete, MODELS)


def _gpus(incomplete: str) -> list[str]:
    """Return short names of GPUs, without spaces, that `find_gpu` finds: rtx3090, 3090, a100-pcie-80gb."""
    from memscale.hardware import list_gpus

    names = ["cpu"]
    for gpu in list_gpus():
        words = [word for word in gpu.name.lower().split() if word not in _LEFT_OUT]
        name = re.sub(r"^(rtx|gtx|rx)-(?=\d)", r"\1", "-".join(words))
        names += [name, *re.findall(r"^(?:rtx|gtx|rx)(.+)", name)]  # people write 3090 as well
    return _completed(incomplete, names)


def _optimizers(incomplete: str) -> list[str]:
    return _completed(incomplete, OPTIMIZERS)


def _completed(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin so, as it was typed; of a list with commas the last item is completed."""
    before, comma, last = incomplete.rpartition(",")
    found = [name for name in dict.fromkeys(names) if name.startswith(last.lower())]
    return [f"{before}{comma}{last}{name[len(last) :]}" for name in found]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="registry name, HF config, or package.module:factory",
        autocompletion=_models,
    ),
]
Batch = Annotated[
    int | None, typer.Option(metavar="N", help="samples in a batch", show_default="the model's own")
]
Seq = Annotated[
    int | None, typer.Option(metavar="N", help="tokens in a sample", show_default="the model's own")
]
On = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help='a GPU ("RTX 3090", rtx3090), a size ("24GiB"), or cpu',
        show_default="this machine",
        autocompletion=_gpus,
    ),
]
ModeOption = Annotated[
    Mode,
    typer.Option(
        "--mode",
        metavar="MODE",
        help=f"how much step time to give up for memory: {', '.join(each.value for each in Mode)}",
    ),
]
Budget = Annotated[str | None, typer.Option(metavar="SIZE", help='fastest plan within "6GB", "9.25GiB"')]
OptimizerOption = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help=f"one of {', '.join(OPTIMIZERS)}",
        autocompletion=_optimizers,
    ),
]


def run(arguments: Sequence[str]) -> int:
    """Run a subcommand; return its exit code."""
    from memscale.errors import ConfigError, ConfigTypeError, HardwareError, MemScaleError

    try:
        code = app(args=list(arguments) or ["--help"], standalone_mode=False)
    except typer.Exit as done:
        code = done.exit_code
    except MemScaleError as error:
        print(f"memscale: error: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS if isinstance(error, (ConfigError, ConfigTypeError, HardwareError)) else FAILED
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        usage = getattr(error, "format_message", None)  # click's errors of usage
        if usage is None:
            raise
        print(f"memscale: error: {usage()}", file=sys.stderr)
        return int(getattr(error, "exit_code", WRONG_ARGUMENTS))
    if code == INTERRUPTED:
        print("memscale: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


@app.command(
    cls=_Command,
    epilog='Example: memscale plan gpt2-xl --on "RTX 3060" --batch 1 --seq 512',
    short_help="the plan of a model, its peak and step time",
)
def plan(
    model: Model,
    batch: Batch = None,
    seq: Seq = None,
    on: On = None,
    mode: ModeOption = Mode.BALANCED,
    budget: Budget = None,
    optimizer: OptimizerOption = "adamw",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the plan as JSON; - for standard output")
    ] = None,
) -> int:
    """Show what `memscale.wrap` would do to a model: the plan, its peak and step time, and the alternatives."""
    from memscale.execution_plan.explain import frontier_chart, memory_table
    from memscale.planner.decide import room_of
    from memscale.planner.make_plan import fits
    from memscale.units import format_bytes

    is_printed = str(json) == "-"
    _check_writable(None if is_printed else json)
    target, config, there = _target(model, batch, seq), _config(mode, budget), _hardware(on)
    with _planning(target, 2) as advance:
        made = _plan(target, config, there, _optimizer(optimizer, target), advance)
    does_fit = fits(made, there, config)
    if is_printed:
        print(made.to_json())
    else:
        print(made.explain(trades=False))
        for part in (memory_table(made), frontier_chart(made)):
            if part:
                print(f"\n{part}")
        if not does_fit:
            room = format_bytes(room_of(there, config))
            print(f"\nIt does not fit: {room} may be used of {made.device}.")
        if json is not None:
            _write(json, made.to_json())
            print(f"Written to {json}.")
    return 0 if does_fit else DOES_NOT_FIT


@app.command(
    cls=_Command,
    epilog='Example: memscale report gpt2-medium --on "RTX 3090" -o report.html',
    short_help="the same as a page",
)
def report(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="the page to write")] = Path(
        "memscale-report.html"
    ),
    batch: Batch = None,
    seq: Seq = None,
    on: On = None,
    mode: ModeOption = Mode.BALANCED,
    budget: Budget = None,
    optimizer: OptimizerOption = "adamw",
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the simulated memory, for pytorch.org/memory_viz")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the timeline, for chrome://tracing or ui.perfetto.dev"),
    ] = None,
) -> int:
    """Write a page that shows what `memscale.wrap` would do to a model: memory over a step, layers, alternatives."""
    import memscale
    from memscale.execution_plan.page import write_page
    from memscale.planner.make_plan import fits
    from memscale.report.export import write_chrome_trace, write_memory_snapshot

    _check_writable(output, snapshot, trace)
    target, config, there = _target(model, batch, seq), _config(mode, budget), _hardware(on)
    stepped = _optimizer(optimizer, target)
    modes: dict[str, Plan] = {}
    with _planning(target, 2 + len(Mode)) as advance:
        made = _plan(target, config, there, stepped, advance)
        for each in Mode:
            settings = _config(each, None)
            modes[each.value] = memscale.plan(target.model, target.sample, settings, there, optimizer=stepped)
            advance()
    title = f"{target.name}, {target.size}"
    with _writing(output):
        write_page(made, output, title=title, hardware=there, modes=modes)
    for path, write in ((snapshot, write_memory_snapshot), (trace, write_chrome_trace)):
        if path is not None:
            with _writing(path):
                write(made, path)
    print(made)
    print(f"Written to {', '.join(str(path) for path in (output, snapshot, trace) if path is not None)}.")
    return 0 if fits(made, there, config) else DOES_NOT_FIT


@app.command(
    cls=_Command,
    epilog='Example: memscale fit llama-3.2-1b --seq 2048; memscale fit gpt2-xl --on "RTX 3090"',
    short_help="on which GPUs a model trains, with which batch",
)
def fit(
    model: Model,
    batch: Batch = None,
    seq: Seq = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="show which batches fit this device, in each mode", autocompletion=_gpus
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help='which GPUs, or sizes ("24GiB"), to try',
            show_default=", ".join(COMMON_GPUS),
            autocompletion=_gpus,
        ),
    ] = None,
    optimizer: OptimizerOption = "adamw",
) -> int:
    """Show on which GPUs a model trains, and how fast; with --on, which batches fit that device."""
    if on is not None and gpus is not None:
        raise _wrong("--on shows the batches of one device, --gpus one batch on several: give one of them.")
    target = _target(model, batch, seq)
    if on is not None:
        return _fit_batches(target, on, optimizer)
    return _fit_gpus(target, COMMON_GPUS if gpus is None else gpus.split(","), optimizer)


def _fit_gpus(target: Target, gpus: Sequence[str], optimizer: str) -> int:
    import memscale
    from memscale.execution_plan.explain import STEPS_AFTER_BACKWARD
    from memscale.hardware import virtual_hardware
    from memscale.planner.decide import capacity_of
    from memscale.planner.make_plan import fits
    from memscale.planner.predict import Step, plain_step
    from memscale.profiler import Place
    from memscale.report import Column, table
    from memscale.units import format_bytes

    named = [virtual_hardware(name.strip()) for name in gpus]
    cards = sorted(
        {each.device.name: each for each in named}.values(), key=lambda each: each.device.total_bytes
    )
    fitting: list[str] = []
    rows: list[tuple[str | None, ...]] = []
    stepped = _optimizer(optimizer, target)
    plain: dict[Place, Step] = {}  # libraries' workspaces are not the same on all cards
    with _planning(target, len(cards) * (1 + len(Mode))) as advance:
        for hardware in cards:
            card, place = hardware.device, Place.of(hardware.device)
            if place not in plain:
                plain[place] = plain_step(
                    target.model, target.sample, place, _config(Mode.BALANCED, None), stepped
                )
            advance()
            as_it_is = format_bytes(plain[place].peak_bytes)
            if plain[place].capacity_bytes > capacity_of(hardware):
                as_it_is = f"needs\n{format_bytes(plain[place].capacity_bytes)}"
            row: list[str | None] = []
            for mode in Mode:
                config = _config(mode, None)
                made = memscale.plan(target.model, target.sample, config, hardware, optimizer=stepped)
                row.append(_cell(made) if fits(made, hardware, config) else None)
                advance()
            rows.append((card.name, format_bytes(card.total_bytes), as_it_is, *row))
            fitting += [card.name] * any(row)
    columns = [
        Column("GPU"),
        *(Column(name, "right") for name in ("memory", "plain", *(each.value for each in Mode))),
    ]
    caption = (
        "Peaks simulated, step times estimated, as multiples of the plain step's. –: does not fit; needs: what torch's "
        f"allocator would have to reserve. {STEPS_AFTER_BACKWARD}"
    )
    print(table(f"{target.name}, {target.size}", columns, rows, caption=caption))
    if not fitting:
        print(
            "It fits none of them. Try a smaller --batch or --seq, or larger --gpus (memscale gpus lists them)."
        )
        return DOES_NOT_FIT
    print(f"The smallest that is enough: {fitting[0]}.")
    return 0


def _cell(made: Plan) -> str:
    from memscale.units import format_bytes

    return f"{format_bytes(made.predicted_peak_bytes)}\n{made.predicted_time_ratio:.2f} ×"


def _fit_batches(target: Target, on: str, optimizer: str) -> int:
    import memscale
    from memscale.report import table
    from memscale.units import format_bytes

    hardware, stepped = _hardware(on), _optimizer(optimizer, target)
    rows: list[tuple[str | None, ...]] = []
    with _planning(target, len(Mode)) as advance:
        for mode in Mode:
            config = _config(mode, None)
            found = memscale.find_batch_size(target.model, target.sample, config, hardware, optimizer=stepped)
            for what in ("largest", "longest", "fastest"):
                fit = getattr(found, what)
                if fit is not None:
                    peak = format_bytes(fit.plan.predicted_peak_bytes)
                    rate = f"{fit.samples_per_second:.3g}"
                    rows.append((mode.value, what, str(fit.batch_size), str(fit.length), peak, rate))
            advance()
            device, room = found.device, found.room_bytes
    if not rows:
        print(f"Not even one sample of {target.name} fits {device} ({format_bytes(room)}).")
        return DOES_NOT_FIT
    columns = ["mode", "batch", "samples", "length", "peak", "samples/s"]
    caption = "Peaks simulated, samples a second estimated. longest: with as many samples as were given."
    print(table(f"{target.name} on {device}", columns, rows, caption=caption))
    return 0


@app.command(epilog="Example: memscale gpus 4090", short_help="the GPUs that are known by name")
def gpus(
    name: Annotated[str, typer.Argument(metavar="WORD", help="only those with this word")] = "",
) -> int:
    """List the GPUs that can be planned for by name."""
    from memscale.hardware import list_gpus
    from memscale.report import table

    found = [gpu for gpu in list_gpus() if name.lower() in gpu.name.lower()]
    if not found:
        raise _wrong(f"No GPU has {name!r} in its name: memscale gpus lists them all.")
    columns = ["GPU", "memory", "fp32 TFLOP/s", "16-bit TFLOP/s", "memory GB/s", "link GB/s"]
    caption = "Published by the vendors: theoretical peaks."
    print(table("GPUs", columns, map(_gpu_row, found), caption=caption))
    return 0


def _gpu_row(gpu: GpuSpec) -> tuple[str, ...]:
    from memscale.units import format_bytes

    numbers = (gpu.fp32_tflops, gpu.bf16_tflops or gpu.fp16_tflops, gpu.memory_bandwidth_gbs, gpu.link_gbs)
    return (gpu.name, format_bytes(gpu.memory_bytes), *(f"{number:g}" for number in numbers))


@app.command(
    epilog="Example: memscale doctor --selftest --json report.json",
    short_help="what is usable on this machine",
)
def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="train a small model with every technique; about a minute")
    ] = False,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1", show_default="the best one")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write what --selftest found, for a bug report")
    ] = None,
) -> int:
    """Show what is installed and usable on this machine, and why the rest is not; exit code 1 if a check fails."""
    import memscale
    from memscale.report import table

    if json is not None and not selftest:
        raise _wrong("--json has what --selftest found: give both.")
    _check_writable(json)
    with _working("checking this machine"):
        found = memscale.doctor(device)
    cells = [(row.name, row.status, row.detail) for row in found]
    print(table("This machine", ["what", "usable", "detail"], cells))
    failed = any(row.status == "fail" for row in found)
    if selftest:
        with _parts("training a small model with every technique") as progress:
            tried = memscale.selftest(device, progress=progress)
        print(f"\n{tried}")
        failed = failed or not tried.passed
        if json is not None:
            _write(json, tried.to_json())
            print(f"Written to {json}; it is a calibration file as well (MEMSCALE_CALIBRATION={json}).")
    return FAILED if failed else 0


@app.command(epilog="Example: memscale calibrate", short_help="measure the rates of this machine")
def calibrate(
    path: Annotated[
        Path | None, typer.Option(metavar="FILE", help="where to write", show_default="the user's cache")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1", show_default="the best one")
    ] = None,
) -> int:
    """Measure this machine's rates, from which later plans take their times."""
    import memscale
    from memscale.hardware.calibrate import default_path
    from memscale.report import table

    _check_writable(path)
    with _parts("measuring: matrix products, memory, link, Adam, disk") as progress:
        hardware = memscale.calibrate(path, device=device, progress=progress)
    measured = hardware.measured
    assert measured is not None  # what `calibrate` returns has them
    rates = (
        ("products in fp32", measured.fp32, 1e12, "TFLOP/s"),
        ("products in TF32", measured.tf32, 1e12, "TFLOP/s"),
        ("products in 16 bits", measured.half, 1e12, "TFLOP/s"),
        ("memory", measured.memory_bandwidth, 1e9, "GB/s"),
        ("page-locked memory to the device", measured.h2d, 1e9, "GB/s"),
        ("and back", measured.d2h, 1e9, "GB/s"),
        ("pageable memory to the device", measured.pageable_h2d, 1e9, "GB/s"),
        ("and back", measured.pageable_d2h, 1e9, "GB/s"),
        ("Adam on the host, torch's loop", measured.host_adam_loop, 1e-9 / 4, "ns a parameter"),
        ("Adam on the host, fused", measured.host_adam_fused, 1e-9 / 4, "ns a parameter"),
        ("disk, read", hardware.disk.read_bandwidth, 1e9, "GB/s"),
        ("disk, written", hardware.disk.write_bandwidth, 1e9, "GB/s"),
    )
    rows = [(what, f"{rate / unit:.3g}", name) for what, rate, unit, name in rates if rate is not None]
    caption = f"Written to {path or default_path(hardware)}; plans take their times from it from now on."
    print(table(hardware.describe(), ["measured", "rate", "unit"], rows, caption=caption))
    return 0


@app.command(
    cls=_Bench,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    epilog='Example: memscale bench --on "RTX 3090"',
    short_help="the benchmark suite",
)
def bench(context: typer.Context) -> int:
    """Run the benchmark suite; `memscale bench --help` lists its options."""
    from memscale.benchmarks.__main__ import main

    try:
        return main(context.args, program="memscale bench")
    except SystemExit as done:  # argparse, after a message of its own
        return done.code if isinstance(done.code, int) else FAILED


# What subcommands share ------------------------------------------------------------------------------


def _target(model: str, batch: int | None, seq: int | None) -> Target:
    with _working(f"building {model}"):
        from memscale.cli.target import find_target

        target = find_target(model, batch, seq)
    if target.remark:
        print(f"memscale: {target.remark}", file=sys.stderr)
    return target


def _config(mode: Mode, budget: str | None) -> Config:
    from memscale.config import Config

    quiet = Config(mode=mode, enable_logging=False)
    return quiet if budget is None else quiet.replace(memory_budget=budget)


def _hardware(on: str | None) -> Hardware:
    from memscale.hardware import detect, virtual_hardware

    if on is None:
        return detect()
    if re.fullmatch(r"cuda(:\d+)?|gpu|mps|xpu", on.lower()):
        raise _wrong(f"--on {on}: --on names a GPU that is not here; leave it out to plan for this machine.")
    return detect("cpu") if on.lower() == "cpu" else virtual_hardware(on)


def _plan(
    target: Target, config: Config, there: Hardware, optimizer: Optimizer, advance: Callable[[], object]
) -> Plan:
    """Return a plan with the plain step simulated as well, to be shown beside it."""
    import memscale
    from memscale.planner.predict import with_plain_step
    from memscale.profiler import Place

    made = memscale.plan(target.model, target.sample, config, there, optimizer=optimizer)
    advance()
    made = with_plain_step(target.model, made, target.sample, Place.of(there.device), config, optimizer)
    advance()
    return made


def _optimizer(name: str, target: Target) -> Optimizer:
    import torch

    if name.lower() not in OPTIMIZERS:
        raise _wrong(f"--optimizer {name} is not known: one of {', '.join(OPTIMIZERS)}.")
    kinds = {each.lower(): getattr(torch.optim, each) for each in torch.optim.__all__}
    made: Optimizer = kinds[name.lower()](target.model.parameters(), lr=1e-3)
    return made


def _check_writable(*paths: Path | None) -> None:
    """Raise an error if a file can't be written: before the work, not after it."""
    for path in paths:
        if path is None:
            continue
        parent = path.absolute().parent
        if path.is_dir():
            raise _wrong(f"{path} can't be written: it is a directory.")
        if not parent.is_dir():
            raise _wrong(f"{path} can't be written: there is no directory {path.parent}.")
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise _wrong(f"{path} can't be written: permission denied.")


def _write(path: Path, text: str) -> None:
    with _writing(path):
        path.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _wrong(f"{path} can't be written: {error.strerror or error}.") from None


def _wrong(message: str) -> Exception:
    from memscale.errors import ConfigError

    return ConfigError(message)


@contextlib.contextmanager
def _working(what: str) -> Iterator[None]:
    """Show on a terminal that something is under way, and for how long; nothing where stderr is none."""
    with terminal.bars() as bars:
        bars.add_task(what, total=None)
        yield


@contextlib.contextmanager
def _planning(target: Target, total: int) -> Iterator[Any]:
    """Show a bar with the time left; yields the function that advances it by one."""
    from memscale.errors import ProfileError

    with terminal.bars() as bars:
        task = bars.add_task(f"planning {target.name}", total=total)
        try:
            yield lambda: bars.advance(task)
        except ProfileError as error:
            if not target.is_batch_derived:
                raise
            raise _wrong(
                f"{error} MemScale derived this batch from the config: for another one, write a function that returns "
                "the model and a batch, and give it as package.module:function."
            ) from error


@contextlib.contextmanager
def _parts(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar with the time left; yields what is called with how many parts are done, and of how many."""
    with terminal.bars() as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
