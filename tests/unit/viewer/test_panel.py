"""The panel as nerfstudio drives it: elements it finds, callbacks from many threads, late results."""

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nerfstudio.viewer.utils import parse_object
from nerfstudio.viewer.viewer_elements import ViewerControl, ViewerElement
from torch import nn

from f3rm_ext.errors import WeightsNotFoundError
from f3rm_ext.query.embeddings import Query
from f3rm_ext.viewer.panel import QueryPanel

PATIENCE_S = 30.0


def write(panel: QueryPanel, text: str, wait: bool = True) -> None:
    """Types into the text field."""
    panel.ask_01_text.value = text
    panel.ask_01_text.cb_hook(panel.ask_01_text)
    assert not wait or panel._encoding.join(PATIENCE_S)


def press(button: Any) -> None:
    """Presses a button."""
    button.cb_hook(button)


def click(server: SimpleNamespace, direction: tuple[float, ...]) -> None:
    """A click on the scene, as nerfstudio passes it on from the page; the origin is in viser's units."""
    event = SimpleNamespace(
        event_type="click", ray_origin=(0.0, 0.0, 0.0), ray_direction=direction, screen_pos=[(0.5, 0.5)]
    )
    server.scene.callback(event)


def live(panel: QueryPanel) -> Query:
    query = panel.store.state.live
    assert query is not None
    return query


# --- what nerfstudio finds -------------------------------------------------------------------------------------------


def test_nerfstudio_finds_the_elements_in_their_order(toy) -> None:
    class Pipeline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._model = toy

        @property
        def model(self) -> nn.Module:
            return self._model

    found = parse_object(Pipeline(), ViewerElement, "Custom Elements")
    assert [element.name for _, element in found] == [
        "Query",
        "Status",
        "Negatives",
        "Feature",
        "Temperature",
        "Threshold",
        "Click to query",
        "Click a group",
        "Add to named queries",
        "Clear queries",
        "Refit PCA",
        "Memory",
    ]
    assert {path.rsplit("/", 1)[0] for path, _ in found} == {"Custom Elements/model/queries"}
    assert len(parse_object(Pipeline(), ViewerControl, "Custom Elements")) == 1


def test_nothing_of_the_panel_is_in_a_checkpoint(make_model, make_spec, query_for) -> None:
    model = make_model((make_spec("dense", 12),))
    before = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    assert not [name for name in before if "queries" in name]
    model.queries.store.change(lambda state: replace(state.add_named(query_for("mug")), threshold=0.9))
    assert model.state_dict().keys() == before.keys()


def test_a_checkpoint_brings_the_heads_to_choose_from(make_model, make_spec) -> None:
    trained = make_model((make_spec("dense", 12), make_spec("other", 5)))
    model = make_model()
    panel = model.queries
    panel.sync()
    assert panel.ask_04_feature.options == ["none"] and "No features" in panel.ask_02_status.content
    panel.ask_02_status._handle = SimpleNamespace(content="")  # as if a viewer had come first, as in resumed training
    model.load_state_dict(trained.state_dict())
    assert panel.ask_04_feature.options == ["dense", "other"] and panel.ask_04_feature.visible
    assert panel.ask_04_feature.value == "dense" and "**Feature** dense" in panel.ask_02_status._handle.content


def test_panels_of_two_models_share_nothing(panel, make_toy) -> None:
    model = make_toy("toy")
    other = model.queries
    write(panel, "mug")
    panel.ask_06_threshold.value = 0.9
    press(panel.ask_06_threshold)
    assert other.store.state.live is None and other.store.state.threshold == 0.5
    assert other.ask_01_text.value == "" and other.viewer_control is not panel.viewer_control


def test_the_panel_of_a_copied_model_is_the_copys(make_model) -> None:
    model = make_model()
    twin = copy.deepcopy(model)
    assert twin.queries is not model.queries
    assert twin.queries._get_model() is twin and model.queries._get_model() is model


# --- texts -----------------------------------------------------------------------------------------------------------


def test_a_text_is_compared_against_the_negatives(panel, encoder, viewer) -> None:
    write(panel, "mug | book")
    query = live(panel)
    assert query.name == "mug | book" and query.head == "toy"
    assert query.positives.sources == ("mug", "book")
    assert query.negatives.sources == ("object", "things", "stuff", "texture")
    assert torch.equal(query.positives.values, torch.eye(3)[:2])
    assert viewer.drawn == 1 and viewer.control_panel._output_render.value == "relevancy_overlay"
    assert "“mug”, “book” against “object”" in panel.ask_02_status.content
    shown = viewer.control_panel._output_render
    for value, options in (("depth", ["rgb", "relevancy_overlay"]), ("rgb", ["rgb"])):
        shown.value, shown.options = value, options
        write(panel, "mug")
        assert shown.value == value, "chosen by hand, or not offered"

    def leave() -> None:
        raise KeyError(3)  # the page disconnects while it is drawn again

    viewer._trigger_rerender = leave
    write(panel, "book")
    assert live(panel).name == "book" and "Problem" not in panel.ask_02_status.content


def test_while_weights_load_nothing_is_held_up_and_the_status_says_so(panel, encoder, viewer) -> None:
    write(panel, "slow", wait=False)
    assert encoder.at_work.wait(PATIENCE_S)
    assert "Loading text weights" in panel.ask_02_status.content
    assert viewer.train_lock.acquire(timeout=1), "the training lock is free"
    viewer.train_lock.release()
    assert panel.store.state.live is None
    press(panel.ask_06_threshold)  # a change supersedes nothing
    encoder.go_on.set()
    assert panel._encoding.join(PATIENCE_S)
    assert live(panel).name == "slow" and "Loading" not in panel.ask_02_status.content


def test_a_newer_text_supersedes_one_that_is_being_encoded(panel, encoder, viewer) -> None:
    write(panel, "slow", wait=False)
    assert encoder.at_work.wait(PATIENCE_S)
    for text in ("m", "mu", "mug"):
        write(panel, text, wait=False)
    encoder.go_on.set()
    assert panel._encoding.join(PATIENCE_S)
    assert live(panel).name == "mug" and viewer.drawn == 1, "the superseded result is never shown"
    assert [prompts[0] for prompts in encoder.read] == ["slow", "mug"], "what was typed meanwhile is not even encoded"


@pytest.mark.parametrize("action", ["clear", "empty", "click"])
def test_other_actions_supersede_a_text_that_is_being_encoded(panel, encoder, server, action) -> None:
    write(panel, "slow", wait=False)
    assert encoder.at_work.wait(PATIENCE_S)
    if action == "click":
        press(panel.ask_07_click)
        click(server, (1, 0, -1))
    elif action == "empty":
        write(panel, "  ", wait=False)
    else:
        press(panel.ask_09_clear)
    encoder.go_on.set()
    assert panel._encoding.join(PATIENCE_S)
    state = panel.store.state
    assert (state.live and state.live.name) == ("click 1" if action == "click" else None)
    assert not any(word in panel.ask_02_status.content for word in ("Loading", "Problem"))


def test_an_alternative_that_is_empty_is_a_problem(panel) -> None:
    write(panel, "mug")
    write(panel, "mug |")
    assert panel.store.state.live is None and "Problem" in panel.ask_02_status.content
    write(panel, "mug | book")
    assert len(live(panel).positives) == 2 and "Problem" not in panel.ask_02_status.content


def test_negatives_apply_at_once_and_without_them_it_is_the_cosine(panel) -> None:
    write(panel, "mug")
    panel.ask_03_negatives.value = "book"
    press(panel.ask_03_negatives)
    assert panel._encoding.join(PATIENCE_S) and live(panel).negatives.sources == ("book",)
    panel.ask_03_negatives.value = ""
    press(panel.ask_03_negatives)
    assert panel._encoding.join(PATIENCE_S) and not live(panel).is_relevancy
    assert "plain cosine" in panel.ask_02_status.content


def test_missing_weights_are_a_status_and_clicks_go_on_working(panel, encoder, server, viewer) -> None:
    encoder.failure = WeightsNotFoundError("The weights of X (x.pt) are not in /somewhere: get them.")
    write(panel, "mug")
    assert panel.store.state.live is None
    assert "Problem" in panel.ask_02_status.content and "/somewhere: get them" in panel.ask_02_status.content
    press(panel.ask_07_click)
    click(server, (1, 0, -1))
    assert live(panel).name == "click 1" and "Problem" not in panel.ask_02_status.content
    encoder.failure = ZeroDivisionError("broken on purpose")
    write(panel, "mug")
    assert "ZeroDivisionError: broken on purpose" in panel.ask_02_status.content


def test_a_text_that_the_feature_does_not_know_says_so_and_is_a_negative_all_the_same(panel) -> None:
    write(panel, "no class")
    assert panel.store.state.live is None
    assert "Problem" in panel.ask_02_status.content and "no class 'no class'" in panel.ask_02_status.content
    panel.ask_03_negatives.value = "no class"
    write(panel, "mug")
    assert live(panel).name == "mug" and "Problem" not in panel.ask_02_status.content


def test_a_feature_that_understands_no_text_says_so(make_toy) -> None:
    model = make_toy("toy")  # its extractor is dense-daisy, encoded by the real encoder
    panel = model.queries
    panel.sync()
    assert "understands no text, so query by click" in panel.ask_02_status.content
    write(panel, "mug")
    assert "understands no text" in panel.ask_02_status.content and "Problem" in panel.ask_02_status.content


def test_a_model_without_features_says_so(panel, toy) -> None:
    toy.heads.clear()
    panel.sync()
    for action in (lambda: write(panel, "mug"), lambda: press(panel.ask_07_click)):
        action()
        assert "has no distilled features" in panel.ask_02_status.content


# --- clicks ----------------------------------------------------------------------------------------------------------


def test_a_click_queries_what_it_hits(panel, toy, server, viewer) -> None:
    write(panel, "book")
    press(panel.ask_07_click)
    assert "Click on the scene" in panel.ask_02_status.content
    toy.train()
    click(server, (1, 0, -1))
    query = live(panel)
    assert server.scene.callback is None, "the next click is the page's again"
    assert query.positives.values[0].tolist() == pytest.approx([1 / 1.01**0.5, 0.1 / 1.01**0.5, 0.0])
    assert query.positives.sources[1:2] == ("click 1:60,60",)
    assert query.is_relevancy
    assert panel.ask_01_text.value == "", "the text is not what is shown"
    assert set(toy.was_training) == {False} and toy.training
    assert "1.41, 0.00, -1.41" in panel.ask_02_status.content.replace("&#45;", "-")
    press(panel.ask_07_click)
    assert server.scene.callback is not None
    press(panel.ask_07_click)
    assert server.scene.callback is None, "a second press gives the mouse back"
    press(panel.ask_07_click)
    click(server, (0, 1, 0))
    assert live(panel) == query and "nothing where you clicked" in panel.ask_02_status.content, "what is shown stays"
    assert not viewer.train_lock.locked()


def test_a_click_lights_the_group_that_it_hits(panel, toy, server, viewer) -> None:
    viewer.control_panel._output_render.options.append("group")
    assert not panel.ask_07_group.visible and not panel.lit_points()
    toy.groups = torch.tensor([0, 0, 1, 1, 1, -1])
    panel.sync()
    assert panel.ask_07_group.visible and not panel.lit_points()
    press(panel.ask_07_click)
    press(panel.ask_07_group)  # instead
    toy.train()
    click(server, (1, 0, -1))
    assert server.scene.callback is None and panel.store.state.live is None
    assert panel.lit_points()["group"].tolist() == [False, False, True, True, True, False]
    assert "**Group** 1 of 2: 3 Gaussians" in panel.ask_02_status.content
    assert viewer.control_panel._output_render.value == "group" and viewer.drawn
    assert set(toy.was_training) == {False} and toy.training
    press(panel.ask_07_group)
    click(server, (0, 1, 0))
    assert "no group where you clicked" in panel.ask_02_status.content and panel.lit_points()
    press(panel.ask_04_feature)
    assert panel.store.state.group is None and "**Group**" not in panel.ask_02_status.content, "of another feature"
    press(panel.ask_07_group)
    click(server, (1, 0, -1))
    write(panel, "mug")
    assert viewer.control_panel._output_render.value == "relevancy_overlay"
    press(panel.ask_09_clear)
    assert not panel.lit_points()


def test_a_click_waits_for_the_model(panel, toy, server, viewer) -> None:
    press(panel.ask_07_click)
    with viewer.train_lock:
        thread = threading.Thread(target=click, args=(server, (1, 0, -1)))
        thread.start()
        thread.join(0.05)
        assert thread.is_alive() and not toy.was_training
    thread.join(PATIENCE_S)
    assert live(panel).name == "click 1"


# --- the other elements ----------------------------------------------------------------------------------------------


def test_temperature_and_threshold_apply_at_once(panel) -> None:
    write(panel, "mug")
    press(panel.ask_08_name)
    panel.ask_05_temperature.value, panel.ask_06_threshold.value = 0.5, 0.7
    press(panel.ask_05_temperature)
    press(panel.ask_06_threshold)
    state = panel.store.state
    assert live(panel).temperature == state.named[0].temperature == 0.5 and state.threshold == 0.7
    write(panel, "book")
    assert live(panel).temperature == 0.5, "that of the panel"
    assert "found from 0.70" in panel.ask_02_status.content


def test_queries_are_named_and_cleared(panel) -> None:
    press(panel.ask_08_name)
    assert "There is no query to add" in panel.ask_02_status.content
    for text in ("mug", "book"):
        write(panel, text)
        press(panel.ask_08_name)
    assert [query.name for query in panel.store.state.named] == ["mug", "book"]
    assert "`#e69f00` mug, `#56b4e9` book" in panel.ask_02_status.content
    panel.ask_03_negatives.value = "thing"
    write(panel, "mug")
    press(panel.ask_08_name)
    mug, book = panel.store.state.named
    assert (mug.name, book.name) == ("mug", "book") and mug.negatives.sources == ("thing",), "once, in its place"
    press(panel.ask_09_clear)
    assert not panel.store.state.named and panel.store.state.live is None and panel.ask_01_text.value == ""
    write(panel, "book")
    assert live(panel).name == "book"


def test_another_feature_gets_the_same_text(make_toy, encoder, server) -> None:
    model = make_toy("toy", "second")
    panel = model.queries = QueryPanel(model, encoder)
    panel.viewer_control._setup(
        SimpleNamespace(viser_server=server, train_lock=None, _trigger_rerender=lambda: None, render_statemachines={})
    )
    panel.viewer_control.viewer.control_panel = SimpleNamespace(_output_render=SimpleNamespace(value="x"))
    panel.sync()
    assert panel.ask_04_feature.visible and panel.ask_04_feature.options == ["toy", "second"]
    write(panel, "mug")
    panel.ask_04_feature.value = "second"
    press(panel.ask_04_feature)
    assert panel._encoding.join(PATIENCE_S) and live(panel).head == "second"
    press(panel.ask_07_click)
    click(server, (1, 0, -1))
    assert live(panel).head == "second"
    panel.ask_04_feature.value = "toy"
    press(panel.ask_04_feature)
    assert panel.store.state.live is None, "where was clicked in the other feature means nothing here"


def test_refitted_colors_are_not_in_the_checkpoint(
    make_model, make_spec, make_camera, monkeypatch, as_viewer_thread
) -> None:
    model = make_model((make_spec("dense", 12),), init_density=5.0).eval()
    panel, camera = model.queries, make_camera(16)
    press(panel.ask_10_refit)
    assert "look at the scene first" in panel.ask_02_status.content
    as_viewer_thread()
    before, stored = model.get_outputs_for_camera(camera), model.state_dict()["feature_field.heads.dense.display_low"]
    press(panel.ask_10_refit)
    assert "Problem" not in panel.ask_02_status.content, panel.ask_02_status.content
    after = model.get_outputs_for_camera(camera)
    assert float(after["feature_pca"].std()) > 2 * float(before["feature_pca"].std()), "the view uses the whole range"
    assert torch.equal(model.state_dict()["feature_field.heads.dense.display_low"], stored)
    monkeypatch.undo()
    assert torch.equal(model.get_outputs_for_camera(camera)["feature_pca"], after["feature_pca"])


# --- pictures --------------------------------------------------------------------------------------------------------


def test_outside_the_viewer_only_a_query_computes(make_model, make_spec, make_camera, as_viewer_thread) -> None:
    from f3rm_ext.query.embeddings import Embeddings

    model, camera = make_model((make_spec("dense", 12),), init_density=5.0).eval(), make_camera(8)
    ours = {"relevancy", "relevancy_overlay", "labels"}
    assert model.queries.extra_outputs(camera, None) == {} and not ours & set(model.get_outputs_for_camera(camera))
    vectors = Embeddings.from_full(torch.eye(12)[:1], ["x"])
    model.queries.store.change(lambda q: q.set_live(Query("x", "dense", vectors, Embeddings.empty(12))))
    shown = model.get_outputs_for_camera(camera)
    assert ours <= set(shown) and shown["relevancy"].shape == (8, 8, 1)
    assert shown["labels"].shape == shown["relevancy_overlay"].shape == (8, 8, 3)
    model.queries.store.change(lambda q: q.set_live(None))
    as_viewer_thread()
    assert ours <= set(model.get_outputs_for_camera(camera)), "in the viewer they can be chosen before there is a query"


def test_a_query_that_does_not_fit_leaves_the_picture_alone(make_model, make_spec, make_camera, query_for) -> None:
    model = make_model((make_spec("dense", 12),)).eval()
    model.queries.store.change(lambda q: q.set_live(query_for("mug", head="dense")))
    shown = model.get_outputs_for_camera(make_camera(8))
    assert "rgb" in shown and "feature_pca" in shown and "relevancy" not in shown
    assert "has 3 dimensions" in model.queries.ask_02_status.content
