"""Train a small byte-level model with true multi-head attention, to convert where no public one is at hand.

The whole chain, from the repository's root:

    python scripts/train_mha.py mha --data ../shared/data --minutes 60
    mla convert mha/model mha/mla-8 --ratio 8 --calib mha/train --heal full --heal-minutes 60
    mla eval mha/mla-8 --baseline mha/model --tasks ppl,kl --text mha/held-out.txt
    mla eval mha/mla-8 --baseline mha/model --tasks ppl,kl --text ../shared/data/text/wikitext2-test.txt

It trains on the first nine tenths of every text in `DATA/text/calibration` (copied to `mha/train`); the last tenths make
`mha/held-out.txt`. The evaluation's column `drop %` says how much worse loss and accuracy of the next byte are than the
source's. `--family gpt2` trains GPT-2's architecture (learned positions) in place of Llama's (rotary positions).

`mha/state.pt` is written every few minutes and at the end: the same command with `--resume` goes on. `--minutes` bounds the
training time of all runs together, and the learning rate follows that clock; with `--steps` it follows the steps, and the
same seed gives the same weights on the same machine, however often the run was interrupted. It stops early where the
held-out loss no longer falls. `mha/model` gets the weights of the best check.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import pre_tokenizers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mla_cli.calibration.precision import computing_in
from mla_cli.errors import EXIT_INTERRUPTED, EXIT_OK, InputError, MlaError, UsageError
from mla_cli.model.tokenizer import load_tokenizer
from mla_cli.model.tokenizer_build import byte_level_bpe

TRAINED_SHARE = 0.9  # of every text; the rest is held out
CHECKED_WINDOWS = 64  # spread over the held-out text; a check costs about as much as three steps
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.1
STATE_SECONDS = 180.0

# What a resumed run may have otherwise than the run that was interrupted.
FREE_OPTIONS = ("run", "data", "minutes", "resume", "flat_checks", "flat_gain")


class Check(NamedTuple):
    """What the held-out text showed after so many steps and seconds of training."""

    step: int
    seconds: float
    bits: float  # a byte
    accuracy: float  # of the next byte


class Training:
    """A model in training: everything that a state file holds.

    Attributes:
        fixed: the options that every run of a training shares.
        seconds: spent in steps, of all runs together.
        best: weights of the check with the fewest bits.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.fixed = {name: value for name, value in vars(options).items() if name not in FREE_OPTIONS}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build_model(options).to(self.device)
        self.optimizers = build_optimizers(self.model, options.optimizer, options.rate)
        self.step, self.seconds = 0, 0.0
        self.checks: list[Check] = []
        self.best: dict[str, Tensor] = {}

    @property
    def done(self) -> float:
        """The share of the schedule that is past; 1 and more at its end."""
        if self.options.steps:
            return float(self.step / self.options.steps)
        return float(self.seconds / (60 * self.options.minutes))

    def advance(self, rows: Tensor) -> None:
        """One step on `[B, T]` tokens.

        Raises:
            MlaError: the loss is not finite.
        """
        begun = time.monotonic()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.rate * rate_share(self.step, self.done)
        losses, _ = self.predict(rows)
        loss = losses.mean()
        if not math.isfinite(float(loss.detach())):
            raise MlaError(f"the loss is not finite in step {self.step}", where="--rate", fix="give a lower --rate")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.seconds += time.monotonic() - begun

    def predict(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Loss in nats and hit or miss of every token of `[B, T]` but a row's first: two of `[B, T - 1]`."""
        rows = rows.to(self.device)
        with computing_in(getattr(torch, self.options.dtype), self.device), plain_attention():
            logits = self.model(rows, use_cache=False).logits[:, :-1].float()  # [B, T - 1, V]
        losses = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
        return losses, logits.argmax(dim=-1) == rows[:, 1:]

    @torch.no_grad()
    def check(self, windows: Tensor) -> Check:
        """Look at the held-out `[N, T]` windows; keep the weights where they are the best so far."""
        parts = [self.predict(rows) for rows in windows.split(self.options.batch)]
        bits = float(torch.cat([losses for losses, _ in parts]).double().mean()) / math.log(2)
        accuracy = float(torch.cat([hits for _, hits in parts]).double().mean())
        if not any(check.bits <= bits for check in self.checks):
            self.best = {name: tensor.cpu().clone() for name, tensor in self.model.state_dict().items()}
        self.checks.append(Check(self.step, self.seconds, bits, accuracy))
        return self.checks[-1]

    def save(self, file: Path) -> None:
        """Write the state, whole or not at all."""
        state = {
            "options": self.fixed, "model": self.model.state_dict(), "best": self.best,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step, "seconds": self.seconds, "checks": [tuple(check) for check in self.checks],
        }  # fmt: skip
        temporary = file.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(file)

    def load(self, file: Path) -> None:
        """Go back to a written state.

        Raises:
            UsageError: there is none, or it was begun with other options.
        """
        if not file.is_file():
            raise UsageError("there is no run to go on with", where=file, fix="leave out --resume")
        state = torch.load(file, weights_only=True, map_location=self.device)
        other = [name for name, value in state["options"].items() if self.fixed[name] != value]
        if other:
            told = ", ".join(f"--{name.replace('_', '-')} {state['options'][name]}" for name in other)
            raise UsageError("the run was begun with other options", where=file, fix=f"give {told}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.best = state["step"], state["seconds"], state["best"]
        self.checks = [Check(*check) for check in state["checks"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train from the command line; the exit code: 0 done, 1 failed, 2 unusable options, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return train(options)
    except MlaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def train(options: argparse.Namespace) -> int:
    """Train, or go on, and write `RUN/model`; the exit code.

    Raises:
        InputError: there is not enough text. UsageError: the run exists, or was begun with other options.
        MlaError: the loss is not finite.
    """
    run: Path = options.run
    state, folder = run / "state.pt", run / "model"
    training = Training(options)
    if options.resume:
        training.load(state)
    elif state.exists():
        raise UsageError("this run exists", where=run, fix="go on with --resume, or choose another folder")
    else:
        split_texts(options.data / "text/calibration", run)
        save_tokenizer(folder)
    tokens = [read_tokens(folder, files) for files in (sorted((run / "train").glob("*.txt")), [run / "held-out.txt"])]
    windows = tokens[1][: len(tokens[1]) // options.context * options.context].view(-1, options.context)  # [N, T]
    windows = windows[:: math.ceil(len(windows) / CHECKED_WINDOWS) or 1]
    per_epoch = (len(tokens[0]) // options.context - 1) // options.batch
    if per_epoch < 1 or not len(windows):
        raise InputError("the texts are too short for one batch", where=options.data, fix="lower --batch or --context")
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {len(tokens[0]):,} bytes to train on ({per_epoch} steps an epoch)")

    with interruptions() as interrupted:
        reason = _run_steps(training, tokens[0], windows, state, interrupted)
    training.save(state)
    training.model.load_state_dict(training.best)
    training.model.save_pretrained(folder)
    best = min(training.checks, key=lambda check: check.bits)
    print(f"{reason}; {folder} has the weights of step {best.step}: {best.bits:.4f} bits a byte")
    return EXIT_INTERRUPTED if interrupted() else EXIT_OK


def _run_steps(
    training: Training, tokens: Tensor, windows: Tensor, state: Path, interrupted: Callable[[], bool]
) -> str:
    """Steps and checks until there is a reason to stop, which it returns."""
    options = training.options
    saved = time.monotonic()
    while True:
        ended = training.done >= 1
        checked = bool(training.checks) and training.checks[-1].step == training.step
        if (training.step % options.check_steps == 0 or ended) and not checked:
            _tell(training.check(windows), options)
        if is_flat([check.bits for check in training.checks], options.flat_checks, options.flat_gain):
            return f"flat after {training.step} steps"
        if ended or interrupted() or training.seconds >= 60 * options.minutes:
            return f"{'ended' if ended else 'stopped'} after {training.step} steps"
        training.advance(batch_at(tokens, training.step, options.batch, options.context, options.seed))
        if time.monotonic() - saved > STATE_SECONDS:
            training.save(state)
            saved = time.monotonic()


def build_model(options: argparse.Namespace) -> Any:
    """A new transformers model of 256 tokens with as many key/value heads as query heads.

    Raises:
        UsageError: the hidden size does not divide into heads (of an even size where they are rotated).
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    width, left = divmod(options.hidden, options.heads)
    if left or (options.family == "llama" and width % 2):
        raise UsageError(
            f"{options.hidden} channels do not divide into {options.heads} heads", where="--heads", fix="try --heads 8"
        )
    common = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": True}
    config: Any = transformers.LlamaConfig(
        hidden_size=options.hidden, intermediate_size=64 * round(options.hidden / 24),  # 8/3, in whole vectors
        num_hidden_layers=options.layers, num_attention_heads=options.heads, num_key_value_heads=options.heads,
        max_position_embeddings=options.context, **common,
    )  # fmt: skip
    if options.family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=options.hidden, n_layer=options.layers, n_head=options.heads, n_positions=options.context,
            activation_function="gelu_pytorch_tanh",  # gelu_new in one kernel
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, **common,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def build_optimizers(model: Any, kind: str, rate: float) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices inside layers and AdamW for the rest; only those matrices decay."""
    named = list(model.named_parameters())
    inside = [p for name, p in named if p.dim() == 2 and (".layers." in name or ".h." in name)]
    rest = [p for _, p in named if not any(p is matrix for matrix in inside)]
    groups = [{"params": rest, "weight_decay": 0.0}]
    if kind == "adamw":
        groups.append({"params": inside, "weight_decay": WEIGHT_DECAY})
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)]
    if kind == "muon":
        optimizers.append(torch.optim.Muon(inside, lr=rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def rate_share(step: int, done: float) -> float:
    """The share of the full learning rate: a linear rise over the first steps, on half a cosine down to nothing."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def is_flat(bits: Sequence[float], checks: int, gain: float) -> bool:
    """Whether the last `checks` figures together are not better by `gain` than the best before them."""
    return len(bits) > checks and min(bits[:-checks]) - min(bits[-checks:]) < gain


def split_texts(source: Path, run: Path) -> None:
    """Copy the first part of every text file to `run/train` and join the rest as `run/held-out.txt`, cut between lines.

    Raises:
        InputError: there are no readable UTF-8 texts.
    """
    files = sorted(source.glob("*.txt"))
    if not files:
        raise InputError("no text files to train on", where=source, fix="give --data, a folder with text/calibration/")
    (run / "train").mkdir(parents=True, exist_ok=True)
    rests = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError("the text is not readable UTF-8", where=file) from error
        share = int(TRAINED_SHARE * len(text))
        cut = text.find("\n", share) + 1 or share
        (run / "train" / file.name).write_text(text[:cut], encoding="utf-8")
        rests.append(text[cut:])
    (run / "held-out.txt").write_text("\n".join(rests), encoding="utf-8")


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of 256 bytes beside a model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the characters that stand for bytes
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_bpe({character: i for i, character in enumerate(alphabet)}, []).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def read_tokens(folder: Path, files: Sequence[Path]) -> Tensor:
    """Token ids `[N]` of files in turn, by the tokenizer in `folder`."""
    tokenizer = load_tokenizer(folder)
    return torch.cat([torch.tensor(tokenizer.encode(file.read_text(encoding="utf-8"))) for file in files])


def batch_at(tokens: Tensor, step: int, batch: int, context: int, seed: int) -> Tensor:
    """`[batch, context]` tokens of a step: every epoch cuts windows from another offset and takes them in another order."""
    count = len(tokens) // context - 1  # of windows, from any offset
    epoch, place = divmod(step, count // batch)
    random = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    offset = int(torch.randint(context, (), generator=random))
    chosen = torch.randperm(count, generator=random)[place * batch : (place + 1) * batch]
    return tokens[offset + chosen[:, None] * context + torch.arange(context)]


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention as two products in bfloat16, which on a CPU are faster than the fused kernel (docs/decisions/0003)."""
    allow = torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    allow(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        allow(before)


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came: a step is finished before anyone listens."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(check: Check, options: argparse.Namespace) -> None:
    tokens = check.step * options.batch * options.context
    speed = f"{tokens / check.seconds:,.0f} tokens/s" if tokens else ""
    print(
        f"step {check.step:5}  {check.seconds / 60:6.1f} min  held out {check.bits:.4f} bits a byte, "
        f"{100 * check.accuracy:.2f} % right  {speed}",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("run", type=Path, help="folder for texts, state and model")
    data = Path(os.environ.get("MLA_DATA", "../shared/data"))
    add("--data", type=Path, default=data, help="folder with text/calibration/*.txt (default: MLA_DATA)")
    add("--minutes", type=_positive(float), default=60.0, help="longest training time, of all runs together")
    add("--steps", type=_positive(int), default=None, help="length of the schedule (default: by the minutes)")
    add("--resume", action="store_true", help="go on with an interrupted run")
    add("--family", choices=("llama", "gpt2"), default="llama")
    add("--layers", type=_positive(int), default=4)
    add("--hidden", type=_positive(int), default=512)
    add("--heads", type=_positive(int), default=8)
    add("--context", type=_positive(int), default=512)
    add("--batch", type=_positive(int), default=8, help="windows of a step")
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--rate", type=_positive(float), default=0.01, help="largest learning rate (for adamw 0.003 is better)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="what matrix products are computed in")
    add("--check-steps", type=_positive(int), default=50, help="steps between looks at the held-out text")
    add("--flat-checks", type=_positive(int), default=8, help="the loss is flat when so many checks ...")
    add("--flat-gain", type=float, default=0.002, help="... together bring less than so many bits a byte")
    add("--seed", type=int, default=0)
    return parser


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        if not 0 < (value := kind(text)) < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above zero")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
