// The page of splats: cameras, ways to move, questions and the places that they find. Frame: that of the .spz file.
"use strict";

const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const add = (a, b, share = 1) => a.map((value, i) => value + share * b[i]);
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const unit = (a) => { const length = Math.hypot(...a) || 1; return a.map((value) => value / length); };

/** Turns a vector about a unit axis, radians (Rodrigues). */
function rotate(v, axis, angle) {
  const along = dot(axis, v) * (1 - Math.cos(angle)), side = cross(axis, v);
  return v.map((value, i) => value * Math.cos(angle) + side[i] * Math.sin(angle) + axis[i] * along);
}

/** The stored value of a score, and the score of a stored value: logits of relevancies up to ±8, or cosines themselves. */
const CURVES = {
  linear: [(score) => score, (value) => value],
  logit: [(score) => Math.max(-8, Math.min(8, Math.log(score / (1 - score)))), (value) => 1 / (1 + Math.exp(-value))],
};

/** Unpacks gzip from base64. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return { bytes, content: await new Response(stream).arrayBuffer() };
}

/** Where the viewer is, and how it moves. */
class Eye {
  constructor(up, radius) { Object.assign(this, { up, radius, mode: "orbit" }); }

  /** Takes the place of a camera of the capture. */
  take(view) {
    this.position = [...view.position];
    this.rows = view.turn.map((row) => [...row]);
    this.view = view;
    this.target = add(this.position, this.forward, Math.max(view.reach, 1e-3));
  }

  get forward() { return this.rows[2]; }

  /** Intrinsics in a picture of this size: the whole view of the capture's camera fits. */
  lens(width, height) {
    const { fx, fy, cx, cy, width: w, height: h } = this.view, scale = Math.min(width / w, height / h);
    return [fx * scale, fy * scale, width / 2 + (cx - w / 2) * scale, height / 2 + (cy - h / 2) * scale];
  }

  turn(yaw, pitch) {
    const right = this.rows[0], steepness = (v) => Math.abs(dot(v, this.up));
    const turned = (v) => rotate(rotate(v, right, pitch), this.up, yaw);
    // Not to straight up or down, where yaw has no meaning; but from there, as photos from a drone look.
    if (steepness(turned(this.forward)) > Math.max(0.999, steepness(this.forward) + 1e-9)) return;
    if (this.mode === "orbit") this.position = add(this.target, turned(add(this.position, this.target, -1)));
    this.rows = this.rows.map(turned);
  }

  pan(x, y) {
    const step = add(add([0, 0, 0], this.rows[0], x), this.rows[1], y);
    this.position = add(this.position, step);
    this.target = add(this.target, step);
  }

  zoom(factor) {
    const away = add(this.position, this.target, -1), distance = Math.hypot(...away);
    if (this.mode === "orbit") this.position = add(this.target, away, Math.max(factor, 1e-3 * this.radius / distance));
    else this.move(0, 0, (1 - factor) * this.radius);
  }

  move(right, up, ahead) {
    let forward = this.forward;
    if (this.mode === "walk") forward = unit(add(forward, this.up, -dot(forward, this.up)));
    const lift = this.mode === "walk" ? this.up : this.rows[1].map((value) => -value);
    let step = add([0, 0, 0], this.rows[0], right);
    step = add(add(step, forward, ahead), lift, up);
    this.position = add(this.position, step);
    this.target = add(this.target, step);
  }

  /** Position in the picture and depth of a point of the scene. */
  project(point, lens) {
    const [x, y, z] = this.rows.map((row) => dot(row, add(point, this.position, -1)));
    return [lens[0] * x / z + lens[2], lens[1] * y / z + lens[3], z];
  }
}

class SplatPage {
  constructor(content, splats, scores, canvas) {
    Object.assign(this, { content, splats, canvas, held: new Set(), question: null, part: "all", notes: content.notes });
    this.eye = new Eye(content.up, content.radius);
    const { count } = splats, asked = content.questions.length;
    this.scores = content.questions.map((_, i) => new Uint8Array(scores, i * count, count));
    this.renderer = new SplatRenderer(canvas, splats, asked ? new Uint8Array(scores, asked * count, count) : null, content);
    for (const question of content.questions) [question.store, question.score] = CURVES[question.curve];
    this.thresholds = content.questions.map((question) => question.store(question.threshold));
    this.element = (id) => document.getElementById(id);
    this.fillPanel();
    this.listen();
    document.body.classList.toggle("folded", window.innerWidth <= 560);
    this.setNotes(content.notes);
    this.look(0);
    this.ask("none");
    new ResizeObserver(() => this.refresh()).observe(canvas);
  }

  // --- pictures ---

  /** Draws at the next frame, and again once the Gaussians are sorted; resolves then. */
  refresh() {
    this.settled = new Promise((resolve) => {
      (this.pending ||= []).push(resolve);
      if (this.pending.length > 1) return;
      requestAnimationFrame(() => {
        const done = this.pending;
        this.pending = null;
        this.draw();
        this.renderer.sort({ position: this.eye.position, forward: this.eye.forward }).then(() => {
          this.draw();
          done.forEach((each) => each());
        });
      });
    });
    return this.settled;
  }

  draw() {
    const ratio = Math.min(window.devicePixelRatio || 1, 2), { clientWidth, clientHeight } = this.canvas;
    const width = Math.max(1, Math.round(clientWidth * ratio)), height = Math.max(1, Math.round(clientHeight * ratio));
    this.renderer.resize(width, height);
    const lens = this.eye.lens(width, height);
    this.renderer.draw({ position: this.eye.position, turn: this.eye.rows, lens });
    for (const pin of document.querySelectorAll(".pin")) {
      const [x, y, depth] = this.eye.project(pin.at, lens);
      pin.hidden = !(depth > 0 && x > 0 && y > 0 && x < width && y < height);
      pin.style.transform = `translate(${x / ratio}px, ${y / ratio}px)`;
    }
  }

  look(index) {
    const { cameras } = this.content;
    this.camera = (index + cameras.length) % cameras.length;
    this.eye.take(cameras[this.camera]);
    this.element("cameras").value = String(this.camera);
    return this.refresh();
  }

  /** Looks at a place from where it was seen best. */
  visit(place) {
    this.eye.take(this.content.cameras[place.camera]);
    const ahead = add(place.at, this.eye.position, -1), forward = unit(ahead);
    // What is above or below has no upright view, so that the camera's own up counts, or what it looked at.
    const [, down, before] = this.eye.rows, level = (axis) => Math.abs(dot(forward, axis)) < 0.9;
    const right = unit(cross(forward, [this.content.up, down.map((value) => -value), before].find(level)));
    this.eye.rows = [right, cross(forward, right), forward];
    const distance = Math.hypot(...ahead), near = Math.min(distance, Math.max(3 * place.size, 0.25 * distance));
    this.eye.position = add(place.at, forward, -near);
    this.eye.target = place.at;
    return this.refresh();
  }

  // --- questions ---

  /** Asks a question by its number, or "labels" or "none". */
  ask(which) {
    const question = this.content.questions[which], labels = which === "labels";
    this.question = question ? Number(which) : labels ? "labels" : null;
    document.querySelectorAll("[data-question]").forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.question === String(which))));
    this.element("answer").hidden = !question && !labels;
    this.element("legend").hidden = !question;
    if (question) {
      const slider = this.element("threshold");
      [slider.min, slider.max, slider.step] = [question.low, question.high, (question.high - question.low) / 255];
      slider.value = String(this.thresholds[which]);
      this.element("highest").textContent = question.score(question.high).toFixed(2);
    }
    this.element("threshold-row").hidden = !question;
    this.element("places").replaceChildren(...(question ? question.places : []).map((place, i) => {
      const row = document.createElement("li"), button = document.createElement("button");
      button.type = "button";
      button.textContent = `${i + 1}: ${place.label}`;
      button.addEventListener("click", () => this.visit(place));
      row.append(button);
      return row;
    }));
    this.element("places-row").hidden = !question;
    this.element("no-place").hidden = !question || question.places.length > 0;
    this.pin(question ? question.places : []);
    return this.update();
  }

  /** Sets the threshold of the question that is asked, as a score. */
  setThreshold(score) {
    this.thresholds[this.question] = this.content.questions[this.question].store(score);
    return this.update();
  }

  /** Shows "all"; "only" the pixels that match, or "hide"s them; or "keep"s or "drop"s Gaussians that match. A part is
   * shown as it looks, without heat. */
  show(part) {
    this.part = part;
    document.querySelectorAll("[data-part]").forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.part === part)));
    return this.update();
  }

  update() {
    this.renderer.part = this.question === null ? "all" : this.part;
    this.renderer.look = this.renderer.part !== "all" || this.question === null ? "photo"
      : this.question === "labels" ? "labels" : "heat";
    const { questions } = this.content;
    const number = typeof this.question === "number" ? this.question : null;
    const labels = this.question === "labels" ? this.labels() : new Uint8Array(this.splats.count);
    if (number === null) {
      // With labels, every labelled Gaussian is chosen; without a question, all are.
      this.renderer.setScores(labels.map((label) => (label ? 255 : 0)), labels);
      this.renderer.threshold = this.question === "labels" ? 0.5 : 0;
      this.renderer.range = [0.5, 1];
    } else {
      const { low, high, score } = questions[number], stored = (this.thresholds[number] - low) / (high - low);
      this.renderer.setScores(this.scores[number], labels);
      this.renderer.threshold = stored;
      this.renderer.range = [stored, 1];
      this.element("threshold-value").textContent = score(this.thresholds[number]).toFixed(2);
    }
    return this.refresh();
  }

  /** The question that fits each Gaussian best, from 1; 0 where none reaches its threshold. */
  labels() {
    const { questions } = this.content, labels = new Uint8Array(this.splats.count);
    for (let i = 0; i < labels.length; i++) {
      let best = -Infinity;
      for (let q = 0; q < questions.length; q++) {
        const { low, high, score } = questions[q], stored = low + this.scores[q][i] / 255 * (high - low);
        if (stored < this.thresholds[q] - 1e-5 * (high - low)) continue;
        // Logits of relevancies and cosines cannot be compared; scores can.
        if (score(stored) > best) { best = score(stored); labels[i] = q + 1; }
      }
    }
    return labels;
  }

  /** Pins the numbers of places, and the notes. */
  pin(places) {
    this.places = places;
    const pin = (name, text, at) => Object.assign(document.createElement("span"), { className: name, textContent: text, at });
    this.element("pins").replaceChildren(...places.map((place, i) => pin("pin", String(i + 1), place.at)),
      ...this.notes.map((note) => pin("pin note", note.text, note.at)));
  }

  // --- notes ---

  /** Replaces the notes: {text, at, camera, size} each, as places. */
  setNotes(notes) {
    this.notes = notes;
    const button = (text, name, action) => {
      const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, ariaLabel: name });
      made.addEventListener("click", action);
      return made;
    };
    this.element("notes").replaceChildren(...notes.map((note) => {
      const row = document.createElement("li");
      row.append(button(note.text, note.text, () => this.visit(note)),
        button("×", `Remove the note ${note.text}`, () => this.setNotes(this.notes.filter((one) => one !== note))));
      return row;
    }));
    this.element("save-notes").hidden = !notes.length;
    this.pin(this.places || []);
    return this.refresh();
  }

  /** Saves the notes as `f3rm-ext export page --notes` takes them, in the frame of the capture. */
  saveNotes() {
    const position = (at) => this.content.capture.map((row) => dot(row, at) + row[3]);
    const notes = this.notes.map((note) => ({ text: note.text, position: position(note.at) }));
    saveFile(new Blob([JSON.stringify(notes, null, 1)], { type: "application/json" }), `${this.content.name}-notes.json`);
  }

  // --- the panel and the keys ---

  fillPanel() {
    this.content.cameras.forEach((camera, i) => this.element("cameras").add(new Option(camera.name, String(i))));
    document.querySelectorAll("[data-question]").forEach((button) =>
      button.addEventListener("click", () => this.ask(button.dataset.question)));
    document.querySelectorAll("[data-part]").forEach((button) =>
      button.addEventListener("click", () => this.show(button.dataset.part)));
    document.querySelectorAll("[data-mode]").forEach((button) =>
      button.addEventListener("click", () => this.setMode(button.dataset.mode)));
    const actions = {
      previous: () => this.look(this.camera - 1), next: () => this.look(this.camera + 1),
      notes: () => this.saveNotes(), picture: () => this.savePicture(), file: () => this.saveSplats(), fold: () => document.body.classList.toggle("folded"),
      keys: () => { this.element("help").hidden = !this.element("help").hidden; },
    };
    for (const [name, action] of Object.entries(actions))
      document.querySelectorAll(`[data-do=${name}]`).forEach((button) => button.addEventListener("click", action));
    this.actions = actions;
    this.element("cameras").addEventListener("change", (event) => this.look(Number(event.target.value)));
    this.element("threshold").addEventListener("input", (event) => {
      this.thresholds[this.question] = Number(event.target.value);
      this.update();
    });
  }

  setMode(mode) {
    this.eye.mode = mode;
    if (mode === "orbit") this.eye.target = add(this.eye.position, this.eye.forward, this.eye.view.reach);
    document.querySelectorAll("[data-mode]").forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset.mode === mode)));
  }

  savePicture() { this.draw(); this.canvas.toBlob((blob) => saveFile(blob, `${this.content.name}.png`)); }

  saveSplats() { saveFile(new Blob([this.splats.file]), `${this.content.name}.spz`); }

  listen() {
    const { canvas, eye } = this, fingers = new Map();
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
    });
    const forget = (event) => fingers.delete(event.pointerId);
    canvas.addEventListener("pointerup", forget);
    canvas.addEventListener("pointercancel", forget);
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      const [x, y] = [event.clientX - before[0], event.clientY - before[1]];
      const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
      if (other) {
        const spread = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1;
        eye.zoom(spread(before) / spread([event.clientX, event.clientY]));
        this.panPixels(x / 2, y / 2);
      } else if (event.buttons & 2 || event.shiftKey) this.panPixels(x, y);
      else eye.turn(-x * 0.006, -y * 0.006);
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      this.refresh();
    });
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      eye.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.001))));
      this.refresh();
    }, { passive: false });
    canvas.addEventListener("dblclick", (event) => {
      const at = this.pick(event.offsetX, event.offsetY), field = this.element("note"), text = field.value.trim();
      if (!at) return;
      if (!text) { eye.target = at; return; }
      field.value = "";
      this.setNotes([...this.notes, { text, at, camera: this.camera, size: 0 }]);
    });
    window.addEventListener("keydown", (event) => this.press(event));
    window.addEventListener("keyup", (event) => this.held.delete(event.key.toLowerCase()));
    window.addEventListener("blur", () => this.held.clear());
  }

  panPixels(x, y) {
    const lens = this.eye.lens(this.canvas.clientWidth, this.canvas.clientHeight);
    const distance = Math.hypot(...add(this.eye.position, this.eye.target, -1));
    this.eye.pan(-x * distance / lens[0], -y * distance / lens[1]);
  }

  /** What is seen at a place of the canvas: the nearest opaque Gaussian within eight pixels of it, or null. */
  pick(x, y) {
    const lens = this.eye.lens(this.canvas.clientWidth, this.canvas.clientHeight), { positions, opacities } = this.splats;
    let best = Infinity, found = null;
    for (let i = 0; i < this.splats.count; i++) {
      if (opacities[i] < 64 || !this.renderer.draws(i)) continue;
      const point = positions.subarray(3 * i, 3 * i + 3), [px, py, depth] = this.eye.project([...point], lens);
      if (depth > this.renderer.near && depth < best && Math.hypot(px - x, py - y) < 8) { best = depth; found = [...point]; }
    }
    return found;
  }

  press(event) {
    const key = event.key.toLowerCase(), last = this.content.questions.length;
    const own = event.target.matches(key.startsWith("arrow") ? "select, input" : "select, [type=text]");
    if (event.ctrlKey || event.metaKey || event.altKey || own) return;
    if ("wasdqe".includes(key) || key.startsWith("arrow")) {
      event.preventDefault();
      if (!this.held.size) this.last = performance.now();
      this.held.add(key);
      if (!this.moving) this.fly();
    } else if (key === "0") this.ask("none");
    else if (key >= "1" && key <= "9" && Number(key) <= last) this.ask(String(Number(key) - 1));
    else if (key === "l" && last > 1) this.ask("labels");
    else if (key === "m") this.setMode({ orbit: "fly", fly: "walk", walk: "orbit" }[this.eye.mode]);
    else {
      const name = { n: "next", p: "previous", c: "picture", h: "fold", "?": "keys", escape: "keys" }[key];
      if (name && !(key === "escape" && this.element("help").hidden)) this.actions[name]();
    }
  }

  fly() {
    this.moving = this.held.size > 0;
    if (!this.moving) return;
    const now = performance.now(), step = 0.5 * this.content.radius * Math.min(now - this.last, 100) / 1000;
    const pair = (plus, minus) => (plus.some((key) => this.held.has(key)) - minus.some((key) => this.held.has(key))) * step;
    this.last = now;
    this.eye.move(pair(["d", "arrowright"], ["a", "arrowleft"]), pair(["e"], ["q"]), pair(["w", "arrowup"], ["s", "arrowdown"]));
    this.refresh().then(() => this.fly());
  }
}

(async function () {
  const holder = document.getElementById("scene"), text = (id) => document.getElementById(id).textContent;
  try {
    const content = JSON.parse(text("content"));
    const [file, scores] = await Promise.all([unpack(text("splats")), unpack(text("scores"))]);
    const splats = { ...parseSpz(file.content), file: file.bytes };
    window.f3rm = new SplatPage(content, splats, scores.content, holder.querySelector("canvas"));
    await window.f3rm.settled;
    document.body.dataset.state = "shown";
    document.getElementById("poster").hidden = true;
  } catch (error) {
    document.body.dataset.state = "failed";
    document.getElementById("problem").textContent = /WebGL2/.test(error.message)
      ? "This browser has no WebGL2, so the scene cannot be turned: this is a picture of it. Open the page in a current Firefox, Chrome, Edge or Safari."
      : `The scene cannot be shown: ${error.message}`;
  }
})();
