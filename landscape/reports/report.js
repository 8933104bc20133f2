"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const find = (id) => document.getElementById(id);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const COLORS = data.colors ?? []; // those of the pictures
const SCALE = COLORS.map((color, k) => [k / (COLORS.length - 1), color]);
const CONFIG = {
  responsive: true, displaylogo: false, showSendToCloud: false, showEditInChartStudio: false,
  modeBarButtonsToRemove: ["sendDataToCloud", "select2d", "lasso2d", "autoScale2d", "hoverClosest3d", "tableRotation"],
};
const plain = (text) => { // Plotly's texts come with &, < and > escaped
  const area = document.createElement("textarea");
  area.innerHTML = text.replaceAll("<", "&lt;");
  return area.value;
};
const short = (value) => value === null ? "not finite" : Number(value.toPrecision(4)).toString();

// Light and dark
const wanted = matchMedia("(prefers-color-scheme: dark)");
const setTheme = (name) => { root.dataset.theme = name; drawn.forEach((figure, div) => draw(div, figure)); };
const drawn = new Map();
root.dataset.theme = wanted.matches ? "dark" : "light";
wanted.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
find("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));

function themed(layout) {
  const style = getComputedStyle(root);
  const [ink, line] = ["--ink", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: ink, automargin: true, title: { standoff: 6 } };
  const space = { ...axis, backgroundcolor: "rgba(0,0,0,0)", showbackground: false, color: ink };
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: COLORS, hovermode: "closest",
    font: { color: ink, size: 12, family: "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif" },
    hoverlabel: { namelength: -1 }, xaxis: axis, yaxis: axis, modebar: { orientation: "v" },
    legend: { orientation: "h", y: -0.22, yanchor: "top" }, scene: { xaxis: space, yaxis: space, zaxis: space },
  };
  const margin = { l: 56, r: 14, t: 12, b: 44 };
  return { showlegend: false, margin, ...layout, template: { layout: base } };
}

let smoothing = 0; // the weight of what is before, in an exponential moving average without its bias
function smoothed(trace) { // not the bands, and not the limits and learning rates
  if (!smoothing || trace.fill || trace.legendgroup || !trace.mode?.includes("lines")) return trace;
  let [sum, weight] = [0, 0];
  const y = trace.y.map((value) => {
    if (value === null) return null;
    [sum, weight] = [smoothing * sum + value, smoothing * weight + 1];
    return sum / weight;
  });
  return { ...trace, y };
}
const switched = new Set(); // the charts whose vertical scale is the other one than that of their figure
function draw(div, figure) {
  drawn.set(div, figure);
  const layout = structuredClone(figure.layout); // Plotly changes what it gets
  const { title, type } = layout.yaxis ?? {};
  if (switched.has(div)) layout.yaxis = type === "log" ? { title } : { title, type: "log", exponentformat: "power" };
  const traces = curves().includes(figure) ? figure.data.map(smoothed) : figure.data;
  return Plotly.react(div, traces, themed(layout), CONFIG);
}

// Surfaces
const scaleOf = (k) => data.groups[data.surfaces[k].group].scale;
const shown = (value, scale) => value === null ? null : scale.log ? Math.log10(value) : value;
const heights = (k) => data.surfaces[k].z.map((row) => row.map((value) => shown(value, scaleOf(k))));
function ticks(low, high, log) {
  if (!log) return {};
  const values = [];
  for (let power = Math.floor(low); power <= high; power++) {
    for (const digit of [1, 2, 5]) {
      const at = power + Math.log10(digit);
      if (at >= low && at <= high) values.push(at);
    }
  }
  return { tickvals: values, ticktext: values.map((at) => short(10 ** at)) };
}
function nearest(list, value) {
  let best = 0;
  list.forEach((other, k) => { if (Math.abs(other - value) < Math.abs(list[best] - value)) best = k; });
  return best;
}
function heightAt(k, x, y) { // bilinear; null outside the grid and where a corner is not finite
  const { x: xs, y: ys } = data.surfaces[k];
  const cell = (list, value) => {
    if (value < list[0] || value > list[list.length - 1]) return null;
    let i = list.findIndex((other) => other > value);
    i = (i < 0 ? list.length - 1 : i) - 1;
    return [i, (value - list[i]) / (list[i + 1] - list[i])];
  };
  const [across, up] = [cell(xs, x), cell(ys, y)];
  if (!across || !up) return null;
  const z = data.surfaces[k].z;
  const corners = [[0, 0], [0, 1], [1, 0], [1, 1]].map(([i, j]) => shown(z[up[0] + i][across[0] + j], scaleOf(k)));
  if (corners.some((corner) => corner === null)) return null;
  const [s, t] = [across[1], up[1]];
  return (corners[0] * (1 - s) + corners[1] * s) * (1 - t) + (corners[2] * (1 - s) + corners[3] * s) * t;
}
function markersOf(k) { // the traces of the weights that are marked: [name, mode, points]
  const surface = data.surfaces[k];
  const of = (...roles) => surface.markers.filter((marker) => roles.includes(marker.role));
  const path = surface.kind === "pca" ? surface.markers : [];
  return [
    ["trajectory", "lines+markers", path, "#D55E00", "circle"],
    ["learners", "markers", of("learner", "anchor"), "#D55E00", "circle"],
    ["w_a", "markers", of("mean"), "#E69F00", "star"],
    ["lowest grid point", "markers", [{ x: surface.lowest[0], y: surface.lowest[1], text: "lowest grid point" }], "#ffffff", "triangle-down"],
  ].filter(([, , points]) => points.length);
}
function contourTrace(k) {
  const surface = data.surfaces[k], scale = scaleOf(k);
  return {
    type: "contour", x: surface.x, y: surface.y, z: heights(k), zmin: scale.low, zmax: scale.high, zauto: false,
    autocontour: false, contours: { start: scale.start, end: scale.end, size: scale.size, coloring: "heatmap" },
    colorscale: SCALE, showscale: false, line: { width: 0.6, color: "rgba(0,0,0,0.55)" }, hoverinfo: "none", customdata: surface.z,
  };
}
function contourFigure(k) {
  const surface = data.surfaces[k];
  const points = markersOf(k).map(([name, mode, list, color, symbol]) => ({
    type: "scatter", mode, name, x: list.map((p) => p.x), y: list.map((p) => p.y), text: list.map((p) => p.text),
    hoverinfo: "text", marker: { color, symbol, size: symbol === "star" ? 13 : 8, line: { color: "#000", width: 1 } },
    line: { color, width: 1.5 },
  }));
  const range = (list) => [list[0], list[list.length - 1]];
  return {
    data: [contourTrace(k), ...points],
    layout: {
      xaxis: { range: range(surface.x), title: { text: surface.axes[0] }, nticks: 6, showgrid: false, mirror: true, showline: true },
      yaxis: { range: range(surface.y), title: { text: surface.axes[1] }, nticks: 6, showgrid: false, mirror: true, showline: true },
    },
  };
}
all("[data-scale]").forEach((box) => {
  const scale = scaleOf(Number(box.dataset.scale));
  const words = [0, 0.25, 0.5, 0.75, 1].map((share) => {
    const at = scale.low + share * (scale.high - scale.low);
    return short(scale.log ? 10 ** at : at);
  });
  const bar = document.createElement("i"), labels = document.createElement("span");
  bar.style.background = `linear-gradient(to right, ${COLORS.join(", ")})`;
  words[words.length - 1] += " or more";
  labels.append(...words.map((word) => Object.assign(document.createElement("span"), { textContent: word })));
  const signs = { "star": "★", "circle": "●", "triangle-down": "▽" };
  const marked = markersOf(Number(box.dataset.scale)).map(([name, , , , symbol]) => `; ${signs[symbol]} ${name}`);
  box.append(bar, labels, `loss (nat)${scale.log ? ", logarithmic" : ""}${marked.join("")}`);
});

// Linked cursors: one place for all contours of a group
function showCursor(figure, x, y) {
  const div = figure.querySelector(".plot"), full = div._fullLayout, k = Number(figure.dataset.surface);
  const surface = data.surfaces[k];
  let cursor = div.querySelector(".cursor");
  if (!cursor) {
    cursor = Object.assign(document.createElement("div"), { className: "cursor" });
    div.append(cursor);
  }
  figure.dataset.x = x;
  figure.dataset.y = y;
  const inside = full && [[full.xaxis, x], [full.yaxis, y]].every(([axis, at]) => {
    const place = axis.d2p(at);
    return place >= -1 && place <= axis._length + 1;
  });
  cursor.hidden = !inside;
  if (inside) {
    cursor.style.left = `${full.xaxis._offset + full.xaxis.d2p(x)}px`;
    cursor.style.top = `${full.yaxis._offset + full.yaxis.d2p(y)}px`;
  }
  const value = surface.z[nearest(surface.y, y)][nearest(surface.x, x)];
  figure.querySelector(".reading").textContent =
    inside ? `x = ${short(x)}, y = ${short(y)}: loss ${short(value)}` : `x = ${short(x)}, y = ${short(y)}: outside`;
}
function moveCursor(figure, x, y) {
  const linked = figure.closest("[data-linked]");
  (linked ? all("figure.contour", linked) : [figure]).forEach((other) => showCursor(other, x, y));
}
function enableCursor(figure) {
  const div = figure.querySelector(".plot"), surface = data.surfaces[Number(figure.dataset.surface)];
  div.on("plotly_hover", (event) => {
    const point = event.points.find((p) => p.data.type === "contour") ?? event.points[0];
    moveCursor(figure, point.x, point.y);
  });
  div.on("plotly_relayout", () => { if (figure.dataset.x) showCursor(figure, +figure.dataset.x, +figure.dataset.y); });
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (list, at, by) => list[Math.min(list.length - 1, Math.max(0, nearest(list, at) + by))];
    moveCursor(figure, next(surface.x, +(figure.dataset.x ?? 0), step[0]), next(surface.y, +(figure.dataset.y ?? 0), step[1]));
  });
}

// Three dimensions: at most two views, one camera
const CAMERA = { eye: { x: 0.95, y: -1.05, z: 1.6 }, center: { x: 0, y: 0, z: -0.12 }, up: { x: 0, y: 0, z: 1 } };
let camera = structuredClone(CAMERA);
function sceneFigure(k, other) {
  const surface = data.surfaces[k], scale = scaleOf(k), beside = other === null ? scale : scaleOf(other);
  const log = scale.log && beside.log;
  const [low, high] = [Math.min(scale.low, beside.low), Math.max(scale.high, beside.high)];
  const apart = scale.log !== beside.log; // a linear next to a logarithmic scale: each has its own
  const [bottom, top] = apart ? [scale.low, scale.high] : [low, high];
  const logged = apart ? scale.log : log;
  const margin = 0.02 * (top - bottom);
  const lift = (points) => points.map((p) => heightAt(k, p.x, p.y)).map((z) => z === null ? null : z + margin);
  const way = data.scrubbers.find((scrubber) => scrubber.surface === k);
  const means = way ? way.frames.map((frame) => ({ x: frame.mean[0], y: frame.mean[1], text: `w_a, step ${frame.step}` })) : [];
  const lists = [...markersOf(k).filter(([name]) => name !== "trajectory" || !means.length)];
  if (means.length) lists.push(["trajectory", "lines+markers", means, "#D55E00", "circle"]);
  const points = lists.map(([name, mode, list, color, symbol]) => ({
    type: "scatter3d", mode, name, x: list.map((p) => p.x), y: list.map((p) => p.y), z: lift(list),
    text: list.map((p) => p.text), hoverinfo: "text",
    marker: { color, size: name === "trajectory" ? 3 : 5, symbol: symbol === "star" ? "diamond" : "circle", line: { color: "#000", width: 1 } },
    line: { color, width: 5 },
  }));
  const sheet = {
    type: "surface", x: surface.x, y: surface.y, z: heights(k), cmin: bottom, cmax: top, colorscale: SCALE, showscale: false,
    lighting: { ambient: 0.7, diffuse: 0.35, specular: 0.03, roughness: 0.9, fresnel: 0 }, // no color becomes white
    lightposition: { x: -1000, y: -500, z: 3000 }, customdata: surface.z,
    hovertemplate: "x = %{x:.4g}<br>y = %{y:.4g}<br>loss %{customdata:.4g}<extra></extra>",
  };
  const axis = (list, title) => ({ range: [list[0], list[list.length - 1]], nticks: 5, title: { text: title } });
  const layout = {
    margin: { l: 0, r: 0, t: 26, b: 0 }, title: { text: surface.label, font: { size: 13 }, y: 0.98 },
    scene: {
      camera, aspectmode: "manual", aspectratio: { x: 1, y: 1, z: 0.7 },
      xaxis: axis(surface.x, "x"), yaxis: axis(surface.y, "y"),
      zaxis: { range: [bottom, top + 2 * margin], title: { text: logged ? "loss (log)" : "loss" }, ...ticks(bottom, top, logged), nticks: 5 },
    },
  };
  return { data: [sheet, ...points], layout };
}
function setUpScenes() {
  const [a, b] = [find("scene-a"), find("scene-b")];
  if (!a) return [];
  const probe = document.createElement("canvas");
  const context = probe.getContext("webgl2") ?? probe.getContext("webgl");
  if (!context) {
    find("no-webgl").hidden = false;
    all(".scenes, #space .controls").forEach((box) => { box.hidden = true; box.style.display = "none"; });
    return [];
  }
  context.getExtension("WEBGL_lose_context")?.loseContext();
  const options = data.surfaces.map((surface, k) => {
    const many = data.groups.length > 1 ? ` – ${plain(data.groups[surface.group].title)}` : "";
    return new Option(plain(surface.label) + many, k);
  });
  options.sort((p, q) => data.surfaces[p.value].group - data.surfaces[q.value].group);
  a.append(...options.map((option) => option.cloneNode(true)));
  b.append(new Option("none", ""), ...options);
  const beside = options.filter((option) => data.surfaces[option.value].group === data.surfaces[options[0].value].group);
  const word = (option) => option.text.split(/[ ,]/)[0]; // of a label: the algorithm
  b.value = (beside.find((option) => word(option) !== word(beside[0])) ?? beside[1])?.value ?? "";
  const views = [find("plot-a"), find("plot-b")];
  const chosen = () => [Number(a.value), b.value === "" ? null : Number(b.value)];
  const update = async () => {
    const [left, right] = chosen();
    views[1].parentElement.hidden = right === null;
    await draw(views[0], sceneFigure(left, right));
    views[0].setAttribute("aria-label", `The loss surface of ${plain(data.surfaces[left].label)} in three dimensions`);
    if (right === null) { Plotly.purge(views[1]); drawn.delete(views[1]); } else {
      await draw(views[1], sceneFigure(right, left));
      views[1].setAttribute("aria-label", `The loss surface of ${plain(data.surfaces[right].label)} in three dimensions`);
    }
    await Promise.all(views.filter((view) => drawn.has(view)).map((view) => Plotly.Plots.resize(view)));
    views.forEach(follow);
  };
  let [moving, waits, redrawn] = [false, null, []];
  const setCamera = async (next, from) => { // while one move is drawn, the last of those that come waits
    waits = { next, from };
    if (moving) return;
    moving = true;
    while (waits) {
      const { from: mover } = waits;
      redrawn = views.filter((view) => view !== mover && drawn.has(view));
      camera = waits.next;
      waits = null;
      drawn.forEach((figure, view) => { if (views.includes(view)) figure.layout.scene.camera = camera; });
      await Promise.all(redrawn.map((view) => Plotly.relayout(view, { "scene.camera": structuredClone(camera) })));
    }
    [moving, redrawn] = [false, []];
  };
  const same = (p, q) => ["eye", "center", "up"].every((key) => JSON.stringify(p[key]) === JSON.stringify(q[key]));
  const follow = (view) => {
    if (view.dataset.followed || !drawn.has(view)) return;
    view.dataset.followed = "1";
    const moved = (event, from) => {
      const next = event["scene.camera"];
      if (next && !redrawn.includes(view) && !(from && same(next, camera))) setCamera(structuredClone(next), from);
    };
    view.on("plotly_relayouting", (event) => moved(event, view));
    view.on("plotly_relayout", (event) => moved(event, null)); // the moved view, too: it turns on after its last event
  };
  [a, b].forEach((select) => select.addEventListener("change", update));
  all("[data-turn]").forEach((button) => button.addEventListener("click", () => {
    const { x, y, z } = camera.eye, [turn, tilt, zoom] = {
      left: [-0.2, 0, 1], right: [0.2, 0, 1], up: [0, 0.15, 1], down: [0, -0.15, 1], in: [0, 0, 0.85], out: [0, 0, 1.18], reset: [0, 0, 1],
    }[button.dataset.turn];
    if (button.dataset.turn === "reset") return setCamera(structuredClone(CAMERA));
    const radius = Math.hypot(x, y, z) * zoom, angle = Math.atan2(y, x) + turn;
    const height = Math.min(1.5, Math.max(-1.2, Math.asin(z / Math.hypot(x, y, z)) + tilt));
    const eye = { x: radius * Math.cos(height) * Math.cos(angle), y: radius * Math.cos(height) * Math.sin(angle), z: radius * Math.sin(height) };
    return setCamera({ ...camera, eye });
  }));
  return [update];
}

// The learners along a run
function setUpScrubber() {
  const which = find("scrub-which");
  if (!which) return [];
  const [slider, close, text, div, play] = ["scrub", "scrub-close", "scrub-text", "plot-scrub", "scrub-play"].map(find);
  which.append(...data.scrubbers.map((scrubber, k) => new Option(plain(scrubber.name), k)));
  const current = () => data.scrubbers[Number(which.value)];
  const dots = (points, more) => ({ type: "scatter", x: points.map((p) => p[0]), y: points.map((p) => p[1]), ...more });
  function ranges(scrubber, frame) {
    const surface = data.surfaces[scrubber.surface];
    if (close.checked) {
      const reach = 1.4 * Math.max(1e-9, ...frame.points.map((p) => Math.max(...p.map((at, i) => Math.abs(at - frame.mean[i])))));
      return frame.mean.map((at) => [at - reach, at + reach]);
    }
    return [surface.x, surface.y].map((grid, i) => {
      const every = scrubber.frames.flatMap((f) => f.points.map((p) => p[i]));
      const [low, high] = [Math.min(grid[0], ...every), Math.max(grid[grid.length - 1], ...every)];
      return [low - 0.03 * (high - low), high + 0.03 * (high - low)];
    });
  }
  function update() {
    const scrubber = current(), surface = data.surfaces[scrubber.surface], frame = scrubber.frames[Number(slider.value)];
    const before = scrubber.frames.slice(0, Number(slider.value) + 1).map((f) => f.mean);
    const [x, y] = ranges(scrubber, frame);
    text.textContent = frame.text;
    slider.setAttribute("aria-valuetext", frame.text);
    div.setAttribute("aria-label", `Learners of ${plain(scrubber.name)} at step ${frame.step}, with the contour of the loss beneath`);
    const edge = { color: "#000", width: 1 };
    return draw(div, {
      data: [
        contourTrace(scrubber.surface),
        dots(before, { mode: "lines", name: "way of w_a", line: { color: "#E69F00", width: 2 } }),
        dots(frame.points, { mode: "markers", name: "learners", marker: { color: "#D55E00", size: 10, line: edge }, text: frame.points.map((p, j) => `learner ${j}`), hoverinfo: "text" }),
        dots([frame.mean], { mode: "markers", name: "w_a", marker: { color: "#E69F00", symbol: "star", size: 15, line: edge } }),
      ],
      layout: {
        xaxis: { range: x, title: { text: surface.axes[0] } }, yaxis: { range: y, title: { text: surface.axes[1] } },
      },
    });
  }
  const choose = (at) => { slider.value = at; return update(); };
  const restart = () => { slider.max = current().frames.length - 1; return choose(slider.max); };
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.setAttribute("aria-pressed", "false"); play.textContent = "Play"; };
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (slider.value === slider.max) choose(0);
    play.setAttribute("aria-pressed", "true");
    play.textContent = "Pause";
    timer = setInterval(() => { if (Number(slider.value) >= Number(slider.max)) stop(); else choose(Number(slider.value) + 1); }, 250);
  });
  which.addEventListener("change", () => { stop(); restart(); });
  slider.addEventListener("input", update);
  close.addEventListener("change", update);
  find("scrub-back").addEventListener("click", () => choose(Number(slider.value) - 1));
  find("scrub-on").addEventListener("click", () => choose(Number(slider.value) + 1));
  return [restart];
}

// Runs that are shown, and tables
function named(box, { name, color, dash }) { // a line as charts draw it, and its name
  const dashes = { dash: "6 4", dot: "2 3", dashdot: "6 3 2 3", longdash: "10 4" }[dash] ?? "none";
  box.insertAdjacentHTML("beforeend", `<svg viewBox="0 0 36 8" aria-hidden="true"><line x1="0" x2="36" y1="4" y2="4" stroke="${color}" stroke-width="3" stroke-dasharray="${dashes}"/></svg>`);
  box.append(name);
}
all("[data-key]").forEach((box) => data.key.forEach((line) => {
  const item = document.createElement("span");
  named(item, line);
  box.append(item);
}));
all("[data-runs]").forEach((box) => data.runs.forEach((run) => {
  const label = document.createElement("label"), input = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
  label.append(input);
  named(label, run);
  box.append(label);
  input.addEventListener("change", () => { run.hidden = !input.checked; redraw(); });
}));
const [single, slider] = [find("single"), find("smoothing")];
const curves = () => Object.entries(data.charts ?? {}).filter(([name]) => name.startsWith("curve-")).map(([, chart]) => chart.figure);
function choose() { // of a setting with a band, single runs are shown on demand
  curves().forEach((figure) => figure.data.forEach((trace) => {
    const run = data.runs[trace.meta];
    if (run) trace.visible = !run.hidden && (!run.grouped || single.checked);
  }));
  all("[data-runs]").forEach((box) => { box.hidden = !single.checked && data.runs.every((run) => run.grouped); });
}
function redraw() {
  choose();
  const shownNow = curves();
  drawn.forEach((figure, div) => { if (shownNow.includes(figure)) draw(div, figure); });
}
if (single) {
  find("single-label").hidden = !data.runs.some((run) => run.grouped);
  single.addEventListener("change", redraw);
  slider.addEventListener("input", () => { smoothing = Number(slider.value); redraw(); });
  choose();
}

// Pictures and numbers of a chart, and its scale
function save(text, name) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
function csv(figure) {
  const cell = (value) => typeof value === "string" ? `"${plain(value).replaceAll('"', '""')}"` : value ?? "";
  const rows = figure.data.flatMap((trace) => Array.isArray(trace.z?.[0])
    ? trace.y.flatMap((y, i) => trace.x.map((x, j) => [trace.name ?? "loss", x, y, (trace.customdata ?? trace.z)[i][j]]))
    : [...(trace.y ?? [])].map((y, i) => [trace.name ?? "", trace.x?.[i] ?? i, y, ""]));
  return [["name", "x", "y", "z"], ...rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
function toolsOf(div, name, more = {}) {
  const image = (format) => Plotly.downloadImage(div, { format, filename: name, scale: format === "png" ? 2 : 1 });
  const tools = { PNG: () => image("png"), SVG: () => image("svg"), CSV: () => save(csv(drawn.get(div)), `${name}.csv`), ...more };
  const row = Object.assign(document.createElement("div"), { className: "tools" });
  row.append(...Object.entries(tools).map(([text, run]) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: text });
    button.setAttribute("aria-label", text === "Log" ? "Logarithmic or linear" : `Save as ${text}`);
    button.addEventListener("click", () => { if (drawn.has(div)) run(); });
    return button;
  }));
  return row;
}
all("[data-chart]").forEach((box) => {
  const [div, name] = [box.querySelector(".plot"), box.dataset.chart];
  const log = { Log: () => { if (!switched.delete(div)) switched.add(div); draw(div, drawn.get(div)); } };
  box.querySelector("figcaption").after(toolsOf(div, name, name.startsWith("curve-") ? log : {}));
});
all(".scene, .scrubbed").forEach((div) => div.before(toolsOf(div, div.id)));
all("th button").forEach((button) => button.addEventListener("click", () => {
  const th = button.parentElement, place = [...th.parentElement.children].indexOf(th), body = th.closest("table").tBodies[0];
  const down = th.getAttribute("aria-sort") === "ascending";
  all("th", th.parentElement).forEach((other) => other.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => {
    const cell = row.children[place];
    return "key" in cell.dataset ? (Number.isNaN(Number(cell.dataset.key)) ? -Infinity : Number(cell.dataset.key)) : cell.textContent;
  };
  const order = (p, q) => typeof p === "number" && typeof q === "number" ? p - q : String(p).localeCompare(String(q));
  body.append(...[...body.rows].sort((p, q) => (down ? -1 : 1) * (order(key(p), key(q)) || 0)));
}));

// Charts are drawn one after another, those in sight first, so that the page can be read meanwhile
const waiting = all("[data-chart]").map((figure) => {
  const { figure: chart } = data.charts[figure.dataset.chart], div = figure.querySelector(".plot");
  if (!("surface" in chart)) return { div, run: () => draw(div, chart) };
  figure.dataset.surface = chart.surface;
  return { div, run: async () => { await draw(div, contourFigure(chart.surface)); enableCursor(figure); } };
});
setUpScenes().forEach((run) => waiting.push({ div: find("plot-a"), run }));
setUpScrubber().forEach((run) => waiting.push({ div: find("plot-scrub"), run }));
const inSight = ({ div }) => { const box = div.getBoundingClientRect(); return box.bottom > 0 && box.top < innerHeight; };
const rest = () => new Promise((done) => (window.requestIdleCallback ?? ((f) => setTimeout(f, 1)))(done, { timeout: 100 }));
(async () => {
  while (waiting.length) {
    const next = Math.max(0, waiting.findIndex(inSight));
    const [{ run }] = waiting.splice(next, 1);
    await run();
    await rest();
  }
  root.dataset.ready = "1";
})();
let before = "light";
addEventListener("beforeprint", () => {
  before = root.dataset.theme;
  if (before === "dark") setTheme("light");
});
addEventListener("afterprint", () => { if (before === "dark") setTheme("dark"); });
})();
