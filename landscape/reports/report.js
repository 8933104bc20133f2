"use strict";
(() => {
const all = (selector) => [...document.querySelectorAll(selector)];

// Pictures are saved as they are, or as the browser draws them
function save(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
all("[data-save]").forEach((button) => button.addEventListener("click", () => {
  const figure = button.closest("figure"), picture = figure.querySelector("img"), name = figure.dataset.name;
  if (button.dataset.save === "svg") {
    const bytes = Uint8Array.from(atob(picture.src.split(",")[1]), (letter) => letter.charCodeAt(0));
    return save(new Blob([bytes], { type: "image/svg+xml" }), `${name}.svg`);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * picture.naturalWidth, 2 * picture.naturalHeight];
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  canvas.toBlob((blob) => save(blob, `${name}.png`));
}));

// Surfaces turn together
const scenes = JSON.parse(document.getElementById("scenes").textContent);
const views = all("[data-scene]"), shown = new Set();
const START = { eye: { x: 1.3, y: -1.45, z: 1.6 }, center: { x: 0, y: 0, z: -0.1 }, up: { x: 0, y: 0, z: 1 } };
const CONFIG = {
  responsive: true, displaylogo: false, showSendToCloud: false, showEditInChartStudio: false,
  modeBarButtonsToRemove: ["sendDataToCloud", "hoverClosest3d", "tableRotation", "resetCameraLastSave3d"],
};
let camera = structuredClone(START);
async function draw(view) {
  const { data, scene } = scenes[view.dataset.scene];
  const axes = Object.fromEntries(["xaxis", "yaxis", "zaxis"].map((name) => [name, { ...scene[name], showbackground: false }]));
  const look = { ...axes, camera: structuredClone(camera), aspectmode: "manual", aspectratio: { x: 1, y: 1, z: 0.7 } };
  const layout = { margin: { l: 0, r: 0, t: 0, b: 0 }, showlegend: false, font: { size: 11 }, scene: look };
  await Plotly.newPlot(view, data, layout, CONFIG);
  view.on("plotly_relayouting", (event) => moved(event, view));
  view.on("plotly_relayout", (event) => moved(event, null)); // the moved view, too: it turns on after its last event
}
let [moving, waits, redrawn] = [false, null, []];
async function setCamera(next, mover) { // while one move is drawn, the last of those that come waits
  waits = { next, mover };
  if (moving) return;
  moving = true;
  while (waits) {
    redrawn = [...shown].filter((view) => view !== waits.mover);
    camera = waits.next;
    waits = null;
    await Promise.all(redrawn.map((view) => Plotly.relayout(view, { "scene.camera": structuredClone(camera) })));
  }
  [moving, redrawn] = [false, []];
}
function moved(event, view) {
  const next = event["scene.camera"];
  const same = (key) => JSON.stringify(next[key]) === JSON.stringify(camera[key]);
  if (next && !redrawn.includes(view) && (view || !["eye", "center", "up"].every(same))) setCamera(structuredClone(next), view);
}
const TURNS = {
  left: [-0.2, 0, 1], right: [0.2, 0, 1], up: [0, 0.15, 1], down: [0, -0.15, 1], in: [0, 0, 0.85], out: [0, 0, 1.18],
};
all("[data-turn]").forEach((button) => button.addEventListener("click", () => {
  if (button.dataset.turn === "reset") return setCamera(structuredClone(START), null);
  const { x, y, z } = camera.eye, [turn, tilt, zoom] = TURNS[button.dataset.turn], length = Math.hypot(x, y, z);
  const angle = Math.atan2(y, x) + turn, height = Math.min(1.5, Math.max(-1.2, Math.asin(z / length) + tilt));
  const unit = { x: Math.cos(height) * Math.cos(angle), y: Math.cos(height) * Math.sin(angle), z: Math.sin(height) };
  const eye = Object.fromEntries(Object.entries(unit).map(([axis, value]) => [axis, length * zoom * value]));
  return setCamera({ ...camera, eye }, null);
}));

// Those in sight are drawn, one after another: a browser draws few at once
function freed(canvas) { // whether it can draw; what it had for that is given back
  const context = canvas.getContext("webgl2") ?? canvas.getContext("webgl");
  context?.getExtension("WEBGL_lose_context")?.loseContext();
  return context !== null;
}
let last = Promise.resolve();
const sight = new IntersectionObserver((entries) => {
  entries.forEach(({ target, isIntersecting }) => {
    last = last.then(async () => {
      if (isIntersecting && shown.has(target)) return;
      if (isIntersecting) { await draw(target); shown.add(target); } else if (shown.delete(target)) {
        target.querySelectorAll("canvas").forEach(freed);
        Plotly.purge(target);
      }
    });
  });
});
const draws = views.length > 0 && freed(document.createElement("canvas"));
views.forEach((view) => {
  if (draws) sight.observe(view);
  else view.textContent = "This browser does not draw in three dimensions (it has no WebGL). The picture above shows the same numbers.";
});
})();
