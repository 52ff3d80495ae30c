"""Options of `mla generate` alone, grouped as in its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_cli.commands import configured
from mla_cli.commands.options import INPUT, METHOD, OUTPUT, RUNTIME, existing_path, one_of
from mla_cli.runtime import choices

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='JSON lines with "prompt" or "messages", and sampling options of their own.',
        rich_help_panel=INPUT,
        callback=existing_path("file"),
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Use the chat template; without a PROMPT, converse.", rich_help_panel=INPUT)
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message of the conversation.", rich_help_panel=INPUT),
]

MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens",
        metavar="N",
        help="Most tokens to generate, from 1; the context cuts earlier.",
        rich_help_panel=METHOD,
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", help="0: always the likeliest token.", rich_help_panel=METHOD)
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", metavar="P", help="Fewest likeliest tokens of probability P, 0 < P <= 1.", rich_help_panel=METHOD
    ),
]
TopK = Annotated[
    int, typer.Option("--top-k", metavar="K", help="The K likeliest tokens; 0: all.", rich_help_panel=METHOD)
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", metavar="P", help="Tokens at least P times as likely as the likeliest.", rich_help_panel=METHOD
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1: rather no token again.", rich_help_panel=METHOD),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End before this text; repeatable.", rich_help_panel=METHOD),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.", rich_help_panel=METHOD)
]

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the results of --prompts here.", rich_help_panel=OUTPUT),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on with an interrupted --prompts run to --out.", rich_help_panel=OUTPUT),
]
Stats = Annotated[bool, typer.Option("--stats", help="Times and cache size, on stderr.", rich_help_panel=OUTPUT)]

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="mla.yaml: what options say where they are not given (docs/configuration.md).",
        rich_help_panel=RUNTIME,
        is_eager=True,
        callback=configured.use_config,
    ),
]
Profile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="|".join(choices.PROFILES),
        help="What neither options nor --config say.",
        rich_help_panel=RUNTIME,
        is_eager=True,
        callback=configured.use_profile,
        autocompletion=lambda: list(choices.PROFILES),
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option("--print-config", help="Print what holds altogether, as YAML, and end.", rich_help_panel=OUTPUT),
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        help="How latents are cached; auto: as calibrated.",
        rich_help_panel=RUNTIME,
        **one_of(*choices.KV_DTYPES, aliases=choices.KV_DTYPE_ALIASES),
    ),
]
MaxBatch = Annotated[
    int, typer.Option("--max-batch", metavar="N", min=1, help="Most prompts at a time.", rich_help_panel=RUNTIME)
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        metavar="N",
        min=2,
        help="Most tokens of prompt and answer (default: the model's positions).",
        rich_help_panel=RUNTIME,
    ),
]
PoolSize = Annotated[
    int | None,
    typer.Option(
        "--pool-size",
        metavar="N",
        min=1,
        help="Most memory of the cache, in chunks of 256 tokens (default: --max-batch whole contexts).",
        rich_help_panel=RUNTIME,
    ),
]
