"""How many threads compute: as the user says, else as many as this process may use cores."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
VARIABLE = "MLX_SPEC_THREADS"
MAX_THREADS = 256


def wanted_threads() -> int:
    """Return the threads that the environment asks for, else ``usable_cores``. Raises ValueError for no number."""
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return usable_cores()
    if not asked.isascii() or not asked.isdigit() or not 1 <= int(asked) <= MAX_THREADS:
        raise ValueError(f"{VARIABLE} is {asked!r}; it takes a whole number from 1 to {MAX_THREADS}.")
    return int(asked)


def usable_cores() -> int:
    """Return how many threads can compute at once: the cores that the process may run on, within its quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(int(quota) for quota in _quotas())]))


def _quotas() -> list[float]:
    """Return the cores' worth of time that each control group around this process allows, where one is limited."""
    try:
        lines = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()]
    except OSError:  # no Linux
        return []
    found = []
    for _, controllers, place in lines:
        root = CGROUPS / "cpu" if "cpu" in controllers.split(",") else CGROUPS
        if controllers and root == CGROUPS:
            continue
        group = root / place.lstrip("/")
        # In a container the path may be the host's, and the limit lies at the root.
        found += [_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return [quota for quota in found if quota is not None]


def _quota(folder: Path) -> float | None:
    """Return the limit of one group, as version 2 or version 1 of control groups writes it."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # no such file, or "max"
        return None
