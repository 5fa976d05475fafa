"""The query panel of nerfstudio's viewer, as a part of a model."""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.viewer.viewer_elements import (
    ViewerButton,
    ViewerClick,
    ViewerDropdown,
    ViewerSlider,
    ViewerText,
)
from torch import nn

from f3rm_ext import compat
from f3rm_ext.errors import ConfigError
from f3rm_ext.features.extractors.registry import extractor_name
from f3rm_ext.features.space import ExtraOutput
from f3rm_ext.model_components.output_guard import OutputGuard
from f3rm_ext.query.builders import mean_of_photos
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Embeddings, Query
from f3rm_ext.query.encoders import DEFAULT_NEGATIVES, TextEncoder
from f3rm_ext.query.options import ALTERNATIVES, split_prompts
from f3rm_ext.query.queryable import Queryable, QueryHead, checked_head
from f3rm_ext.viewer import outputs, status
from f3rm_ext.viewer.first_view import FirstViewControl
from f3rm_ext.viewer.picking import Ray, Viewpoint, clicked_feature, fitted_displays
from f3rm_ext.viewer.state import DEFAULT_THRESHOLD, QueryStateStore
from f3rm_ext.viewer.worker import LatestJob

_NO_FEATURE = "none"


class QueryPanel(nn.Module):
    """Elements by which people ask a model in the viewer, and the outputs that answer them.

    Nerfstudio finds the elements because this is a module with public attributes, and sorts them by attribute name. It
    calls what they do under its training lock, from several threads. The model's heads may come later, with a
    checkpoint. There are no parameters and no buffers: nothing of this is in a checkpoint.

    Args:
        model: whose panel this is, a :class:`~f3rm_ext.query.queryable.Queryable`; it is not kept alive, and may be
            unfinished as yet.
        encoder: reads texts; one of its own by default.
    """

    def __init__(self, model: nn.Module, encoder: TextEncoder | None = None) -> None:
        super().__init__()
        self._model = weakref.ref(model)
        self._board = QueryStateStore()
        self._reader = LatestJob("f3rm-ext text query")
        # Not on the model's device: a text tower would take memory that training counts on.
        self._encoder = encoder or TextEncoder("cpu")
        self._guard = OutputGuard(self._output_failed)
        self._sight: Viewpoint | None = None
        self._text_seen = ""
        self._clicks, self._waits_for_click = 0, False
        self._feature_line, self._activity, self._problem = "", "", ""

        self.ask_01_text = ViewerText(
            "Query", "", cb_hook=self._act(self._ask_text), hint=f"What to find: mug {ALTERNATIVES} cup"
        )
        self.ask_02_status = status.StatusLine(self.sync)
        self.ask_03_negatives = ViewerText(
            "Negatives",
            f" {ALTERNATIVES} ".join(DEFAULT_NEGATIVES),
            cb_hook=self._act(self._negatives_changed),
            hint="What a text is told from; with none the score is the cosine",
        )
        self.ask_04_feature = ViewerDropdown(
            "Feature", _NO_FEATURE, [_NO_FEATURE], visible=False, cb_hook=self._act(self._feature_changed)
        )
        self.ask_05_temperature = ViewerSlider(
            "Temperature",
            DEFAULT_TEMPERATURE,
            *(0.01, 1.0, 0.01),
            cb_hook=self._act(self._temperature_changed),
            hint="Low: all or nothing. High: soft",
        )
        self.ask_06_threshold = ViewerSlider(
            "Threshold",
            DEFAULT_THRESHOLD,
            *(0.0, 1.0, 0.01),
            cb_hook=self._act(self._threshold_changed),
            hint="Least relevancy that is shown in the overlay and in labels",
        )
        self.ask_07_click = ViewerButton("Click to query", cb_hook=self._act(self._await_click))
        self.ask_08_name = ViewerButton("Add to named queries", cb_hook=self._act(self._add_to_named))
        self.ask_09_clear = ViewerButton("Clear queries", cb_hook=self._act(self._clear))
        self.ask_10_refit = ViewerButton("Refit PCA", cb_hook=self._act(self._refit))
        self.viewer_control = FirstViewControl()

    def __deepcopy__(self, memo: dict[int, Any]) -> "QueryPanel":
        """A new panel: of the model's copy where the model is being copied."""
        model = self._model()
        return QueryPanel(memo.get(id(model), model))

    # --- for the model -----------------------------------------------------------------------------------------------

    def extra_outputs(self, camera: Cameras, obb_box: OrientedBox | None) -> dict[str, ExtraOutput]:
        """What to compute beside the model's own outputs for a picture; nothing where nobody asks and nobody looks.

        Never raises anything but the viewer's interrupt.

        Args:
            camera: of the picture.
            obb_box: the crop box, if any.
        """
        questions, looked_at = self._board.questions, compat.is_viewer_thread()
        if not (questions.are_any or looked_at):
            return {}
        if looked_at:
            self._sight = Viewpoint(camera, obb_box)
        try:
            return outputs.extra_outputs(self._required_model(), questions, self._guard)
        except compat.viewer_interrupts():
            raise
        except Exception as error:
            self._guard.report(outputs.RELEVANCY, error)
            return {}

    def sync(self) -> None:
        """Takes over the model's heads: when a viewer comes, and after a checkpoint is loaded."""
        names = list(self._heads()) or [_NO_FEATURE]
        element = self.ask_04_feature
        if element.value not in names:
            element.default_value = names[0]
        element.visible = len(names) > 1
        element.set_options(names)
        if element.gui_handle is not None:
            element.set_visible(element.visible)
        self._describe_feature()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.ask_02_status.installed:
            self.sync()

    # --- asking ------------------------------------------------------------------------------------------------------

    @property
    def board(self) -> QueryStateStore:
        """What is asked at present."""
        return self._board

    def wait(self, timeout_s: float) -> bool:
        """Waits for texts that are being read; returns whether all are."""
        return self._reader.join(timeout_s)

    def _ask_text(self) -> None:
        text = self.ask_01_text.value.strip()
        if text == self._text_seen:
            return
        self._text_seen = text
        self._read_text()

    def _read_text(self) -> None:
        """Has the text field read in the background, or clears the query where it is empty."""
        ticket = self._board.ticket()
        text, negatives = self._text_seen, self.ask_03_negatives.value.strip()
        if not text:
            self._board.answer(ticket, lambda questions: questions.looking_for(None))
            self._say()
            return
        try:
            head = self._head()
            prompts = split_prompts(text)
            told_from = split_prompts(negatives) if negatives else []
        except ConfigError:
            self._board.answer(ticket, lambda questions: questions.looking_for(None))
            raise
        self._say(activity=f"Loading text weights of {extractor_name(head.extractor)} …")
        self._reader.submit(lambda: self._answer_text(ticket, head, text, prompts, told_from))

    def _answer_text(self, ticket: int, head: QueryHead, text: str, prompts: list[str], told_from: list[str]) -> None:
        """In the background, without any lock."""
        if not self._board.is_newest(ticket):
            return
        problem, query = "", None
        try:
            vectors = self._encoder.encode(head, [*prompts, *told_from])
            positives, negatives = (
                Embeddings(vectors.values[part], vectors.sources[part])
                for part in (slice(0, len(prompts)), slice(len(prompts), None))
            )
            query = Query(text, head.name, positives, negatives)
        except Exception as error:
            problem = status.sentence(error)
        self._answered(ticket, query, problem)

    def _answered(self, ticket: int, query: Query | None, problem: str = "") -> None:
        """Puts an answer in place, unless something else was asked meanwhile."""
        if self._board.answer(ticket, lambda questions: questions.looking_for(query)):
            self._say(problem=problem)
            if query is not None:
                compat.viewer_show_output(self.viewer_control, outputs.OVERLAY, instead_of="rgb")
            compat.viewer_redraw(self.viewer_control)

    def _await_click(self) -> None:
        if self._waits_for_click:
            self._stop_waiting()
            self._say()
            return
        self._head()
        self._waits_for_click = True
        self.viewer_control.register_pointer_cb("click", self._clicked)
        self._say(activity="Click on the scene.")

    def _stop_waiting(self) -> None:
        if self._waits_for_click:
            self._waits_for_click = False
            self.viewer_control.unregister_pointer_cb()

    def _clicked(self, click: ViewerClick) -> None:
        """In a thread of the viewer's, without its lock."""
        if not self._waits_for_click:
            return
        self._stop_waiting()
        ticket = self._board.ticket()
        self._say(activity="Looking where you clicked …")
        # A picture that is being computed at high resolution would keep the model for long.
        compat.viewer_redraw(self.viewer_control)
        problem, query = "", None
        try:
            with compat.viewer_lock(self.viewer_control):
                query = self._query_by_click(Ray.of_click(click.origin, click.direction))
            self._text_seen = ""
            self.ask_01_text.value = ""
        except Exception as error:
            problem = status.sentence(error)
        self._answered(ticket, query, problem)

    def _query_by_click(self, ray: Ray) -> Query:
        head = self._head()
        name = f"click {self._clicks + 1}"
        box = None if self._sight is None else self._sight.obb_box
        vectors, (x, y, z) = clicked_feature(self._required_model(), head, ray, name, box)
        positives = Embeddings(vectors.values, (f"{name} at {x:.2f}, {y:.2f}, {z:.2f}",))
        query = Query(name, head.name, positives, mean_of_photos(head))
        self._clicks += 1
        return query

    # --- the other elements ------------------------------------------------------------------------------------------

    def _negatives_changed(self) -> None:
        if self._text_seen:
            self._read_text()

    def _feature_changed(self) -> None:
        self._describe_feature()
        if self._text_seen:
            self._read_text()
        else:
            self._board.answer(self._board.ticket(), lambda questions: questions.looking_for(None))
            self._say()

    def _temperature_changed(self) -> None:
        temperature = float(self.ask_05_temperature.value)
        self._board.change(lambda questions: questions.at_temperature(temperature))

    def _threshold_changed(self) -> None:
        threshold = float(self.ask_06_threshold.value)
        self._board.change(lambda questions: replace(questions, threshold=threshold))

    def _add_to_named(self) -> None:
        query = self._board.questions.live
        if query is None:
            raise ConfigError("There is no query to add: type a text or click first.")
        self._board.change(lambda questions: questions.with_named(query))
        self._say()

    def _clear(self) -> None:
        self._stop_waiting()
        self._text_seen = ""
        self.ask_01_text.value = ""
        self._board.answer(self._board.ticket(), lambda questions: replace(questions, live=None, named=()))
        self._say()

    def _refit(self) -> None:
        if self._sight is None:
            raise ConfigError("No picture was computed yet whose colours could be refitted: look at the scene first.")
        displays = fitted_displays(self._required_model(), self._sight)
        self._board.change(lambda questions: replace(questions, displays=displays))
        self._say(activity="Feature colours fit this view now.")

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _required_model(self) -> Queryable:
        model = self._model()
        assert model is not None, "the panel outlived its model"
        return cast(Queryable, model)

    def _heads(self) -> Mapping[str, QueryHead]:
        return self._required_model().query_heads()

    def _head(self) -> QueryHead:
        heads = self._heads()
        return checked_head(heads, self.ask_04_feature.value if heads else "")

    def _act(self, action: Callable[[], None]) -> Callable[[object], None]:
        """What an element calls: nobody would see an exception, so the status shows it."""

        def run(_: object) -> None:
            try:
                action()
            except Exception as error:
                self._say(problem=status.sentence(error))

        return run

    def _output_failed(self, name: str, error: Exception) -> None:
        problem = f"Output {name} is left out: {status.sentence(error)}"
        if problem != self._problem:  # it comes once per chunk of rays
            self._say(problem=problem)

    def _describe_feature(self) -> None:
        heads = self._heads()
        self._feature_line = status.describe_feature(self._head() if heads else None)
        self._show_status()

    def _say(self, activity: str = "", problem: str = "") -> None:
        self._activity, self._problem = activity, problem
        self._show_status()

    def _show_status(self) -> None:
        questions = self._board.questions
        lines = [
            f"**Problem** {status.plain(self._problem)}" if self._problem else "",
            status.plain(self._activity),
            status.describe_query(questions.live),
            status.describe_labels(questions.named),
            self._feature_line,
        ]
        self.ask_02_status.show("  \n".join(line for line in lines if line))
