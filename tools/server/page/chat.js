// The conversation on the screen: messages, what can be done with them, the box to write in.
import { $, copy, copyButton, el, fill, icon, iconButton, number, toast } from "./dom.js";
import * as generate from "./generate.js";
import { render } from "./markdown.js";
import * as store from "./store.js";

let current = null; // the conversation that is shown
const rows = new Map(); // message id -> its element
let stick = true,
  frame = 0;
const dirty = new Set();

export const shown = () => current;

export function open(c) {
  current = c;
  stick = true;
  $("composer").value = c._draft ?? "";
  grow();
  draw();
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

// --- messages

export function draw() {
  rows.clear();
  const messages = store.path(current);
  $("title").textContent = current.title || "New conversation";
  $("log").replaceChildren(...(messages.length ? messages.map(row) : [welcome()]));
  $("view-chat").classList.toggle("empty", !messages.length);
  refresh();
}

function welcome() {
  const ideas = [
    "Explain how a language model picks its next word.",
    "Write a haiku about rain.",
    "What is 17 × 23? Think step by step.",
  ];
  return el(
    "div.welcome",
    {},
    el("h2", {}, "What shall we talk about?"),
    el(
      "div.ideas",
      {},
      ...ideas.map((text) =>
        el(
          "button.idea",
          {
            type: "button",
            onclick: () => {
              $("composer").value = text;
              submit();
            },
          },
          text,
        ),
      ),
    ),
  );
}

function row(m) {
  const node = el(`article.message.${m.role}`, { "aria-label": m.role === "user" ? "You" : "Assistant", data: { id: m.id } });
  rows.set(m.id, node);
  paint(m, node);
  return node;
}

function paint(m, node) {
  node.classList.toggle("pending", Boolean(m.pending));
  node._parts ??= { reasoning: el("div"), body: el("div.body"), notice: el("div"), foot: el("footer") };
  const { reasoning, body, notice, foot } = node._parts;
  if (!body.isConnected) node.replaceChildren(reasoning, body, notice, foot);
  if (m.role === "user") body.textContent = m.content;
  else {
    thought(m, reasoning);
    if (node._probs) body.replaceChildren(probabilities(m));
    else if (m.pending && !m.content) waiting(m, body);
    else written(m, body);
  }
  fill(notice, noticed(m));
  fill(foot, m.pending ? speed(m) : [actions(m, node), versions(m), speed(m)]);
}

function written(m, body) {
  if (body._waiting) body.replaceChildren();
  body._waiting = false;
  render(body, m.content);
}

function waiting(m, body) {
  body._parts = [];
  body._waiting = true;
  const p = m._progress;
  const share = p && p.total > p.cache ? (p.processed - p.cache) / (p.total - p.cache) : 0;
  if (m.reasoning) {
    body.replaceChildren();
    return;
  }
  const text = p && p.total ? `Reading the prompt: ${p.processed} of ${p.total} tokens` : "Waiting for a slot";
  body.replaceChildren(el("div.waiting", {}, el("progress", { max: 1, value: share, "aria-label": text }), el("span", {}, text)));
}

/** Thoughts, folded. */
function thought(m, box) {
  if (!m.reasoning) {
    box.replaceChildren();
    return;
  }
  if (!box.firstChild) {
    box._text = el("div.body");
    box._title = el("summary");
    box._fold = el("details.thought", {}, box._title, box._text);
    box.append(box._fold);
  }
  box._title.textContent = m.pending && !m.content ? "Thinking…" : "Thoughts";
  render(box._text, m.reasoning);
}

function noticed(m) {
  const out = [];
  if (m.error) {
    out.push(
      el(
        "p.notice.error",
        { role: "alert" },
        el("span", {}, m.error),
        el("button.link", { type: "button", onclick: () => again(m) }, "Try again"),
      ),
    );
  } else if (!m.pending && m.role === "assistant" && (m.stopped || m.finish === "length") && m.content && last(m)) {
    const why = m.stopped ? "Stopped." : "The limit of tokens was reached.";
    const more = m.reasoning
      ? null
      : el("button.link", { type: "button", onclick: () => go(generate.resume(current, m)) }, "Continue");
    out.push(el("p.notice", {}, el("span", {}, why), more));
  } else if (!m.pending && m.role === "assistant" && !m.content && !m.reasoning) {
    out.push(el("p.notice", {}, el("span", {}, m.stopped ? "Stopped before the first word." : "The answer is empty.")));
  }
  return out;
}

const last = (m) => m.id === current.leaf;

function actions(m, node) {
  const own = m.role === "assistant";
  const look = () => (location.hash = `#/inside/${current.id}/${m.id}`);
  return el("div.actions", {}, [
    m.content && copyButton(() => m.content, "Copy message"),
    m.content && iconButton("edit", "Edit", () => edit(m, node)),
    own && iconButton("again", "Answer again", () => again(m)),
    own && m._probs?.length && chartButton(m, node),
    own && m.content && iconButton("look", "Look inside this answer", look),
    iconButton("trash", "Delete", () => erase(m)),
  ]);
}

function chartButton(m, node) {
  const toggle = () => {
    node._probs = !node._probs;
    node._parts.body._parts = [];
    node._parts.body.replaceChildren();
    paint(m, node);
  };
  return iconButton("chart", "Token probabilities", toggle, { "aria-pressed": String(Boolean(node._probs)) });
}

function versions(m) {
  const all = store.siblings(current, m);
  if (all.length < 2) return null;
  const at = all.indexOf(m);
  const step = (d) => () => {
    store.show(current, all[at + d]);
    keep();
    draw();
  };
  return el(
    "div.versions",
    { role: "group", "aria-label": "Versions" },
    iconButton("left", "Previous version", step(-1), { disabled: at === 0 }),
    el("span", {}, `${at + 1} / ${all.length}`),
    iconButton("right", "Next version", step(1), { disabled: at === all.length - 1 }),
  );
}

function speed(m) {
  if (m.role !== "assistant") return null;
  if (m.pending && m._n) {
    const s = (performance.now() - m._first) / 1000;
    return el("span.speed", {}, `${number(m._n)} tokens` + (s > 0.3 ? ` · ${number((m._n - 1) / s, 1)} tokens/s` : ""));
  }
  const t = m.stats;
  if (!t || m.pending) return null;
  const prompt = `Prompt: ${number(t.prompt + t.cached)} tokens, ${number(t.cached)} of them cached, ${number(t.promptMs)} ms`;
  return el("span.speed", { title: prompt }, `${number(t.n)} tokens · ${number(t.perSecond, 1)} tokens/s`);
}

/** The tokens of an answer, coloured by probability; each tells what else was likely. */
function probabilities(m) {
  const info = el("p.alternatives", { role: "status" }, "Choose a token to see what else was likely.");
  const show = (t) => () =>
    info.replaceChildren(
      ...[{ ...t, chosen: true }, ...t.top_logprobs.filter((o) => o.id !== t.id)].map((o) =>
        el(
          o.chosen ? "span.alt.chosen" : "span.alt",
          {},
          el("code", {}, visible(o.token)),
          ` ${number(100 * Math.exp(o.logprob), 1)}%`,
        ),
      ),
    );
  const tokens = m._probs.map((t) =>
    el(
      "button.token",
      {
        type: "button",
        onclick: show(t),
        onfocus: show(t),
        data: { level: level(t.logprob) },
        title: `${number(100 * Math.exp(t.logprob), 1)}%`,
      },
      t.token,
    ),
  );
  return el("div.probabilities", {}, el("p.tokens", {}, ...tokens), info);
}

/** A token's text with its white space to be seen. */
export const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";

/** 0 (hardly) to 4 (nearly sure). */
export const level = (logprob) => [0.1, 0.35, 0.7, 0.95].filter((p) => Math.exp(logprob) >= p).length;

// --- what can be done

function edit(m, node) {
  const area = el("textarea", { value: m.content, "aria-label": "Edit message" });
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`;
  };
  const done = () => paint(m, node);
  const send = () => {
    if (area.value.trim() === "" || !free()) return;
    const copied = store.add(current, {
      parent: m.parent,
      role: m.role,
      content: area.value,
      ...(m.role === "assistant" ? { reasoning: m.reasoning, edited: true } : {}),
    });
    keep();
    draw();
    if (m.role === "user") go(generate.answer(current, copied));
  };
  const form = el(
    "form.edit",
    {
      onsubmit: (e) => {
        e.preventDefault();
        send();
      },
    },
    area,
    el(
      "div.row",
      {},
      el("button", { type: "button", onclick: done }, "Cancel"),
      el("button.primary", { type: "submit" }, m.role === "user" ? "Send" : "Save"),
    ),
  );
  area.addEventListener("input", fit);
  area.addEventListener("keydown", (e) => {
    if (e.key === "Escape") {
      e.stopPropagation();
      done();
    }
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
      e.preventDefault();
      send();
    }
  });
  node.replaceChildren(form);
  fit();
  area.focus();
}

function again(m) {
  if (!free()) return;
  const parent = current.messages[m.parent];
  if (!m.content && !m.reasoning) store.prune(current, m); // nothing to keep as a version
  current.leaf = parent.id;
  go(generate.answer(current, parent));
}

function erase(m) {
  if (!free()) return;
  const before = structuredClone({
    messages: Object.fromEntries(Object.entries(current.messages).map(([k, v]) => [k, plain(v)])),
    leaf: current.leaf,
  });
  const c = current;
  store.prune(c, m);
  keep();
  draw();
  toast("Deleted, with what followed.", {
    label: "Undo",
    run: () => {
      Object.assign(c, before);
      store.save(c);
      if (c === current) draw();
    },
  });
}

const plain = (m) => Object.fromEntries(Object.entries(m).filter(([k]) => !k.startsWith("_") || k === "_probs"));

const busy = () => generate.runs(current) !== null;

function free() {
  if (busy()) toast("Stop the answer first.");
  return !busy();
}

function keep() {
  try {
    store.save(current);
  } catch {
    toast("The browser's storage is full: this conversation is not kept. Delete some others.");
  }
}

export function submit() {
  const text = $("composer").value;
  if (busy() || text.trim() === "") return;
  $("composer").value = "";
  current._draft = "";
  grow();
  const m = store.add(current, { parent: current.leaf, role: "user", content: text.trimEnd() });
  stick = true;
  go(generate.answer(current, m));
}

function go(promise) {
  stick = true;
  draw();
  if (location.hash !== `#/chat/${current.id}`) history.replaceState(null, "", `#/chat/${current.id}`);
  promise.then(() => {
    $("status").textContent = "The answer is complete.";
  });
}

export const stop = () => (busy() ? (generate.stop(current), true) : false);

export function editLast() {
  const m = store
    .path(current)
    .filter((o) => o.role === "user")
    .at(-1);
  if (m && !busy()) edit(m, rows.get(m.id));
}

export async function copyLast() {
  const m = store
    .path(current)
    .filter((o) => o.role === "assistant")
    .at(-1);
  if (m) {
    await copy(m.content);
    toast("Copied the last answer.");
  }
}

export function againLast() {
  const m = store.path(current).at(-1);
  if (m?.role === "assistant") again(m);
}

// --- keeping up with an answer

generate.onProgress((c, m) => {
  if (c !== current) return;
  dirty.add(m.id);
  frame ||= requestAnimationFrame(update);
});

function update() {
  frame = 0;
  for (const id of dirty) {
    const m = current.messages[id],
      node = rows.get(id);
    if (m && node) paint(m, node);
  }
  dirty.clear();
  refresh();
  if (stick) $("scroll").scrollTop = $("scroll").scrollHeight;
}

/** The send button, the line below the box. */
function refresh() {
  const on = busy();
  $("send").replaceChildren(icon(on ? "stop" : "send"));
  $("send").setAttribute("aria-label", on ? "Stop" : "Send");
  $("send").title = on ? "Stop (Esc)" : "Send (Enter)";
  $("send").disabled = !on && $("composer").value.trim() === "";
  $("hint").textContent = current._unsaved ? "The browser's storage is full: this conversation is not kept." : "";
  $("down").hidden = stick;
}

export function grow() {
  const area = $("composer");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
}

export function start() {
  $("down").append(icon("down"));
  $("down").addEventListener("click", () => {
    stick = true;
    update();
  });
  $("scroll").addEventListener(
    "scroll",
    () => {
      const box = $("scroll");
      stick = box.scrollHeight - box.scrollTop - box.clientHeight < 48;
      $("down").hidden = stick;
    },
    { passive: true },
  );
  $("composer-form").addEventListener("submit", (e) => {
    e.preventDefault();
    if (!stop()) submit();
  });
  $("composer").addEventListener("input", () => {
    current._draft = $("composer").value;
    grow();
    refresh();
  });
  $("composer").addEventListener("keydown", (e) => {
    const touch = matchMedia("(pointer: coarse)").matches;
    if (e.key === "Enter" && !e.shiftKey && !e.isComposing && !touch) {
      e.preventDefault();
      submit();
    }
    if (e.key === "ArrowUp" && $("composer").value === "") {
      e.preventDefault();
      editLast();
    }
  });
}
