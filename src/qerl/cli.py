"""The command line: parse, call, print.

Mistakes of a user end in one line on stderr and exit code 2; a run that was stopped and saved ends with 130, one that
cannot go on, has no memory left, or by its plan does not fit, with 1.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from qerl import __version__
from qerl.config import ConfigError, ModelConfig, RunConfig, Section, load_config, model_folder, validate
from qerl.display import ByteProgress

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning of large language models on one GPU, over frozen NVFP4 weights.",
)

bench = typer.Typer(no_args_is_help=True, help="Measure this machine, without any model files.")
app.add_typer(bench, name="bench")


def complete_setting(incomplete: str) -> list[tuple[str, str]]:
    """What a shell offers for a setting that is half typed: its key or, where there are few, its values; with help."""
    offered: list[tuple[str, str]] = []
    sections = [(f"{name}.", field.default) for name, field in RunConfig.model_fields.items()]
    for prefix, section in [("", RunConfig()), *((p, s) for p, s in sections if isinstance(s, Section))]:
        for name, field in type(section).model_fields.items():
            if isinstance(getattr(section, name), Section):
                continue
            values = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            help = (field.description or "").partition("\n")[0]
            offered += [(f"{prefix}{name}={value}", help) for value in values or [""]]
    return [(text, help) for text, help in offered if text.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings as section.key=value, such as noise.sigma_start=1e-2.", autocompletion=complete_setting
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Argument(help="The run's TOML file; without one, the defaults.", autocompletion=complete_setting),
]

FORMATS: tuple[str, ...] = get_args(ModelConfig.model_fields["format"].annotation)
PICTURES = (".png", ".svg", ".pdf")
PACKED_FORMATS = tuple(format for format in FORMATS if format != "bf16")
FormatOption = Annotated[
    str,
    typer.Option(
        help=f"Storage of the base: {', '.join(FORMATS)}.",
        autocompletion=lambda incomplete: [format for format in FORMATS if format.startswith(incomplete)],
    ),
]

DoubleQuantOption = Annotated[
    bool, typer.Option("--double-quant/--no-double-quant", help="Of nf4: quantise the maxima of blocks too.")
]
GroupSizeOption = Annotated[int, typer.Option(help="Of int4: weights that share a scale, 32, 64 or 128.")]
SymmetricOption = Annotated[bool, typer.Option("--symmetric", help="Of int4: without zero points.")]

EVAL_SETTINGS = (
    "model.",
    "task.",
    *(
        f"rollout.{k}"
        for k in ("engine", "cuda_graphs", "kv_cache_tokens", "kv_cache_memory", "prefill_tokens", "top_k", "min_p")
    ),
)


@app.command()
def train(
    config: ConfigFile = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in output_dir.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and the end alone.")] = False,
) -> None:
    """Train adapters by reinforcement learning."""
    settings = _load(config, overrides)
    model_folder(settings.model.path)  # before what takes seconds to import
    from qerl.display import Display
    from qerl.report.plot import plot_run
    from qerl.rl.checkpoint import list_checkpoints
    from qerl.rl.trainer import Interrupted, RunFailed, Trainer

    go_on = f"Go on with: {shlex.join(['qerl', *sys.argv[1:], *([] if resume else ['--resume'])])}"
    title = f"{settings.output_dir} · {settings.task.name} · {Path(settings.model.path).name}"
    display = Display(settings.steps, title=title, quiet=quiet)
    try:
        Trainer(settings, resume=resume, display=display).train()
    except Interrupted as stop:
        print(f"{stop}\n{go_on}")
        raise typer.Exit(130) from None
    except KeyboardInterrupt:  # before the first step, or the second of two
        saved = list_checkpoints(Path(settings.output_dir))
        kept = f"what was done since {saved[-1]} is lost\n{go_on}" if saved else "nothing is saved"
        print(f"stopped at once: {kept}", file=sys.stderr)
        raise typer.Exit(130) from None
    except RunFailed as failure:
        print(f"qerl: {failure}", file=sys.stderr)
        raise typer.Exit(1) from None
    folder = settings.output_dir
    print(f"adapter: {folder}/adapter\nplot: {plot_run(Path(folder))}\na page with all of it: qerl report {folder}")


def _load(path: Path | None, overrides: list[str] | None) -> RunConfig:
    """The config of a file, or of the defaults where the first word is a setting already."""
    if path is not None and "=" in str(path) and not path.is_file():
        path, overrides = None, [str(path), *(overrides or [])]
    return load_config(path, overrides)


def _choice(option: str, value: str, choices: Sequence[str]) -> Any:
    """The value, which is one of the choices; ValueError for another."""
    if value not in choices:
        raise ValueError(f"{option} {value}: choose one of {', '.join(choices)}")
    return value


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Folder of a transformers model in bf16 safetensors.")],
    target: Annotated[Path, typer.Argument(help="New folder, as compressed-tensors (nf4: bitsandbytes) lays it out.")],
    format: Annotated[str, typer.Option(help=f"{', '.join(PACKED_FORMATS)}.")] = "nvfp4",
    scale: Annotated[
        str | None,
        typer.Option(
            help="Block scales: sweep (least squares), amax (by the largest value alone) or, the default with "
            "--calibrate, weighted (a sweep weighted by the activations).",
            show_default="sweep",
        ),
    ] = None,
    double_quant: DoubleQuantOption = True,
    group_size: GroupSizeOption = 128,
    symmetric: SymmetricOption = False,
    keep: Annotated[list[str] | None, typer.Option(help="Glob of layers that stay in bf16; may be repeated.")] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="Text file to calibrate on: AWQ, and weighted scales.", show_default=False)
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Of --calibrate: most windows of the text.", show_default="256")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Of --calibrate: tokens of a window.", show_default="2048")
    ] = None,
    awq: Annotated[
        bool | None, typer.Option("--awq/--no-awq", help="Of --calibrate: fold AWQ's factors in.", show_default="awq")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
) -> None:
    """Write a folder's linear layers in 4 bits, shard by shard; called again after a cut, it goes on."""
    scale = scale or ("weighted" if calibrate else "sweep")
    _choice("--format", format, PACKED_FORMATS)
    _choice("--scale", scale, ("sweep", "amax", "weighted"))
    if calibrate is None and (awq, windows, length) != (None, None, None):
        raise ValueError("--awq, --windows and --length are of a calibration: name its text, --calibrate FILE")
    awq, windows, length = awq is not False, windows or 256, length or 2048
    if scale == "weighted" and calibrate is None:
        raise ValueError("--scale weighted: name the text to weigh by, --calibrate FILE")
    if calibrate is not None and not awq and scale != "weighted":
        raise ValueError(f"--calibrate is of no use with --no-awq and --scale {scale}: take one of them out")
    from qerl.calibrate import calibrated_quantize
    from qerl.evaluate.show import show_progress
    from qerl.formats.codes import BF16, Swept
    from qerl.formats.writing import quantize_checkpoint
    from qerl.nn.load import base_format, resolve_device

    settings = {"format": format, "scale": "amax" if scale == "amax" else "sweep"}
    settings |= {"double_quant": double_quant, "group_size": group_size, "symmetric": symmetric}
    chosen = base_format(validate({"model": settings}).model)
    assert not isinstance(chosen, BF16)
    options: dict[str, Any] = {"format": chosen, "keep": keep or []}
    if calibrate is None:
        report = quantize_checkpoint(
            source, target, **options, device=resolve_device(device), progress=ByteProgress(sys.stderr)
        )
    else:
        if not isinstance(chosen, Swept):
            raise ValueError(f"{format} has no choice of scales to calibrate: leave --calibrate out")
        with show_progress("calibration, layers") as progress:
            report = calibrated_quantize(
                source,
                target,
                calibrate,
                **options,
                awq=awq,
                weighted=scale == "weighted",
                length=length,
                max_windows=windows,
                device=device,
                calibration_progress=progress,
                progress=ByteProgress(sys.stderr),
            )
    for key, value in report.items():
        if isinstance(value, list):
            few = ", ".join(value[:4]) + (", ..." if len(value) > 4 else "")
            value = f"{len(value)} ({few})" if value else 0
        print(f"{key}: {value}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="output_dir of a run (or one of its checkpoints).")],
    to: Annotated[Path, typer.Option("--to", help="New folder.")],
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter, in PEFT's layout.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Base and adapter as one model in 16 bits.")] = False,
    requantize: Annotated[
        str | None,
        typer.Option(help=f"The merged model in 4 bits again: {', '.join(PACKED_FORMATS)}.", show_default=False),
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Folder of the base model, where the run's model.path has moved.")
    ] = None,
    unfold: Annotated[
        bool, typer.Option("--unfold", help="Of an adapter over an AWQ base: fit it to the model before AWQ.")
    ] = False,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
) -> None:
    """Write what a run has learned as a folder that other programs load."""
    if adapter + merged + (requantize is not None) != 1:
        raise ValueError("qerl export: choose one of --adapter, --merged, --requantize nvfp4")
    format = "nvfp4" if requantize is None else _choice("--requantize", requantize, PACKED_FORMATS)
    from qerl.export import export
    from qerl.report.weights import print_export

    kind = "adapter" if adapter else "merged" if merged else "requantized"
    result = export(
        run,
        to,
        kind,
        format=format,
        base_folder=base,
        unfold=unfold,
        device=device,
        progress=ByteProgress(sys.stderr),
    )
    print_export(result)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help='Packed folder, or a bf16 one (or "embedded") to quantise in memory.')],
    against: Annotated[
        Path | None, typer.Option(help="The bf16 folder that a packed one was made of.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to compare next-token distributions on.", show_default=False)
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(FORMATS)}; default: the folder's own, else nvfp4.", show_default=False),
    ] = None,
    scale: Annotated[str, typer.Option(help="Of a bf16 folder: sweep or amax.")] = "sweep",
    double_quant: DoubleQuantOption = True,
    group_size: GroupSizeOption = 128,
    symmetric: SymmetricOption = False,
    keep: Annotated[list[str] | None, typer.Option(help="Of a bf16 folder: glob of layers that stay in bf16.")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window of the text.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Most windows of the text.")] = 16,
    worst: Annotated[int, typer.Option(min=0, help="Layers to list.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for all numbers.", show_default=False)] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help=f"Picture to draw, {', '.join(PICTURES)}.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
) -> None:
    """Say how far a 4-bit model is from its bf16 weights: SQNR by layer and, on text, KL, agreement and entropy."""
    for file in (json_file, plot_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{file}: there is no folder {file.parent}")
    if plot_file is not None and plot_file.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot {plot_file}: its name must end with {', '.join(PICTURES)}")
    model_folder(model)
    from qerl.evaluate.show import show_progress
    from qerl.inspection.text import compare_text
    from qerl.inspection.weights import compare_weights, open_pair, stored_format
    from qerl.report.inspection import plot_inspection, print_inspection, write_json

    format = format or stored_format(model) or "nvfp4"
    _choice("--format", format, FORMATS)
    settings = {"path": model, "format": format, "scale": scale, "keep": keep or [], "device": device}
    settings |= {"double_quant": double_quant, "group_size": group_size, "symmetric": symmetric}
    pair = open_pair(validate({"model": settings}).model, against)
    with show_progress("products") as progress:
        weights = compare_weights(*pair, progress)
    on_text = None
    if text is not None:
        with show_progress("layers, on the text") as progress:
            on_text = compare_text(*pair, text, length=length, max_windows=windows, progress=progress)
    print_inspection(weights, on_text, worst=worst)
    if json_file is not None:
        write_json(json_file, weights, on_text)
    if plot_file is not None:
        plot_inspection(plot_file, weights, on_text)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help='Model folder, or "embedded".')],
    prompt: Annotated[
        str | None, typer.Argument(help="The user's message; without one, a chat on the terminal.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of an adapter to apply.")] = None,
    format: FormatOption = "nvfp4",
    samples: Annotated[int, typer.Option("-n", min=1, help="Completions of the prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Key of the sampling.")] = 0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
) -> None:
    """Sample completions of a prompt."""
    _choice("--format", format, FORMATS)
    model_folder(model)
    from qerl.evaluate.show import show_progress
    from qerl.generate import Generator

    settings = ModelConfig.model_validate({"path": model, "format": format})
    with show_progress("loading the model") as progress:
        generator = Generator(settings, adapter, progress)

    def complete(messages: list[dict[str, str]], seed: int) -> list[str]:
        with show_progress("completions") as progress:
            return generator(messages, seed=seed, progress=progress, **options)

    options = {"samples": samples, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    history = [{"role": "system", "content": system}] if system else []
    if prompt is not None:
        for text in complete([*history, {"role": "user", "content": prompt}], seed):
            print(text)
        return
    print("An empty line or Ctrl-D ends the chat.")
    while line := _ask():
        history.append({"role": "user", "content": line})
        texts = complete(history, seed)
        print("\n\n".join(texts))
        history.append({"role": "assistant", "content": texts[0]})
        seed += 1


def _ask() -> str:
    """The next line of a chat; empty at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        print()  # the shell's prompt begins a line
        return ""


@app.command("eval")
def evaluate(
    model: Annotated[
        str | None, typer.Argument(help='Model folder, or "embedded"; none with --from-parquet.', show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings of the config, such as task.difficulty=3.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="A task's name; default arithmetic.")] = None,
    path: Annotated[str | None, typer.Option(help="File or folder with the task's data.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of an adapter to apply.")] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Measure this adapter, other model, or results.parquet too: the change, problem by problem."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Completions of each problem in the sampled mode; 0: none.")] = 4,
    temperature: Annotated[float, typer.Option(help="Of the sampled mode.")] = 0.6,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling of the sampled mode; 1 is off.")] = 0.95,
    greedy: Annotated[bool, typer.Option(help="Measure greedy decoding.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many held-out problems.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest completion, in tokens.")] = 512,
    seed: Annotated[int, typer.Option(help="Key of the sampling.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results.parquet and summary.json; default: only print.")
    ] = None,
    tag_free: Annotated[
        bool, typer.Option("--tag-free", help="Put tag-free grading first; both are always reported.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Most sequences that decode at a time; bounds memory.")] = 256,
    format: FormatOption = "nvfp4",
    from_parquet: Annotated[
        Path | None, typer.Option(help="Grade the completions of this results.parquet anew, without a model.")
    ] = None,
) -> None:
    """Measure accuracy on a task's held-out problems: greedy, Pass@1, pass@k, majority@k, with 95 % intervals."""
    if model is not None and "=" in model and not Path(model).is_dir():
        model, overrides = None, [model, *(overrides or [])]
    if model is not None:
        model_folder(model)
    from qerl.evaluate.command import Settings, run
    from qerl.evaluate.files import read_settings

    _choice("--format", format, FORMATS)
    if temperature == 0:
        raise ValueError(
            "--temperature 0: the sampled mode needs one above 0; leave it out and use --greedy (the default; "
            "--samples 0 for greedy decoding alone)"
        )
    if (model is None) == (from_parquet is None):
        raise ValueError("qerl eval needs a model's folder or --from-parquet FILE, and not both")
    options = {
        "model.path": model,
        "model.format": format,
        "task.name": task,
        "task.path": path,
        "rollout.temperature": temperature,
        "rollout.top_p": top_p,
        "rollout.max_completion_length": max_new_tokens,
        "rollout.max_batch_size": batch_size,
        "seed": seed,
    }
    if from_parquet is not None and task is None:  # the grader of the task that was measured
        saved = read_settings(from_parquet)["task"]
        options = {f"task.{key}": value for key, value in saved.items()} | {
            k: v for k, v in options.items() if v is not None
        }
    settings = _eval_config(options, overrides or [])
    run(
        Settings(
            model=settings.model,
            task=settings.task,
            rollout=settings.rollout,
            adapter=adapter,
            compare_with=compare,
            greedy=greedy,
            num_samples=samples,
            limit=limit,
            seed=settings.seed,
            tag_free=tag_free,
            output_dir=output,
            from_parquet=from_parquet,
        )
    )


def _eval_config(options: dict[str, Any], overrides: list[str]) -> RunConfig:
    """The config that an evaluation takes its sections from; ConfigError for settings that it would not read."""
    for override in overrides:
        if not override.startswith(EVAL_SETTINGS):
            raise ConfigError(f"{override}: an evaluation reads {', '.join(EVAL_SETTINGS)}, and its options (--help)")
    options = options | {"loss.importance_sampling": False}  # nothing is trained, so top-p is free
    given = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in options.items() if value is not None]
    return load_config(None, given + overrides)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="output_dir of a run; several are drawn over each other.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: report.html in the first run.")
    ] = None,
) -> None:
    """Write a page with a run's curves, completions and config, which opens offline."""
    from qerl.report.html import write_report

    print(write_report(runs, output))


@app.command()
def plot(run: Annotated[Path, typer.Argument(help="output_dir of a run.")]) -> None:
    """Draw a run's curves into plot.png."""
    from qerl.report.plot import plot_run

    print(plot_run(run))


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = None,
    gpu: Annotated[
        str | None, typer.Option(help="A card's memory, such as 24GB (1 GB = 1e9 bytes); default: the GPU here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as JSON.")] = False,
) -> None:
    """Say what a run will take, and whether it fits a card, without loading anything; exit code 1 if it does not."""
    settings = _load(config, overrides)
    import torch
    from rich.console import Console

    from qerl.plan import show
    from qerl.plan.fit import parse_card

    card = None if gpu is None else parse_card(gpu)
    if card is None and torch.cuda.is_available():
        card = torch.cuda.mem_get_info()[1]
    made = show.make_plan(settings, card)
    if as_json:
        print(json.dumps(show.as_json(made), indent=2))
    else:
        show.show(made, Console())
    if made.card is not None and not made.card.fits:
        raise typer.Exit(1)


@bench.command("step")
def bench_step(
    model: Annotated[str, typer.Option(help="A Qwen2.5 model's size, such as 7B; its weights are random.")] = "0.5B",
    overrides: Overrides = None,
    format: FormatOption = "nvfp4",
    cap: Annotated[
        str | None, typer.Option(help="Memory to stay below, such as 24GB; default: all.", show_default=False)
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters on all seven projections.")] = 32,
    completions: Annotated[int, typer.Option(min=2, help="Of the step.")] = 16,
    group: Annotated[int, typer.Option(min=2, help="Completions of a prompt.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    new: Annotated[int, typer.Option(min=2, help="Tokens of a completion.")] = 2048,
    stop_after: Annotated[
        int | None,
        typer.Option(help="End completions after so many tokens, all else being for --new.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is planned.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File to append the record to, as a line of JSON.", show_default=False)
    ] = None,
    run: Annotated[str, typer.Option(help="A name for the record.")] = "",
    commit: Annotated[
        str | None, typer.Option(help="For the record; default: the working tree's.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu or cuda.")] = "auto",
) -> None:
    """Time one whole step (rollout, update, wake) over random weights, part by part, under a card's memory."""
    _choice("--format", format, FORMATS)
    from qerl.bench import step
    from qerl.plan.fit import parse_card

    case = step.Case(
        model=model,
        format=format,
        rank=rank,
        completions=completions,
        group=group,
        prompt_tokens=prompt,
        new_tokens=new,
        cap_bytes=None if cap is None else parse_card(cap, "--cap"),
        stop_after=stop_after,
        overrides=tuple(overrides or ()),
    )
    if dry_run:
        print(json.dumps(step.dry_run(case, run=run, commit=commit, device=device)))
        return
    if case.cap_bytes is not None and step.resolve_device(device).type != "cuda":
        raise ValueError("--cap holds a GPU's memory, and there is no GPU: --dry-run says what is planned for one")
    record = step.run_step(case, run=run, commit=commit, device=device)
    print(*step.show(record), sep="\n")
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    if "error" in record:
        raise typer.Exit(1)


@app.command()
def doctor(measure: Annotated[bool, typer.Option(help="Measure speeds, a second or two a device.")] = True) -> None:
    """Say what this machine has, which paths it will take, what it can train, and how fast."""
    from qerl.doctor import report

    for name, value in report(measure):
        print(f"{name:<14} {value}", flush=True)


@app.command()
def config(
    path: Annotated[Path | None, typer.Argument(help="A TOML file.")] = None, overrides: Overrides = None
) -> None:
    """Check a config and print it whole, defaults included, as JSON."""
    settings = _load(path, overrides)
    print(settings.model_dump_json(indent=2))


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Handle --version."""
    if version:
        print(f"qerl {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `qerl` command."""
    # Before torch is loaded. GNU OpenMP's threads spin about a millisecond before they sleep, and where something else
    # uses a core as well, a small model on a CPU then runs ten times slower. A short spin costs a tenth on free cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Memory of torch's allocator that grows in place: rollouts and updates take turns with the same bytes, in pieces of
    # other sizes, which fixed segments would scatter.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # transformers renames its switches; PEFT still uses the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    # PEFT imports bitsandbytes where it is installed, which warns on a CPU of kernels that nothing here calls.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        app()
    except (ConfigError, ValueError, OSError) as error:
        print(f"qerl: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except RuntimeError as error:
        import torch  # which is loaded already where memory has run out

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        print(f"qerl: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
