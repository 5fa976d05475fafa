"""The best solution for the cameras: by which mapper, of which photos, and whether its poses can be trusted."""

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from f3rm_ext.capture.images import name_some
from f3rm_ext.sfm.database import FeatureDatabase, translate_errors
from f3rm_ext.sfm.mapping import Mapper, adjust, distortion_folds, image_names, separate_cameras, solve
from f3rm_ext.sfm.quality import FEW_FEATURES
from f3rm_ext.sfm.second_pass import register_missing
from f3rm_ext.sfm.verdict import (
    LEAST_MATCHES_FIT,
    LEAST_PHOTO_FIT,
    MOST_CUT,
    Evidence,
    PairFits,
    PointVisibility,
    collect_evidence,
    find_doubt,
    weakest_cut,
)
from f3rm_ext.utils.console import StageProgress

Origin = Mapper | Literal["predicted"]
SOLVING, AT_ONCE, AGAIN = "Solving for cameras", "Solving for all cameras at once", "Trying photos again"
LEAST_SHARED_POINTS = 20
"""Smallest number of points that a photo of the global mapper sees together with two others. That mapper places every
photo that matches another one, and those with fewer points are often wrong."""
FOCAL_FACTORS = (1.0, 1.8, 0.6)
"""Factors on the focal lengths with which the global mapper begins, until it is enough: it does not get over ones that
are wrong by half, as where EXIF tells none of a telephoto lens, or that before photos were cropped."""
_MOST_CUT_OFF = 0.1
"""Largest share of the photos that are left out because more of their matches contradict their poses than fit."""
_ENOUGH = 0.95
"""Share of the photos with features with which a solution is taken without trying others."""


@dataclass(frozen=True)
class Solution:
    """Cameras and points, and what is known of their poses."""

    model: Any
    """``pycolmap.Reconstruction`` of the largest group of photos that fit together."""
    groups: list[set[str]]
    """Names of the photos of each group, the model's first."""
    mapper: Origin
    """COLMAP's mapper that found the poses, or ``predicted`` for those of a front end."""
    evidence: Evidence
    doubt: str
    """Reason why poses are probably wrong; empty if they seem right."""
    registered_again: list[str]
    """Photos that got their pose in the second pass."""

    @property
    def num_photos(self) -> int:
        """Number of photos with a pose."""
        return len(self.groups[0])

    def beats(self, other: "Solution") -> bool:
        """Returns whether this solution is to be taken in place of another one.

        Poses that can be trusted beat others, then those of more photos. Among doubtful ones the one that explains more
        matches wins.
        """
        if self.doubt and other.doubt:
            ours, theirs = (some.evidence.matches_fit * some.evidence.matches for some in (self, other))
            return ours > theirs
        return not self.doubt and (bool(other.doubt) or self.num_photos > other.num_photos)


class Solver:
    """Finds cameras from the matches in a database.

    Args:
        folder: temporary folder of COLMAP.
        choose_lens: whether lens distortion may be left out where photos do not determine it.
        show, say: see :class:`~f3rm_ext.sfm.process.Processing`.
    """

    def __init__(
        self,
        database: FeatureDatabase,
        folder: Path,
        choose_lens: bool,
        show: StageProgress,
        say: Callable[[str], None],
    ) -> None:
        self.database, self.folder, self.show, self.say = database, folder, show, say
        self.choose_lens = choose_lens
        self.features = database.num_features()
        self.copy = folder.with_suffix(".db")
        """The database with other focal lengths; a killed call leaves it."""
        shutil.rmtree(folder, ignore_errors=True)
        self.copy.unlink(missing_ok=True)

    def find(self, mapper: Literal["auto", "incremental", "global"]) -> Solution | None:
        """Returns the best solution; None if no two photos fit together.

        Args:
            mapper: ``auto`` tries the global mapper where the incremental one leaves photos without a pose, or its
                poses are doubtful.
        """
        first = best = None if mapper == "global" else self._solve_one_by_one()
        if mapper != "incremental" and not self._is_enough(best):
            for number, factor in enumerate(FOCAL_FACTORS):
                self.show(AT_ONCE, number, len(FOCAL_FACTORS))
                other = self._solve_at_once(factor)
                if other is not None and self._is_better(other, best, mapper):
                    best = other
                if self._is_enough(best):
                    break
            self.show(AT_ONCE, len(FOCAL_FACTORS), len(FOCAL_FACTORS))
        if best is not None and mapper == "auto" and best is not first:
            before = f"{first.num_photos}{', which are doubtful' if first.doubt else ''}" if first else "none"
            self.say(f"Solving for all cameras at once gave poses to {best.num_photos} photos (one by one: {before}).")
        if best is not None and best.registered_again:
            self.say(f"A second pass found poses of {name_some(best.registered_again)}.")
        return best

    def _is_enough(self, solution: Solution | None) -> bool:
        """Returns whether nothing else needs to be tried."""
        able = sum(number >= FEW_FEATURES for number in self.features.values())
        return solution is not None and not solution.doubt and solution.num_photos >= _ENOUGH * able

    def _is_better(self, solution: Solution, best: Solution | None, mapper: str) -> bool:
        """Returns whether a solution of the global mapper is to be taken in place of the best one so far."""
        if mapper == "auto" and _lens_folds(solution.model):
            return False
        if best is None:  # a doubtful solution where the other mapper found none is rather chance
            return mapper == "global" or not solution.doubt
        return solution.beats(best)

    def _solve_one_by_one(self) -> Solution | None:
        """Adds one camera after the other."""
        count, refine = partial(self.show, SOLVING), True
        models = solve(self.database, self.folder, "incremental", count)
        if self.choose_lens and models and _lens_folds(models[0]):
            self.say("These photos do not determine the lens distortion, so it is left out.")
            models, refine = solve(self.database, self.folder, "incremental", count, refine_distortion=False), False
        if not models or models[0].num_reg_images() < 2:
            return None
        solution = judge(models, "incremental", self.database, self._register_missing(models[0], refine))
        # Without such a group, a copy of the model and another look at all matches would find nothing.
        is_cut = solution.doubt and solution.evidence.cut > MOST_CUT
        return self._repair(solution, refine) if is_cut else solution

    def _repair(self, solution: Solution, refine_distortion: bool) -> Solution:
        """Returns a doubtful solution without the photos that are probably in the wrong place, if that one can be
        trusted; otherwise the solution itself."""
        model = copy.deepcopy(solution.model)
        with translate_errors("removing photos in the wrong place"):
            if not remove_cut_off_photos(model, self.database, refine_distortion):
                return solution
            again = self._register_missing(model, refine_distortion)
            remove_cut_off_photos(model, self.database, refine_distortion)
        names = image_names(model)
        again = [name for name in (*solution.registered_again, *again) if name in names]
        repaired = judge([model], solution.mapper, self.database, again)
        if repaired.doubt:
            return solution
        if removed := sorted(solution.groups[0] - repaired.groups[0]):
            self.say(f"Left out, as more of their matches contradict their poses than fit them: {name_some(removed)}.")
        return replace(repaired, groups=[*repaired.groups, *solution.groups[1:]])

    def _solve_at_once(self, focal_factor: float) -> Solution | None:
        """Solves for all cameras at once, and removes photos with weak poses."""
        try:
            begin = self.database.copy(self.copy, focal_factor)
            models = solve(begin, self.folder, "global", partial(self.show, SOLVING))
        finally:
            self.copy.unlink(missing_ok=True)
        if not models:
            return None
        model = models[0]
        with translate_errors("removing photos with weak poses"):
            remove_weak_photos(model, self.database)
            again = self._register_missing(model)
            contradicted = remove_weak_photos(model, self.database)
        if model.num_reg_images() < 2:
            return None
        again = [name for name in again if name in image_names(model)]
        return judge(models, "global", self.database, again, contradicted)

    def _register_missing(self, model: Any, refine_distortion: bool = True) -> list[str]:
        """Tries photos without a pose once more. Returns the names of those that got one."""
        missing = [name for name in self.features if name not in image_names(model)]
        return register_missing(model, self.database, missing, partial(self.show, AGAIN), refine_distortion)


def _lens_folds(model: Any) -> bool:
    """Returns whether the distortion of a camera of a model cannot be undone."""
    return any(map(distortion_folds, model.cameras.values()))


def judge(
    models: list[Any],
    mapper: Origin,
    database: FeatureDatabase,
    registered_again: list[str],
    contradicted: Sequence[str] = (),
) -> Solution:
    """Returns a solution with the evidence for and against its poses.

    Args:
        models: ``pycolmap.Reconstruction`` objects, the one with most photos first.
        contradicted: what :func:`remove_weak_photos` returned.
    """
    model = models[0]
    groups = [image_names(some) for some in models]
    groups = [*groups[:1], *(rest for group in groups[1:] if (rest := group - groups[0]))]
    evidence, separate = replace(collect_evidence(model, database), contradicted=list(contradicted)), None
    if evidence.matches_fit < LEAST_MATCHES_FIT and model.num_cameras() < model.num_reg_images():
        separate = collect_evidence(separate_cameras(model), database)
    return Solution(model, groups, mapper, evidence, find_doubt(evidence, separate), registered_again)


def remove_cut_off_photos(model: Any, database: FeatureDatabase, refine_distortion: bool = True) -> list[str]:
    """Removes small groups of photos of which more matches with the others contradict the poses than fit them.

    Args:
        model: a ``pycolmap.Reconstruction``, changed in place; the rest is adjusted.

    Returns:
        Names of the removed photos.
    """
    removed: list[str] = []
    most = _MOST_CUT_OFF * model.num_reg_images()
    while True:
        with database.open() as opened:
            pairs = PairFits(model, opened)
        cut, group = weakest_cut(*pairs.counts())
        if cut <= MOST_CUT or len(removed) + group.sum() > most:
            return removed
        for number in np.array(list(pairs.poses))[group].tolist():
            removed.append(model.image(number).name)
            model.deregister_frame(model.image(number).frame_id)
        adjust(model, refine_distortion)


def remove_weak_photos(model: Any, database: FeatureDatabase) -> list[str]:
    """Removes photos whose poses hang on few points, or which many of their matches contradict, the weakest first.

    Where the contradicted photos have many of all matches, others may be wrong as well, so they stay for the verdict.

    Args:
        model: a ``pycolmap.Reconstruction``, changed in place; the rest is adjusted. Without three strong photos no
            photo keeps its pose.

    Returns:
        Names of the contradicted photos that stay.
    """
    budget = np.inf
    while model.num_reg_images():
        points = PointVisibility(model)
        views, rows = points.views.copy(), points.rows_by_photo
        numbers = list(rows)
        with database.open() as opened:
            fits, matches = PairFits(model, opened).counts()
        budget = min(budget, (1 - LEAST_MATCHES_FIT) * matches.sum() / 2)
        stays = np.ones(len(numbers), bool)
        contradicted = np.zeros(len(numbers), bool)
        while stays.any():
            shared = np.array([np.count_nonzero(views[rows[number]] > 2) for number in numbers])
            place = int(np.where(stays, shared, np.inf).argmin())
            if shared[place] >= LEAST_SHARED_POINTS:
                totals = matches @ stays
                shares = np.where(stays & (totals > 0), (fits @ stays) / np.maximum(totals, 1), 1.0)
                contradicted, place = shares < LEAST_PHOTO_FIT, int(shares.argmin())
                if not contradicted.any() or totals[place] > budget:
                    break
                budget -= totals[place]
            views[rows[numbers[place]]] -= 1
            stays[place] = False
        for place in np.flatnonzero(~stays):
            model.deregister_frame(model.image(numbers[place]).frame_id)
        if stays.all():
            return sorted(model.image(numbers[place]).name for place in np.flatnonzero(contradicted))
        if stays.any():
            adjust(model)
    return []
