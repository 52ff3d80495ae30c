"""`mla generate`: continue a prompt, a file of prompts, or a conversation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mla_cli import console
from mla_cli.commands import generate_options as own
from mla_cli.commands import options, serving, watching
from mla_cli.commands.configured import check_width, configured, configured_strength, warm_up
from mla_cli.commands.tiering import tiered
from mla_cli.errors import InputError, MlaError, UsageError
from mla_cli.runtime import choices
from mla_cli.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mla_cli.runtime.engine import Engine
    from mla_cli.runtime.prompt_file import PromptLine
    from mla_cli.runtime.request import Request

_DEFAULTS = SamplingParams()


def generate(
    context: typer.Context,
    ckpt: options.Checkpoint,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")
    ] = None,
    prompts: own.Prompts = None,
    chat: own.Chat = False,
    system: own.System = None,
    max_new_tokens: own.MaxNewTokens = _DEFAULTS.max_new_tokens,
    temperature: own.Temperature = _DEFAULTS.temperature,
    top_p: own.TopP = _DEFAULTS.top_p,
    top_k: own.TopK = _DEFAULTS.top_k,
    min_p: own.MinP = _DEFAULTS.min_p,
    repetition_penalty: own.RepetitionPenalty = _DEFAULTS.repetition_penalty,
    stop: own.Stop = None,
    ignore_eos: own.IgnoreEos = False,
    seed: options.Seed = options.DEFAULT_SEED,
    out: own.Out = None,
    resume: own.Resume = False,
    force: options.Force = False,
    print_config: own.PrintConfig = False,
    stats: own.Stats = False,
    metrics: watching.Metrics = None,
    watch: watching.Watch = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    config: own.Config = None,
    profile: own.Profile = None,
    backend: options.Backend = "auto",
    kv_dtype: own.KvDtype = "auto",
    latent_strength: options.LatentStrength = 1.0,
    weights: options.Weights = "float",
    max_batch: own.MaxBatch = choices.DEFAULT_MAX_BATCH,
    max_context: own.MaxContext = None,
    pool_size: own.PoolSize = None,
    serve: serving.ServeAt = None,
    api_key_file: serving.ApiKeyFile = None,
    max_queue: serving.MaxQueue = choices.DEFAULT_QUEUE,
    max_seconds: serving.MaxSeconds = choices.DEFAULT_REQUEST_SECONDS,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    debug: options.Debug = False,
) -> None:
    """Continue a prompt, a file of prompts, or a conversation.

    With --dtype auto a CPU computes in float32 (stored weights are widened without loss; with --weights int8 in bfloat16
    where it has instructions for it), a GPU in the stored type.
    Answers to --prompts are JSON lines in the order of the prompts; a line that cannot be answered says why.
    CKPT may also be a model that was not converted: it runs with a standard cache.

    Examples:

      mla generate out "Once upon a time" --stats

      mla generate out "Why is the sky blue?" --chat --temperature 0.7 --top-p 0.9

      mla generate out --prompts prompts.jsonl --out results.jsonl

      mla generate out "Once upon a time" --latent-strength 0.5

      mla generate out --serve :8000

      mla generate out --config mla.yaml --print-config
    """
    params = SamplingParams(
        max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, tuple(stop or ()), seed, ignore_eos
    )
    values = configured(context)
    if print_config:
        from mla_cli.runtime.config_file import effective_config

        typer.echo(effective_config(values, {**context.params, "stop": list(params.stop)}), nl=False)
        return
    given = (prompt, prompts, system, out) != (None,) * 4 or chat or json or resume
    server = None if serve is None else serving.begin(serve, api_key_file, max_queue, max_seconds, alone=not given)
    if server is None:
        _check_combination(prompt, prompts, chat, system, out, json, resume)
    text = None if prompts is not None or server is not None else _prompt_text(prompt, chat)
    if out is not None:
        from mla_cli.runtime.result_file import check_result_file

        check_result_file(out, force=force)
    if prompts is not None:
        from mla_cli.runtime.prompt_file import read_prompt_file

        lines = read_prompt_file(prompts, params)

    options.setup_runtime(threads, seed, quiet, debug)
    with watching.place(
        metrics, watch, values, stats=stats, force=force, others=(out, prompts),
        several=prompts is not None or server is not None,
        shared=prompts is not None and out is None and sys.stdout.isatty(), served=server is not None,
    ) as place:  # fmt: skip
        latent_strength = configured_strength(values, config, ckpt, latent_strength)
        from mla_cli.runtime.engine import open_engine

        engine = open_engine(
            ckpt,
            device=options.resolve_device(device),
            dtype=options.resolve_dtype(dtype),
            kv_dtype=kv_dtype,
            backend=backend,
            latent_strength=latent_strength,
            weights=weights,
            max_batch=max_batch,
            max_context=max_context,
            pool_tokens=None if pool_size is None else pool_size * place.chunk_pages * choices.PAGE_TOKENS,
            cool_down=values.get("latent_attention.fallback.cool_down", choices.COOL_DOWN),
            chat=chat,
        )
        check_width(values, config, engine.generator.decoder)
        for note in engine.notes:
            console.note(note)
        try:
            with tiered(values, engine), watching.watched(place, engine.generator):
                warm_up(values, config, engine)
                if server is not None:
                    serving.run(server, engine, ckpt, params, place.figures)
                elif prompts is not None:
                    how = {"kv_dtype": kv_dtype, "latent_strength": latent_strength, "weights": weights}
                    told = _Told(prompts, len(lines), bar=not place.live)
                    if out is None:
                        _answer_file(engine, told, lines, system, chat, json)
                    else:
                        _answer_to_file(engine, told, lines, system, chat, out, resume, how)
                elif text is None:
                    _converse(engine, system, params)
                else:
                    _answer(engine, _request(engine, _messages(system, text) if chat else text, params), json)
        finally:
            if stats and engine.generator.statistics.new_tokens:
                from mla_cli.runtime.statistics import table

                typer.echo(table(engine.generator.statistics.summary()), err=True)  # asked for, so even with --quiet


def _check_combination(
    prompt: str | None,
    prompts: Path | None,
    chat: bool,
    system: str | None,
    out: Path | None,
    json: bool,
    resume: bool,
) -> None:
    if prompt is not None and prompts is not None:
        raise UsageError("a PROMPT and --prompts are given", fix="give one of them")
    if prompt is None and prompts is None and not chat:
        raise UsageError("no prompt is given", fix="give a PROMPT, - for stdin, --prompts FILE or --chat")
    if system is not None and not chat:
        raise UsageError("a system message belongs to a conversation", where="--system", fix="add --chat")
    if out is not None and prompts is None:
        raise UsageError("only the results of --prompts go to a file", where="--out", fix="redirect stdout instead")
    if resume and out is None:
        raise UsageError("only a run that writes to a file can be resumed", where="--resume", fix="repeat its --out")
    if out is not None and json:
        raise UsageError("one object on stdout, or lines in a file", where="--json --out", fix="give one of them")
    if out is not None and prompts is not None and out.exists() and out.samefile(prompts):
        raise UsageError("the results would replace the prompts", where=f"--out {out}", fix="choose another file")


def _prompt_text(prompt: str | None, chat: bool) -> str | None:
    """The prompt; None for a conversation at the terminal."""
    from mla_cli.runtime.prompt_text import text_of_argument, text_of_bytes, without_final_newline

    if prompt is None and chat and sys.stdin.isatty():
        return None
    if prompt is None or prompt == "-":
        return without_final_newline(text_of_bytes(sys.stdin.buffer.read(), "stdin"))
    return text_of_argument(prompt)


def _messages(system: str | None, text: str) -> list[Mapping[str, Any]]:
    from mla_cli.runtime.prompt_file import conversation

    return conversation(text, system)


def _request(engine: Engine, prompt: str | list[Mapping[str, Any]], params: SamplingParams) -> Request:
    from mla_cli.runtime.request import Request

    ids = prompt if isinstance(prompt, str) else tuple(engine.tokenizer.encode_chat(prompt))
    return Request(ids, params)


def _answer(engine: Engine, request: Request, json: bool) -> str:
    """One answer, as it comes or as one JSON object."""
    terminal = not json and sys.stdout.isatty()
    try:
        completion = engine.generator.complete(request, (lambda _: None) if json else _print_piece)
    finally:
        if terminal:
            _print_piece("\n")
    if json:
        console.result_json({**completion.as_dict(), "statistics": engine.generator.statistics.summary()})
    elif completion.note is not None:
        console.warn(completion.note)
    return completion.text


def _print_piece(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _converse(engine: Engine, system: str | None, params: SamplingParams) -> None:
    """Turn by turn at the terminal, until end of input."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing in `input`)
    console.note("an empty line is skipped; Ctrl-D ends the conversation")
    history = _messages(system, "")[:-1]
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        if not text.strip():
            continue
        turn = [*history, {"role": "user", "content": text}]
        try:
            answer = _answer(engine, _request(engine, turn, params), json=False)
        except InputError as error:  # e.g. the conversation has outgrown the context: what was said stays
            console.error(str(error))
            continue
        history = [*turn, {"role": "assistant", "content": answer}]


def _answer_file(
    engine: Engine, told: _Told, lines: list[PromptLine], system: str | None, chat: bool, json: bool
) -> None:
    from mla_cli.runtime.prompt_file import answer_lines, in_order
    from mla_cli.runtime.result_file import write_line

    answers = in_order(told(answer_lines(engine.generator, lines, system, chat=chat, times=json)))
    if json:
        console.result_json({"completions": list(answers), "statistics": engine.generator.statistics.summary()})
    else:
        for answer in answers:
            write_line(answer)
    told.check()


def _answer_to_file(
    engine: Engine,
    told: _Told,
    lines: list[PromptLine],
    system: str | None,
    chat: bool,
    out: Path,
    resume: bool,
    how: dict[str, Any],
) -> None:
    from mla_cli.runtime.prompt_file import answer_lines
    from mla_cli.runtime.result_journal import open_journal, run_facts

    generator, source = engine.generator, engine.model.source
    how = {**how, "max_context": generator.context, "chat": chat, "system": system}
    facts = run_facts(lines, source.folder, source.sha256(), generator.decoder, how)
    with open_journal(out, facts, resume=resume, total=len(lines)) as journal:
        if journal.done:
            console.note(f"going on after {len(journal.done)} of {len(lines)} answers")
        for answer in told(answer_lines(generator, lines, system, chat=chat, done=frozenset(journal.done))):
            journal.add(answer)
    told.check()


class _Told:
    """Answers to a file of prompts on their way: progress on stderr, and the lines that could not be answered.

    Args:
        path: the file, of so many prompts in all. bar: show how far it is.
    """

    def __init__(self, path: Path, total: int, *, bar: bool) -> None:
        self._path, self._total, self._bar, self._failed = path, total, bar, 0

    def __call__(self, answers: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if self._bar:
            answers = console.progress(answers, "answering prompts", total=self._total, unit="prompt")
        for answer in answers:
            if "error" in answer:
                self._failed += 1
                console.error(f"{self._path}:{answer['line']}: {answer['error']}")
            yield answer

    def check(self) -> None:
        """Fail if any could not be answered, now that all others are written."""
        if self._failed:
            what = f"{self._failed} of {self._total} prompts could not be answered"
            raise MlaError(what, where=self._path, fix="mend the lines that are named above")
