"""`f3rm-ext export page` as a user types it, on a run of splats with the capture's classes as features."""

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

Typed = Callable[..., Any]


@pytest.fixture(scope="module")
def run(labelled_splats: Any) -> Path:
    """Folder of the run."""
    return labelled_splats.folder


@pytest.fixture(scope="module")
def bare(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without features."""
    import torch

    folder = tmp_path_factory.mktemp("bare") / "e" / "sugar-ext-lite" / "t"
    shutil.copytree(run, folder)
    (file,) = folder.glob("nerfstudio_models/*.ckpt")
    content = torch.load(file, weights_only=True, map_location="cpu")
    state = {name: value for name, value in content["pipeline"].items() if "lifted" not in name}
    extra = state["_model._extra_state"]
    extra["about"] = json.dumps({**json.loads(extra["about"]), "features": []})
    torch.save({**content, "pipeline": state}, file)
    config = folder / "config.yml"
    config.write_text(config.read_text().replace(str(run.parents[2]), str(folder.parents[2])))
    return folder


class Resources(HTMLParser):
    """Everything that a browser would load, and the policy that forbids it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.policy = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.found += [given[name] or "" for name in ("src", "href", "srcset", "action") if name in given]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""


def shown(file: Path) -> dict[str, Any]:
    """What the page's script reads."""
    found = re.search(r'id="content">(.*?)</script>', file.read_text())
    assert found
    return json.loads(found[1])


def test_a_page_is_one_file_that_loads_nothing(run: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    out = tmp_path / "room.html"
    done = f3rm_ext(
        "export", "page", "--load-config", run / "config.yml", "--out", out, "--text", "table", "walls"
    ).succeeds()
    text = out.read_text()
    assert 40_000 < len(text) < 400_000 and "800 Gaussians" in done.stdout and list(tmp_path.iterdir()) == [out]
    page = Resources(text)
    assert page.found and all(address.startswith("data:") for address in page.found)
    assert page.policy.startswith("default-src 'none'") and "connect-src" not in page.policy
    assert not re.search(r"https?:|url\((?!data:)|@import|fetch\(", text.replace("http://www.w3.org/2000/svg", ""))
    content = shown(out)
    assert [question["name"] for question in content["questions"]] == ["table", "walls"]
    assert len(content["cameras"]) == 12 and "places" in content["questions"][0]
    assert f3rm_ext("export", "page", "--load-config", run / "config.yml", "--out", out).code == 0, "our own file"
    assert shown(out)["questions"] == []


def test_saved_questions_have_the_scores_of_new_ones(run: Path, bare: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    config, asked = run / "config.yml", ("--text", "table", "--exemplar", "it=frame_00001.png:20,14,16,12")
    query = ("query", "--load-config", config, "--views", "frame_00003.png", "--out", tmp_path / "q")
    f3rm_ext(*query, *asked, "--threshold", 0.6).succeeds()
    page = ("export", "page", "--load-config", config, "--out")
    for name, words in (("new", (*asked, "--threshold", 0.6)), ("saved", ("--saved", tmp_path / "q"))):
        done = f3rm_ext(*page, tmp_path / f"{name}.html", *words, "--title", "room").succeeds()
    new, saved = shown(tmp_path / "new.html"), shown(tmp_path / "saved.html")
    assert [one["name"] for one in saved["questions"]] == ["table", "it"] and saved["questions"][0]["threshold"] == 0.6
    for one, other in zip(new["questions"], saved["questions"], strict=True):
        assert one["high"] == pytest.approx(other["high"], abs=1e-3) and len(one["places"]) == len(other["places"])
    summary = json.loads((tmp_path / "q" / "summary.json").read_text())
    for changed, says in (
        ({"checkpoint": str(bare / "other.ckpt")}, "another run"),
        ({"negative_vectors": None}, "f3rm-ext query"),
        ({"queries": "x"}, "f3rm-ext query"),
        ({"vectors": {"table": "none.npy", "it": "it.npy"}}, "none.npy"),
    ):
        (tmp_path / "q" / "summary.json").write_text(json.dumps(summary | changed))
        done = f3rm_ext(*page, tmp_path / "x.html", "--saved", tmp_path / "q")
        done.refuses(re.escape(says))
    (tmp_path / "q" / "summary.json").write_text(json.dumps(summary))
    done = f3rm_ext(*page, tmp_path / "x.html", "--saved", tmp_path / "q", "--text", "table")
    done.refuses("'table'")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--text", ""), "empty"),
        (("--exemplar", "frame_00001.png:1,2,3"), "IMAGE:x,y"),
        (("--exemplar", "frame_00001.png:1,2,0,3"), "empty"),
        (("--exemplar", "none.png:1,2"), "none.png"),
        (("--text", "table", "--feature", "clip"), "labels"),
        (("--vector", "none.npy"), "none.npy"),
        (("--saved", "none"), "none"),
        (("--notes", "none.json"), "none.json"),
        (("--text", *(f"q{i}=table" for i in range(17))), "'q16'"),
        (("--max-mb", 1, "--max-loss-db", 1), "--max-loss-db"),
        (("--out", "page.htm"), ".html"),
    ],
)
def test_what_cannot_be_made_is_refused(
    run: Path, f3rm_ext: Typed, tmp_path: Path, words: tuple[object, ...], says: str
) -> None:
    done = f3rm_ext("export", "page", "--load-config", run / "config.yml", "--out", tmp_path / "a.html", *words)
    done.refuses(re.escape(says))
    assert not list(tmp_path.iterdir())


def test_a_run_without_features_answers_nothing(bare: Path, f3rm_ext: Typed, tmp_path: Path) -> None:
    page = ("export", "page", "--load-config", bare / "config.yml", "--out", tmp_path / "a.html")
    done = f3rm_ext(*page, "--text", "table")
    done.refuses("features lift")
    assert not list(tmp_path.iterdir())
    assert f3rm_ext(*page).code == 0 and shown(tmp_path / "a.html")["questions"] == []
