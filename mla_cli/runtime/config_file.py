"""`mla.yaml` read, checked and written: sections of keys (see `config_keys`), and profiles that say what they leave open."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mla_cli.errors import InputError, UnsupportedError
from mla_cli.runtime.config_keys import BY_PATH, FLOATS, KEYS, SECTIONS, LeftOut, NotAllowedError
from mla_cli.runtime.prompt_text import text_of_bytes

MOST_BYTES = 1 << 20  # far more than any configuration: a larger file is another kind of file

# What a profile says where neither the file nor the command line does.
PROFILES: dict[str, dict[str, Any]] = {
    "datacenter": {"runtime.max_batch": 64},
    # GPUs whose INT8 units are slow, or missing: nothing is computed in INT8.
    "consumer": {"precision.projection": "auto", "precision.cache": "bf16", "runtime.max_batch": 4},
    "edge": {"runtime.max_batch": 1, "runtime.max_context": 2048, "latent_attention.memory.pool_size": 8},
}

# Keys of a section that say how something is done, and nothing where it is not.
NEEDS = {"prefetch": ("lookahead", "threshold"), "tiers": ("file_size", "keep_file")}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that occurs twice, and reads `1e-3` as the number that it is in YAML 1.2."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, (str, int, float, bool)) or key in seen:
                what = f"the key {key!r} occurs twice" if isinstance(key, str) else f"{key!r} is no name of a key"
                raise yaml.constructor.ConstructorError(None, None, what, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=True)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def read_config(path: Path) -> dict[str, Any]:
    """The keys that a file sets, by their paths, checked one by one and together. A key that is null is left out.

    Raises:
        InputError: the file cannot be read, is no YAML, or has a key twice, an unknown one, or one with a wrong value.
        UnsupportedError: it asks for what does not exist.
    """
    try:
        with open(path, "rb") as stream:
            content = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the configuration: {error.strerror}", where=path, fix="check the path and its permissions"
        ) from error
    if len(content) > MOST_BYTES:
        raise InputError("the file is too large for a configuration", where=path, fix="check the path")
    found = _parsed(text_of_bytes(content, path), path)
    values = {}
    for name, value in _flat(found, (), path):
        try:
            values[name] = BY_PATH[name].check(value)
        except LeftOut:
            continue
        except NotAllowedError as error:
            kind = UnsupportedError if error.fix.endswith("leave it out") else InputError
            raise kind(error.what, where=f"{path}:{name}", fix=error.fix) from error
    _check_together(values, path)
    return values


def with_profile(values: Mapping[str, Any], profile: str | None) -> dict[str, Any]:
    """What a file says, and a profile where the file says nothing."""
    name = profile or values.get("profile")
    return {**PROFILES.get(name or "", {}), **values, **({} if name is None else {"profile": name})}


def as_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the parameters of `mla generate` that they are defaults of."""
    options = {key.option: values[key.path] for key in KEYS if key.option is not None and key.path in values}
    projection, attention = values.get("precision.projection"), values.get("precision.attention", "auto")
    if projection is not None:
        options["weights"] = "int8" if projection == "int8" else "float"
    computed = attention if projection in (None, "auto", "int8") else projection
    if "precision.attention" in values or projection is not None:
        options["dtype"] = FLOATS[computed]
    return options


def effective_config(values: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What holds altogether, as YAML that says the same when it is read.

    Args:
        values: of file and profile. options: by their parameters, as the command has them in the end.
    """
    names = {long: short for short, long in FLOATS.items()}
    computed = names[options["dtype"]]
    whole = {
        "latent_attention.enabled": "auto",
        "latent_attention.prefetch.enabled": False,
        "latent_attention.memory.defrag_interval": 0,
        "safety.nan_check": True,
        **values,
        **{key.path: options[key.option] for key in KEYS if key.option is not None and key.option in options},
        "precision.projection": "int8" if options["weights"] == "int8" else computed,
        "precision.attention": computed,
    }
    nested: dict[str, Any] = {}
    for key in KEYS:
        if key.path not in whole:
            continue
        *sections, name = key.path.split(".")
        into = nested
        for section in sections:
            into = into.setdefault(section, {})
        into[name] = whole[key.path]
    return str(yaml.safe_dump(nested, sort_keys=False, allow_unicode=True, width=120))


def _parsed(text: str, path: Path) -> Mapping[Any, Any]:
    try:
        found = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = path if mark is None else f"{path}:{mark.line + 1}"
        raise InputError(f"not valid YAML: {error.problem}", where=place, fix="mend the line") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InputError("not valid YAML", where=path, fix="write sections of `key: value` lines") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InputError("the file holds no keys", where=path, fix="write sections of `key: value` lines")
    return found


def _flat(section: Mapping[Any, Any], above: tuple[str, ...], path: Path) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        names = (*above, str(name))
        whole = ".".join(names)
        if whole in BY_PATH:
            if value is not None:
                yield whole, value
        elif whole not in SECTIONS:
            raise InputError(f"unknown key '{name}'", where=f"{path}:{whole}", fix=_advice(names))
        elif isinstance(value, Mapping):
            yield from _flat(value, names, path)
        elif value is not None:
            fix = f"write its keys below it: {', '.join(_within(names))}"
            raise InputError("it is a section, not a value", where=f"{path}:{whole}", fix=fix)


def _within(above: tuple[str, ...]) -> list[str]:
    """Names of what a section holds."""
    depth = len(above)
    paths = [key.path.split(".") for key in KEYS]
    return list(dict.fromkeys(parts[depth] for parts in paths if tuple(parts[:depth]) == above))


def _advice(names: tuple[str, ...]) -> str:
    *above, last = names
    beside = _within(tuple(above))
    near = difflib.get_close_matches(last, beside, n=1, cutoff=0.6)
    if near:
        return f"did you mean '{'.'.join([*above, near[0]])}'?"
    # The right name in a wrong place, or what the command line calls it.
    elsewhere = {"weights": "precision.projection", "dtype": "precision.attention"}
    for key in KEYS:
        elsewhere.setdefault(key.path.rpartition(".")[2], key.path)
        elsewhere.setdefault(key.option or key.path, key.path)
    near = difflib.get_close_matches(last.replace("-", "_"), elsewhere, n=1, cutoff=0.7)
    return f"did you mean '{elsewhere[near[0]]}'?" if near else f"known here: {', '.join(beside)}"


def _check_together(values: Mapping[str, Any], path: Path) -> None:
    for section, needed in (("prefetch", "prefetch.enabled"), ("tiers", "tiers.file")):
        alone = [name for name in NEEDS[section] if f"latent_attention.{section}.{name}" in values]
        if alone and f"latent_attention.{needed}" not in values:
            where = f"{path}:latent_attention.{section}.{alone[0]}"
            raise InputError(
                "alone it does nothing", where=where, fix=f"set latent_attention.{needed}, or leave it out"
            )
    projection, attention = values.get("precision.projection"), values.get("precision.attention")
    if projection not in (None, "auto", "int8") and attention not in (None, "auto", projection):
        raise UnsupportedError(
            f"projections in {projection} beside attention in {attention}: one type computes both",
            where=f"{path}:precision.projection",
            fix=f"set both to {attention}, or projection to int8",
        )
