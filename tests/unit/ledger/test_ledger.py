"""The ledger keeps what it was given, whatever happens to the processes that write to it."""

import math
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from f3rm_ext.errors import LedgerError
from f3rm_ext.ledger import ledger as module
from f3rm_ext.ledger.ledger import APPLICATION_ID, SCHEMA, Ledger, throughput
from f3rm_ext.ledger.report import markdown_report
from f3rm_ext.ledger.runs import baseline_variant

WRITER = """
import sys
from pathlib import Path
from f3rm_ext.ledger.ledger import Ledger
ledger, name, count = Ledger(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
ledger.add(name, "nerfacto")
for number in range(count):
    ledger.add_repeat(name, {f"figure_{k}": number + k for k in range(20)}, session="s", seed=number)
    print(number, flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Ledger:
    return Ledger(path)


def writer(path: Path, name: str, count: int) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def start(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def integrity(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        return connection.execute("PRAGMA integrity_check").fetchone()[0]


def test_an_entry_comes_back_as_it_was_written(ledger: Ledger) -> None:
    name = ledger.add(
        "base", "f3rm-ext", command=("f3rm-ext", "--data", "fox"), conditions={"width_px": 64}, origin={"commit": "c"}
    )
    ledger.add_repeat(name, {"it_per_s": 10.5, "lpips": math.nan}, session="s", seed=42)
    ledger.add_repeat(name, {"it_per_s": 11.0}, session="s")
    ledger.note(name, "with pinned memory", "no gain")
    ledger.note(name, "caf\udce9.jpg is missing")  # a name that is not UTF-8
    entry = ledger.entry("base")
    assert (entry.method, entry.status, tuple(entry.command)) == ("f3rm-ext", "no gain", ("f3rm-ext", "--data", "fox"))
    assert (entry.conditions, entry.origin) == ({"width_px": 64}, {"commit": "c"})
    assert entry.values("it_per_s") == [10.5, 11.0] and entry.values("psnr") == []
    assert math.isnan(entry.values("lpips")[0])
    assert [repeat.seed for repeat in entry.repeats] == [42, None]
    assert [text for _, text in entry.notes] == ["with pinned memory", r"caf\udce9.jpg is missing"]
    assert "lpips is nan" in entry.anomalies()


def test_names_are_unique_and_made_up_where_none_is_given(ledger: Ledger) -> None:
    assert [ledger.add("", "nerfacto"), ledger.add("", "nerfacto")] == ["nerfacto-1", "nerfacto-2"]
    ledger.note("nerfacto-4", status="idea")
    assert ledger.add("", "nerfacto") == "nerfacto-5", "and the idea is still one"
    with pytest.raises(LedgerError, match=r"nerfacto-1 .*--name"):
        ledger.add("nerfacto-1", "nerfacto")
    with pytest.raises(LedgerError, match=r"entry x.*nerfacto-1, nerfacto-2"):
        ledger.note("x", "text")
    with pytest.raises(LedgerError, match="entry x"):
        ledger.entry("x")


def test_an_idea_is_noted_before_any_run_and_measured_under_its_name(ledger: Ledger) -> None:
    ledger.note("half", "if -r2 shows trouble", "idea")
    idea = ledger.entry("half")
    assert (idea.status, idea.is_idea, idea.anomalies(), list(idea.repeats)) == ("idea", True, [], [])
    assert throughput("", hardware="", ledger=ledger.path) is None
    text = markdown_report(ledger.entries())
    assert "if -r2 shows trouble" in text and "Conditions not known" not in text
    with pytest.raises(LedgerError, match="half"):
        baseline_variant(ledger, "half", "new", "python")
    ledger.note("half", status="on hold")
    ledger.require_new("half")
    ledger.add("half", "f3rm-ext", command=("f3rm-ext",), conditions={"width_px": 64}, note="as planned")
    ledger.add_repeat("half", {"it_per_s": 2.0}, session="s")
    entry = ledger.entry("half")
    assert (entry.status, entry.method, entry.conditions) == ("open", "f3rm-ext", {"width_px": 64})
    assert entry.values("it_per_s") == [2.0]
    assert [note for _, note in entry.notes] == ["if -r2 shows trouble", "as planned"]
    with pytest.raises(LedgerError, match="half already"):
        ledger.note("half", "again", "idea")


def test_a_failed_change_leaves_nothing_behind(ledger: Ledger) -> None:
    ledger.add("base", "nerfacto")
    with pytest.raises(ValueError, match="could not convert"):
        ledger.add_repeat("base", {"it_per_s": 1.0, "psnr": "bright"}, session="s")  # type: ignore[dict-item]
    assert list(ledger.entry("base").repeats) == []


def test_two_processes_write_at_once(path: Path) -> None:
    writers = [writer(path, name, 25) for name in ("a", "b")]
    for process in writers:
        start(process)
    assert [process.wait(60) for process in writers] == [0, 0]
    entries = Ledger(path).entries()
    assert {entry.name: [repeat.number for repeat in entry.repeats] for entry in entries} == {
        "a": list(range(25)),
        "b": list(range(25)),
    }


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no SIGKILL")
def test_a_killed_writer_leaves_the_ledger_intact(path: Path) -> None:
    for round_, after in enumerate((0, 2, 7)):
        process = writer(path, f"killed-{round_}", 10**6)
        start(process)
        assert process.stdout is not None
        confirmed = -1
        while confirmed < after:
            confirmed = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        confirmed = max([confirmed, *map(int, process.stdout.read().split())])
        assert integrity(path) == "ok"
        repeats = Ledger(path).entry(f"killed-{round_}").repeats
        assert len(repeats) in (confirmed + 1, confirmed + 2), "a confirmed repeat is lost"
        assert all(len(repeat.values) == 20 for repeat in repeats), "a repeat is there in part"
    Ledger(path).add("afterwards", "nerfacto")


def test_other_files_are_refused_in_a_sentence(tmp_path: Path, ledger: Ledger, path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledger.*bench run"):
        ledger.entries()
    assert not path.parent.exists(), "reading makes no folder"
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    text = tmp_path / "notes.txt"
    text.write_text("it/s 11.06, as measured by hand\n" * 40)
    for file in (other, text):
        before = file.read_bytes()
        for action in (Ledger(file).entries, lambda file=file: Ledger(file).add("x", "nerfacto")):
            with pytest.raises(LedgerError, match=f"{file.name}.*--ledger"):
                action()
        assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("entries", "conditions", "[1]"),
        ("entries", "conditions", '{"width_px": [64]}'),
        ("entries", "conditions", "[" * 100_000),
        ("entries", "command", "3"),
        ("entries", "command", "[null]"),
        ("entries", "origin", '{"versions": "1.0"}'),
        ("entries", "origin", "{"),
        ("repeats", "seed", math.inf),
        ("figures", "value", b"\xff\xfe"),
        ("figures", "value", "text"),
    ],
)
def test_values_of_another_shape_are_refused(
    ledger: Ledger, path: Path, table: str, column: str, value: object
) -> None:
    ledger.add("base", "nerfacto")
    ledger.add_repeat("base", {"psnr": 20.0}, session="s", seed=1)
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
    with pytest.raises(LedgerError, match=path.name):
        ledger.entries()


@pytest.mark.parametrize(("schema", "age"), [(SCHEMA + 1, "newer"), (0, "older")])
def test_another_schema_is_refused_and_left_alone(ledger: Ledger, path: Path, schema: int, age: str) -> None:
    ledger.add("base", "nerfacto")
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {schema}")
        assert connection.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID
    for action in (ledger.entries, lambda: ledger.add("x", "nerfacto")):
        with pytest.raises(LedgerError, match=f"{schema}, .*{age}"):
            action()


def test_a_locked_ledger_is_said_to_be_locked(ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.add("base", "nerfacto")
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    for action in (ledger.entries, lambda: ledger.add("x", "nerfacto")):
        with pytest.raises(LedgerError, match="locked"):
            action()
    other.execute("ROLLBACK")
    other.close()
    assert [entry.name for entry in ledger.entries()] == ["base"]


def test_a_full_disk_is_said_to_be_full(ledger: Ledger, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger.add("base", "nerfacto")
    connect = sqlite3.connect

    def small(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)  # type: ignore[arg-type]
        connection.execute("PRAGMA max_page_count = 1")
        return connection

    with monkeypatch.context() as context:
        context.setattr(sqlite3, "connect", small)
        with pytest.raises(LedgerError, match="disk is full"):
            ledger.note("base", "text " * 100_000)
    assert integrity(path) == "ok" and not ledger.entry("base").notes


def test_throughput_of_a_method_on_this_machine(ledger: Ledger, path: Path) -> None:
    assert throughput("nerfacto", hardware="here", ledger=path) is None
    for name, method, hardware, speeds, status in (
        ("old", "nerfacto", "here", (4.0, 5.0, 6.0), "open"),
        ("new", "nerfacto", "here", (7.0, 8.0), "success"),
        ("oom", "nerfacto", "here", (900.0,), "failed"),
        ("elsewhere", "nerfacto", "there", (70.0,), "open"),
        ("other", "splatfacto", "here", (70.0,), "open"),
    ):
        ledger.add(name, method, conditions={"hardware": hardware, "width_px": 64}, status=status)  # type: ignore[arg-type]
        for speed in speeds:
            ledger.add_repeat(name, {"it_per_s": speed, "rays_per_step": 512, "rays_per_s": 512 * speed}, session=name)
    speed = throughput("nerfacto", hardware="here", ledger=path)
    assert speed is not None and speed.rays_per_s is not None
    assert (speed.it_per_s.middle, speed.samples, speed.entries) == (6.0, 5, ("old", "new"))
    assert speed.rays_per_s.middle == 512 * 6.0 and speed.date == ledger.entry("new").date
    assert throughput("nerfacto", hardware="here", ledger=path, conditions={"width_px": 65}) is None
    assert throughput("nerfacto", hardware="here", ledger=path, rays_per_step=1024) is None
    assert throughput("f3rm-ext", hardware="here", ledger=path) is None


def test_the_default_place_is_the_folder_for_data_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Ledger().path == tmp_path / "f3rm_ext" / "ledger.sqlite"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert Ledger().path == Path.home() / ".local" / "share" / "f3rm_ext" / "ledger.sqlite"
