"""Tables of camera poses and of pre-training."""

from markdown_table import Report, quality, table

from f3rm_ext.moco.comparison import percent


def unposed(report: Report) -> str:
    """Trainings on photos whose poses were found."""
    rows = [
        [name, str(row["photos"]), str(row["width"]), f"{row['steps']:,}", f"{row['train_s'] / 60:.1f}",
         *quality(row)]
        for name, row in report["rows"].items()
    ]  # fmt: skip
    return table(["method", "photos", "width px", "steps", "training min", "PSNR", "SSIM", "LPIPS"], rows)


def poses(report: Report) -> str:
    """Poses beside the given ones."""
    head = ["photos", "mapper", "with a pose", "RRA@5", "RTA@5", "AUC@30", "centres", "reprojection px", "s"]
    rows = [
        [name, row["mapper"], f"{row['registered']} of {row['photos']}",
         *(f"{value:.3f}" for value in (row["rra"]["5"], row["rta"]["5"], row["auc_30"])),
         f"{row['center_error']:.2%} ({row['center_worst']:.2%})", f"{row['reprojection_error_px']:.2f}",
         f"{row['seconds']:.0f}" + " (matches kept)" * row["features_reused"]]
        for name, some in report["captures"].items() for row in some
    ]  # fmt: skip
    return table(head, rows)


def pose_verdicts(report: Report) -> str:
    """How often verdicts on poses are right, in sum and by capture."""
    judged = [row for row in report["rows"] if row["right"] is not None]
    sums = []
    for half, words in (("choose", "thresholds were chosen on"), ("judge", "others")):
        some = [row for row in judged if row["half"] == half]
        counts = [
            sum(row["right"] == right and row["verdict"] == verdict for row in some)
            for right, verdict in ((True, "trusted"), (True, "doubtful"), (False, "doubtful"), (False, "trusted"))
        ]
        refused = sum(row["right"] is None and row["half"] == half for row in report["rows"])
        sums.append([words, *map(str, (len(some), *counts, refused))])
    head = [
        "captures that",
        "judged",
        "right, trusted",
        "right, doubted",
        "wrong, doubted",
        "wrong, trusted",
        "refused",
    ]
    rows = [
        [row["what"], row["half"], row["mapper"], f"{row['registered']} of {row['photos']}",
         f"{row['reprojection_error_px']:.2f}", f"{row['rotation_deg']:.1f}°", f"{row['centres_near']:.0%}",
         "right" if row["right"] else "wrong", row["verdict"], f"{row['evidence']['matches_fit']:.0%}",
         f"{row['evidence']['pairs_fit']:.0%}", f"{row['evidence']['blind']:.0%}", f"{row['evidence']['turn_fit']:.0%}",
         f"{row['evidence']['points_per_photo']:.0f}"]
        for row in judged
    ]  # fmt: skip
    columns = ["photos", "half", "mapper", "with a pose", "reprojection px", "rotation error", "centres near", "poses",
               "verdict", "matches fit", "pairs fit", "see nothing", "fit a turn", "points"]  # fmt: skip
    return f"{table(head, sums)}\n\n{table(columns, rows)}"


def _over_seeds(values: list[float]) -> str:
    """Mean and half of the 95 % interval, %; of fewer than three values these themselves."""
    return percent(values) if len(values) > 2 else ", ".join(f"{100 * value:.1f}" for value in values)


def moco_seeds(report: Report) -> str:
    """Accuracy of backbones over several trainings."""
    rows = [[row["name"], *(_over_seeds(row[key]) for key in ("knn", "linear"))] for row in report["rows"]]
    return table(["features, 64 px", "k-NN, %", "linear probe, %"], rows)


def moco_queues(report: Report) -> str:
    """Trainings with queues of several lengths."""
    head = ["queue", "keys held at the end", "own image's keys", "negatives of the batch", "pretext accuracy, %"]
    rows = [
        [
            f"{row['queue']:,}",
            f"{row['keys_held']:,.0f}",
            "masked" if row["masked"] else "negatives",
            "yes" if row["batch_negatives"] else "no",
            f"{100 * row['pretext_accuracy']:.1f}",
            f"{row['output_spread']:.2f}",
            *(f"{100 * row[key]:.1f}" for key in ("knn", "linear", "linear, all stages")),
        ]
        for row in report["rows"]
    ]
    return table([*head, "spread", "k-NN, %", "linear probe, %", "all stages, %"], rows)


def moco_distilled(report: Report) -> str:
    """Scores of distilled features that were asked by example."""
    where = {"rendered": "rendered views", "image-features": "2D features", "direct-3d": "points in 3D"}
    rows = [
        [
            row["features"],
            where[row["protocol"]],
            str(row["pairs"]),
            *(f"{row[key]:.3f}" for key in ("localisation", "miou", "macc", "best_threshold", "best_miou")),
        ]
        for row in report["rows"]
    ]
    head = ["features, asked by one pixel", "protocol", "pairs", "localisation", "mIoU", "mAcc", "best threshold"]
    return table([*head, "mIoU there"], rows)


def tiny_diffusion(report: Report) -> str:
    """Poses and endpoints that both stages predict."""
    head = ["model", "steps", "RRA@15", "RTA@15", "AUC@30", "centres", "endpoint error"]
    rows = []
    for row in report["rows"]:
        name = row["model"]
        if name == "dense":
            name += ", begins as the sparse model" if row["residual"] else ", head alone"
        poses = [f"{row[key]:.3f}" for key in ("rra_15", "rta_15", "auc_30", "centers")]
        rows.append([name, f"{row['steps']:,}", *poses, f"{row['endpoints']:.3f}"])
        if "endpoints_interpolated" in row:
            steps, error = f"{row['steps']:,}", f"{row['endpoints_interpolated']:.3f}"
            rows.append([f"{name}, interpolated", steps, *poses, error])
    true = report["true_rays"]
    for name, key in (("true rays of the patches", "endpoints"), ("the same, interpolated", "endpoints_interpolated")):
        rows.append([name, *"–" * 5, f"{true[key]:.3f}"])
    return table(head, rows)


def _beside_plan(row: Report) -> list[str]:
    return [f"{row['planned_mib']:,}", f"{row['peak_mib']:,}", f"{row['peak_to_plan']:.2f}"]


def pose_training(report: Report) -> str:
    """Memory and time of DiffusionSfM's training."""
    head = ["stage", "device", "scenes × images", "planned, MiB", "allocated, MiB", "allocated ÷ planned", "s/step"]
    rows = [
        [row["label"], f"{report['device']}, {row['precision']}", f"{row['batch']} × {row['images']}",
         *_beside_plan(row), f"{row['full_step_ms'] / 1e3:.2f}"]
        for row in report["rows"]
    ]  # fmt: skip
    return table(head, rows)


def moco_training(report: Report) -> str:
    """Memory and time of MoCo's training."""
    head = ["preset", "device", "batch", "queue", "planned, MiB", "allocated, MiB", "allocated ÷ planned", "s/step"]
    rows = [
        [row["label"], f"{report['device']}, {row['precision']}", f"{row['batch']} × {row['accumulation']}",
         f"{row['queue']:,}", *_beside_plan(row), f"{row['step_ms'] / 1e3:.2f}"]
        for row in report["rows"]
    ]  # fmt: skip
    return table(head, rows)
