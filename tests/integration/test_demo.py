"""`f3rm-ext demo` from end to end on a tiny capture, and starting it again."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
OPTIONS = ("--steps", 20, "--method", "f3rm-ext-lite")


@pytest.fixture(scope="module")
def demo(run_command: Run, tiny_capture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("demo") / "d"
    return out, run_command("f3rm-ext", "demo", "--data", tiny_capture, "--out", out, *OPTIONS, timeout_s=600)


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href") and tag != "a"]


def test_the_report_is_one_file(demo: tuple[Path, Any]) -> None:
    out, done = demo
    done.succeeds()
    assert json.loads((out / "manifest.json").read_text())["stages"]["train"]["working_s"] > 0
    text = (out / "report.html").read_text()
    page = _Resources()
    page.feed(text)
    assert page.found and all(resource.startswith(("data:", "#")) for resource in page.found)
    assert len(text) < 4_000_000
    for wanted in ("PSNR", "SSIM", "ns-train f3rm-ext-lite", "ns-eval"):
        assert wanted in text, wanted


def test_the_commands_it_shows_are_those_it_ran(demo: tuple[Path, Any]) -> None:
    out, _ = demo
    logged = (out / "logs" / "train.log").read_text().splitlines()[0].removeprefix("$ ")
    assert logged.startswith("ns-train f3rm-ext-lite --data")
    shown = (out / "report.html").read_text()
    assert logged.split(" --load-dir")[0].split()[-1] in shown


def test_the_same_command_again_trains_nothing(demo: tuple[Path, Any], run_command: Run, tiny_capture: Path) -> None:
    out, _ = demo
    before = sorted((path.name, path.stat().st_mtime_ns) for path in out.rglob("*.ckpt"))
    done = run_command("f3rm-ext", "demo", "--data", tiny_capture, "--out", out, *OPTIONS).succeeds()
    assert sorted((path.name, path.stat().st_mtime_ns) for path in out.rglob("*.ckpt")) == before
    assert "done before" in done.text


@pytest.mark.parametrize(
    ("options", "words"),
    [(("--steps", -1), "--steps is -1"), (("--minutes", -1), "--minutes"), (("--scale", 2), "--scale")],
)
def test_bad_options_are_one_sentence(
    run_command: Run, tmp_path: Path, options: tuple[str, object], words: str
) -> None:
    done = run_command("f3rm-ext", "demo", "--out", tmp_path / "d", *options)
    done.refuses(words)
    assert not (tmp_path / "d").exists()


def test_a_capture_that_cannot_be_used_says_so_in_its_own_words(run_command: Run, tmp_path: Path) -> None:
    (tmp_path / "capture").mkdir()
    done = run_command("f3rm-ext", "demo", "--data", tmp_path / "capture", "--out", tmp_path / "d")
    done.refuses(r"transforms\.json")
