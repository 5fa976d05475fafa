"""The query panel of nerfstudio's viewer, as a submodule of a model."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from jaxtyping import Bool
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.viewer.viewer_elements import ViewerButton, ViewerClick, ViewerDropdown, ViewerSlider, ViewerText
from torch import Tensor, nn

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.registry import extractor_name
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.query.builders import query_example
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Embeddings, Query
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder
from f3rm_ext.query.options import ALTERNATIVES, split_prompts
from f3rm_ext.query.queryable import Editable, GroupedPoints, HasGroups, Queryable, QueryHead, get_head
from f3rm_ext.viewer import outputs, status
from f3rm_ext.viewer.editing import SELECTION, EditPanel
from f3rm_ext.viewer.first_view import FirstViewControl
from f3rm_ext.viewer.picking import Ray, Viewpoint, fit_displays, pick_feature, pick_group, pick_thing
from f3rm_ext.viewer.state import DEFAULT_THRESHOLD, QueryStateStore
from f3rm_ext.viewer.worker import LatestJob

_NO_FEATURE = "none"


class QueryPanel(nn.Module):
    """The elements by which a model is queried in the viewer, and the outputs that show the results.

    Nerfstudio finds the elements because this is a module with public attributes, and sorts them by attribute name. It
    calls their callbacks from several threads, under its training lock. The model's heads may appear later, with a
    checkpoint. The panel has no parameters or buffers, so it leaves no trace in checkpoints.

    Args:
        model: the model that is queried, a :class:`~f3rm_ext.query.queryable.Queryable`. The panel holds a weak
            reference to it, and the model may still be under construction.
        encoder: encodes texts; by default the panel has its own, on the CPU.
    """

    def __init__(self, model: nn.Module, encoder: TextEncoder | None = None) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self.store = QueryStateStore()
        self._encoding = LatestJob("f3rm-ext text query")
        # Not on the model's device: a text tower would take memory that training needs.
        self._encoder = encoder or TextEncoder("cpu")
        self._guard = OutputGuard(self._output_failed)
        self._viewpoint: Viewpoint | None = None
        self._text_seen = ""
        self._clicks = 0
        self._clicked: Callable[[Ray], None] | None = None
        self._feature_line, self._activity, self._problem = "", "", ""

        self.ask_01_text = ViewerText(
            "Query", "", cb_hook=self.act(self._query_text), hint=f"What to find: mug {ALTERNATIVES} cup"
        )
        self.ask_02_status = status.StatusLine(self.sync)
        self.ask_03_negatives = ViewerText(
            "Negatives",
            f" {ALTERNATIVES} ".join(DEFAULT_NEGATIVES),
            cb_hook=self.act(self._negatives_changed),
            hint="Phrases a text is compared against; without any the score is the cosine",
        )
        self.ask_04_feature = ViewerDropdown(
            "Feature", _NO_FEATURE, [_NO_FEATURE], visible=False, cb_hook=self.act(self._feature_changed)
        )
        self.ask_05_temperature = ViewerSlider(
            "Temperature",
            DEFAULT_TEMPERATURE,
            *(0.01, 1.0, 0.01),
            cb_hook=self.act(self._temperature_changed),
            hint="Low: hard decisions. High: soft ones",
        )
        self.ask_06_threshold = ViewerSlider(
            "Threshold",
            DEFAULT_THRESHOLD,
            *(0.0, 1.0, 0.01),
            cb_hook=self.act(self._threshold_changed),
            hint="Lowest relevancy that the overlay and the labels show",
        )
        self.ask_07_click = ViewerButton(
            "Click to query", cb_hook=self.act(lambda: self._await_click(self._query_click))
        )
        self.ask_07_group = ViewerButton(
            "Click a group", cb_hook=self.act(lambda: self._await_click(self._light_click)), visible=False
        )
        self.ask_08_name = ViewerButton("Add to named queries", cb_hook=self.act(self._add_to_named))
        self.ask_09_clear = ViewerButton("Clear queries", cb_hook=self.act(self._clear))
        self.ask_10_refit = ViewerButton("Refit PCA", cb_hook=self.act(self._refit))
        self.ask_11_memory = status.MemoryLine(lambda: self._get_model().device)
        self.viewer_control = FirstViewControl()
        editable = isinstance(model, Editable) and model.opened_checkpoint() is not None
        self.edit = EditPanel(cast(Editable, model), self) if editable else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "QueryPanel":
        """Returns a new panel for the copy of the model, or for the same model if only the panel is copied."""
        model = self._model()
        return QueryPanel(memo.get(id(model), model))

    # --- for the model -----------------------------------------------------------------------------------------------

    def extra_outputs(self, camera: Cameras, obb_box: OrientedBox | None) -> dict[str, ExtraOutput]:
        """Returns the outputs to compute in addition to the model's own for a picture.

        Empty outside the viewer, unless there are queries or refitted colours. Raises nothing but the viewer's
        interrupt.
        """
        state, in_viewer = self.store.state, compat.is_viewer_thread()
        if not (state.is_active or in_viewer):
            return {}
        if in_viewer:
            self._viewpoint = Viewpoint(camera, obb_box)
            self.ask_11_memory.update()
        try:
            return outputs.extra_outputs(self._get_model(), state, self._guard)
        except compat.viewer_interrupts():
            raise
        except Exception as error:
            self._guard.report(outputs.RELEVANCY, error)
            return {}

    def lit_points(self) -> dict[str, Bool[Tensor, " points"] | None]:
        """Returns which points of the model some outputs light, by name; None for none. Empty where there is nothing to
        show: the model has no groups and cannot be edited, or this is not the viewer and no group was clicked."""
        state, in_viewer = self.store.state, compat.is_viewer_thread()
        lit: dict[str, Tensor | None] = {}
        if (state.group or in_viewer) and (groups := self._groups()) is not None:
            head, number = state.group or ("", 0)
            lit[outputs.GROUP] = groups.groups == number if head == self.ask_04_feature.value else None
        if in_viewer and self.edit is not None:
            lit[SELECTION] = self.edit.selected
        return lit

    def hidden(self) -> Bool[Tensor, " points"] | None:
        """Returns the points of the model that are not to be drawn; None where all are."""
        return None if self.edit is None else self.edit.hidden

    def sync(self) -> None:
        """Offers the model's heads for choice; called when a viewer starts and after a checkpoint is loaded."""
        names = list(self._heads()) or [_NO_FEATURE]
        element = self.ask_04_feature
        if element.value not in names:
            element.default_value = names[0]
        element.visible = len(names) > 1
        element.set_options(names)
        self.ask_07_group.visible = self._groups() is not None
        for shown in (element, self.ask_07_group):
            if shown.gui_handle is not None:
                shown.set_visible(shown.visible)
        self._describe_feature()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.ask_02_status.is_installed:
            self.sync()

    # --- queries -----------------------------------------------------------------------------------------------------

    def _query_text(self) -> None:
        text = self.ask_01_text.value.strip()
        if text == self._text_seen:
            return
        self._text_seen = text
        self._encode_text()

    def _encode_text(self) -> None:
        """Encodes the text field in the background, or clears the query if it is empty."""
        request_id = self.store.new_request()
        text, negatives_text = self._text_seen, self.ask_03_negatives.value.strip()
        if not text:
            self.store.resolve(request_id, lambda state: state.set_live(None))
            self.say()
            return
        try:
            head = self._head()
            positives = split_prompts(text)
            negatives = split_prompts(negatives_text) if negatives_text else []
        except ConfigError:
            self.store.resolve(request_id, lambda state: state.set_live(None))
            raise
        self.say(activity=f"Loading text weights of {extractor_name(head.extractor)} …")

        def encode() -> Query:
            encoded = self._encoder.encode(head, [*positives, *negatives], known=positives)
            count = len(positives)
            return Query(
                text,
                head.name,
                Embeddings(encoded.values[:count], encoded.sources[:count]),
                Embeddings(encoded.values[count:], encoded.sources[count:]),
            )

        self._encoding.submit(lambda: self._show_query(request_id, encode))

    def _show_query(self, request_id: int, make_query: Callable[[], Query], *, keeps_former: bool = False) -> None:
        """Makes a query and shows it, or what went wrong, unless there is a newer request. Takes no lock itself.

        Args:
            keeps_former: where it goes wrong, the query before stays.
        """
        if not self.store.is_newest(request_id):
            return
        problem, query = "", None
        try:
            query = make_query()
        except Exception as error:
            problem = status.sentence(error)
        keeps = keeps_former and query is None
        if self.store.resolve(request_id, lambda state: state if keeps else state.set_live(query)):
            self.say(problem=problem)
            if query is not None:
                self.show_output(outputs.OVERLAY)
            compat.viewer_redraw(self.viewer_control)

    def show_output(self, name: str) -> None:
        """Shows an output, unless one was chosen that is none of the panel's."""
        for other in ("rgb", outputs.OVERLAY, outputs.GROUP, SELECTION):
            if other != name:
                compat.viewer_show_output(self.viewer_control, name, instead_of=other)

    def _await_click(self, clicked: Callable[[Ray], None]) -> None:
        was_waiting_for = self._clicked
        self._stop_waiting()
        if was_waiting_for == clicked:
            self.say()
            return
        self._head()
        self._clicked = clicked
        self.viewer_control.register_pointer_cb("click", self._handle_click)
        self.say(activity="Click on the scene.")

    def _stop_waiting(self) -> None:
        if self._clicked is not None:
            self._clicked = None
            self.viewer_control.unregister_pointer_cb()

    def _handle_click(self, click: ViewerClick) -> None:
        """Runs in a thread of the viewer, without the training lock."""
        if (clicked := self._clicked) is None:
            return
        self._stop_waiting()
        self.say(activity="Rendering the feature where you clicked …")
        # Otherwise a picture that is being rendered at high resolution would keep the lock for seconds.
        compat.viewer_redraw(self.viewer_control)
        clicked(Ray.from_click(click.origin, click.direction))

    def _query_click(self, ray: Ray) -> None:
        # The text field goes on showing the query before, unless something was clicked.
        self._show_query(self.store.new_request(), lambda: self._query_by_click(ray), keeps_former=True)

    def _light_click(self, ray: Ray) -> None:
        problem = ""
        try:
            with compat.viewer_lock(self.viewer_control):
                head, model = self._head(), self._get_model()
                group = head.name, pick_group(model, head.name, ray, self.crop_box())
            self.store.change(lambda state: replace(state, group=group))
            self.show_output(outputs.GROUP)
        except Exception as error:
            problem = status.sentence(error)
        self.say(problem=problem)
        compat.viewer_redraw(self.viewer_control)

    def _query_by_click(self, ray: Ray) -> Query:
        with compat.viewer_lock(self.viewer_control):
            head, name = self._head(), f"click {self._clicks + 1}"
            model, box = self._get_model(), self.crop_box()
            clicked, (x, y, z) = pick_feature(model, head, ray, name, box)
            thing = pick_thing(model, head, ray, name, box)
            place = Embeddings(clicked.values, (f"{name} at {x:.2f}, {y:.2f}, {z:.2f}",))
            positives = Embeddings.join([place, thing.positives])
            query = query_example(name, head, replace(thing, positives=positives))
            self._clicks += 1
        self._text_seen = ""
        self.ask_01_text.value = ""
        return query

    # --- the other elements ------------------------------------------------------------------------------------------

    def _negatives_changed(self) -> None:
        if self._text_seen:
            self._encode_text()

    def _feature_changed(self) -> None:
        self.store.change(lambda state: replace(state, group=None))  # of the feature before
        self._describe_feature()
        if self._text_seen:
            self._encode_text()
        else:
            self.store.resolve(self.store.new_request(), lambda state: state.set_live(None))
            self.say()

    def _temperature_changed(self) -> None:
        temperature = float(self.ask_05_temperature.value)
        self.store.change(lambda state: state.set_temperature(temperature))

    def _threshold_changed(self) -> None:
        threshold = float(self.ask_06_threshold.value)
        self.store.change(lambda state: replace(state, threshold=threshold))
        self._show_status()

    def _add_to_named(self) -> None:
        query = self.store.state.live
        if query is None:
            raise ConfigError("There is no query to add: type a text or click first.")
        self.store.change(lambda state: state.add_named(query))
        self.say()

    def _clear(self) -> None:
        self._stop_waiting()
        self._text_seen = ""
        self.ask_01_text.value = ""
        self.store.resolve(self.store.new_request(), lambda state: replace(state, live=None, named=(), group=None))
        self.say()

    def _refit(self) -> None:
        if self._viewpoint is None:
            raise ConfigError("There is no view to fit colours to yet: look at the scene first.")
        displays = fit_displays(self._get_model(), self._viewpoint)
        self.store.change(lambda state: replace(state, displays=displays))
        self.say(activity="Feature colours now fit this view.")

    # --- helpers -----------------------------------------------------------------------------------------------------

    def crop_box(self) -> OrientedBox | None:
        """Returns the box that the newest picture was cropped to."""
        return None if self._viewpoint is None else self._viewpoint.obb_box

    def _get_model(self) -> Queryable:
        model = self._model()
        assert model is not None, "the panel outlived its model"
        return cast(Queryable, model)

    def _groups(self) -> GroupedPoints | None:
        """The groups by the chosen feature; None where there are none."""
        model, name = self._get_model(), self.ask_04_feature.value
        return model.grouped_points(name) if isinstance(model, HasGroups) and name in self._heads() else None

    def _heads(self) -> Mapping[str, QueryHead]:
        return self._get_model().query_heads()

    def _head(self) -> QueryHead:
        heads = self._heads()
        return get_head(heads, self.ask_04_feature.value if heads else "")

    def act(self, action: Callable[[], None]) -> Callable[[object], None]:
        """Returns the callback of an element. The status shows exceptions, which nobody would see otherwise."""

        def run(_: object) -> None:
            try:
                action()
            except Exception as error:
                self.say(problem=status.sentence(error))

        return run

    def _output_failed(self, name: str, error: Exception) -> None:
        problem = f"Output {name} is left out: {status.sentence(error)}"
        if problem != self._problem:  # a failure is reported once per chunk of rays
            self.say(problem=problem)

    def _describe_feature(self) -> None:
        heads = self._heads()
        self._feature_line = status.describe_feature(self._head() if heads else None)
        self._show_status()

    def say(self, activity: str = "", problem: str = "") -> None:
        """Shows what goes on, or went wrong, in the status."""
        self._activity, self._problem = activity, problem
        self._show_status()

    def _show_status(self) -> None:
        state = self.store.state
        lines = [
            f"**Problem** {status.plain(self._problem)}" if self._problem else "",
            status.plain(self._activity),
            status.describe_query(state.live, state.threshold),
            status.describe_group(state.group, self._groups()),
            status.describe_labels(state.named),
            "" if self.edit is None else self.edit.describe(),
            self._feature_line,
        ]
        self.ask_02_status.show("  \n".join(line for line in lines if line))
