"""Queries that ``f3rm-ext query`` has saved, with their embeddings, to be asked again without encoders."""

import json
from pathlib import Path
from typing import Any

from f3rm_ext.errors import ConfigError
from f3rm_ext.query.embeddings import DEFAULT_TEMPERATURE, Embeddings, Query, load_embeddings
from f3rm_ext.query.queryable import get_head
from f3rm_ext.query.run import Run
from f3rm_ext.utils.output_folder import SUMMARY


def load_queries(path: Path, run: Run) -> list[tuple[Query, float]]:
    """Reads queries that were saved of the same run, each with the score from which upwards it matches.

    Args:
        path: the folder that ``f3rm-ext query`` wrote, or the summary.json in it.

    Raises:
        ConfigError: there is no such file, it is not of ``f3rm-ext query`` or of another run, or a file of vectors is
            missing or has other dimensions.
    """
    file = path / SUMMARY if path.is_dir() else path
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        described, files, negatives = record["queries"], record["vectors"], record["negative_vectors"]
        step, checkpoint, threshold = record["step"], Path(record["checkpoint"]), float(record["threshold"])
        names = [(str(one["name"]), str(one["feature"]), one["temperature"]) for one in described]
        vectors = [(file.parent / files[name], negatives.get(name)) for name, _, _ in names]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"The saved query {file} cannot be read ({error}): give a folder of `f3rm-ext query`."
        ) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} is no saved query of a run, or one of an earlier version ({error} is missing): ask again with "
            "`f3rm-ext query`, and give the folder that it writes."
        ) from error
    if (step, checkpoint) != (run.step, run.checkpoint.resolve()):
        raise ConfigError(
            f"The saved query {file} is of another run ({checkpoint}): ask this one with `f3rm-ext query`, or give the "
            "vectors alone with --vector."
        )
    queries = []
    for (name, feature, temperature), (positive, negative) in zip(names, vectors, strict=True):
        head = get_head(run.model.query_heads(), feature)
        against = Embeddings.empty(head.dim)
        if negative is not None:
            against = load_embeddings(file.parent / negative, head.dim, head.basis)
        looked_for = load_embeddings(positive, head.dim, head.basis)
        query = Query(name, head.name, looked_for, against, temperature or DEFAULT_TEMPERATURE)
        queries.append((query, threshold))
    return queries
