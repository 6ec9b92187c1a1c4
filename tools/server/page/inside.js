// Inside of a request: a text runs step by step on the server, and each step shows its five variables, its graph and its times.
import { json } from "./api.js";
import { level, visible } from "./chat.js";
import { $, el, fill, iconButton, number } from "./dom.js";
import { messagesOf, settingsOf } from "./generate.js";
import * as graphs from "./graph.js";

const EXAMPLE = "The capital of France is";
const ROLES = [
  ["hidden", "Hidden states", "What flows through the layers: token ids become rows of numbers, and each layer adds to them."],
  ["positions", "Positions", "Where each token stands. Q and K are turned by an angle that grows with it."],
  ["mask", "Mask", "Which cells a token may look at: only what came before it, and only its own sequence."],
  ["memory", "KV cells and state rows", "K and V of every token so far. This step writes its own, and reads all that it may see."],
  ["decode", "Decode state", "The last row becomes logits; a sampler picks the next token from them."],
];
let limits = null,
  subject = null; // subject: {c, m}, an answer that is looked into; else the text of the form
let found = null,
  at = 0,
  layer = 0;

export async function show(c, id) {
  const m = c?.messages[id];
  const same = m ? subject?.m === m : !id;
  if (m && !same) {
    subject = { c, m };
    found = null;
  }
  if (limits && same) return;
  try {
    limits ??= await json("/ggraph/inspect");
    frame();
    if (subject && !found) run();
  } catch (e) {
    fill($("view-inside"), heading(), el("p.notice.error", { role: "alert" }, e.message));
  }
}

// Pictures of cells take the colours of the moment.
const repaint = () => {
  if (found && $("look-result")) draw();
};
new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

const heading = () =>
  el(
    "header.page-head",
    {},
    el("h1", {}, "Inside a request"),
    el("p", {}, "A short text runs once more, in a context of its own, and every step of it is written down."),
  );

function frame() {
  const text = el("textarea", { id: "look-text", rows: 2, value: EXAMPLE });
  const steps = el("input", { id: "look-steps", type: "number", min: 1, max: limits.max_steps, value: 8, inputmode: "numeric" });
  const what = subject
    ? el(
        "div.subject",
        {},
        el("span", {}, "The answer to “", el("em", {}, asked()), "”"),
        iconButton("close", "Another text", () => {
          subject = null;
          found = null;
          location.hash = "#/inside";
          frame();
        }),
      )
    : el("div.field", {}, el("label", { for: "look-text" }, "Text"), text);
  const form = el(
    "form.look",
    {
      onsubmit: (e) => {
        e.preventDefault();
        run();
      },
    },
    what,
    el("div.field.few", {}, el("label", { for: "look-steps" }, "Tokens"), steps),
    el("button.primary", { type: "submit" }, "Look"),
  );
  fill($("view-inside"), heading(), form, el("div", { id: "look-result", "aria-live": "polite" }));
}

const asked = () => (subject.c.messages[subject.m.parent]?.content ?? "").slice(0, 80);

async function run() {
  const n = Math.min(Math.max(1, Number($("look-steps").value) || 8), limits.max_steps);
  const body = subject
    ? { messages: messagesOf(subject.c, subject.m.parent), answer: subject.m.content, ...settingsOf(subject.c), max_tokens: n }
    : { prompt: $("look-text").value, max_tokens: n, temperature: 0 };
  const button = document.querySelector(".look button.primary");
  button.disabled = true;
  fill($("look-result"), el("p.waiting", {}, el("progress", { "aria-label": "Running" }), "Running"));
  try {
    found = await json("/ggraph/inspect", { body });
    at = found.steps.length - found.chosen.length;
    layer = found.steps[0].nodes.find((s) => s.layer !== null)?.layer ?? null;
    draw();
  } catch (e) {
    fill($("look-result"), el("p.notice.error", { role: "alert" }, e.message));
  }
  button.disabled = false;
}

function draw() {
  fill($("look-result"), ribbon(), stepBar(), el("div.cards", {}, ROLES.map(card)), graph());
}

function go(step) {
  at = Math.min(Math.max(0, step), found.steps.length - 1);
  const focused = document.activeElement?.dataset?.go;
  draw();
  if (focused) document.querySelector(`[data-go="${focused}"]`)?.focus();
}

const first = () => found.steps.length - found.chosen.length; // the step that gave the first token

/** The whole text: what was read, then what was written, by probability. A token leads to the step that brought it forth. */
function ribbon() {
  const read = found.steps
    .slice(0, first() + 1)
    .flatMap((s, i) =>
      s.tokens.map((t) =>
        el(
          "span.token.read",
          { title: `position ${t.pos[0]}, id ${t.id}`, ...(i === at ? { "aria-current": "true" } : {}) },
          visible(t.text),
        ),
      ),
    );
  const written = found.chosen.map((t, i) =>
    el(
      "button.token.written",
      {
        type: "button",
        data: { level: level(Math.log(t.p)), go: `t${i}` },
        title: `${number(100 * t.p, 1)}%${t.given ? ", given" : ""}`,
        ...(first() + i === at ? { "aria-current": "step" } : {}),
        onclick: () => go(first() + i),
      },
      visible(t.text),
    ),
  );
  return el("p.ribbon", { "aria-label": "Tokens" }, read, written);
}

function stepBar() {
  const s = found.steps[at];
  const parts = [
    `${number(s.tokens.length)} ${s.tokens.length === 1 ? "token" : "tokens"} in`,
    `${number(s.ms, 2)} ms`,
    `plan ${s.how}`,
    `${s.nodes.length} kernels`,
    [...new Set(s.splits.map((p) => p.backend))].join(" + "),
  ];
  return el(
    "div.step-bar",
    {},
    iconButton("left", "Previous step", () => go(at - 1), { disabled: at === 0, "data-go": "back" }),
    el("strong", {}, `Step ${at + 1} of ${found.steps.length}`),
    iconButton("right", "Next step", () => go(at + 1), { disabled: at === found.steps.length - 1, "data-go": "on" }),
    el("span.small", {}, parts.join(" · ")),
  );
}

function card([role, title, text]) {
  const s = found.steps[at],
    rows = s.variables.filter((v) => v.role === role);
  const picture = { hidden, positions, mask, memory, decode }[role](s);
  return el(
    "article.card",
    { data: { role }, "aria-label": title },
    el("h2", {}, title),
    el("p.small", {}, text),
    picture,
    el(
      "details",
      {},
      el("summary", {}, `${rows.length} ${rows.length === 1 ? "tensor" : "tensors"}`),
      el("ul.variables", {}, rows.map(variable)),
    ),
  );
}

function variable(v) {
  const shape = v.symbols.map((s, i) => (s === String(v.ne[i]) ? s : `${s} = ${v.ne[i]}`));
  while (shape.length > 1 && shape.at(-1) === "1") shape.pop();
  const layers = v.layers.length > 1 ? `, ${v.layers.length} layers` : "";
  return el(
    "li",
    {},
    el("code", {}, v.name),
    v.op ? ` ${v.op}` : "",
    el("span.small", {}, ` ${v.type} [${shape.join(", ")}]${layers}${v.note ? `: ${v.note}` : ""}`),
  );
}

// --- the five

function hidden(s) {
  if (!s.hidden.length) return null;
  const most = Math.max(...s.hidden.map((h) => h.rms));
  const label = `Size of the last token's hidden state through ${s.hidden.length} places, at most ${number(most, 1)}`;
  return el(
    "figure",
    {},
    el(
      "div.bars",
      { role: "img", "aria-label": label },
      s.hidden.map((h) =>
        el("span", { title: `${h.name}: ${number(h.rms, 3)}`, style: { height: `${Math.max(2, (100 * h.rms) / most)}%` } }),
      ),
    ),
    el(
      "figcaption.small",
      {},
      `Size (root mean square) from ${s.hidden[0].name} to ${s.hidden.at(-1).name}; the highest is ${number(most, 1)}.`,
    ),
  );
}

function positions(s) {
  const shown = s.tokens.length > 24 ? [...s.tokens.slice(0, 12), null, ...s.tokens.slice(-11)] : s.tokens;
  return el(
    "div.chips",
    {},
    shown.map((t) => (t ? el("span.chip", {}, el("b", {}, String(t.pos[0])), ` ${visible(t.text)}`) : el("span", {}, "…"))),
  );
}

function mask(s) {
  if (!s.masks.length) return null;
  return el(
    "figure",
    {},
    s.masks.map((m) =>
      m.rows.map((rows) =>
        grid(
          rows.length,
          Math.max(...rows.map((r) => r.length)),
          (y, x) => (rows[y][x] === "1" ? "--accent" : "--line"),
          `${m.name}: ${rows.length} rows of ${rows[0].length} cells`,
        ),
      ),
    ),
    el("figcaption.small", {}, "A row for each token, a column for each cell; seen cells are filled."),
  );
}

function memory(s) {
  return el("div", {}, s.pools.map(pool), s.states ? el("p.small", {}, stateRows(s.states)) : null);
}

function pool(p) {
  const window = p.window ? `window ${p.window}, ` : "";
  const bytes = `${number(p.bytes_used / 1024)} of ${number(p.bytes / 1024)} KiB`;
  const text = `${p.layers.length} layers, ${window}${number(p.used)} of ${number(p.size)} cells in use, ${bytes}. Written now: `;
  return el(
    "figure",
    {},
    p.streams.map((stream) => cells(p, stream)),
    el("figcaption.small", {}, text, el("span.key")),
  );
}

function cells(p, stream) {
  const written = new Set(stream.written);
  const columns = 48;
  const n = Math.min(p.n_kv, p.size);
  const colour = (y, x) => {
    const i = y * columns + x;
    if (i >= n) return null;
    if (written.has(i)) return "--p-new";
    return (stream.pos[i] ?? -1) >= 0 ? "--accent" : "--line";
  };
  const label = `${p.used} of ${p.size} cells in use, ${stream.written.length} written by this step`;
  return grid(Math.ceil(n / columns), columns, colour, label);
}

function stateRows(r) {
  const left = r.dst.map((rows) => rows.join(" and ")).join(", ");
  const size = `${number(r.bytes_used / 1024)} KiB whatever the length of the text`;
  return `${r.layers.length} layers keep a state: read from row ${r.src.join(", ")}, left in row ${left}; ${size}.`;
}

function decode(s) {
  const row = s.outputs.at(-1),
    pick = found.chosen[at - first()];
  if (!row) return el("p.small", {}, "No row of this step is asked for: the prompt goes on in the next one.");
  const others = row.top.some(([id]) => id === pick?.id) ? row.top : [...row.top, [pick.id, pick.text, pick.p]];
  return el(
    "ol.top",
    { "aria-label": "The likeliest next tokens" },
    others.map(([id, text, p]) =>
      el(
        id === pick?.id ? "li.chosen" : "li",
        {},
        el("code", {}, visible(text)),
        el("span.track", {}, el("span", { style: { width: `${100 * p}%` } })),
        el("span.amount", {}, `${number(100 * p, 1)}%`),
        id === pick?.id ? el("span.hidden", {}, " taken") : null,
      ),
    ),
  );
}

/** A picture of cells. `colour(y, x)`: the name of a colour, or null for nothing. */
function grid(rows, columns, colour, label) {
  const size = Math.max(2, Math.min(12, Math.floor(320 / columns))),
    gap = size > 4 ? 1 : 0,
    scale = Math.min(2, devicePixelRatio || 1);
  const canvas = el("canvas", {
    role: "img",
    "aria-label": label,
    title: label,
    width: columns * size * scale,
    height: rows * size * scale,
    style: { width: `${columns * size}px` },
  });
  const pen = canvas.getContext("2d"),
    known = {};
  pen.scale(scale, scale);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      const name = colour(y, x);
      if (!name) continue;
      pen.fillStyle = known[name] ??= resolved(name);
      pen.fillRect(x * size, y * size, size - gap, size - gap);
    }
  }
  return canvas;
}

/** What a colour's name stands for now. */
function resolved(name) {
  const probe = $("view-inside");
  probe.style.color = `var(${name})`;
  const colour = getComputedStyle(probe).color;
  probe.style.color = "";
  return colour;
}

// --- the graph

function graph() {
  const s = found.steps[at],
    g = found.graphs[s.graph],
    times = graphs.timesOf(g, s.nodes);
  const about = el("pre.about", { role: "status" }, "Choose a node to read about it.");
  const choose = (l) => {
    layer = l;
    go(at);
  };
  const sum = s.nodes.filter((n) => n.layer === layer).reduce((t, n) => t + n.us, 0),
    all = s.nodes.reduce((t, n) => t + n.us, 0),
    n = g.nodes.filter((node) => !node.view).length;
  return el(
    "section.card.whole",
    { "aria-label": "Graph" },
    el("h2", {}, "Graph"),
    el(
      "p.small",
      {},
      `${number(n)} nodes run as ${number(s.nodes.length)} kernels in ${number(all / 1000, 2)} ms. Choose a layer.`,
    ),
    graphs.byLayer(s, layer, choose),
    el(
      "h3",
      {},
      layer === null ? "Start and end" : `Layer ${layer}`,
      el("span.small", {}, ` ${number(sum, 0)} µs, ${number((100 * sum) / all, 1)}% of the step`),
    ),
    el(
      "div.split",
      {},
      graphs.drawing(g, layer, times, (n, step, text) => {
        about.textContent = text;
      }),
      el("div", {}, about, graphs.table(s, layer)),
    ),
  );
}
