"""What people reported of other converters and no other test holds (`tests/cases.py` says which test has which case)."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file

from mla_cli.app import COMMANDS, build_app, main
from mla_cli.checkpoint.load import load_decoder, open_model
from mla_cli.errors import InputError
from tests.tiny import SHAPE, random_tokens, run_convert, save_text, save_tiny, save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("--heal", "none", "--ratio", 2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder for a source, with text to calibrate on beside it."""
    save_text(tmp_path / "text.txt")
    save_tokenizer(tmp_path / "source")
    return tmp_path / "source"


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`; a value of `...` removes the key."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Set tensors by name, points written as two underscores; `change(old)` where a function is given."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors[name] = value(tensors[name]) if callable(value) else value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The folder's model on these tokens, in float64."""
    decoder = load_decoder(open_model(str(folder)), dtype=torch.float64)
    with torch.inference_mode():
        return decoder.logits(decoder(tokens))


@pytest.mark.parametrize(("family", "share"), [("phi", 0.5), ("stablelm", 0.25), ("gpt_neox", 0.25)])
def test_a_rotary_share_that_only_the_architecture_says(tmp_path: Path, family: str, share: float) -> None:
    """CV-04."""
    reference = save_tiny(tmp_path, family, **({} if family == "gpt_neox" else {"num_key_value_heads": 4}))
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {key: value for key, value in config["rope_parameters"].items() if key != "partial_rotary_factor"}
    edit_config(tmp_path, rope_parameters=rope, partial_rotary_factor=..., rotary_pct=...)
    model = open_model(str(tmp_path))
    turning = model.spec.attention[0].rotary
    assert turning is not None
    assert turning.dim == share * model.spec.hidden_size / model.spec.attention[0].num_heads
    tokens = random_tokens(2, 60)
    with torch.inference_mode():
        torch.testing.assert_close(logits(tmp_path, tokens).float(), reference(tokens).logits, atol=1e-4, rtol=0)


def test_a_tied_model_stays_tied(source: Path) -> None:
    """CV-13, CV-14 (a): whether or not the file repeats the embedding as its head."""
    save_tiny(source, tie_word_embeddings=True)
    outputs = []
    for _ in range(2):
        assert run_convert(source, *QUICK, "--force") == 0
        out = source.parent / "out"
        assert "lm_head.weight" not in open_model(str(out)).source.tensors.infos
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
        outputs.append((out / "model.safetensors").read_bytes())
        embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
        edit_tensors(source, lm_head__weight=embedding.clone())
    assert outputs[0] == outputs[1]


def test_a_head_that_contradicts_the_tied_flag_is_kept(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CV-14 (b)."""
    save_tiny(source, tie_word_embeddings=True)
    head = torch.randn(64, SHAPE["hidden_size"], generator=torch.Generator().manual_seed(3))
    edit_tensors(source, lm_head__weight=head)
    assert run_convert(source, *QUICK, "--json") == 0
    assert any("lm_head.weight differs" in note for note in json.loads(capsys.readouterr().out)["notes"])
    out = source.parent / "out"
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(open_model(str(out)).tensor("lm_head.weight"), head, atol=0, rtol=0)


def test_stored_frequencies_are_ignored_and_other_strange_tensors_are_not(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CV-16."""
    save_tiny(source)
    tokens = random_tokens(2, 60)
    clean = logits(source, tokens)
    edit_tensors(source, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert torch.equal(logits(source, tokens), clean)
    edit_tensors(source, model__layers__0__self_attn__sinks=torch.ones(6))
    assert run_convert(source, *QUICK) == 2
    assert "model.layers.0.self_attn.sinks" in capsys.readouterr().err


def test_architectures_say_nothing_that_the_model_type_does_not(source: Path) -> None:
    """CV-19: an empty list beside a known model_type."""
    save_tiny(source)
    tokens = random_tokens(1, 20)
    expected = logits(source, tokens)
    for architectures in ([], ..., None):
        edit_config(source, architectures=architectures)
        assert torch.equal(logits(source, tokens), expected)


def test_a_window_that_is_switched_off_is_none(source: Path) -> None:
    """CV-20, the control."""
    reference = save_tiny(source, "qwen2", bias=1.0, use_sliding_window=False, sliding_window=8, max_window_layers=1)
    edit_config(source, use_sliding_window=False, sliding_window=8, layer_types=...)
    tokens = random_tokens(2, 40)
    with torch.inference_mode():
        torch.testing.assert_close(logits(source, tokens).float(), reference(tokens).logits, atol=1e-4, rtol=0)
    assert run_convert(source, *QUICK, "--format", "deepseek") == 0


def test_what_float16_cannot_hold_is_named_and_not_written(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CV-22."""
    save_tiny(source, dtype=torch.bfloat16)

    def far(weight: torch.Tensor) -> torch.Tensor:
        weight[0, 0] = 1e5
        return weight

    edit_tensors(source, model__layers__1__mlp__gate_proj__weight=far)
    assert run_convert(source, *QUICK, "--format", "native", "--dtype", "float16") == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "model.layers.1.mlp.gate_proj.weight" in said
    assert "float16" in said
    assert not (source.parent / "out").exists()
    assert run_convert(source, *QUICK, "--format", "native") == 0
    written = load_file(source.parent / "out" / "model.safetensors")
    assert written["model.layers.1.mlp.gate_proj.weight"].dtype == torch.bfloat16
    assert all(tensor.isfinite().all() for tensor in written.values())


@pytest.mark.parametrize("said", [{"dtype": "float32"}, {"torch_dtype": "float32"}, {}, {"dtype": "bfloat16"}])
def test_the_file_says_what_is_stored(tmp_path: Path, said: dict[str, str]) -> None:
    """CV-23: whatever the configuration says of the type, or if it says nothing."""
    save_tiny(tmp_path, dtype=torch.bfloat16)
    edit_config(tmp_path, **{"dtype": ..., "torch_dtype": ..., **said})
    assert open_model(str(tmp_path)).stored_dtype == torch.bfloat16


def test_a_conversion_that_loses_too_much_says_so(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CV-26: on stderr and in the report; one that loses nothing says nothing."""
    save_tiny(source)
    shape = ("--format", "native", "--heal", "none", "--json")
    assert run_convert(source, *shape, "--kv-lora-rank", 1, "--qk-rope-head-dim", 2) == 0
    said = capsys.readouterr()
    assert "of little use" in said.err
    assert any("of little use" in note for note in json.loads(said.out)["notes"])
    assert run_convert(source, *shape, "--kv-lora-rank", 32, "--qk-rope-head-dim", 16, "--force") == 0
    said = capsys.readouterr()
    assert "of little use" not in said.err + said.out
    report = json.loads(said.out)
    assert abs(report["heldout"]["ppl_final"] / report["heldout"]["ppl_source"] - 1) < 1e-3
    assert all(layer["factorization_error"] is not None for layer in report["layers"])


def test_all_commands_run_one_after_another_in_one_process(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CL-08: nothing is registered twice."""
    save_tiny(source)
    text, out = str(source.parent / "text.txt"), str(source.parent / "out")
    assert run_convert(source, *QUICK) == 0
    assert main(["calibrate", out, "--calib", text, "--samples", "4", "--seq-len", "32", "--max-loss", "100"]) == 0
    assert main(["eval", out, "--tasks", "ppl", "--text", text, "--baseline", str(source), "--max-drop", "1000"]) == 0
    for form in ("native", "deepseek"):
        assert run_convert(source, *QUICK, "--format", form, "--force") == 0
        assert main(["generate", out, "a text", "--max-new-tokens", "4"]) == 0
    assert main(["inspect", out]) == 0
    assert "Traceback" not in capsys.readouterr().err


def documented() -> list[str]:
    """Every `mla …` line of the documents, continued lines joined."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = []
    for file in files:
        text = file.read_text(encoding="utf-8").replace("\\\n", " ")
        found += re.findall(r"^(?:\$ )?(mla (?!\w+ {2,}).*)$", text, re.MULTILINE)
        found += re.findall(r"`(mla (?:convert|calibrate|generate|eval|bench|inspect) [^`\n]*[^`\n ] [^`\n]*)`", text)
    return found


def parse(command: Any, arguments: list[str]) -> None:
    """Parse a command line without running it; files that the reader has need not be here."""
    try:
        command.make_context(command.name, arguments)
    except (typer.BadParameter, InputError) as error:
        if not re.search(r"no such (folder|file): |No such file or directory \[mla\.yaml\]", str(error)):
            raise


def test_every_documented_command_parses() -> None:
    """CL-08: commands and options in the documents are those that the program has."""
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    lines = [line for line in documented() if "..." not in line and "…" not in line]
    assert len(lines) > 15
    for line in lines:
        name, *arguments = shlex.split(line.split(" > ")[0], comments=True)[1:]
        named = {word for word in arguments if word.startswith("--")}
        if named and arguments[0] in named:  # options alone, in a sentence
            known = {option for p in commands[name].params for option in (*p.opts, *p.secondary_opts)}
            assert named <= known, line
        elif named:
            parse(commands[name], arguments)


@pytest.mark.slow
def test_help_with_the_oldest_typer_that_is_allowed(tmp_path: Path) -> None:
    """CL-03."""
    bound = re.search(r'"typer>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert bound is not None
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    # The lowest release of that series: `typer>=0.26` may not have a 0.26 itself.
    got = subprocess.run([*install, f"typer=={bound[1]}.*"], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"no package index: {got.stderr[-200:]}")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import typer; assert typer.__version__.startswith({bound[1]!r});"
        "from mla_cli.app import main; sys.exit(main(sys.argv[1:]))"
    )
    for command in COMMANDS:
        run = subprocess.run(
            [sys.executable, "-c", code, command.name, "--help"], capture_output=True, text=True, cwd=ROOT
        )
        assert run.returncode == 0, run.stderr
        assert f"Usage: mla {command.name}" in run.stdout
