"""Control groups of Linux, which limit cores and memory of a container or of a job."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def group_folders(controller: str, memberships: str, root: Path) -> Iterator[Path]:
    """Yields the folders of the control groups around a process, the innermost first.

    Args:
        controller: ``cpu`` or ``memory``.
        memberships: content of ``/proc/self/cgroup``.
        root: where control groups are mounted.
    """
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts = {root, root / "unified"}
        elif controller in controllers.split(","):
            mounts = {root / controllers, root / controller}
        else:
            continue
        # A container may see the name its group has outside: then only the upper part is there.
        inner = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        yield from (mount / part for mount in mounts for part in (inner, *inner.parents))


def own_groups(controller: str) -> list[Path]:
    """:func:`group_folders` of this process; empty where there are no control groups."""
    try:
        return list(group_folders(controller, Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup")))
    except (OSError, ValueError):
        return []
