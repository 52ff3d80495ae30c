"""Where fetched and unpacked models are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """`MLA_CACHE`, or the platform's cache folder; not created here."""
    chosen = os.environ.get("MLA_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mla"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "mla" / "Cache"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mla"
