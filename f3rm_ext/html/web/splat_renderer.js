// Draws 3D Gaussians with WebGL2 as training does: sorted by depth along the camera's axis, with the same blur of the
// image and its compensation, spherical harmonics, and cut-off at an opacity of 1/255 (Kerbl et al. 2023; Yu et al.
// 2024). Input is an .spz file of version 3. A worker sorts. A second image of the same weights holds scores.
"use strict";

const TEXTURE_WIDTH = 2048, MAX_LABELS = 16;
const LOOKS = { photo: 0, heat: 1, labels: 2 };
/** What is shown: pixels by the score that they blend to ("only", "hide"), or Gaussians by their own ("keep", "drop"). */
const PARTS = { all: 0, only: 1, hide: 2, keep: 3, drop: 4 };

/** Parses an unpacked .spz file of version 3. The axes stay those of the file: right, up, back. */
function parseSpz(buffer) {
  const view = new DataView(buffer), count = view.getUint32(8, true), degree = view.getUint8(12);
  if (view.getUint32(0, true) !== 0x5053474e || view.getUint32(4, true) !== 3) throw new Error("no .spz of version 3");
  const steps = 2 ** view.getUint8(13), antialiased = (view.getUint8(14) & 1) === 1;
  const coefficients = 3 * ((degree + 1) ** 2 - 1);
  let at = 16;
  const take = (columns) => new Uint8Array(buffer, (at += count * columns) - count * columns, count * columns);
  const packed = take(9), positions = new Float32Array(3 * count);
  for (let i = 0; i < positions.length; i++) {
    const fixed = (packed[3 * i] << 8) | (packed[3 * i + 1] << 16) | (packed[3 * i + 2] << 24);
    positions[i] = (fixed >> 8) / steps;
  }
  return { count, degree, antialiased, coefficients, positions, opacities: take(1), colors: take(3), scales: take(3),
    rotations: take(4), harmonics: take(coefficients) };
}

// Runs in the worker. Depths of Gaussians in front of the camera are positive floats, whose bits sort like integers:
// two passes of 16 bits sort them exactly, farthest first.
function sortInWorker() {
  let positions = null;
  const counts = new Uint32Array(65536);
  function pass(keys, order, shift, out) {
    counts.fill(0);
    for (const i of order) counts[(keys[i] >>> shift) & 65535]++;
    for (let bin = 65535, sum = 0; bin >= 0; bin--) { const here = counts[bin]; counts[bin] = sum; sum += here; }
    for (const i of order) out[counts[(keys[i] >>> shift) & 65535]++] = i;
  }
  self.onmessage = function (event) {
    if (event.data.positions) { positions = event.data.positions; return; }
    const [x, y, z, start] = event.data.axis, near = event.data.near, total = positions.length / 3;
    const depths = new Float32Array(total), keys = new Uint32Array(depths.buffer), front = new Uint32Array(total);
    let count = 0;
    for (let i = 0; i < total; i++) {
      depths[i] = x * positions[3 * i] + y * positions[3 * i + 1] + z * positions[3 * i + 2] - start;
      if (depths[i] > near) front[count++] = i;
    }
    const order = front.subarray(0, count), half = new Uint32Array(count), sorted = new Uint32Array(count);
    pass(keys, order, 0, half);
    pass(keys, half, 16, sorted);
    self.postMessage({ sorted }, [sorted.buffer]);
  };
}

const SPLAT_VERTEX = `#version 300 es
precision highp float; precision highp int; precision highp usampler2D; precision highp sampler2D;
uniform usampler2D shapes, harmonics;
uniform sampler2D scores;
uniform mat3 turn;       // scene to camera: right, down, forward
uniform vec3 eye;
uniform vec4 lens;       // fx, fy, cx, cy, pixels
uniform vec2 size;       // pixels
uniform float blur, threshold, near;
uniform bool compensate;
uniform int degree, look, part;
uniform vec3 palette[${MAX_LABELS}];
in uint index;
out vec2 offset;
flat out vec3 conic;
flat out vec4 paint;
// The score times its weight, and the weight; or the colour of the label, and then paint is its grey and whether it has
// a label.
flat out vec3 mark;

ivec2 texel(int number) { return ivec2(number % ${TEXTURE_WIDTH}, number / ${TEXTURE_WIDTH}); }

mat3 rotation(uint packed) {
  // The three smaller components have a sign and 9 bits each; the largest is positive and follows from them.
  int largest = int(packed >> 30);
  vec4 q = vec4(0.0);
  float rest = 1.0;
  for (int i = 3, shift = 0; i >= 0; i--) {
    if (i == largest) continue;
    float value = float((packed >> shift) & 511u) / 511.0 * 0.70710678;
    q[i] = ((packed >> (shift + 9)) & 1u) == 1u ? -value : value;
    rest -= value * value;
    shift += 10;
  }
  q[largest] = sqrt(max(rest, 0.0));
  float x = q.x, y = q.y, z = q.z, w = q.w;
  return mat3(1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y + w * z), 2.0 * (x * z - w * y),
              2.0 * (x * y - w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z + w * x),
              2.0 * (x * z + w * y), 2.0 * (y * z - w * x), 1.0 - 2.0 * (x * x + y * y));
}

vec3 coefficient(int start, int number) {
  vec3 value;
  for (int c = 0; c < 3; c++) {
    int at = 3 * number + c;
    uint word = texelFetch(harmonics, texel(start + at / 16), 0)[(at / 4) % 4];
    value[c] = (float((word >> uint(8 * (at % 4))) & 255u) - 128.0) / 128.0;
  }
  return value;
}

vec3 color(vec3 base, int start, vec3 d) {
  vec3 rgb = base * 0.28209479 + 0.5;
  float x = d.x, y = d.y, z = d.z, xx = x * x, yy = y * y, zz = z * z;
  if (degree > 0)
    rgb += 0.48860251 * (-y * coefficient(start, 0) + z * coefficient(start, 1) - x * coefficient(start, 2));
  if (degree > 1)
    rgb += 1.09254843 * (x * y * coefficient(start, 3) - y * z * coefficient(start, 4) - x * z * coefficient(start, 6))
         + 0.31539157 * (3.0 * zz - 1.0) * coefficient(start, 5) + 0.54627422 * (xx - yy) * coefficient(start, 7);
  if (degree > 2)
    rgb += -0.59004359 * (y * (3.0 * xx - yy) * coefficient(start, 8) + x * (xx - 3.0 * yy) * coefficient(start, 14))
         + 2.89061144 * x * y * z * coefficient(start, 9)
         - 0.45704579 * (5.0 * zz - 1.0) * (y * coefficient(start, 10) + x * coefficient(start, 12))
         + 0.37317633 * z * (5.0 * zz - 3.0) * coefficient(start, 11)
         + 1.44530572 * z * (xx - yy) * coefficient(start, 13);
  return max(rgb, 0.0);
}

void main() {
  gl_Position = vec4(0.0, 0.0, 2.0, 1.0);  // outside: not drawn
  int i = int(index);
  uvec4 first = texelFetch(shapes, texel(2 * i), 0), second = texelFetch(shapes, texel(2 * i + 1), 0);
  vec3 mean = uintBitsToFloat(first.xyz), at = turn * (mean - eye);
  if (at.z <= near) return;
  vec3 score = texelFetch(scores, texel(i), 0).rgb;  // with label and weight
  bool chosen = score.r >= threshold - 1e-5;
  if ((part == ${PARTS.keep} && !chosen) || (part == ${PARTS.drop} && chosen)) return;

  // The projection is made affine at the centre, or at most 15 % outside the image (Zwicker et al. 2001).
  vec2 low = -(lens.zw + 0.15 * size) / lens.xy, high = (size * 1.15 - lens.zw) / lens.xy;
  vec2 slope = clamp(at.xy / at.z, low, high);
  vec3 across = vec3(lens.x / at.z, 0.0, -lens.x * slope.x / at.z), down = vec3(0.0, lens.y, -lens.y * slope.y) / at.z;
  vec3 sizes = exp(vec3(second.x & 255u, (second.x >> 8) & 255u, (second.x >> 16) & 255u) / 16.0 - 10.0);
  mat3 axes = turn * rotation(second.y);
  vec3 u = (across * axes) * sizes, v = (down * axes) * sizes;
  float xy = dot(u, v), xx = dot(u, u) + blur, yy = dot(v, v) + blur, det = xx * yy - xy * xy;
  if (det <= 0.0) return;
  float opacity = float(first.w >> 24) / 255.0;
  if (compensate) opacity *= sqrt(max((dot(u, u) * dot(v, v) - xy * xy) / det, 0.0));
  if (opacity < 1.0 / 255.0) return;

  // A rectangle along the axes of the ellipse on which the opacity falls to 1/255.
  float reach = sqrt(2.0 * log(255.0 * opacity)), middle = 0.5 * (xx + yy);
  float radius = sqrt(max(middle * middle - det, 0.0));
  vec2 axis = abs(xy) < 1e-9 ? (xx >= yy ? vec2(1.0, 0.0) : vec2(0.0, 1.0)) : normalize(vec2(xy, middle + radius - xx));
  vec2 corner = vec2(gl_VertexID & 1, gl_VertexID >> 1) * 2.0 - 1.0;
  offset = reach * (corner.x * sqrt(middle + radius) * axis
                  + corner.y * sqrt(max(middle - radius, 0.0)) * vec2(-axis.y, axis.x));
  vec2 pixel = lens.xy * at.xy / at.z + lens.zw + offset;
  gl_Position = vec4(2.0 * pixel.x / size.x - 1.0, 1.0 - 2.0 * pixel.y / size.y, 0.0, 1.0);
  conic = vec3(yy, -xy, xx) / det;
  vec3 base = (vec3(first.w & 255u, (first.w >> 8) & 255u, (first.w >> 16) & 255u) / 255.0 - 0.5) / 0.15;
  int texels = (3 * ((degree + 1) * (degree + 1) - 1) + 15) / 16;
  paint = vec4(color(base, texels * i, normalize(mean - eye)), opacity);
  int label = int(score.g * 255.0 + 0.5);
  mark = vec3(score.r * score.b, score.b, 0.0);
  if (look == ${LOOKS.labels}) {
    mark = label > 0 ? palette[min(label, ${MAX_LABELS}) - 1] : vec3(0.0);
    paint.rgb = vec3(dot(paint.rgb, vec3(0.299, 0.587, 0.114)), label > 0 ? 1.0 : 0.0, 0.0);
  }
}`;

const SPLAT_FRAGMENT = `#version 300 es
precision highp float;
in vec2 offset;
flat in vec3 conic;
flat in vec4 paint;
flat in vec3 mark;
layout(location = 0) out vec4 picture;
layout(location = 1) out vec4 marks;
void main() {
  float power = 0.5 * (conic.x * offset.x * offset.x + conic.z * offset.y * offset.y) + conic.y * offset.x * offset.y;
  float alpha = min(paint.a * exp(-power), 0.999);
  if (alpha < 1.0 / 255.0) discard;
  picture = vec4(paint.rgb, 1.0) * alpha;
  marks = vec4(mark, 1.0) * alpha;
}`;

const SCREEN_VERTEX = `#version 300 es
void main() { gl_Position = vec4(vec2(gl_VertexID & 1, gl_VertexID >> 1) * 4.0 - 1.0, 0.0, 1.0); }`;

// As f3rm_ext/utils/colormaps.py lays heat and labels over a picture.
const SCREEN_FRAGMENT = `#version 300 es
precision highp float;
uniform sampler2D picture, marks;
uniform vec3 background, heat[9];
uniform vec2 range;      // scores at which matches begin, and at which the heat is hottest
uniform int look, part;
out vec4 shown;
void main() {
  vec4 drawn = texelFetch(picture, ivec2(gl_FragCoord.xy), 0), mark = texelFetch(marks, ivec2(gl_FragCoord.xy), 0);
  vec3 rgb = clamp(drawn.rgb + (1.0 - drawn.a) * background, 0.0, 1.0);
  float grey = dot(rgb, vec3(0.299, 0.587, 0.114));
  vec3 dimmed = 0.15 * rgb + 0.4 * grey;
  float score = mark.g > 0.001 ? mark.r / mark.g : 0.0;
  bool match = score >= range.x;
  shown = vec4(rgb, 1.0);
  if ((part == ${PARTS.only} && !match) || (part == ${PARTS.hide} && match)) {
    shown.rgb = background;
  } else if (look == ${LOOKS.heat}) {
    float strength = clamp((score - range.x) / max(range.y - range.x, 1e-4), 0.0, 1.0) * 8.0;
    vec3 glow = mix(heat[int(strength)], heat[min(int(strength) + 1, 8)], fract(strength));
    shown.rgb = match ? mix(dimmed, glow, 0.5 + 0.0375 * strength) : dimmed;
  } else if (look == ${LOOKS.labels}) {
    float shade = min(drawn.r + (1.0 - drawn.a) * dot(background, vec3(0.299, 0.587, 0.114)), 1.0), share = drawn.g;
    vec3 label = mark.rgb / max(share, 1e-3);
    shown.rgb = mix(vec3(0.55 * shade), 0.35 * vec3(shade) + 0.65 * label, clamp(share, 0.0, 1.0));
  }
}`;

class SplatRenderer {
  /**
   * @param weights of the Gaussians' scores when they are blended, 0 to 255.
   * @throws {Error} if the browser has no WebGL2, or less of it than is needed. */
  constructor(canvas, splats, weights, { blur, near, background, heat, palette }) {
    const gl = canvas.getContext("webgl2", { antialias: false, alpha: false, preserveDrawingBuffer: true });
    if (!gl) throw new Error("WebGL2 is missing");
    Object.assign(this, { canvas, gl, splats, background, blur, near });
    this.exact = Boolean(gl.getExtension("EXT_color_buffer_float") || gl.getExtension("EXT_color_buffer_half_float"));
    this.look = "photo"; this.part = "all"; this.threshold = 0; this.range = [0, 1];
    this.splatProgram = this.program(SPLAT_VERTEX, SPLAT_FRAGMENT);
    this.screenProgram = this.program(SCREEN_VERTEX, SCREEN_FRAGMENT);
    this.upload(weights);
    gl.useProgram(this.splatProgram.program);
    gl.uniform3fv(this.splatProgram.at("palette"), palette.flat());
    gl.useProgram(this.screenProgram.program);
    gl.uniform3fv(this.screenProgram.at("heat"), heat.flat());
    this.targets = [null, null];
    this.drawn = 0;
    this.worker = new Worker(URL.createObjectURL(new Blob([`(${sortInWorker})()`], { type: "text/javascript" })));
    this.worker.postMessage({ positions: splats.positions });
    this.waiting = null;
    this.worker.onmessage = (event) => this.take(event.data.sorted);
  }

  program(vertex, fragment) {
    const gl = this.gl, program = gl.createProgram(), places = {};
    for (const [kind, text] of [[gl.VERTEX_SHADER, vertex], [gl.FRAGMENT_SHADER, fragment]]) {
      const shader = gl.createShader(kind);
      gl.shaderSource(shader, text);
      gl.compileShader(shader);
      if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) throw new Error(gl.getShaderInfoLog(shader));
      gl.attachShader(program, shader);
    }
    gl.bindAttribLocation(program, 0, "index");
    gl.linkProgram(program);
    if (!gl.getProgramParameter(program, gl.LINK_STATUS)) throw new Error(gl.getProgramInfoLog(program));
    return { program, at: (name) => (places[name] ??= gl.getUniformLocation(program, name)) };
  }

  upload(weights) {
    const { gl, splats } = this, { count, positions, colors, opacities, scales, rotations } = splats;
    const rows = (texels) => Math.max(1, Math.ceil(texels / TEXTURE_WIDTH));
    const shapes = new Uint32Array(4 * TEXTURE_WIDTH * rows(2 * count)), floats = new Float32Array(shapes.buffer);
    const turns = new DataView(rotations.buffer, rotations.byteOffset, rotations.byteLength);
    for (let i = 0; i < count; i++) {
      floats.set(positions.subarray(3 * i, 3 * i + 3), 8 * i);
      shapes[8 * i + 3] = colors[3 * i] | colors[3 * i + 1] << 8 | colors[3 * i + 2] << 16 | opacities[i] << 24;
      shapes[8 * i + 4] = scales[3 * i] | scales[3 * i + 1] << 8 | scales[3 * i + 2] << 16;
      shapes[8 * i + 5] = turns.getUint32(4 * i, true);
    }
    const texels = Math.ceil(splats.coefficients / 16), bytes = new Uint8Array(16 * TEXTURE_WIDTH * rows(texels * count));
    for (let i = 0; texels && i < count; i++)
      bytes.set(splats.harmonics.subarray(splats.coefficients * i, splats.coefficients * (i + 1)), 16 * texels * i);
    this.textures = [
      this.texture(0, gl.RGBA32UI, rows(2 * count), gl.RGBA_INTEGER, gl.UNSIGNED_INT, shapes),
      this.texture(1, gl.RGBA32UI, rows(texels * count), gl.RGBA_INTEGER, gl.UNSIGNED_INT, new Uint32Array(bytes.buffer)),
    ];
    this.scoreBytes = new Uint8Array(3 * TEXTURE_WIDTH * rows(count));
    for (let i = 0; i < count; i++) this.scoreBytes[3 * i + 2] = weights ? weights[i] : 255;
    this.textures.push(this.texture(2, gl.RGB8, rows(count), gl.RGB, gl.UNSIGNED_BYTE, this.scoreBytes));
    this.array = gl.createVertexArray();
    this.indices = gl.createBuffer();
    gl.bindVertexArray(this.array);
    gl.bindBuffer(gl.ARRAY_BUFFER, this.indices);
    gl.enableVertexAttribArray(0);
    gl.vertexAttribIPointer(0, 1, gl.UNSIGNED_INT, 0, 0);
    gl.vertexAttribDivisor(0, 1);
    gl.bindVertexArray(null);
  }

  texture(unit, inner, height, format, kind, data, width = TEXTURE_WIDTH) {
    const gl = this.gl, texture = gl.createTexture();
    gl.activeTexture(gl.TEXTURE0 + unit);
    gl.bindTexture(gl.TEXTURE_2D, texture);
    gl.texImage2D(gl.TEXTURE_2D, 0, inner, width, height, 0, format, kind, data);
    for (const name of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, name, gl.NEAREST);
    return texture;
  }

  /** Scores from 0 to 255 of the question that is asked, and one label per Gaussian (0: none). */
  setScores(scores, labels) {
    const { gl, scoreBytes } = this;
    for (let i = 0; i < this.splats.count; i++) {
      scoreBytes[3 * i] = scores[i];
      scoreBytes[3 * i + 1] = labels[i];
    }
    gl.activeTexture(gl.TEXTURE2);
    gl.bindTexture(gl.TEXTURE_2D, this.textures[2]);
    gl.texSubImage2D(gl.TEXTURE_2D, 0, 0, 0, TEXTURE_WIDTH, scoreBytes.length / 3 / TEXTURE_WIDTH, gl.RGB,
      gl.UNSIGNED_BYTE, scoreBytes);
  }

  /** Whether a Gaussian is drawn, as the shader decides where Gaussians that match are kept or dropped. */
  draws(i) {
    const chosen = this.scoreBytes[3 * i] / 255 >= this.threshold - 1e-5;
    return this.part === "keep" ? chosen : this.part === "drop" ? !chosen : true;
  }

  resize(width, height) {
    const { gl, canvas } = this;
    if (canvas.width === width && canvas.height === height && this.frame) return;
    [canvas.width, canvas.height] = [width, height];
    this.targets.forEach((target) => target && gl.deleteTexture(target));
    const [inner, kind] = this.exact ? [gl.RGBA16F, gl.HALF_FLOAT] : [gl.RGBA8, gl.UNSIGNED_BYTE];
    this.targets = [3, 4].map((unit) => this.texture(unit, inner, height, gl.RGBA, kind, null, width));
    this.frame ??= gl.createFramebuffer();
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    this.targets.forEach((target, i) =>
      gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0 + i, gl.TEXTURE_2D, target, 0));
  }

  /** Sorts for a camera. Resolves when the order has arrived; a newer request replaces one that waits. */
  sort(camera) {
    const [x, y, z] = camera.forward, at = camera.position;
    const axis = [x, y, z, x * at[0] + y * at[1] + z * at[2]];
    return new Promise((resolve) => {
      if (this.busy) { this.waiting?.resolve(); this.waiting = { axis, resolve }; return; }
      this.busy = resolve;
      this.worker.postMessage({ axis, near: this.near });
    });
  }

  take(sorted) {
    const gl = this.gl, resolve = this.busy;
    gl.bindBuffer(gl.ARRAY_BUFFER, this.indices);
    gl.bufferData(gl.ARRAY_BUFFER, sorted, gl.DYNAMIC_DRAW);
    this.drawn = sorted.length;
    this.busy = null;
    if (this.waiting) {
      const next = this.waiting;
      this.waiting = null;
      this.busy = next.resolve;
      this.worker.postMessage({ axis: next.axis, near: this.near });
    }
    resolve();
  }

  /** Draws a camera: {position, turn (rows right, down, forward), lens (fx, fy, cx, cy; pixels)}. */
  draw(camera) {
    const { gl, canvas, splatProgram: splat, screenProgram: screen } = this;
    gl.bindFramebuffer(gl.FRAMEBUFFER, this.frame);
    // The image of scores costs a fifth of the time in software rendering, so it is drawn only where it is looked at.
    const asked = this.look !== "photo" || this.part === "only" || this.part === "hide";
    gl.drawBuffers([gl.COLOR_ATTACHMENT0, asked ? gl.COLOR_ATTACHMENT1 : gl.NONE]);
    gl.viewport(0, 0, canvas.width, canvas.height);
    gl.clearColor(0, 0, 0, 0);
    gl.clear(gl.COLOR_BUFFER_BIT);
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
    gl.useProgram(splat.program);
    ["shapes", "harmonics", "scores"].forEach((name, unit) => gl.uniform1i(splat.at(name), unit));
    this.textures.forEach((texture, unit) => {
      gl.activeTexture(gl.TEXTURE0 + unit);
      gl.bindTexture(gl.TEXTURE_2D, texture);
    });
    gl.uniformMatrix3fv(splat.at("turn"), true, camera.turn.flat());
    gl.uniform3fv(splat.at("eye"), camera.position);
    gl.uniform4fv(splat.at("lens"), camera.lens);
    gl.uniform2f(splat.at("size"), canvas.width, canvas.height);
    gl.uniform1f(splat.at("blur"), this.blur);
    gl.uniform1f(splat.at("near"), this.near);
    gl.uniform1f(splat.at("threshold"), this.threshold);
    gl.uniform1i(splat.at("compensate"), this.splats.antialiased ? 1 : 0);
    gl.uniform1i(splat.at("degree"), this.splats.degree);
    gl.uniform1i(splat.at("look"), LOOKS[this.look]);
    gl.uniform1i(splat.at("part"), PARTS[this.part]);
    gl.bindVertexArray(this.array);
    gl.drawArraysInstanced(gl.TRIANGLE_STRIP, 0, 4, this.drawn);
    gl.bindVertexArray(null);

    gl.bindFramebuffer(gl.FRAMEBUFFER, null);
    gl.disable(gl.BLEND);
    gl.useProgram(screen.program);
    this.targets.forEach((target, i) => {
      gl.activeTexture(gl.TEXTURE3 + i);
      gl.bindTexture(gl.TEXTURE_2D, target);
    });
    gl.uniform1i(screen.at("picture"), 3);
    gl.uniform1i(screen.at("marks"), 4);
    gl.uniform3fv(screen.at("background"), this.background);
    gl.uniform2fv(screen.at("range"), this.range);
    gl.uniform1i(screen.at("look"), LOOKS[this.look]);
    gl.uniform1i(screen.at("part"), PARTS[this.part]);
    gl.drawArrays(gl.TRIANGLE_STRIP, 0, 3);
  }
}
