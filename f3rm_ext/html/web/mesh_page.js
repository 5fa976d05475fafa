// The page of a mesh: the cameras of its capture, its buttons and keys. The mesh itself is shown by mesh_viewer.js.
"use strict";
(function () {
  const body = document.body, element = (id) => document.getElementById(id);
  const content = JSON.parse(element("content").textContent), { cameras, name } = content;
  let index = 0, lens = null, viewer = null;

  /** Shows the whole picture of a camera of the capture, with its principal point. */
  function fit() {
    const width = body.clientWidth, height = body.clientHeight, { camera } = viewer;
    const { fx, fy, cx, cy, width: w, height: h } = lens, scale = Math.min(width / w, height / h);
    camera.fov = 2 * Math.atan(height / 2 / (fy * scale)) * 180 / Math.PI;
    const across = width * fy / fx;  // the aspect follows from it
    camera.setViewOffset(across, height, (w / 2 - cx) * scale * fy / fx, (h / 2 - cy) * scale, across, height);
    viewer.draw();
  }

  function look(which) {
    index = (which + cameras.length) % cameras.length;
    lens = cameras[index];
    const { camera, controls } = viewer, [right, down, ahead] = lens.turn.map((row) => new THREE.Vector3(...row));
    camera.position.set(...lens.position);
    controls.target.copy(camera.position).addScaledVector(ahead, lens.reach);
    controls.update();
    // The controls keep the horizon level, which photos need not have.
    camera.quaternion.setFromRotationMatrix(camera.matrix.clone().makeBasis(right, down.negate(), ahead.negate()));
    if (element("cameras")) element("cameras").value = String(index);
    fit();
  }

  const actions = {
    previous: () => look(index - 1), next: () => look(index + 1), reset: () => look(0),
    fold: () => body.classList.toggle("folded"),
    picture: () => { viewer.draw(); viewer.canvas.toBlob((blob) => saveFile(blob, `${name}.png`)); },
    file: () => saveFile(new Blob([viewer.file]), `${name}.glb`),
  };
  const keys = { n: "next", p: "previous", r: "reset", h: "fold", c: "picture" };

  body.classList.toggle("folded", window.innerWidth <= 560);
  body.addEventListener("shown", function () {
    viewer = body.viewer;
    cameras.forEach((camera, i) => element("cameras")?.add(new Option(camera.name, String(i))));
    element("cameras")?.addEventListener("change", (event) => look(Number(event.target.value)));
    for (const [action, act] of Object.entries(actions))
      document.querySelectorAll(`[data-do=${action}]`).forEach((button) => button.addEventListener("click", act));
    window.addEventListener("resize", fit);
    window.addEventListener("keydown", function (event) {
      const action = keys[event.key.toLowerCase()];
      if (action && !event.ctrlKey && !event.metaKey && !event.altKey && event.target.tagName !== "SELECT") actions[action]();
    });
    look(0);
    element("poster").hidden = true;
  });
})();
