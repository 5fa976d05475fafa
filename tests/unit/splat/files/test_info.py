"""What comments say of splats."""

import pytest

from f3rm_ext.splat.files import SplatInfo
from f3rm_ext.splat.files.info import combine_provenance, find_maker, read_tags, tag_comments


@pytest.mark.parametrize(
    ("comments", "mode"),
    [
        (["  SPLATRENDERMODE:MIP "], "mip"),
        (["SplatRenderMode: default"], "default"),
        (["antialiased 0"], "default"),
        (["antialiased 1", "SplatRenderMode: default"], "default"),
        (["SplatRenderMode: default", "antialiased 1"], "mip"),
        (["SplatRenderMode: 2dgs"], None),
        ([], None),
    ],
)
def test_render_mode(comments: list[str], mode: str | None) -> None:
    assert read_tags(comments)[0] == mode


def test_tags_are_taken_out_and_others_stay() -> None:
    comments = ["made_by: us", "filter_3d: fused", "SplatRenderMode: mip", "SplatRenderMode: 2dgs", "filter_3d: odd"]
    assert read_tags(comments) == ("mip", True, ("made_by: us", "SplatRenderMode: 2dgs", "filter_3d: odd"))
    assert read_tags(["filter_3d: none"])[1] is False


@pytest.mark.parametrize("mode", ["mip", "default", None])
@pytest.mark.parametrize("fused", [True, False, None])
def test_tags_that_are_written_are_read(mode: str | None, fused: bool | None) -> None:
    info = SplatInfo(render_mode=mode, filters_fused=fused, comments=("a",))  # type: ignore[arg-type]
    assert read_tags(tag_comments(info)) == (mode, fused, ("a",))


def test_origin_is_told_after_the_maker() -> None:
    origin = SplatInfo(comments=("made_by: them", "step: 7", "version: 1"))
    told = combine_provenance(origin, {"made_by": "us", "version": 1})
    assert told == ("made_by: us", "version: 1", "origin_made_by: them", "step: 7")
    assert find_maker(told) == "us" and find_maker(["step: 7"]) is None
