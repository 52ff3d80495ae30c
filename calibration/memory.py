"""How much memory there is to work in: what the system has left, or what a container leaves."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Memory that this process may still take; None where the system does not tell."""
    found = [_system(), *(_left(folder) for folder in _cgroup_folders())]
    known = [left for left in found if left is not None]
    return min(known) if known else None


def _system() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    words = fields.get("MemAvailable", "").split()
    return 1024 * int(words[0]) if words else None


def _cgroup_folders() -> list[Path]:
    """The groups that limit this process, each with those above it."""
    try:
        lines = _CGROUPS.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            base = _ROOT if not controllers else _ROOT / controllers
            own = Path(path.lstrip("/"))
            folders += [base / own, *(base / parent for parent in own.parents)]
    return folders


def _left(folder: Path) -> int | None:
    """What a group has left; its files in the page cache, which the system drops when it needs room, count as left."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        try:
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        return max(0, most - taken + int(stat.get(cached, 0)))
    return None
