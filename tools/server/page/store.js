// Conversations, kept in this browser. A conversation is a tree of messages: another version of a message is a sibling,
// `leaf` is the end of the branch that is shown.

import { storage } from "./storage.js";

const PREFIX = "ggraph.chat.",
  DEFAULTS = "ggraph.defaults";
const listeners = new Set();
const all = new Map();

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");

export function onChange(listener) {
  listeners.add(listener);
}
function changed(id) {
  for (const listener of listeners) listener(id);
}

export function load() {
  for (let i = 0; i < storage.length; i++) {
    const key = storage.key(i);
    if (key.startsWith(PREFIX)) read(key, settle);
  }
}

/** What was being written when a page closed has stopped. */
function settle(c) {
  for (const m of Object.values(c.messages).filter((o) => o.pending)) Object.assign(m, { pending: false, stopped: true });
}

function read(key, then = () => {}) {
  try {
    const c = JSON.parse(storage.getItem(key));
    if (!c || typeof c.messages !== "object" || typeof c.id !== "string") throw new Error("not a conversation");
    then(c);
    all.set(c.id, c);
  } catch (e) {
    console.warn(`${key} is not readable and is left alone: ${e.message}`);
  }
}

// Another tab wrote, and may be writing still.
addEventListener("storage", (e) => {
  if (!e.key?.startsWith(PREFIX)) return;
  if (e.newValue) read(e.key);
  else all.delete(e.key.slice(PREFIX.length));
  changed(e.key.slice(PREFIX.length));
});

export const list = () => [...all.values()].sort((a, b) => b.updated - a.updated);
export const get = (id) => all.get(id) ?? null;
export const defaults = () => ({ system: "", settings: {}, ...JSON.parse(storage.getItem(DEFAULTS) ?? "{}") });
export const setDefaults = (value) => storage.setItem(DEFAULTS, JSON.stringify(value));

/** Not kept before its first message is. */
export function create() {
  const { system, settings } = defaults();
  return {
    id: newId(),
    title: "",
    created: Date.now(),
    updated: Date.now(),
    system,
    settings: { ...settings },
    messages: {},
    leaf: null,
  };
}

/** Throws where the browser's storage is full: the caller tells. */
export function save(c) {
  all.set(c.id, c);
  changed(c.id);
  storage.setItem(
    PREFIX + c.id,
    JSON.stringify(c, (k, v) => (k.startsWith("_") ? undefined : v)),
  );
}

export function remove(c) {
  all.delete(c.id);
  storage.removeItem(PREFIX + c.id);
  changed(c.id);
}

/** From the first message to the leaf. */
export function path(c, leaf = c.leaf) {
  const found = [];
  for (let m = c.messages[leaf]; m; m = c.messages[m.parent]) found.unshift(m);
  return found;
}

export function add(c, message) {
  const m = { id: newId(), created: Date.now(), ...message };
  c.messages[m.id] = m;
  c.leaf = m.id;
  c.updated = Date.now();
  if (!c.title && m.role === "user") c.title = m.content.trim().replace(/\s+/g, " ").slice(0, 80);
  return m;
}

/** The versions of a message, oldest first. */
export const siblings = (c, m) =>
  Object.values(c.messages)
    .filter((o) => o.parent === m.parent)
    .sort((a, b) => a.created - b.created);

/** Show the branch of this message, down to its newest end. */
export function show(c, m) {
  const below = (id) =>
    Object.values(c.messages)
      .filter((o) => o.parent === id)
      .sort((a, b) => b.created - a.created)[0];
  for (let next = m; next; next = below(next.id)) c.leaf = next.id;
}

/** Without this message and all that follows it. */
export function prune(c, m) {
  const gone = [m.id];
  for (const id of gone)
    gone.push(
      ...Object.values(c.messages)
        .filter((o) => o.parent === id)
        .map((o) => o.id),
    );
  const others = siblings(c, m).filter((o) => o !== m);
  for (const id of gone) delete c.messages[id];
  if (others.length) show(c, others.at(-1));
  else c.leaf = m.parent;
}

export function markdown(c) {
  const parts = path(c).map((m) => `**${m.role === "user" ? "You" : "Assistant"}**\n\n${m.content}\n`);
  return `# ${c.title}\n\n${c.system ? `> ${c.system.replaceAll("\n", "\n> ")}\n\n` : ""}${parts.join("\n")}`;
}
