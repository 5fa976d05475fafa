"""Features on the splats of the GPU day, in this process: lifting them, and a picture with the scores of a text.

gpu_day.py runs it; the last line of what it prints has the result. The options are those of splat_speed.py and:
"""

import tempfile
from pathlib import Path

import torch
from gpu_day_field import ask
from peers import tolerate_missing_lpips
from processes import report_result
from splat_speed import make_parser, start_run
from step_watch import StepWatch

VARIANT = "sugar-ext without regularisation"


def main() -> None:
    """Trains for a while, lifts, asks, and hands the result over."""
    parser = make_parser()
    parser.description = __doc__
    parser.add_argument("--extractor", required=True, help="of the features, which have to understand text")
    parser.add_argument("--text", default="a chair", help="what to look for")
    parser.add_argument("--picture", type=int, nargs=2, default=(1920, 1080), help="its width and height, px")
    options = parser.parse_args()
    from f3rm_ext.data.image_datamanager import LiftedFeatureOptions
    from f3rm_ext.engine.cost import device_time, peak_mib, reset_peak

    tolerate_missing_lpips()
    with tempfile.TemporaryDirectory() as folder:
        features = LiftedFeatureOptions(extractors=(options.extractor,))
        trainer = start_run(VARIANT, options, Path(folder), features=features)
        model, manager = trainer.pipeline.model, trainer.pipeline.datamanager
        device = torch.device(model.device)
        watch = StepWatch(device, options.steps - 1, warm_up=2, seconds=options.seconds)
        watch.attach(trainer)
        watch.run(trainer.train)
        source = manager.train_feature_source()
        reset_peak(device)
        begin = device_time(device)
        model.lift_features(manager.train_dataset, source, required=True)
        lifting_s = device_time(device) - begin
        lifting_peak = peak_mib(device)
        result = {
            "gaussians": model.num_gaussians,
            "views": len(manager.train_dataset),
            "dimensions": source.specs[0].dim,
            "lifting_s": round(lifting_s, 2),
            "lifting_peak_mib": round(lifting_peak),
        }
        report_result(result)
        query = ask(model, manager.train_dataset.cameras, options.text, tuple(options.picture))
        report_result({**result, "query": query})


if __name__ == "__main__":
    main()
