"""``f3rm-ext features extract|lift|lift-mesh|info|verify``: makes, lifts, lists and checks 2D features."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from f3rm_ext.errors import ConfigError, FeatureStoreError
from f3rm_ext.features.options import FeatureOptions
from f3rm_ext.scripts.lift_mesh import LiftMesh
from f3rm_ext.utils.console import console, image_progress, say

if TYPE_CHECKING:
    from nerfstudio.engine.trainer import TrainerConfig

    from f3rm_ext.data.photo_dataset import PhotoDataset
    from f3rm_ext.features.source import FeatureSource
    from f3rm_ext.features.store.feature_store import FeatureStore

EXIT_DAMAGED = 2


@dataclass
class ExtractOptions(FeatureOptions):
    """Options of extraction, by their names in the other commands and by those of ns-train."""

    extractors: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--extractor", "--features.extractors"])] = ("clip",)
    cache_dir: Annotated[Path | None, tyro.conf.arg(aliases=["--features.cache-dir"])] = None
    codes: Annotated[int, tyro.conf.arg(aliases=["--features.codes"])] = 0


@dataclass
class Extract:
    """Extract the 2D features of a capture into the feature store, and make their PCA codes.

    ns-train does this by itself. Run it beforehand to see how long it takes, to use another machine that shares the
    cache folder, or to repair damaged features: it checks every stored file and makes damaged ones again.
    You can stop it at any time with Ctrl-C; the same command then continues.

    Typical calls:
      f3rm-ext features extract --data photos/room
      f3rm-ext features extract --data photos/room --extractors clip dinov2 --codes 96
      f3rm-ext features extract --data photos/room --extractors dense-daisy --camera-res-scale-factor 0.5
    """

    data: Path
    """Capture: a folder with transforms.json or COLMAP's sparse/0, or that JSON file itself."""
    features: Annotated[ExtractOptions, tyro.conf.arg(name="")] = field(default_factory=ExtractOptions)
    """Options of extraction, the same as ns-train's --pipeline.datamanager.features."""
    camera_res_scale_factor: float | Literal["auto"] = 1.0
    """Factor by which images are scaled first, above 0 to 1; auto is that of the lite methods. It must be that of
    ns-train."""
    downscale_factor: int | None = None
    """Factor N of the copies in images_N to use, such as 2 or 4; 1 uses the original images. By default the same as in
    ns-train."""
    drop_missing_frames: bool = False
    """Leave out frames whose image file is missing."""
    device: str = "auto"
    """Device of the extractors: auto (CUDA if available), cpu, cuda, cuda:1 and so on."""

    def __post_init__(self) -> None:
        if self.camera_res_scale_factor != "auto" and not 0 < self.camera_res_scale_factor <= 1:
            raise ConfigError(
                f"--camera-res-scale-factor is {self.camera_res_scale_factor}, outside (0, 1]: 1 keeps the size."
            )

    def main(self) -> int:

        from f3rm_ext.compat import open_device
        from f3rm_ext.features.source import prepare_features
        from f3rm_ext.features.store.feature_store import cache_root

        if not self.features.extractors:
            raise ConfigError("No extractor is given: name one, e.g. --extractors clip.")
        device = open_device(self.device)
        sources = prepare_features(self._datasets(), self.features, device=device, repair=True)
        for spec in sources[0].specs:
            kind = f"{spec.dim} PCA codes" if spec.code_basis is not None else f"{spec.dim} dimensions"
            images = len({key for source in sources for key in source.keys})
            say(f"{spec.name}: {images} images, {kind}.")
        say(f"Features are in {cache_root(self.features.cache_dir)}.")
        return 0

    def _datasets(self) -> "list[PhotoDataset]":
        """Returns the training images, then the images of the other splits."""
        from f3rm_ext.capture.dataparser import CaptureDataParserConfig
        from f3rm_ext.data.cycling_config import choose_scale
        from f3rm_ext.data.photo_dataset import PhotoDataset

        parser = CaptureDataParserConfig(
            data=self.data, downscale_factor=self.downscale_factor, drop_missing_frames=self.drop_missing_frames
        ).setup()
        outputs = [parser.get_dataparser_outputs(split) for split in ("train", "val", "test")]
        used = [output for number, output in enumerate(outputs) if number == 0 or output.image_filenames]
        cameras = outputs[0].cameras
        scale = choose_scale(self.camera_res_scale_factor, cameras.width, cameras.height)
        return [PhotoDataset(output, scale) for output in used]


@dataclass
class Lift:
    """Lift 2D features onto the splats of a trained run, in one pass over the training photos and without training.

    ns-train does this by itself if it is given --pipeline.model.features. This command rewrites the run's newest
    checkpoint with the new features, which replace features lifted before. The run then answers queries in the
    viewer and in f3rm-ext query, eval query and export features. Further training drops the features; they are
    lifted again at its end only with --pipeline.model.features.

    Typical calls:
      f3rm-ext features lift --load-config .../config.yml --extractors clip --codes 64
      f3rm-ext features lift --load-config .../config.yml --extractors clip dinov2
    """

    load_config: Path
    """The config.yml of a sugar-ext run."""
    extractors: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--extractor"])]
    """Extractors, each written as NAME or NAME:key=value,key=value; `f3rm-ext doctor` lists the names."""
    codes: int = 0
    """Number of PCA codes to lift instead of the full features, 8 to 512.
    0 lifts the full features, which take 2 bytes per Gaussian and dimension."""
    per_group: bool = True
    """Draw the feature of each Gaussian halfway towards the mean of its group (`f3rm-ext query --list`), so that a
    query outlines whole things. Without it, queries find parts of a group more easily."""
    cache_dir: Path | None = None
    """Folder of the feature store, which the checkpoint remembers; by default that of the run."""

    def main(self) -> int:
        from typing import cast

        from f3rm_ext.export.splats import load_splat_run
        from f3rm_ext.splat.features.heads import save_lifted

        if not self.extractors:
            raise ConfigError("No extractor is given: name one, e.g. --extractors clip.")
        wanted = FeatureOptions(self.extractors, self.cache_dir, self.codes)

        def change(config: "TrainerConfig") -> None:
            options = config.pipeline.datamanager.features  # type: ignore[attr-defined]
            options.extractors, options.codes = wanted.extractors, wanted.codes
            options.cache_dir = wanted.cache_dir or options.cache_dir

        run = load_splat_run(self.load_config, change)
        model, manager = run.model, run.manager
        source = cast("FeatureSource", manager.prepare_features(with_train=True)[0])
        model.lift_features(manager.train_dataset, source, required=True, per_group=self.per_group)
        for head in model.query_heads().values():
            head.cache_dir = "" if self.cache_dir is None else str(self.cache_dir.resolve())
        save_lifted(model.lifted, run.checkpoint)
        for name, head in model.query_heads().items():
            say(
                f"{name}: {head.dim} dimensions on {model.num_gaussians} Gaussians "
                f"({head.codes.nbytes / 2**20:.1f} MiB) of {len(manager.train_dataset)} photos are in {run.checkpoint}."
            )
        return 0


@dataclass
class _Store:
    cache_dir: Path | None = None
    """Folder of the feature store; by default $F3RM_EXT_CACHE or, if that is not set, ~/.cache/f3rm_ext."""


@dataclass
class Info(_Store):
    """List what the feature store holds: images, dimension, size on disk, and the energy that PCA codes keep.

    The column "explained" gives the share of the features' energy that the codes keep; 90 % or more is plenty for
    queries.

    Typical calls:
      f3rm-ext features info
      f3rm-ext features info --cache-dir /data/features
    """

    def main(self) -> int:
        from rich.table import Table

        from f3rm_ext.features.store.feature_store import cache_root

        cache = cache_root(self.cache_dir)
        table = Table(title=f"Features in {cache}", title_justify="left")
        for name in ("extractor", "model", "resolution"):
            table.add_column(name, overflow="fold")
        for name in ("images", "dim", "MiB", "explained"):
            table.add_column(name, justify="right", no_wrap=True)
        total, broken = 0, []
        for root in _store_roots(cache):
            try:
                store = _open(root)
            except FeatureStoreError as error:
                broken.append(str(error))
                continue
            identity, size = store.manifest.identity, store.bytes_on_disk()
            total += size
            images, mib = str(len(store.manifest.images)), f"{size / (1 << 20):.1f}"
            if store.manifest.residual:
                table.add_row(
                    f"  codes, K = {store.dim}", "", "", images, str(store.dim), mib, _explained_variance(root)
                )
            else:
                cells = (identity.get(name, "?") for name in ("extractor", "model", "resolution"))
                table.add_row(*cells, images, str(store.dim), mib, "")
        if table.row_count:
            console().print(table)
            say(f"{total / (1 << 20):.1f} MiB in all.")
        elif not broken:
            say(f"There are no features in {cache} yet.")
        say(*broken, style="red")
        return EXIT_DAMAGED if broken else 0


@dataclass
class Verify(_Store):
    """Read every stored feature and name the damaged files; the exit code is 2 if there are any.

    To repair them, run `f3rm-ext features extract`, or delete them: missing features are made again.

    Typical calls:
      f3rm-ext features verify
      f3rm-ext features verify --cache-dir /data/features
    """

    def main(self) -> int:
        from f3rm_ext.features.pca_codes import load_basis
        from f3rm_ext.features.store.feature_store import cache_root

        cache = cache_root(self.cache_dir)
        damages: list[str] = []
        checked = 0
        with image_progress() as progress:
            for root in _store_roots(cache):
                try:
                    store = _open(root)
                    if store.manifest.residual and load_basis(root) is None:
                        damages.append(f"{root / 'basis.npy'} or its spectrum.json is missing")
                except FeatureStoreError as error:
                    damages.append(str(error))
                    checked += 1
                    continue
                keys = list(store.manifest.images)
                read = store.verify(progress.track(keys, description=str(root.relative_to(cache))))
                damages += [f"{damage.path} {damage.reason}" for damage in read]
                checked += len(keys)
        say(*damages, style="red")
        if damages:
            say(
                f"{len(damages)} of {checked} files are damaged: run `f3rm-ext features extract` on their captures, or "
                "delete them."
            )
            return EXIT_DAMAGED
        say(f"All {checked} shards in {cache} are intact.")
        return 0


FeaturesCommand = Extract | Lift | LiftMesh | Info | Verify


def _store_roots(cache: Path) -> Iterator[Path]:
    """Yields the folder of each store, followed by the folders of its codes."""
    for root in sorted(cache.glob("*/manifest.json")):
        yield root.parent
        for codes in sorted(root.parent.glob("codes/*/manifest.json")):
            yield codes.parent


def _open(root: Path) -> "FeatureStore":
    from f3rm_ext.features.store.feature_store import FeatureStore

    store = FeatureStore.at(root)
    if store is None:
        raise FeatureStoreError(f"The manifest of {root} was deleted just now: run the same command again.")
    return store


def _explained_variance(root: Path) -> str:
    try:
        return f"{float(json.loads((root / 'spectrum.json').read_bytes())['explained']):.1%}"
    except (OSError, ValueError, KeyError, TypeError):
        return "?"
