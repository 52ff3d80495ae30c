"""Where the server listens, whom it lets in, and whether it can be run at all: checked before any work."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from mla_cli.errors import InputError, MlaError, UnsupportedError, UsageError

KEY_VARIABLE = "MLA_API_KEY"


@dataclass(frozen=True)
class Address:
    """A host and a port (0: a free one)."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, port: int) -> str:
        """Of the server that listens there, on that port."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"


def parse_address(text: str, option: str = "--serve") -> Address:
    """`:PORT` (this machine only), `HOST:PORT` or `[IPV6]:PORT`.

    Args:
        option: that gave it, for the error.

    Raises:
        UsageError: it is none of these.
    """
    host, colon, port = text.strip().rpartition(":")
    number = int(port) if port.isdecimal() and port.isascii() and len(port) <= 5 else -1
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not 0 <= number <= 65535 or (":" in host and bare == host) or any(c.isspace() for c in host):
        raise UsageError(
            f"'{text}' is no address", where=option, fix="give :PORT, HOST:PORT or [IPV6]:PORT, e.g. :8000"
        )
    return Address(bare or "127.0.0.1", number)


def require_server() -> None:
    """Refuse to go on where the packages of the server are not installed.

    Raises:
        UnsupportedError: one is missing.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"--serve needs {' and '.join(missing)}, which {'are' if len(missing) > 1 else 'is'} not installed",
            fix="pip install 'mla-cli[serve]'",
        )


def read_key(file: Path | None) -> str | None:
    """The API key that clients must have: of the file, else of the environment; None: none is wanted.

    Raises:
        InputError: the file cannot be read, or the key cannot be sent in a header.
    """
    where: object = file if file is not None else KEY_VARIABLE
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise InputError(f"cannot read the API key: {why}", where=file, fix="check the file") from error
    else:
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key:
            return None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError("the API key is no line of ASCII characters", where=where, fix="write one without spaces")
    return key


def bind(address: Address) -> socket.socket:
    """A socket that holds the address; nobody is answered yet.

    Raises:
        MlaError: it is taken, or not this machine's.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        try:
            if os.name == "posix":  # elsewhere it would share a port that another server has
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(place)
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise MlaError(
            f"cannot listen: {error.strerror or error}",
            where=f"--serve {address.host}:{address.port}",
            fix="choose a free port, and an address of this machine",
        ) from error
    return found
