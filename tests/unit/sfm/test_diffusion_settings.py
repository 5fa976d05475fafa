"""Settings by the published names, and what they mean."""

import pytest

from f3rm_ext.errors import ConfigError
from f3rm_ext.sfm.diffusion.settings import check_weights, parse_settings

SPARSE = """training.batch_size=8 training.max_iterations=400000 model.num_images=8 dataset.name=co3d
debug.project_name=diffusionsfm_co3d debug.run_name=co3d_diffusionsfm_sparse""".split()
DENSE = """training.batch_size=4 training.max_iterations=800000 model.num_images=8 dataset.name=co3d
debug.project_name=diffusionsfm_co3d debug.run_name=co3d_diffusionsfm_dense training.dpt_head=True
training.full_num_patches_x=256 training.full_num_patches_y=256 training.gradient_clipping=True training.reinit=True
training.freeze_encoder=True model.freeze_transformer=True training.pretrain_path=sparse.pth""".split()


def test_the_published_commands_are_the_presets() -> None:
    sparse, dense = parse_settings(SPARSE), parse_settings(DENSE)
    dense.training.pretrain_path = ""
    for settings, preset in ((sparse, parse_settings([], "sparse")), (dense, parse_settings([], "dense"))):
        assert settings.training == preset.training and settings.model == preset.model
    assert dense.debug.run_name == "co3d_diffusionsfm_dense" and str(dense.folder) == "outputs/co3d_diffusionsfm_dense"
    assert sparse.cells == 16 and dense.cells == 256


def test_both_spellings_of_category_and_resume() -> None:
    words = ["dataset.category=apple,cup", "train.resume=True", "hydra.run.dir=output_debug", "debug.wandb=False"]
    found = parse_settings(words)
    assert found.dataset.shape == "apple,cup" and found.training.resume and str(found.folder) == "output_debug"
    assert parse_settings(["dataset.shape=apple", "training.resume=true"]).training.resume
    assert not found.debug.wandb
    assert parse_settings(["training.batch_size=2"], "sparse").training.batch_size == 2, "later words count"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["training.batchsize=8"], "write training.batch_size"),
        (["training.batch_size"], "key=value"),
        (["training.batch_size=many"], "an integer"),
        (["training.batch_size=0"], "at least 1"),
        (["training.seed=-1"], "at least 0"),
        (["training.seed=9223372036854775808"], "at most 9223372036854775807"),
        (["training.lr=fast"], "a number"),
        (["training.lr=nan"], "a positive number"),
        (["training.lr=inf"], "a positive number"),
        (["training.lr=0"], "a positive number"),
        (["training.lr=-1"], "a positive number"),
        (["debug.wandb=perhaps"], "True or False"),
        (["model.size=huge"], "published, tiny"),
        (["training.regression=True"], "training.regression"),
        (["dataset.name=multi"], "co3d"),
        (["training.dpt_head=True"], "256"),
        (["training.full_num_patches_x=256", "training.full_num_patches_y=256"], "16"),
        (["training.reinit=True"], "dense stage"),
        (["model.residual=True"], "model.residual"),
        (["model.residual=maybe"], "auto, True, False"),
        (["model.colour=red"], "model.num_images"),
        (["dataset.image_size=225"], "14"),
        (["training.translation_scale=1.5"], "1"),
        (["training.prob_unconditional=0.1"], "0"),
        (["training.sd_scale=1"], "2"),
        (["training.distort=True"], "False"),
        (["training.load_extra_cameras=True"], "False"),
        (["training.calculate_intrinsics=True"], "False"),
        (["training.job_key=a"], "none"),
        (["noise_scheduler.beta_start=0.0121"], "0.012"),
        (["noise_scheduler.beta_end=0.2"], "0.00085"),
        (["noise_scheduler.marigold_ddim=True"], "False"),
        (["dataset.use_global_intrinsics=False"], "True"),
        (["model.model_type=unet"], "dit"),
        (["training.distort=perhaps"], "True or False"),
        (["training.sd_scale=two"], "number"),
    ],
)
def test_mistakes_are_told_in_one_sentence(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_settings(words)


def test_published_dense_models_have_no_residual_head_and_tiny_ones_do() -> None:
    tiny = ("model.size=tiny",)
    assert not parse_settings([], "dense").has_residual and not parse_settings(tiny, "sparse").has_residual
    assert parse_settings(tiny, "dense").has_residual
    assert parse_settings(["model.residual=True"], "dense").has_residual
    assert not parse_settings([*tiny, "model.residual=False"], "dense").has_residual


@pytest.mark.parametrize(
    "words",
    [
        "training.regression=False model.pred_x0=True noise_scheduler.type=linear model.model_type='dit'",
        "training.translation_scale=1.0 training.prob_unconditional=0.0 training.sd_scale=2 training.distort=false",
        "training.load_extra_cameras=False training.calculate_intrinsics=False dataset.use_global_intrinsics=True",
        "noise_scheduler.beta_start=0.0120 noise_scheduler.beta_end=8.5e-4 noise_scheduler.marigold_ddim=False",
        "training.delete_all_checkpoints_after_training=False training.gpu_id=0 training.job_key=",
        "debug.anomaly_detection=False training.depth_resolution=1.0 noise_scheduler.max_timesteps=100",
        "training.interval_visualize=17 training.matmul_precision=medium training.interval_delete_checkpoint=3",
    ],
)
def test_settings_of_the_published_code_that_are_built_in_are_taken(words: str) -> None:
    assert parse_settings(words.split()) == parse_settings([])


def test_random_weights_are_not_frozen() -> None:
    sparse, dense = parse_settings(["model.freeze_transformer=True"], "sparse"), parse_settings([], "dense")
    for stage, settings in (("sparse", sparse), ("dense", dense)):
        with pytest.raises(ConfigError, match=rf"{stage}.*training\.pretrain_path"):
            check_weights(settings)
    check_weights(parse_settings([], "sparse"))
    for word in (
        *("training.pretrain_path=sparse.pth", "training.resume=True", "model.freeze_transformer=False"),
        "training.reinit_after=0",
    ):
        check_weights(parse_settings([word], "dense"))
