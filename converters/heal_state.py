"""What an interrupted conversion leaves beside its output, so that `--resume` goes on from there."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mla_cli.calibration.precision import fast_dtype, settle
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.digest import digest_of
from mla_cli.checkpoint.disk import disk_error
from mla_cli.console import note
from mla_cli.converters.heal_layers import HealedLayer, LayerHealing
from mla_cli.converters.options import INDIFFERENT
from mla_cli.converters.plan import ConversionPlan, standard_layers
from mla_cli.converters.rotary_split import latent_spec
from mla_cli.converters.student import Student
from mla_cli.errors import InputError, UsageError
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec

WRITING = "writing"
_DIFFERENT = {"source": "another source", "options": "other options", "texts": "another calibration text"}
TENSORS = ("q", "q_bias", "down", "down_bias", "up_k", "up_v", "out", "out_bias")


class HealState:
    """A folder `.NAME.mla-resume` beside the output. Files appear by renaming, so that a kill leaves whole ones only."""

    def __init__(self, out: Path, fingerprint: dict[str, Any], *, device: torch.device, resume: bool) -> None:
        """Open the folder; without `resume` whatever an earlier run left there is dropped.

        The type that healing computes in, which is measured, stays that of the interrupted run.

        Args:
            fingerprint: everything the result depends on. A folder that was made with another one is refused.

        Raises:
            UsageError: `resume` was asked for, and what was left is of a run with other options or another text.
        """
        out = Path(out).resolve()
        self._prefix = ""
        self.folder = out.parent / f".{out.name}.mla-resume"
        keys = {name: digest_of(value) for name, value in fingerprint.items()}
        found = self._read("key") if resume else None
        if found is None:
            if resume:
                note("nothing was left to go on from: starting from the beginning")
            self.remove()
            self._write("key", {"keys": keys, "compute": str(fast_dtype(device)).removeprefix("torch.")})
            return
        other = [name for name, key in keys.items() if found["keys"].get(name) != key]
        if other:
            raise UsageError(
                f"the interrupted conversion had {_DIFFERENT[other[0]]}",
                where=self.folder,
                fix="repeat them with --resume, or leave out --resume to start again",
            )
        settle(device, getattr(torch, found["compute"]))

    @staticmethod
    def began_writing(out: Path) -> bool:
        """Whether an interrupted run may have put its output in place, with what makes it whole still missing."""
        out = Path(out).resolve()
        return (out.parent / f".{out.name}.mla-resume" / f"{WRITING}.pt").is_file()

    def save_writing(self) -> None:
        """From here on there may be an output of this run."""
        self._write(WRITING, {})

    def stage(self, name: str) -> HealState:
        """The same folder for one of several healings: what it keeps does not meet what the others do."""
        own = copy.copy(self)
        own._prefix = f"{name}-"
        return own

    def save_layers_and_facts(self, name: str, layers: Sequence[LatentWeights], facts: dict[str, Any]) -> None:
        """Keep what a stage made, and what the report says of it."""
        self._write(name, {"layers": [_tensors(layer) for layer in layers], "facts": json.dumps(facts)})

    def load_layers_and_facts(self, name: str) -> tuple[list[dict[str, Tensor]], Any] | None:
        """What `save_layers_and_facts` kept; see `layers_from`."""
        found = self._read(name)
        return None if found is None else (found["layers"], json.loads(found["facts"]))

    def save_full(self, state: dict[str, Any]) -> None:
        """Keep where a healing end to end stands."""
        self._write("full", state)

    def load_full(self) -> dict[str, Any] | None:
        """Where a healing end to end stood."""
        return self._read("full")

    def save_layer(self, index: int, healed: HealedLayer) -> None:
        """Keep a healed layer, and what the report says of it."""
        weights, record = healed
        self._write(f"layer-{index}", {"layer": _tensors(weights), "record": asdict(record)})

    def load_layers(self, student: Student) -> list[HealedLayer]:
        """The layers healed so far."""
        layers: list[HealedLayer] = []
        for index in range(len(student.learning)):
            found = self._read(f"layer-{index}")
            if found is None:
                break
            weights = weights_from(student.layer(index)[1].weights.spec, found["layer"])
            layers.append((weights, LayerHealing(**found["record"])))
        return layers

    def save_gate(self, index: int, gate: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Keep a layer's gate (its tensors; none where it was dropped), and what the report says of it."""
        self._write(f"gate-{index}", {"gate": gate, "record": record})

    def load_gate(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What `save_gate` kept."""
        found = self._read(f"gate-{index}")
        return None if found is None else (found["gate"], found["record"])

    @contextmanager
    def kept_if_of_use(self) -> Iterator[None]:
        """Where what is inside fails before anything was kept, nothing is left either."""
        try:
            yield
        except Exception:
            whole = {file.name for file in self.folder.glob("*.pt")}
            if whole <= {"key.pt", f"{WRITING}.pt"}:  # an output that could not be finished is not in place
                self.remove()
            raise

    def remove(self) -> None:
        """Nothing is left to resume."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, content: dict[str, Any]) -> None:
        target = self.folder / f"{self._prefix}{name}.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(content, target.with_suffix(".part"))
            target.with_suffix(".part").replace(target)
        except (OSError, RuntimeError) as error:  # torch's own writer tells a full disk as a RuntimeError
            raise disk_error(error, target, 0) from error

    def _read(self, name: str) -> dict[str, Any] | None:
        file = self.folder / f"{self._prefix}{name}.pt"
        if not file.is_file():
            return None
        try:
            return torch.load(file, weights_only=True)  # type: ignore[no-any-return]
        except Exception as error:
            raise InputError("what an interrupted run left is damaged", where=file, fix="leave out --resume") from error


def fingerprint(source_sha256: str, options: Any, texts: Sequence[CalibrationTexts]) -> dict[str, Any]:
    """Everything a conversion's result depends on but the machine, under the names of `_DIFFERENT`."""
    return {
        "source": source_sha256,
        "options": {k: v for k, v in asdict(options).items() if k not in INDIFFERENT},
        "texts": [[part.sequences.tolist(), part.lengths.tolist()] for part in texts],
    }


def weights_from(spec: LatentAttentionSpec, tensors: dict[str, Tensor]) -> LatentWeights:
    """A layer with these tensors."""
    spec = replace(spec, q_bias=True, kv_a_bias=True, o_bias=True)
    norm = tensors.get("norm")
    if norm is None:
        spec = replace(spec, norm_eps=None)
    return LatentWeights(
        spec=spec,
        q=tensors["q"],
        q_bias=tensors["q_bias"],
        down=tensors["down"],
        down_bias=tensors["down_bias"],
        up_k=tensors["up_k"],
        up_v=tensors["up_v"],
        out=tensors["out"],
        out_bias=tensors["out_bias"],
        norm=norm,
        normed={name: tensors[name] for name in tensors if "_norm_proj." in name} or None,
    ).with_needed_biases()


def layers_from(
    source: DecoderSpec, plan: ConversionPlan, tensors: Sequence[dict[str, Tensor]]
) -> tuple[LatentWeights, ...]:
    """The layers of a conversion with these tensors, which say their ranks."""
    return tuple(
        weights_from(latent_spec(spec, found["up_k"].shape[-1], layer.slots), found)
        for spec, layer, found in zip(standard_layers(source), plan.layers, tensors, strict=True)
    )


def _tensors(weights: LatentWeights) -> dict[str, Tensor]:
    tensors = {name: getattr(weights, name) for name in TENSORS}
    tensors |= weights.normed or {}
    return tensors if weights.norm is None else {**tensors, "norm": weights.norm}
