// The graph of one layer as a drawing: nodes from top to bottom, coloured by the time they took.
import { el, number, svg } from "./dom.js";

const BOX = { w: 160, h: 40, x: 16, y: 26 };

/** For each node of a graph, the step of the plan that it ended in: steps name their nodes in the order of the graph. */
export function timesOf(graph, steps) {
  const ids = new Map();
  for (const n of graph.nodes) if (!n.view) ids.set(`${n.name} ${n.op}`, [...(ids.get(`${n.name} ${n.op}`) ?? []), n.id]);
  const found = new Map();
  for (const step of steps)
    step.names.forEach((name, i) => {
      const id = ids.get(`${name} ${step.ops[i]}`)?.shift();
      if (id !== undefined) found.set(id, step);
    });
  return found;
}

/** The nodes that a node reads, seen through views; names of leaves as they are. */
function sources(graph, node) {
  return node.src.flatMap((s) =>
    typeof s === "string" ? [s] : graph.nodes[s].view ? sources(graph, graph.nodes[s]) : [graph.nodes[s]],
  );
}

export function drawing(graph, layer, times, choose) {
  const nodes = graph.nodes.filter((n) => n.layer === layer && !n.view),
    inside = new Set(nodes);
  const rank = new Map(),
    rows = [];
  for (const n of nodes) {
    const above = sources(graph, n).filter((s) => inside.has(s) && rank.has(s));
    rank.set(n, Math.max(-1, ...above.map((s) => rank.get(s))) + 1);
    (rows[rank.get(n)] ??= []).push(n);
  }
  const widest = Math.max(...rows.map((r) => r.length), 1);
  const width = widest * (BOX.w + BOX.x) + BOX.x,
    height = rows.length * (BOX.h + BOX.y) + BOX.y;
  const at = new Map();
  rows.forEach((row, y) =>
    row.forEach((n, x) =>
      at.set(n, [(width - row.length * (BOX.w + BOX.x) + BOX.x) / 2 + x * (BOX.w + BOX.x), BOX.y / 2 + y * (BOX.h + BOX.y)]),
    ),
  );
  const most = Math.max(...nodes.map((n) => times.get(n.id)?.us ?? 0), 0.001);
  const edges = nodes.flatMap((n) =>
    sources(graph, n)
      .filter((s) => inside.has(s))
      .map((s) => edge(at.get(s), at.get(n))),
  );
  const boxes = nodes.map((n) => box(n, at.get(n), times.get(n.id), most, graph, inside, choose));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "graph" }, ...edges, ...boxes);
  picture.style.setProperty("max-width", `${width}px`);
  picture.style.setProperty("min-width", `${0.75 * width}px`);
  return el("div.scrolls", { tabindex: "0", role: "group", "aria-label": "The graph of this layer" }, picture);
}

function edge([x0, y0], [x1, y1]) {
  const a = [x0 + BOX.w / 2, y0 + BOX.h],
    b = [x1 + BOX.w / 2, y1],
    mid = (a[1] + b[1]) / 2;
  return svg("path", { class: "edge", d: `M${a} C${a[0]} ${mid} ${b[0]} ${mid} ${b}` });
}

function box(n, [x, y], step, most, graph, inside, choose) {
  const outside = sources(graph, n)
    .filter((s) => !inside.has(s))
    .map((s) => (typeof s === "string" ? s : s.name || s.op));
  const us = step
    ? `${number(step.us, 1)} µs${step.names.length > 1 ? ` for ${step.names.length} nodes` : ""}`
    : "not run by itself";
  const reads = outside.length ? `\nreads ${outside.join(", ")}` : "";
  const about = `${n.name || n.op}: ${n.op} ${n.type} [${n.ne.join(", ")}]\n${us}${reads}`;
  const node = svg(
    "g",
    {
      class: "node",
      tabindex: "0",
      role: "button",
      "aria-label": about,
      onclick: () => choose(n, step, about),
      onkeydown: (e) => {
        if (e.key === "Enter" || e.key === " ") {
          e.preventDefault();
          choose(n, step, about);
        }
      },
    },
    svg("title", {}, about),
    svg("rect", { x, y, width: BOX.w, height: BOX.h, rx: 8 }),
    svg("text", { x: x + 10, y: y + 17, class: "name" }, short(n.name || n.op)),
    svg("text", { x: x + 10, y: y + 32, class: "op" }, n.op),
    svg("text", { x: x + BOX.w - 10, y: y + 32, class: "us" }, step ? `${number(step.us, step.us < 10 ? 1 : 0)} µs` : ""),
  );
  node.style.setProperty("--heat", `${step ? Math.round(8 + 62 * (step.us / most)) : 0}%`);
  return node;
}

const short = (name) => (name.length > 19 ? `${name.slice(0, 18)}…` : name);

/** Time by layer, as bars to choose from; `null` is what stands before and after the layers. */
export function byLayer(step, chosen, choose) {
  const sums = new Map();
  for (const n of step.nodes) sums.set(n.layer, (sums.get(n.layer) ?? 0) + n.us);
  const layers = [...sums.keys()].sort((a, b) => (a ?? -1) - (b ?? -1)),
    most = Math.max(...sums.values());
  return el(
    "div.layers",
    { role: "group", "aria-label": "Time by layer" },
    layers.map((layer) => {
      const name = layer === null ? "Start and end" : `Layer ${layer}`,
        us = sums.get(layer);
      const bar = el(
        "button.layer",
        {
          type: "button",
          title: `${name}: ${number(us, 0)} µs`,
          "aria-label": `${name}, ${number(us, 0)} microseconds`,
          "aria-pressed": String(layer === chosen),
          onclick: () => choose(layer),
        },
        el("span", { style: { height: `${Math.max(4, (100 * us) / most)}%` } }),
      );
      return bar;
    }),
  );
}

export function table(step, layer) {
  const rows = step.nodes.filter((n) => n.layer === layer);
  return el(
    "div.table",
    { tabindex: "0" },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["Nodes that ran as one", "Ops", "Shape", "µs", "GB/s"].map((h, i) => el(i > 2 ? "th.right" : "th.left", {}, h)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((n) =>
          el(
            "tr",
            {},
            el("td", {}, n.names.filter(Boolean).join(" + ") || n.ops.join(" + ")),
            el("td", {}, `${n.ops.join(" + ")}${n.type ? ` ${n.type}` : ""}`),
            el("td", {}, n.ne.join(" × ")),
            el("td.right", {}, number(n.us, 1)),
            el("td.right", {}, n.us ? number(n.nbytes / n.us / 1000, 1) : ""),
          ),
        ),
      ),
    ),
  );
}
