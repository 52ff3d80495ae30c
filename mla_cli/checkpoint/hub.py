"""Models of the Hugging Face Hub: which files of one are wanted, how they arrive, and why they did not.

Errors are raised `from None`: the library's own texts can hold request headers, and so the user's token.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from fnmatch import fnmatch
from pathlib import Path

from mla_cli.console import note
from mla_cli.errors import InputError, MlaError, NetworkError, OutputError

# What belongs to a model beside its weights, and must reach every output unchanged.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates",
    "additional_chat_templates/*",
    "generation_config.json",
    "license*",
    "notice*",
)
_DESCRIPTIONS = ("config.json", "adapter_config.json", "params.json")
_OFF = ("", "0", "false", "no", "off")


class NotOnHubError(InputError):
    """The Hub has no such model, or does not show it to this user."""


def is_companion(name: str) -> bool:
    """Whether a file (its path inside the model's folder) belongs to the model beside its weights."""
    weightlike = name.endswith((".safetensors", ".bin", ".gguf", ".incomplete"))
    return not weightlike and any(fnmatch(name.lower(), p) for p in COMPANIONS if name.count("/") == p.count("/"))


def wanted_files(repo: str, names: list[str]) -> list[str]:
    """Choose what to download: the small files, and one copy of the weights (safetensors before pickles)."""
    roots = [name for name in names if "/" not in name]
    small = [name for name in names if is_companion(name) or name in _DESCRIPTIONS]
    if "adapter_config.json" in roots or ("params.json" in roots and "config.json" not in roots):
        return small
    others = sorted({Path(name).suffix for name in names if name.endswith((".gguf", ".onnx", ".pth", ".h5"))})
    seen = f" (it holds {', '.join(others)} files)" if others else ""
    fix = "download one .gguf file and give its path" if ".gguf" in others else "give a model in Hugging Face layout"
    if "config.json" not in roots:
        raise InputError(f"{repo} on the Hub has no config.json{seen}", fix=fix)
    safe = [n for n in roots if n.endswith(".safetensors") and not n.startswith(("consolidated", "adapter_model"))]
    if "model.safetensors.index.json" in roots:
        return [*small, "model.safetensors.index.json", *safe]
    if "model.safetensors" in safe:
        return [*small, "model.safetensors"]
    weights = safe or [n for n in roots if re.fullmatch(r"pytorch_model.*\.bin|pytorch_model\.bin\.index\.json", n)]
    if not weights:
        raise InputError(f"{repo} on the Hub has neither safetensors nor pytorch_model.bin{seen}", fix=fix)
    return small + weights


def fetch_model(repo: str, revision: str | None, *, offline: bool = False) -> Path:
    """Return the folder of a model in the Hub's local cache, after downloading what is not there yet.

    The folder's name is the commit. Without a network an earlier download is used.
    """
    import huggingface_hub
    from huggingface_hub import constants

    variable = os.environ.get("HF_HUB_OFFLINE", "").lower() not in _OFF
    if offline or variable or constants.HF_HUB_OFFLINE:
        folder = _cached(repo, revision)
        if folder is None:
            what = f"{_label(repo, revision)} is not in the local cache, and offline mode forbids to download it"
            raise NetworkError(what, fix="run once with a network and HF_HUB_OFFLINE unset, or give a local folder")
        return folder
    try:
        siblings = huggingface_hub.model_info(repo, revision=revision).siblings or []
        patterns = [glob.escape(name) for name in wanted_files(repo, [file.rfilename for file in siblings])]
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except MlaError:
        raise
    except Exception as error:  # the library passes on whatever its HTTP client raises
        failure = _explain(error, repo, revision)
    if isinstance(failure, NetworkError):
        folder = _cached(repo, revision)
        if folder is not None and _is_complete(folder):
            note(f"{failure.what}; using the copy in the local cache")
            return folder
    raise failure from None


def one_line(error: BaseException) -> str:
    """The cause of a failed request in one line that is safe to print."""
    text = (f"{error}".strip().splitlines() or [""])[0][:200]
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        secret = os.environ.get(variable, "").strip()
        text = text.replace(secret, "***") if secret else text
    text = re.sub(r"\bhf_\w{8,}|(?<=Bearer )\S+|(?<=://)[^/@\s]+(?=@)", "***", text)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _label(repo: str, revision: str | None) -> str:
    return f"{repo}@{revision}" if revision else repo


def _cached(repo: str, revision: str | None) -> Path | None:
    """Find an earlier download. One that lacks files counts: the reader says exactly what is absent."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        partial = getattr(error, "snapshot_path", None)
        return Path(partial) if partial else None
    except Exception as error:
        raise _explain(error, repo, revision) from None


def _is_complete(folder: Path) -> bool:
    from mla_cli.checkpoint.reader import open_tensors

    try:
        open_tensors(folder)
    except MlaError:
        return False
    return (folder / "config.json").is_file()


def _explain(error: Exception, repo: str, revision: str | None) -> MlaError:
    """Turn a failure of the Hub library into ours. The order matters: a gated repository is also a missing one."""
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login`"
    if isinstance(error, errors.GatedRepoError):
        fix = f"ask for access at https://huggingface.co/{repo}, then {login}"
        return InputError(f"{repo} on the Hub is gated, and you have no access to it", fix=fix)
    if isinstance(error, errors.RevisionNotFoundError):
        return InputError(f"{repo} on the Hub has no revision {revision!r}", fix="give a branch, tag or commit of it")
    if isinstance(error, errors.DisabledRepoError):
        return InputError(f"{repo} was disabled on the Hub", fix="give another model")
    status = getattr(getattr(error, "response", None), "status_code", None)
    # A missing model answers 401, a bad token too; only the text tells them apart, and mirrors send no error code.
    bad_token = status == 403 or (status == 401 and "credentials" in str(getattr(error, "server_message", "")))
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not bad_token):
        return NotOnHubError(
            f"the Hub has no model {repo}, or it is private", fix=f"check the spelling; for a private model {login}"
        )
    if isinstance(error, errors.HFValidationError):
        return InputError(f"{repo!r} is no valid Hub id", fix="write org/name, or the path of a folder")
    if isinstance(error, errors.HfHubHTTPError):
        if bad_token:
            return NetworkError(f"the Hub refuses the access token for {repo} ({status})", fix=login)
        return NetworkError(f"the Hub fails for {repo}: {one_line(error)}", fix="try again later")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", None)):
        fix = "free some space, or set HF_HOME to a larger disk"
        return OutputError(f"the disk is full while downloading {repo}", where=constants.HF_HUB_CACHE, fix=fix)
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "set HF_HOME to a folder you may write to"
        return OutputError("the Hub's cache folder cannot be written", where=constants.HF_HUB_CACHE, fix=fix)
    return NetworkError(
        f"the Hub cannot be reached for {repo}: {one_line(error)}", fix="check the connection, or give a local folder"
    )
