"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
let graph = data.graphs[0];

// ---- small helpers --------------------------------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function svg(tag, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) { count /= 1024; unit++; }
  return unit ? `${count.toFixed(2)} ${units[unit]}` : `${count} B`;
}

// A table whose headers sort it. columns: [title, row => value, value => text]; numbers stand on the right.
function table(columns, rows, onclick = null) {
  const body = element("tbody");
  const head = element("tr");
  const fill = sorted => body.replaceChildren(...sorted.map(row => {
    const line = element("tr", { "data-text": JSON.stringify(row).toLowerCase() });
    for (const [, value, shown] of columns) {
      const v = value(row);
      const cell = element("td", {}, String(shown ? shown(v) : v ?? ""));
      if (typeof v === "number") cell.className = "number";
      if (v === "fp8" || v === "bf16") cell.className = v;
      line.append(cell);
    }
    if (onclick) { line.style.cursor = "pointer"; line.onclick = () => onclick(row); }
    return line;
  }));
  columns.forEach(([title, value], i) => {
    const cell = element("th", {}, title);
    cell.onclick = () => {
      const up = cell.dataset.order !== "up";
      for (const other of head.children) delete other.dataset.order;
      cell.dataset.order = up ? "up" : "down";
      const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
      fill([...rows].sort((a, b) => (up ? 1 : -1) * order(value(a), value(b))));
      search();
    };
    head.append(cell);
  });
  fill(rows);
  return element("table", {}, element("thead", {}, head), body);
}

// ---- summary --------------------------------------------------------------------------------------------------------

function card(number, text, share = null) {
  const made = element("div", { class: "card" }, element("b", {}, number), element("span", {}, text));
  if (share !== null) made.append(element("div", { class: "bar" }, element("i", { style: `width:${100 * share}%` })));
  return made;
}

function showSummary() {
  const t = data.totals;
  const cards = [card(`${(100 * t.share).toFixed(1)} %`, `of the matmuls' FLOPs in FP8: ${t.fp8} of ${t.matmuls} matmuls`, t.share)];
  if (t.saved) cards.push(card(bytes(t.saved_after), `saved for backward, of ${bytes(t.saved_before)}`, t.saved_after / t.saved_before));
  if (t.milliseconds_bf16) cards.push(card(`${t.milliseconds_decided.toPrecision(3)} ms`, `estimated in matmuls, of ${t.milliseconds_bf16.toPrecision(3)} ms in BF16`));
  if (t.kernels) cards.push(card(String(t.kernels), `generated kernels, which read and write ${bytes(t.moved)}`));
  if (t.states) cards.push(card(bytes(t.states_after), `optimizer states, of ${bytes(t.states_before)}: ${t.states_8bit} of ${t.states} in 8 bits`, t.states_after / t.states_before));
  $("cards").replaceChildren(...cards);
  $("lines").textContent = [graph.title, ...graph.summary, "", `options: ${graph.options}`,
    Object.entries(data.versions).map(v => v.join(" ")).join(", ")].join("\n");
  $("failures").replaceChildren(...graph.failures.map(f => element("div", { class: "failure" },
    element("b", {}, `Failed in ${f.step} (${f.half}): `), f.why,
    element("details", {}, element("summary", {}, "Traceback"), element("pre", {}, f.trace)))));
}

// ---- model ----------------------------------------------------------------------------------------------------------

function showTree() {
  const root = { children: new Map(), rows: [] };
  for (const row of graph.matmuls) {
    let at = root;
    for (const part of splitPath(row.path)) {
      if (!at.children.has(part)) at.children.set(part, { children: new Map(), rows: [] });
      at = at.children.get(part);
    }
    at.rows.push(row);
  }
  $("tree").replaceChildren(branch("model", root, 0));
}

function splitPath(path) {
  const merged = path.indexOf("(");
  const head = (merged < 0 ? path : path.slice(0, merged)).split(".").filter(Boolean);
  return merged < 0 ? head : [...head, path.slice(merged)];
}

function count(node) {
  let [fp8, all] = [node.rows.filter(r => r.decision === "fp8").length, node.rows.length];
  for (const child of node.children.values()) { const c = count(child); fp8 += c[0]; all += c[1]; }
  return [fp8, all];
}

function branch(name, node, depth) {
  const [fp8, all] = count(node);
  const label = element("summary", {}, element("b", {}, name), " ", element("small", {}, `${fp8} of ${all} in FP8`));
  const made = element("details", depth < 3 ? { open: "" } : {}, label);
  if (node.rows.length) made.append(leaf(node.rows));
  for (const [part, child] of node.children) made.append(branch(part, child, depth + 1));
  return made;
}

function leaf(rows) {
  const lines = rows.map(r => {
    const cells = [r.role, `${r.m}×${r.n}×${r.k}`, r.decision, r.left && `${r.left} × ${r.right}`, r.reason];
    const line = element("tr", { "data-text": JSON.stringify(r).toLowerCase() });
    cells.forEach((c, i) => line.append(element("td", i === 2 ? { class: r.decision } : {}, c || "")));
    return line;
  });
  return element("div", { class: "leaf" }, element("small", {}, rows[0].source), element("table", {}, ...lines));
}

const MATMULS = [["path", r => r.path], ["role", r => r.role], ["M", r => r.m], ["N", r => r.n], ["K", r => r.k],
  ["", r => r.decision], ["left", r => r.left], ["right", r => r.right], ["MFLOP", r => r.flops / 1e6, v => v.toPrecision(3)],
  ["ms BF16", r => r.milliseconds_bf16 ?? "", v => v && v.toPrecision(3)], ["ms FP8", r => r.milliseconds_fp8 ?? "", v => v && v.toPrecision(3)],
  ["reason", r => r.reason], ["source", r => r.source]];
const SAVED = [["path", r => r.path], ["value", r => `${r.dtype}[${r.shape}]`], ["as", r => r.form],
  ["before", r => r.bytes_before, bytes], ["after", r => r.bytes, bytes], ["reason", r => r.reason], ["source", r => r.source]];
const KERNELS = [["kernel", r => r.name], ["half", r => r.half], ["space", r => r.space], ["bytes", r => r.moved, v => v ? bytes(v) : "?"],
  ["operations", r => r.operations], ["from", r => r.origins]];
const ERRORS = [["path", r => r.path], ["role", r => r.role], ["operand", r => r.side], ["cast", r => r.delayed ? `${r.cast} delayed(${r.delayed})` : r.cast],
  ["SQNR, dB", r => r.sqnr ?? "", v => v === "" ? "" : v.toFixed(1)], ["amax", r => r.amax, v => v.toPrecision(3)],
  ["saturated", r => r.saturated, v => v.toExponential(1)], ["underflown", r => r.underflown, v => v.toExponential(1)], ["steps", r => r.steps]];
const GROUPS = [["group", r => r.group], ["parameters", r => r.parameters], ["elements", r => r.elements], ["in 8 bits", r => r.in_8_bits],
  ["before", r => r.before, bytes], ["after", r => r.after, bytes], ["settings", r => r.settings], ["not in 8 bits", r => r.others]];
const STATES = [["parameter", r => r.parameter], ["state", r => r.name], ["shape", r => r.shape], ["computed as", r => r.dtype],
  ["kept as", r => r.format || r.dtype], ["bytes", r => r.bytes, bytes], ["reason", r => r.reason]];
const UPDATES = [["parameters", r => r.parameters], ["elements", r => r.elements], ["states", r => r.formats], ["values", r => r.values],
  ["why not together", r => r.reason]];

function showTables() {
  const put = (id, columns, rows, none, onclick) =>
    $(id).replaceChildren(rows.length ? table(columns, rows, onclick) : element("p", { class: "note" }, none));
  put("matmuls", MATMULS, graph.matmuls, "This graph has no matmuls.");
  put("savedtable", SAVED, graph.saved, "No saved tensors are recorded for this graph.");
  put("kerneltable", KERNELS, graph.kernels, "No kernels were generated for this graph.", showSource);
  put("grouptable", GROUPS, graph.groups, "This graph is no optimizer's.");
  put("statetable", STATES, graph.states, "This graph has no optimizer states.");
  put("updatetable", UPDATES, graph.updates, "No updates of parameters are recorded for this graph.");
  put("errortable", ERRORS, data.statistics, "No statistics in this dump: fp8compile.watch(model) collects them, and save(DUMP / 'statistics.json') puts them here.");
  $("source").replaceChildren();
}

function showSource(kernel) {
  const text = data.sources[kernel.name] ?? "the source of this kernel is not in the dump";
  $("source").replaceChildren(element("h3", {}, kernel.name), element("pre", {}, text));
  $("source").scrollIntoView({ block: "nearest" });
}

// ---- memory ---------------------------------------------------------------------------------------------------------

function showMemory() {
  const kinds = [["bf16", "#b45309", "BF16"], ["compiled", "#15803d", "as compiled"]].filter(([k]) => graph.memory?.[k]);
  if (!kinds.length) { $("timeline").replaceChildren(element("p", { class: "note" }, "No timeline in this dump.")); return; }
  const [width, height, left, top] = [1180, 300, 70, 20];
  const halves = [...new Set(kinds.flatMap(([k]) => Object.keys(graph.memory[k])))];
  const highest = Math.max(...kinds.flatMap(([k]) => Object.values(graph.memory[k]).map(h => h.peak)));
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height + 50}`, width: "100%", role: "img" });
  const x = share => left + share * (width - left - 20);
  const y = value => top + height - value / highest * height;
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(svg("line", { x1: left, x2: width - 20, y1: y(part * highest), y2: y(part * highest), stroke: "#e5e7eb" }));
    chart.append(svg("text", { x: left - 6, y: y(part * highest) + 3, "text-anchor": "end", class: "axis" }, bytes(Math.round(part * highest))));
  }
  halves.forEach((half, i) => chart.append(svg("text", { x: x((i + 0.5) / halves.length), y: height + 38, "text-anchor": "middle", class: "axis" }, half)));
  kinds.forEach(([kind, colour, label], row) => {
    const points = halves.flatMap((half, i) => {
      const line = graph.memory[kind][half];
      if (!line) return [];
      const values = [line.start, ...line.alive];
      return values.map((v, j) => [x((i + j / Math.max(1, values.length - 1)) / halves.length), y(v), `${half}, ${line.names[j - 1] ?? "start"}: ${bytes(v)}`]);
    });
    const path = svg("polyline", { points: points.map(p => `${p[0]},${p[1]}`).join(" "), fill: "none", stroke: colour, "stroke-width": 1.8, class: `line-${kind}` });
    chart.append(path);
    const dot = svg("circle", { r: 4, fill: colour, class: "hidden" });
    chart.append(dot);
    const peak = Math.max(...halves.map(h => graph.memory[kind][h]?.peak ?? 0));
    const text = svg("text", { x: left + 10, y: top + 12 + 14 * row, fill: colour }, `${label}: peak ${bytes(peak)}`);
    chart.append(text);
    chart.addEventListener("mousemove", event => {
      const at = (event.clientX - chart.getBoundingClientRect().left) / chart.getBoundingClientRect().width * width;
      const near = points.reduce((a, b) => Math.abs(a[0] - at) < Math.abs(b[0] - at) ? a : b);
      dot.setAttribute("cx", near[0]); dot.setAttribute("cy", near[1]); dot.classList.remove("hidden");
      text.textContent = `${label}: peak ${bytes(peak)} · ${near[2]}`;
    });
  });
  $("timeline").replaceChildren(chart);
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

const [STEP_X, STEP_Y, BOX_X, BOX_Y] = [150, 58, 136, 34];
let view = null;

function showDrawing() {
  const drawing = graph.drawings[$("drawing").selectedIndex];
  if (!drawing) { $("canvas").replaceChildren(element("p", { class: "note" }, "No graph in this dump.")); return; }
  const at = n => [n.x * STEP_X, n.y * STEP_Y];
  const canvas = svg("svg", { role: "img" });
  for (const [a, b] of drawing.edges) {
    const [[ax, ay], [bx, by]] = [at(drawing.nodes[a]), at(drawing.nodes[b])];
    const middle = (ay + BOX_Y + by) / 2;
    canvas.append(svg("path", { class: "edge", d: `M${ax},${ay + BOX_Y} C${ax},${middle} ${bx},${middle} ${bx},${by}` }));
  }
  for (const node of drawing.nodes) {
    const [x, y] = at(node);
    const group = svg("g", { class: "node", "data-text": `${node.name} ${node.op} ${node.type}`.toLowerCase() });
    group.append(svg("rect", { x: x - BOX_X / 2, y, width: BOX_X, height: BOX_Y, class: `k-${node.kind}` }));
    group.append(svg("text", { x, y: y + 14, "text-anchor": "middle" }, short(node.op === "placeholder" ? node.name : node.op.replace("prims.", ""))));
    group.append(svg("text", { x, y: y + 27, "text-anchor": "middle", class: "axis" }, short(node.type)));
    group.append(svg("title", {}, `%${node.name}: ${node.type} = ${node.op}`));
    canvas.append(group);
  }
  const xs = drawing.nodes.map(n => n.x), ys = drawing.nodes.map(n => n.y);
  view = { x: (Math.min(...xs) - 1) * STEP_X, y: -20, whole: [(Math.max(...xs) - Math.min(...xs) + 2) * STEP_X, (Math.max(...ys) + 1) * STEP_Y + 20] };
  [view.width, view.height] = view.whole;
  $("canvas").replaceChildren(canvas);
  if (drawing.left_out) $("canvas").prepend(element("p", { class: "note" }, `${drawing.left_out} later nodes are left out`));
  start();
  navigate(canvas);
  search();
}

function short(text) { return text.length > 21 ? text.slice(0, 20) + "…" : text; }

// Begin at the top, at a size that can be read.
function start() {
  const box = $("canvas").getBoundingClientRect();
  const scale = Math.max(view.whole[0] / box.width, 1);
  place(view.x, -20, box.width * Math.min(scale, 2.2), box.height * Math.min(scale, 2.2));
  if (scale > 2.2) place(view.x + view.whole[0] / 2 - view.width / 2, -20, view.width, view.height);
}

function fit() {
  const left = Math.min(...graph.drawings[$("drawing").selectedIndex].nodes.map(n => n.x)) - 1;
  place(left * STEP_X, -20, ...view.whole);
}

function place(x, y, width, height) {
  Object.assign(view, { x, y, width, height });
  $("canvas").querySelector("svg").setAttribute("viewBox", `${x} ${y} ${width} ${height}`);
}

function navigate(canvas) {
  canvas.onwheel = event => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    const factor = event.deltaY > 0 ? 1.15 : 1 / 1.15;
    const [px, py] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    place(view.x + px * view.width * (1 - factor), view.y + py * view.height * (1 - factor), view.width * factor, view.height * factor);
  };
  canvas.onpointerdown = event => { canvas.setPointerCapture(event.pointerId); canvas.dataset.from = `${event.clientX} ${event.clientY}`; };
  canvas.onpointerup = () => { delete canvas.dataset.from; };
  canvas.onpointermove = event => {
    if (!canvas.dataset.from) return;
    const [fx, fy] = canvas.dataset.from.split(" ").map(Number);
    const scale = view.width / canvas.getBoundingClientRect().width;
    place(view.x - (event.clientX - fx) * scale, view.y - (event.clientY - fy) * scale, view.width, view.height);
    canvas.dataset.from = `${event.clientX} ${event.clientY}`;
  };
}

// ---- search and choice ----------------------------------------------------------------------------------------------

function search() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = text => words.every(w => text.includes(w));
  for (const row of document.querySelectorAll("tr[data-text]")) row.classList.toggle("hidden", !matches(row.dataset.text));
  for (const node of document.querySelectorAll("#canvas g")) node.firstChild.classList.toggle("found", words.length > 0 && matches(node.dataset.text));
  for (const part of [...document.querySelectorAll("#tree .leaf, #tree details")].reverse()) {
    const alive = part.querySelector("tr:not(.hidden)") !== null;
    part.classList.toggle("hidden", !alive);
    if (words.length && alive && part.tagName === "DETAILS") part.open = true;
  }
}

function show() {
  graph = data.graphs[$("graph").selectedIndex];
  $("drawing").replaceChildren(...graph.drawings.map(d => element("option", {}, d.name)));
  showSummary(); showTree(); showTables(); showMemory(); showDrawing(); search();
}

$("title").textContent = data.title;
$("graph").replaceChildren(...data.graphs.map(g => element("option", {}, `${g.name}: ${g.title}`)));
document.querySelector(".legend").innerHTML = [["#bbf7d0", "FP8 matmul"], ["#fed7aa", "matmul, attention"], ["#bfdbfe", "cast"],
  ["#ddd6fe", "generated kernel"], ["#e5e7eb", "input"], ["#fff", "other"]].map(([c, t]) => `<i style="background:${c}"></i>${t}`).join("");
$("graph").onchange = show;
$("drawing").onchange = showDrawing;
$("fit").onclick = fit;
$("search").oninput = search;
$("expand").onclick = () => document.querySelectorAll("#tree details").forEach(d => { d.open = true; });
$("collapse").onclick = () => document.querySelectorAll("#tree details").forEach(d => { d.open = false; });
show();
document.body.dataset.ready = "yes";
