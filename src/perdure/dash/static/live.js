// Keeps a page of `perdure dash` fresh. The server makes all HTML; this puts it in place, draws the
// curves, moves through time, and asks before it steers.
"use strict";

const query = () => new URLSearchParams(location.search);
const here = location.pathname.replace(/\/$/, "");
const byId = (id) => document.getElementById(id);

// --- news --------------------------------------------------------------------------------------

let stream = null;
let heard = Infinity;
let again = 0;
const QUIET_MS = 2000 * Number(byId("lost")?.dataset.beatS); // Two beats of the server.

/** Put a section's HTML in place of the old one, element by element: what is open stays open. */
function place(name, html) {
  const target = byId(`s-${name}`);
  if (!target) return;
  const panel = byId(`p-${name}`);
  if (panel) panel.hidden = !html;
  const log = target.querySelector(".log");
  const atEnd = !log || log.scrollTop + log.clientHeight > log.scrollHeight - 40;
  Idiomorph.morph(target, html, {
    morphStyle: "innerHTML",
    callbacks: {
      beforeNodeMorphed(old, fresh) {
        if (old.nodeType !== 1 || fresh.nodeType !== 1) return true;
        if (old.isEqualNode(fresh)) return false; // Most rows are what they were: one look at each.
        if (old.matches("figure.drawn") && fresh.dataset.curve === old.dataset.curve) return false;
        if (old.tagName === "DETAILS" && old.open) fresh.open = true;
        if (!old.matches("svg.plot") || !fresh.matches("svg.plot")) return true;
        // Nothing in a drawing is open or in focus: its marks are not compared one by one.
        for (const { name, value } of fresh.attributes) old.setAttribute(name, value);
        old.replaceChildren(...fresh.childNodes);
        return false;
      },
    },
  });
  if (name === "curves") drawCurves();
  const fresh = target.querySelector(".log");
  if (fresh && atEnd) fresh.scrollTop = fresh.scrollHeight;
}

function listen() {
  clearTimeout(again);
  stream?.close();
  stream = null;
  if (document.hidden || !byId("lost")) return; // A browser keeps few connections open to one
  // server, and a page of what is over has no news.
  follow(); // The bar is of what was shown before: only the past is taken from it.
  heard = Date.now();
  stream = new EventSource(`${here}/live${location.search}`);
  stream.addEventListener("sections", (event) => {
    heard = Date.now();
    say("");
    for (const [name, html] of Object.entries(JSON.parse(event.data))) place(name, html);
    follow();
  });
  stream.addEventListener("whole", () => {
    stream.close();
    heard = Infinity;
  });
  stream.addEventListener("trouble", (event) => {
    stream.close();
    heard = Infinity;
    say(`${JSON.parse(event.data)} What is shown is how it was.`);
    again = setTimeout(listen, 5000);
  });
  stream.onerror = () => {
    if (stream.readyState === EventSource.CLOSED) again = setTimeout(listen, 3000);
    if (heard !== Infinity) say("No answer from perdure dash: what is shown is how it was.");
  };
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) heard = Infinity;
  listen();
});

function say(text) {
  const box = byId("lost");
  if (!box) return;
  box.textContent = text;
  box.hidden = !text;
}

setInterval(() => {
  if (Date.now() - heard > QUIET_MS) say("Nothing was heard for a while: what is shown is how it was.");
}, 2000);

/** Show something else of the same job, at an address of its own. */
function go(search, replace = false) {
  const address = here + (search.startsWith("?") ? search : `?${search}`);
  history[replace ? "replaceState" : "pushState"](null, "", address);
  listen();
}

addEventListener("popstate", () => {
  listen();
  drawCurves();
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-view]");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(new URL(link.href).search);
});

// --- time --------------------------------------------------------------------------------------

const scrubber = byId("scrubber");
let scrubbing = 0;

/** Let the scrubber stand where the page is; its end goes on with the job while that is now. */
function follow() {
  const wall = byId("s-bar")?.querySelector("[data-wall]")?.dataset.wall;
  if (!scrubber) return;
  if (query().has("at")) {
    if (document.activeElement !== scrubber) scrubber.value = query().get("at");
    return;
  }
  if (!wall || !stream) return;
  scrubber.max = wall;
  scrubber.value = wall;
}

function moveTo(seconds) {
  const asked = query();
  if (seconds >= Number(scrubber.max) - 0.05) asked.delete("at");
  else asked.set("at", Math.max(0, seconds).toFixed(1));
  go(asked.toString(), true);
}

scrubber?.addEventListener("input", () => {
  clearTimeout(scrubbing);
  scrubbing = setTimeout(() => moveTo(Number(scrubber.value)), 120);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const at = Number(query().get("at") ?? scrubber?.max ?? 0);
  const acts = {
    "/": () => document.querySelector("#search input[type=search]")?.focus(),
    n: () => moveTo(Infinity),
    ArrowLeft: () => moveTo(at - 1),
    ArrowRight: () => moveTo(at + 1),
    i: () => byId("s-incidents")?.querySelector("a[data-view]")?.click(),
    j: () => location.assign("/"),
    r: () => location.assign("/results"),
    "?": () => byId("keys")?.showModal(),
  };
  const act = acts[event.key];
  if (!act || !(scrubber || "jr".includes(event.key))) return;
  event.preventDefault();
  act();
});

/** Zoom into a stretch of the ranks' time by dragging over it. */
let drag = null;
document.addEventListener("pointerdown", (event) => {
  const plot = event.target.closest("#s-ranktime svg.plot");
  if (plot) drag = { plot, x: event.clientX };
});
document.addEventListener("pointercancel", () => { drag = null; }); // A finger that scrolls.
document.addEventListener("pointerup", (event) => {
  if (!drag?.plot.isConnected) drag = null; // Another was put in its place.
  if (!drag) return;
  const { plot, x } = drag;
  drag = null;
  if (Math.abs(event.clientX - x) < 8) return;
  const box = plot.getBoundingClientRect();
  const [left, right] = [Number(plot.dataset.left), Number(plot.dataset.right)];
  const { width } = plot.viewBox.baseVal;
  const asked = query();
  const begin = Number(asked.get("begin") ?? 0);
  const end = Number(asked.get("end") ?? scrubber.max);
  const at = (clientX) => {
    const part = (((clientX - box.left) / box.width) * width - left) / (width - left - right);
    return begin + Math.min(1, Math.max(0, part)) * (end - begin);
  };
  const [a, b] = [at(x), at(event.clientX)].sort((p, q) => p - q);
  asked.set("begin", a.toFixed(2));
  asked.set("end", b.toFixed(2));
  go(asked.toString());
});

// --- curves ------------------------------------------------------------------------------------

const plots = new Map(); // Name of a curve -> its uPlot.
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ownOf = (curves, name) => (Object.hasOwn(curves, name) ? curves[name] : undefined);
let drawing = 0;
let drawn = 0;

function drawCurves() {
  clearTimeout(drawing);
  drawing = setTimeout(draw, 150);
}

async function fetchCurves(names, job) {
  const asked = new URLSearchParams(names.map((name) => ["name", name]));
  if (query().has("at") && !job) asked.set("at", query().get("at"));
  const path = job ? `/jobs/${encodeURIComponent(job)}` : here;
  const answer = await fetch(`${path}/curves?${asked}`);
  return answer.ok ? answer.json() : { curves: {}, marks: [], checkpoints: [] };
}

async function draw() {
  const figures = [...document.querySelectorAll("figure.curve")];
  if (!figures.length || typeof uPlot === "undefined") return;
  const beside = byId("beside")?.value;
  const names = figures.map((figure) => figure.dataset.curve);
  const round = ++drawn;
  const [own, other] = await Promise.all([fetchCurves(names), beside ? fetchCurves(names, beside) : null]);
  if (round !== drawn) return;
  for (const [name, plot] of plots) {
    if (plot.root.isConnected) continue;
    plot.destroy();
    plots.delete(name);
  }
  for (const figure of figures) {
    if (!figure.isConnected) continue;
    const name = figure.dataset.curve;
    const mine = ownOf(own.curves, name);
    if (!mine || mine.x.length < 2) continue;
    const theirs = other && ownOf(other.curves, name);
    const data = theirs ? uPlot.join([[mine.x, mine.y], [theirs.x, theirs.y]]) : [mine.x, mine.y];
    const log = byId("log-scale")?.checked ?? false;
    const shape = `${log}|${beside ?? ""}|${Boolean(theirs)}`;
    const known = plots.get(name);
    if (known && figure.contains(known.root) && known.shape === shape) {
      known.marks = own;
      known.setData(data, !known.zoomed);
      if (known.zoomed) known.redraw();
      continue;
    }
    known?.destroy();
    const plot = makePlot(figure, name, data, own, { log, beside: theirs ? beside : "" });
    plot.shape = shape;
    plots.set(name, plot);
  }
}

/** Return a tick in as many digits as tell it from the next one, `step` away. */
function showNumber(value, step) {
  if (value === null) return "";
  const size = Math.abs(value);
  const digits = size > step ? Math.min(12, Math.ceil(Math.log10(size / step)) + 1) : 1;
  const rounded = Number(value.toPrecision(digits));
  const long = size && (size < 1e-4 || size >= 1e6);
  return long ? rounded.toExponential().replace("e+", "e") : String(rounded);
}

function makePlot(figure, name, data, marks, { log, beside }) {
  figure.querySelector("svg")?.remove();
  figure.querySelector(".uplot")?.remove();
  figure.classList.add("drawn");
  const axis = { stroke: style("--soft"), grid: { stroke: style("--edge"), width: 1 }, ticks: { show: false } };
  const series = [{ label: "step" }, { label: name, stroke: style("--curve"), width: 1.6 }];
  if (beside) series.push({ label: beside, stroke: style("--warn"), width: 1.4, spanGaps: true });
  if (beside) series[1].spanGaps = true;
  const options = {
    width: Math.max(280, figure.clientWidth),
    height: 240,
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [axis, { ...axis, size: (u, words) => 20 + 7 * Math.max(4, ...(words ?? []).map((word) => word.length)), values: (u, ticks, axis, space, step) => ticks.map((tick) => showNumber(tick, step)) }],
    series,
    cursor: { sync: { key: "curves" } },
    hooks: {
      draw: [(u) => drawMarks(u)],
      setCursor: [(u) => tellMark(u, figure)],
      setSelect: [(u) => { u.zoomed = true; }],
      setScale: [(u, key) => {
        const x = u.data[0];
        if (key === "x") u.zoomed = u.scales.x.min > x[0] || u.scales.x.max < x[x.length - 1];
      }],
    },
  };
  return new uPlot(options, data, (u, init) => {
    u.marks = marks;
    figure.append(u.root);
    init();
  });
}

/** Draw incidents, changes and remarks as lines, checkpoints as triangles at the bottom. */
function drawMarks(u) {
  if (!u.marks) return;
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.setLineDash([4, 3]);
  for (const mark of u.marks.marks) {
    const x = u.valToPos(mark.x, "x", true);
    ctx.strokeStyle = ctx.fillStyle = mark.color;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.fillStyle = u.marks.checkpoint_color;
  const foot = bbox.top + bbox.height;
  const size = 4 * devicePixelRatio;
  for (const step of u.marks.checkpoints) {
    const x = u.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x - size, foot);
    ctx.lineTo(x + size, foot);
    ctx.lineTo(x, foot - 1.6 * size);
    ctx.fill();
  }
  ctx.restore();
}

/** Say what a mark under the pointer is. */
function tellMark(u, figure) {
  let box = figure.querySelector(".mark");
  if (!box) {
    box = document.createElement("p");
    box.className = "mark soft";
    figure.append(box);
  }
  const at = u.cursor.left;
  const near = at < 0 ? [] : (u.marks?.marks ?? []).filter((m) => Math.abs(u.valToPos(m.x, "x") - at) < 6);
  box.textContent = near.map((m) => m.label).join("; ");
}

addEventListener("resize", () => {
  for (const [name, plot] of plots) {
    const figure = document.querySelector(`figure.curve[data-curve="${CSS.escape(name)}"]`);
    if (figure) plot.setSize({ width: Math.max(280, figure.clientWidth), height: 240 });
  }
});
byId("log-scale")?.addEventListener("change", draw);
byId("beside")?.addEventListener("change", draw);
byId("search")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const asked = query();
  const text = new FormData(event.target).get("search");
  if (text) asked.set("search", text);
  else asked.delete("search");
  go(asked.toString());
});

// --- steering ----------------------------------------------------------------------------------

async function ask(act) {
  try {
    const answer = await fetch(`${here}/ask`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(act),
    });
    return await answer.json();
  } catch (error) {
    return { ok: false, text: `No answer from perdure dash: ${error.message}` };
  }
}

let asking = 0; // Answers to what was asked before are nobody's any more.
let typing = 0;
let agreed = false; // Enter was pressed behind a typed value whose preview is still to come.

/** Say what a verb would do, and have it done once that was read and agreed to. */
async function steer(button) {
  const { verb, target = "", key = "", value = "", field, label } = button.dataset;
  const dialog = byId("ask");
  const said = byId("ask-said");
  const yes = byId("ask-yes");
  byId("ask-title").textContent = `${verb[0].toUpperCase()}${verb.slice(1)} ${target.replace(":", " ") || key}`.trim();
  const fields = byId("ask-fields");
  fields.replaceChildren();
  let input = null;
  if (field) {
    const wrapper = document.createElement("label");
    wrapper.textContent = `${label} `;
    input = document.createElement("input");
    input.value = value;
    input.required = true;
    input.maxLength = 500;
    wrapper.append(input);
    fields.append(wrapper);
  }
  const { run = "" } = byId("s-bar").querySelector("[data-run]")?.dataset ?? {}; // As it is seen now.
  const act = (preview) => {
    const asked = { verb, preview, run };
    if (target) asked.target = target;
    if (key) asked.key = key;
    if (input) asked[field] = input.value;
    return asked;
  };
  const preview = async () => {
    const mine = ++asking;
    yes.disabled = true;
    said.textContent = "Asking what it would do …";
    const answer = await ask(act(true));
    if (mine !== asking) return;
    said.textContent = answer.text;
    said.className = answer.ok ? "" : "bad";
    yes.disabled = !answer.ok;
    if (agreed && dialog.open) yes.click();
    agreed = false;
  };
  clearTimeout(typing);
  agreed = false;
  input?.addEventListener("input", () => {
    asking++; // The preview of the value before is nobody's any more.
    yes.disabled = true;
    agreed = false;
    clearTimeout(typing);
    typing = setTimeout(preview, 300);
  });
  asking++;
  yes.disabled = true;
  said.textContent = said.className = ""; // Of the dialog before.
  dialog.showModal();
  (input ?? byId("ask-title")).focus();
  yes.onclick = async (event) => {
    event.preventDefault();
    yes.disabled = true;
    said.textContent = "It is being done …";
    const mine = ++asking;
    const answer = await ask(act(false));
    if (mine !== asking) return;
    said.textContent = answer.text;
    said.className = answer.ok ? "good" : "bad";
    byId("ask-no").textContent = "Close";
    if (answer.ok) byId("ask-no").focus();
  };
  byId("ask-no").textContent = "Cancel";
  if (!input || input.value) await preview();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-verb]");
  if (button) steer(button);
});
byId("ask-no")?.addEventListener("click", () => byId("ask").close());
byId("ask")?.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || event.target.id === "ask-no") return;
  event.preventDefault();
  if (event.repeat) return; // The key that has opened the dialog is still held.
  agreed = event.target.matches("input") && byId("ask-yes").disabled;
  byId("ask-yes").click();
});

listen();
drawCurves();
