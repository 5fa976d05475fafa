"""`ns-viewer` and `ns-train --vis viewer` as commands: where they listen, what a browser sees, how they end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 180
Hosts = Callable[[int, int], set[str]]


def test_ns_viewer_shows_the_scene(
    trained: Any,
    start_command: Callable[..., Any],
    free_port: Callable[[], int],
    listening_hosts: Hosts,
    open_page: Callable[[str], Any],
    wait_until: Callable[..., None],
) -> None:
    port = free_port()
    process = start_command("ns-viewer", "--load-config", trained.config, "--viewer.websocket-port", port)
    # It listens long before it is built, and a page that comes in between can stop the building for good.
    wait_until(lambda: "disabled local writer" in process.said(), WAIT_S, "built")
    assert listening_hosts(process.pid, port) == {"127.0.0.1"}
    page = open_page(f"http://127.0.0.1:{port}")
    page.set_max_res(64)
    page.hide_cameras()
    wait_until(lambda: page.output() == "rgb" and page.resolution() != (0, 0), WAIT_S, "a first picture")
    wait_until(lambda: page.picture().std() > 0.02, WAIT_S, "a picture of the scene")
    assert {"relevancy", "relevancy_overlay", "labels"} <= set(page.outputs())
    # The feature came with the checkpoint, after the panel had been built.
    assert "dense-daisy: understands no text" in page.status()
    assert process.is_running() and "Traceback" not in process.said()


def test_training_is_shown_while_it_goes_on_and_ends_when_asked(
    tiny_capture: Path,
    tmp_path: Path,
    start_command: Callable[..., Any],
    free_port: Callable[[], int],
    listening_hosts: Hosts,
    open_page: Callable[[str], Any],
    wait_until: Callable[..., None],
    difference: Callable[..., float],
) -> None:
    port = free_port()
    process = start_command(
        "ns-train",
        "f3rm-ext-lite",
        *("--data", tiny_capture, "--output-dir", tmp_path, "--experiment-name", "e", "--timestamp", "t"),
        *("--vis", "viewer", "--viewer.websocket-port", port, "--max-num-iterations", 100_000),
        *("--pipeline.datamanager.train-num-rays-per-batch", 256, "--logging.local-writer.enable", False),
        *(f"--pipeline.model.{name}.log2-hashmap-size=13" for name in ("grid", "feature-grid", "proposals.0.grid")),
    )
    wait_until(lambda: not process.is_running() or bool(listening_hosts(process.pid, port)), WAIT_S, "listening")
    assert process.is_running(), process.said()[-3000:]
    assert listening_hosts(process.pid, port) == {"127.0.0.1"}
    page = open_page(f"http://127.0.0.1:{port}")
    page.set_max_res(64)
    # The training cameras stay in the picture: they do not move, so they change nothing below.
    wait_until(lambda: page.output() == "rgb" and page.resolution() != (0, 0), WAIT_S, "a first picture")
    begin = page.step()
    wait_until(lambda: page.step() > begin, WAIT_S, "the panel counting on")
    first, step = page.picture(), page.step()
    # Nobody moves the view: what changes is what the field has learnt.
    wait_until(lambda: difference(page.picture(), first) > 0.02, WAIT_S, "a picture that has changed by learning")
    wait_until(lambda: page.step() > step, WAIT_S, "later steps than the first picture's")
    done = process.interrupt(WAIT_S)
    assert done.code == 130 and "Traceback" not in done.text, done.text[-3000:]
    assert "continue with: ns-train f3rm-ext-lite --load-dir" in " ".join(done.text.split())
    assert list((tmp_path / "e" / "f3rm-ext-lite" / "t" / "nerfstudio_models").glob("step-*.ckpt"))
