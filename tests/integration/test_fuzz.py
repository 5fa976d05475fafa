"""Hostile input to the commands that read other people's files, by seeds: refused or right, at once, and nothing lost.

Each case damages one file or one option. Whatever it is, the command ends within seconds with exit code 0 or with one
sentence, takes little memory, leaves its inputs as they are, runs no code of theirs, and writes no figure that is NaN.
"""

import copy
import gzip
import json
import math
import os
import random
import re
import resource
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from PIL import Image

Typed = Callable[..., Any]
Arguments = list[object]
pytestmark = [
    pytest.mark.timeout(40, func_only=True),
    pytest.mark.skipif(sys.platform != "linux", reason="limits memory as on Linux"),
]

MOST_MEMORY = 4 << 30
"""Bytes that a case may take beside what the process has."""
VALUES: tuple[Any, ...] = (
    *(None, True, "", "text", "1", "x" * 5000, "../..", "a\0b", "\udcff", [], {}, [[]], [None], {"a": {}}, ["1", "2"]),
    *(0, -1, 1, 0.5, -0.0, 10**11, 2**63, 10**400, 1e30, 1e308, 5e-324, math.nan, math.inf, -math.inf),
    *([[0.0] * 4] * 4, [[math.nan] * 4] * 3, [[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1e30]], [[]] * 9),
)
NUMBERS = (
    "0",
    "-1",
    "-10",
    "1",
    "2",
    "1e308",
    "nan",
    "inf",
    "-inf",
    "1e-320",
    "99999999999",
    "100000000000000",
    "9" * 25,
)
WORDS = ("", " ", "None", "x" * 5000, "../x", "a\nb", "-", "true")
NAMES = (b"caf\xe9.png", b"new\nline.png", b"-rf.png", b"100%d.png", b"a'\"b.png", b"[red]x.png", b"\xff\xfe.png")


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values of JSON; of long lists, of the first three."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def damaged_json(tree: Any, rng: random.Random) -> Any:
    """JSON with one value that was replaced, removed, repeated or renamed; places near the root count more."""
    tree = copy.deepcopy(tree)
    depth = rng.randrange(5)
    found = [path for path in places(tree) if len(path) <= depth + 1]
    path = rng.choice(found)
    if not path:
        return rng.choice(VALUES)
    owner = tree
    for key in path[:-1]:
        owner = owner[key]
    deed, last = rng.randrange(6), path[-1]
    if deed == 0:
        del owner[last]
    elif deed == 1 and isinstance(owner, list):
        owner.append(copy.deepcopy(owner[last]))
    elif deed == 1:
        owner[f"{last}_"] = owner.pop(last)
    else:
        owner[last] = rng.choice(VALUES)
    return tree


def json_bytes(tree: Any, rng: random.Random) -> bytes:
    """JSON as bytes, sometimes cut short, in another encoding, or nested too deeply."""
    text = json.dumps(tree)
    deed = rng.randrange(20)
    if deed == 0:
        return text[: rng.randrange(len(text) + 1)].encode()
    if deed == 1:
        return text.encode("utf-16")
    if deed == 2:
        return b"[" * 100_000
    return text.encode()


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bytes with some that were changed, taken out or put in, or cut short."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 30))):
        # The beginning is a header in most formats.
        at = rng.randrange(min(len(found), rng.choice((24, 400, len(found)))) or 1)
        deed = rng.randrange(4)
        if deed == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif deed == 1:
            found[at : at + 4] = struct.pack("<I", rng.choice((0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FC00000, 1 << 28)))
        elif deed == 2:
            del found[at : at + rng.choice((1, 4, 64))]
        else:
            found[at:at] = rng.choice((b"\0", b"-", b"9", b"\n", b"nan ", b"\xff" * 8))
    if rng.random() < 0.2:
        del found[rng.randrange(len(found) + 1) :]
    return bytes(found)


# --- cases -----------------------------------------------------------------------------------------------------------


class Maker:
    """Makes the input of a case.

    Args:
        rng: of the case.
        folder: where the input goes.
        room: a capture.
    """

    def __init__(self, rng: random.Random, folder: Path, room: Path) -> None:
        self.rng, self.folder, self.room = rng, folder, room
        folder.mkdir()

    def file(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def capture(self) -> Path:
        folder = self.folder / "capture"
        folder.mkdir()
        for item in self.room.iterdir():
            if item.name != "transforms.json":
                (folder / item.name).symlink_to(item)
        meta = json.loads((self.room / "transforms.json").read_text())
        meta |= {"applied_transform": np.eye(4)[:3].tolist(), "applied_scale": 1.0, "ply_file_path": "gt_mesh.ply"}
        meta = damaged_json(meta, self.rng)
        (folder / "transforms.json").write_bytes(json_bytes(meta, self.rng))
        return folder

    def mesh(self) -> Path:
        """A mesh with impossible numbers, or a damaged file."""
        rng, box = self.rng, trimesh.creation.box((1, 2, 3))
        kind = rng.choice(("npz", "npz", "npz", "ply", "obj", "glb", "stl", "off"))
        if kind != "npz":
            data = box.export(file_type=kind)
            return self.file(f"mesh.{kind}", damaged_bytes(data.encode() if isinstance(data, str) else data, rng))
        vertices, faces = np.array(box.vertices), np.array(box.faces)
        at = rng.randrange(8), rng.randrange(3)
        deed = rng.randrange(8)
        if deed < 2:
            faces[at] = rng.choice((-1, -3, 8, 2**31, 2**62))
        elif deed < 5:
            vertices[at] = rng.choice((1e30, -1e30, 1e160, 1e308, np.nan, np.inf, 1e-320))
        elif deed == 5:
            faces = rng.choice(
                (faces[:, :2], faces.astype(float), faces[:0], faces.astype(str), faces.ravel(), faces[:1])
            )
        elif deed == 6:
            vertices = rng.choice(
                (vertices[:, :2], vertices[:0], vertices.astype(str), vertices * 0, vertices[0], vertices * 1e-200)
            )
        else:
            faces = np.zeros_like(faces)
        path = self.folder / "mesh.npz"
        np.savez(path, vertices=vertices, faces=faces)
        return path

    def splats(self) -> Path:
        import torch

        from f3rm_ext.splat.files import SplatInfo, export_splats
        from f3rm_ext.splat.gaussians import Gaussians

        kind = self.rng.choice((".spz", ".spz", ".ply", ".splat", ".compressed.ply", ".sog"))
        zeros = torch.zeros(9, 1)
        splats = Gaussians(
            torch.randn(9, 3), zeros.expand(9, 3), torch.randn(9, 4), zeros, zeros.expand(9, 3), torch.zeros(9, 3, 3)
        )
        path = self.folder / f"splats{kind}"
        export_splats(splats, path, SplatInfo())
        data = path.read_bytes()
        if kind == ".spz":
            head = bytearray(gzip.decompress(data))
            at, value = self.rng.choice(
                ((8, 180_000_000), (8, 0), (8, 2**32 - 1), (12, 3), (12, 255), (13, 255), (13, 24), (4, 9))
            )
            head[at : at + 1 + 3 * (value > 255)] = value.to_bytes(1 + 3 * (value > 255), "little")
            if self.rng.random() < 0.3:
                head += bytes(30_000_000)
            data = gzip.compress(bytes(head), 1)
        if kind != ".spz" or self.rng.random() < 0.3:
            data = damaged_bytes(data, self.rng)
        return self.file(path.name, data)


def captures(make: Maker) -> Arguments:
    data, command = make.capture(), make.rng.randrange(10)
    if command < 3:
        return ["sfm", "eval", "--predicted", data, "--truth", make.room, "--out", make.folder / "out.json"]
    if command < 6:
        return ["sfm", "eval", "--predicted", make.room, "--truth", data, "--out", make.folder / "out.json"]
    if command < 8:
        return ["sfm", "points", data, "--out", make.folder / "out", "--points", 50, "--side", 32]
    mesh = make.room / "gt_mesh.ply"
    if command == 8:
        return ["eval", "mesh", mesh, "--truth", mesh, "--points", 500, "--seen-from", data]
    return ["export", "texture", "--data", data, "--mesh", mesh, "--out", make.folder / "out.ply"]


def meshes(make: Maker) -> Arguments:
    mesh, command, truth = make.mesh(), make.rng.randrange(8), make.room / "gt_mesh.npz"
    if command < 6:
        one, other = (mesh, truth) if command % 2 else (truth, mesh)
        return ["eval", "mesh", one, "--truth", other, "--points", 500, "--out", make.folder / "out.json"]
    if command == 6:
        return ["eval", "texture", "--data", make.room, "--mesh", mesh, "--out", make.folder / "out"]
    return ["export", "texture", "--data", make.room, "--mesh", mesh, "--out", make.folder / "out.ply"]


def splats(make: Maker) -> Arguments:
    return ["export", "convert", make.splats(), "--out", make.folder / "out.ply"]


def options(make: Maker) -> Arguments:
    rng = make.rng
    value = rng.choice(NUMBERS)
    commands: dict[tuple[str, ...], tuple[str, ...]] = {
        ("moco", "pairs"): (
            *("images", "processes", "gradient-accumulation-steps", "epochs", "momentum", "batch-size", "queue-size"),
        ),
        ("moco", "train", "--data", f"{make.room}/images", "--output", f"{make.folder}/out", "--plan"): (
            *("batch-size", "queue-size", "epochs", "image-size", "memory-gib", "learning-rate", "warmup-epochs"),
            *("temperature", "momentum", "gradient-accumulation-steps", "tile-px", "white"),
        ),
        ("sfm", "eval", "--predicted", str(make.room), "--truth", str(make.room)): ("out", "missing"),
        ("sfm", "points", str(make.room), "--out", f"{make.folder}/out"): ("points", "side"),
        ("eval", "mesh", f"{make.room}/gt_mesh.ply", "--truth", f"{make.room}/gt_mesh.ply", "--points", "300"): (
            *("thresholds", "points", "crop", "transform", "ground-plane"),
        ),
        ("bench", "report", "--ledger", str(ledger_file(make, False))): ("tolerance", "baseline", "out"),
    }
    command = rng.choice(list(commands))
    if rng.random() < 0.2:
        value = rng.choice(WORDS)
    return [*command, f"--{rng.choice(commands[command])}", value]


def plans(make: Maker) -> Arguments:
    rng = make.rng
    names = (
        *("max-num-iterations", "epochs", "gaussians", "images", "width-px", "height-px", "points", "vram-gib"),
        *("machine.num-devices", "schedule-steps", "sh-degree", "resolution-scale"),
    )
    name = rng.choice(names)
    sizes = {"images": "10", "width-px": "64", "height-px": "64"}
    given = sizes | {name: rng.choice(NUMBERS)}
    if name not in (*sizes, "points") and rng.random() < 0.5:
        given = {name: given[name]}
    method = rng.choice(("f3rm-ext-lite", "sugar-ext-lite"))
    return ["plan", method, "--json", *(word for key, value in given.items() for word in (f"--{key}", value))]


def ledger_file(make: Maker, damage: bool = True) -> Path:
    from f3rm_ext.ledger.ledger import Ledger

    path = make.folder / "ledger.sqlite"
    book = Ledger(path)
    for name in ("one", "two"):
        conditions = {
            "capture": "room",
            "width_px": 64,
            "hardware": "cpu",
            "threads": 2,
            "first_step": 0,
            "last_step": 9,
        }
        book.add(
            name, "f3rm-ext", command=["--a", "b"], conditions=conditions, origin={"commit": "1234", "changed": False}
        )
        for number in range(3):
            book.add_repeat(
                name, {"it_per_s": 5.0 + number, "psnr": 20.0, "train_peak_mib": 100.0}, session=name, seed=number
            )
    if not damage:
        return path
    if make.rng.random() < 0.2:
        path.write_bytes(damaged_bytes(path.read_bytes(), make.rng))
        return path
    column = make.rng.choice(
        ("conditions", "origin", "command", "command", "status", "date", "value", "session", "seed")
    )
    tables = {"value": "figures", "session": "repeats", "seed": "repeats"}
    connection = sqlite3.connect(path)
    table = tables.get(column, "entries")
    (now,) = connection.execute(f"SELECT {column} FROM {table}").fetchone()
    new: Any = make.rng.choice((None, -1, 1e308, "text", b"\xff\xfe", math.inf, "9" * 5000))
    if column in ("conditions", "origin", "command"):
        new = json_bytes(damaged_json(json.loads(now), make.rng), make.rng)
        new = new.decode("utf-8", "replace")
    try:
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid % 2", (new,))
    except sqlite3.IntegrityError:
        connection.execute(f"UPDATE {table} SET {column} = 'x'")
    connection.commit()
    connection.close()
    return path


def ledgers(make: Maker) -> Arguments:
    book = ledger_file(make)
    command = make.rng.choice((["list"], ["compare", "one", "two"], ["report"], ["report", "--baseline", "one"]))
    return ["bench", *command, "--ledger", book]


def states(make: Maker) -> Arguments:
    """Records that commands leave in their own folders, changed by somebody."""
    rng, out = make.rng, make.folder / "out"
    out.mkdir()
    if rng.random() < 0.5:
        known = {"source": "0.png", "stamp": "1 2", "size": [4, 3], "camera": "x", "turned": False, "blur": 0.5}
        state = {"made_by": "f3rm-ext sfm process", "photos": {"0.png": {**known, "fingerprint": "00ff"}}}
        state |= {"options": {"masks": False}, "complete": True, "unreadable": {"a": "b"}}
        state |= {"video": {"wanted": {}, "frames": ["a.png"]}, "result": {"key": {}, "photos": 3}}
        (out / "sfm.json").write_bytes(json_bytes(damaged_json(state, rng), rng))
        (make.folder / "photos").mkdir()
        for number in range(2):
            make.file(f"photos/{number}.png", b"no photo")
        return ["sfm", "process", "--images", make.folder / "photos", "--output", out]
    from f3rm_ext.workflow.manifest import FORMAT, identify

    output = {"path": "coarse", "size": 3, "digest": "00"}
    record = {"state": "finished", "options": {"a": "b"}, "inputs": {"a": "b"}, "outputs": {"run": output}}
    record |= {"command": "ns-train", "seconds": 1.0, "peak_mib": 1.0, "runs": 1, "attempt": 1, "notes": ["a"]}
    manifest = {"made_by": "f3rm-ext sugar run", "version": "1", "format": FORMAT, "capture": identify(make.room)}
    manifest |= {"checked": "", "defaults": {"vertices": 100}, "stages": {"coarse": record, "mesh": record}}
    (out / "manifest.json").write_bytes(json_bytes(damaged_json(manifest, rng), rng))
    return ["sugar", "run", "--data", make.room, "--output", out, "--from-stage", "texture"]


def profiles(make: Maker) -> Arguments:
    memory = {"allocated": 10, "reserved": 20, "total": 100}
    start = {"kind": "start", "version": 1, "method": "f3rm-ext", "device": "cpu", "step": 0, "memory": memory}
    snapshot = {"kind": "snapshot", "step": 1, "phases": {"forward": {"allocated": 5}}, "tensors": [], "memory": memory}
    lines = [start, snapshot, {"kind": "end", "reason": "done"}]
    at = make.rng.randrange(3)
    lines[at] = damaged_json(lines[at], make.rng)
    make.file("tensor_profile.jsonl", b"\n".join(json_bytes(line, make.rng) for line in lines))
    return ["profile", make.folder, "--out", make.folder / "out"]


def names(make: Maker) -> Arguments:
    rng, photos = make.rng, make.folder / "photos"
    photos.mkdir()
    for number, name in enumerate(rng.sample(NAMES, 4)):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(os.path.join(os.fsencode(photos), name), format="PNG")
    if rng.random() < 0.5:
        return ["moco", "train", "--data", photos, "--output", make.folder / "out", "--plan", "--batch-size", 2]
    return ["sfm", "process", "--images", photos, "--output", make.folder / "out"]


FAMILIES: dict[Callable[[Maker], Arguments], int] = {
    captures: 90,
    meshes: 60,
    splats: 40,
    options: 60,
    plans: 16,
    ledgers: 40,
    states: 30,
    profiles: 15,
    names: 4,
}
"""Kinds of cases, and how many there are of each."""


@contextmanager
def little_memory() -> Iterator[None]:
    """Lets this process map little more memory than it has mapped."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def figures(tree: Any) -> Iterator[float]:
    """All numbers in JSON."""
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from figures(item)
    if isinstance(tree, (int, float)):
        yield tree


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, id=f"{family.__name__}-{seed}")
        for family, count in FAMILIES.items()
        for seed in range(count)
    ],
)
def test_refused_or_right(
    f3rm_ext: Typed,
    tiny_capture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: Callable[[Maker], Arguments],
    seed: int,
) -> None:
    make = Maker(random.Random(f"{family.__name__} {seed}"), tmp_path / "case", tiny_capture)
    arguments = family(make)
    monkeypatch.chdir(tmp_path)
    kept = {path: path.read_bytes() for path in make.folder.rglob("*") if path.is_file() and "out" not in path.parts}
    with little_memory():
        try:
            done = f3rm_ext(*arguments)
            code, said = done.code, done.stderr
        except SystemExit as error:  # of tyro, on wrong options
            code, said = error.code, "Error: "
    assert code in (0, 1, 2, 3), said
    assert code < 2 or len(re.findall(r"^Error: ", said, re.MULTILINE)) == 1, said
    assert all(path.read_bytes() == data for path, data in kept.items()), "an input was changed"
    if code == 0 and (make.folder / "out.json").is_file():
        assert all(map(math.isfinite, figures(json.loads((make.folder / "out.json").read_text()))))
