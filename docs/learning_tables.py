"""Tables of camera poses and of pre-training."""

from markdown_table import Report, table


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
    return table(head, sums)


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
