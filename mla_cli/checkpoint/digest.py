"""What values are compared by when a run goes on with the work of another."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """SHA-256 of what JSON can say (of other values: their text), whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
