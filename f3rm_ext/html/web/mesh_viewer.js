// Shows GLB meshes that are in the page, with three.js: turn by dragging, zoom with the wheel, move with the right button.
"use strict";
document.querySelectorAll("[data-mesh]").forEach(function (holder) {
  var canvas = holder.querySelector("canvas"), note = holder.querySelector(".mesh-note");
  var buttons = holder.querySelectorAll("[data-look]"), renderer;
  function say(text) { note.textContent = text; note.hidden = !text; }
  try {
    renderer = new THREE.WebGLRenderer({ canvas: canvas, antialias: true, preserveDrawingBuffer: true });
  } catch (error) {
    holder.dataset.state = "failed";
    say(holder.dataset.refusal
      || "This browser shows no 3D graphics. The file beside this page opens in Blender and other programs.");
    return;
  }
  var view = JSON.parse(holder.dataset.view), scene = new THREE.Scene(), looks = { texture: [], shape: [] };
  var camera = new THREE.PerspectiveCamera(view.fov_deg || 50, 1, 0.01, 100), controls;
  var center = new THREE.Vector3(), radius = 1;
  var lamp = new THREE.DirectionalLight(0xffffff, 2.2);
  camera.add(lamp);
  scene.add(camera, new THREE.HemisphereLight(0xffffff, 0x667788, 1.4));
  scene.background = new THREE.Color(0x16191d);

  function bytes(text) { return Uint8Array.from(atob(text.trim()), function (c) { return c.charCodeAt(0); }).buffer; }
  function draw() {
    // As near to the mesh as they may be, so that depths are told apart from far away too.
    var away = camera.position.distanceTo(center);
    camera.near = Math.max(radius / 500, 0.99 * (away - radius));
    camera.far = away + 1.01 * radius;
    camera.updateProjectionMatrix();
    renderer.render(scene, camera);
  }
  function fit() {
    var width = holder.clientWidth, height = "fill" in holder.dataset ? holder.clientHeight : Math.round(width * 0.62);
    renderer.setPixelRatio(Math.min(window.devicePixelRatio, 2));
    renderer.setSize(width, height);
    camera.aspect = width / height;
    draw();
  }
  function look(name) {
    looks.texture.forEach(function (pair) { pair[0].material = name === "shape" ? pair[2] : pair[1]; });
    buttons.forEach(function (b) { b.setAttribute("aria-pressed", b.dataset.look === name); });
    holder.dataset.look = name;
    draw();
  }
  function place(model) {
    var box = new THREE.Box3().setFromObject(model), ahead = new THREE.Vector3(0, 0, -1);
    box.getCenter(center);
    radius = Math.max(box.getSize(new THREE.Vector3()).length() / 2, 1e-6);
    if (view.up) camera.up.fromArray(view.up);
    if (view.position) {
      camera.position.fromArray(view.position);
      ahead.fromArray(view.ahead).normalize();
    } else {
      camera.position.copy(center).addScaledVector(ahead, -2.2 * radius);
    }
    var reach = Math.max(center.clone().sub(camera.position).dot(ahead), 0.3 * radius);
    controls = new THREE.OrbitControls(camera, canvas);
    controls.target.copy(camera.position).addScaledVector(ahead, reach);
    controls.addEventListener("change", draw);
    controls.update();
  }
  var file = bytes(document.getElementById(holder.dataset.mesh).textContent);
  new THREE.GLTFLoader().parse(file, "", function (gltf) {
    var shape = new THREE.MeshLambertMaterial({ color: 0xd8d4cc, flatShading: true, side: THREE.DoubleSide });
    var textured = 0, coloured = 0;
    gltf.scene.traverse(function (part) {
      if (!part.isMesh) return;
      var map = part.material.map || null, colored = Boolean(part.geometry.attributes.color);
      textured += map ? 1 : 0;
      coloured += map || colored ? 1 : 0;
      // As the photos are: light and shadow are in the colours.
      var plain = new THREE.MeshBasicMaterial({ map: map, vertexColors: colored, side: THREE.DoubleSide });
      part.material = plain;
      looks.texture.push([part, plain, shape]);
    });
    scene.add(gltf.scene);
    place(gltf.scene);
    buttons.forEach(function (b) { b.addEventListener("click", function () { look(b.dataset.look); }); });
    window.addEventListener("resize", fit);
    fit();
    look(coloured ? "texture" : "shape");
    say("");
    holder.dataset.textured = textured;
    holder.dataset.state = "shown";
    holder.viewer = { camera: camera, canvas: canvas, controls: controls, draw: draw, file: file };
    holder.dispatchEvent(new Event("shown"));
  }, function (error) {
    holder.dataset.state = "failed";
    say("The mesh cannot be shown: " + error.message);
  });
});
