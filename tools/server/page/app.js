// Starts the page: which view, the list of conversations, the model, light and dark, the keyboard.
import { json, request } from "./api.js";
import * as chat from "./chat.js";
import { $, copy, dialog, el, icon, iconButton, toast } from "./dom.js";
import * as generate from "./generate.js";
import * as inside from "./inside.js";
import { settingsDialog } from "./settings.js";
import * as slots from "./slots.js";
import { keeps, storage } from "./storage.js";
import * as store from "./store.js";

const VIEWS = ["chat", "slots", "inside"];
let usual = null; // the server's own sampling settings
const narrow = matchMedia("(max-width: 860px)");

// --- views

function route() {
  const [view, id, message] = location.hash.replace(/^#\//, "").split("/");
  const now = VIEWS.includes(view) ? view : "chat";
  for (const v of VIEWS) $(`view-${v}`).hidden = v !== now;
  for (const a of document.querySelectorAll(".tabs a")) {
    if (a.dataset.view === now) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  slots.show(now === "slots");
  if (now === "chat") {
    const wanted = store.get(id ?? "") ?? (id || !chat.shown() ? null : chat.shown());
    if (wanted !== chat.shown() || !wanted) chat.open(wanted ?? store.create());
    if (!narrow.matches) $("composer").focus();
  }
  if (now === "inside") inside.show(store.get(id ?? "") ?? chat.shown(), message);
  list();
}

const fresh = () => {
  chat.open(store.create());
  if (location.hash === "#/chat") list();
  else location.hash = "#/chat";
  side(false);
  $("composer").focus();
};

// --- the list of conversations

let listed = "";

function list() {
  const query = $("find").value.trim().toLowerCase();
  const match = (c) =>
    !query ||
    c.title.toLowerCase().includes(query) ||
    Object.values(c.messages).some((m) => m.content.toLowerCase().includes(query));
  const groups = new Map(),
    found = store.list().filter(match);
  const told = JSON.stringify([
    query,
    !$("view-chat").hidden && chat.shown()?.id,
    ...found.map((c) => [c.id, c.title, when(c.updated), !generate.runs(c)]),
  ]);
  if (told === listed) return; // what has the focus keeps it
  listed = told;
  for (const c of found) {
    const day = when(c.updated);
    groups.set(day, [...(groups.get(day) ?? []), c]);
  }
  const nodes = [...groups].map(([day, those]) => el("section", {}, el("h2", {}, day), el("ul", {}, ...those.map(entry))));
  $("conversations").replaceChildren(
    ...(nodes.length ? nodes : [el("p.small", {}, query ? "Nothing found." : "Conversations stay in this browser.")]),
  );
  document.title = chat.shown()?.title ? `${chat.shown().title} · ggraph` : "ggraph";
}

function when(ms) {
  const days = Math.round((new Date().setHours(0, 0, 0, 0) - new Date(ms).setHours(0, 0, 0, 0)) / 86_400_000);
  return days <= 0
    ? "Today"
    : days === 1
      ? "Yesterday"
      : days < 7
        ? "This week"
        : new Date(ms).toLocaleDateString("en", { month: "long", year: "numeric" });
}

function entry(c) {
  const open = c === chat.shown() && !$("view-chat").hidden;
  const link = el(
    "a",
    { href: `#/chat/${c.id}`, onclick: () => side(false), ...(open ? { "aria-current": "true" } : {}) },
    el("span", {}, c.title || "Untitled"),
    generate.runs(c) ? el("span.dot.on", { title: "Writing" }) : null,
  );
  return el(
    "li",
    {},
    link,
    el(
      "div.tools",
      {},
      iconButton("edit", "Rename", () => rename(c)),
      iconButton("save", "Copy as Markdown", () => {
        copy(store.markdown(c));
        toast("Copied as Markdown.");
      }),
      iconButton("trash", "Delete conversation", () => erase(c)),
    ),
  );
}

async function rename(c) {
  const title = await dialog("Rename", (close) => {
    const input = el("input", { id: "rename", value: c.title, maxlength: 120, autofocus: true });
    return el(
      "form",
      {
        onsubmit: (e) => {
          e.preventDefault();
          close(input.value.trim());
        },
      },
      el("label", { for: "rename" }, "Title"),
      input,
      el("footer", {}, el("button.primary", { type: "submit" }, "Rename")),
    );
  });
  if (title) {
    c.title = title;
    store.save(c);
  }
}

function erase(c) {
  c._gone = true;
  generate.stop(c);
  store.remove(c);
  if (c === chat.shown()) fresh();
  toast("Conversation deleted.", {
    label: "Undo",
    run: () => {
      c._gone = false;
      store.save(c);
      location.hash = `#/chat/${c.id}`;
    },
  });
}

function side(open) {
  document.body.classList.toggle("side", open);
  $("shade").hidden = !open;
  $("side-open").setAttribute("aria-expanded", String(open));
  $("side").inert = narrow.matches && !open;
  if (open) $("side-close").focus();
}

// --- the model

let meeting = false;

/** Until the model is loaded: then its name and its settings. */
async function meet() {
  if (meeting) return;
  meeting = true;
  while ((await look()) !== "ok") await new Promise((done) => setTimeout(done, 1500));
  meeting = false;
  await introduce();
}

async function look() {
  const state = await request("/health", { quiet: true }).then(
    () => "ok",
    (e) => (e.status === 503 ? "loading" : "gone"),
  );
  document.body.dataset.server = state;
  banner({ ok: "", loading: "The model is being loaded.", gone: "The server cannot be reached. Trying again." }[state]);
  if (state !== "ok") $("model-name").textContent = { loading: "loading", gone: "no server" }[state];
  return state;
}

async function introduce() {
  try {
    const props = await json("/props");
    usual = props.default_generation_settings.params;
    $("model-name").textContent = props.model_alias;
    $("model").title =
      `${props.model_path}\n${props.model_ftype}, ${props.total_slots} slots of ${props.default_generation_settings.n_ctx} tokens`;
  } catch (e) {
    $("model-name").textContent = "unknown";
    if (e.status !== 401) banner(e.message);
  }
}

function banner(text) {
  $("banner").textContent = text;
  $("banner").hidden = !text;
}

// --- light and dark

const THEMES = { auto: "As the system", light: "Light", dark: "Dark" };

function theme(choice) {
  if (choice === "auto") {
    storage.removeItem("ggraph.theme");
    delete document.documentElement.dataset.theme;
  } else {
    storage.setItem("ggraph.theme", choice);
    document.documentElement.dataset.theme = choice;
  }
  $("theme").replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[choice]));
  $("theme").title = `Colours: ${THEMES[choice]}`;
  $("theme").setAttribute("aria-label", `Colours: ${THEMES[choice]}`);
}

const themeNow = () => document.documentElement.dataset.theme ?? "auto";
const nextTheme = () => theme({ auto: "light", light: "dark", dark: "auto" }[themeNow()]);

// --- the keyboard

const mod = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
const settings = () => settingsDialog(chat.shown(), usual, () => $("composer").focus());
const toComposer = () => {
  location.hash = "#/chat";
  $("composer").focus();
};

// Keys as they are shown, what they do, how they are known (null: the message box sees to it), what happens.
const KEYS = [
  ["Enter", "Send", null],
  ["Shift Enter", "A new line", null],
  ["↑", "Edit your last message, from an empty box", null],
  [
    "Esc",
    "Stop the answer",
    (e) => e.key === "Escape",
    () => {
      if (document.body.classList.contains("side")) side(false);
      else chat.stop();
    },
  ],
  [`${mod} Shift O`, "A new conversation", (e) => ctrl(e) && e.shiftKey && e.code === "KeyO", fresh],
  [`${mod} Shift ;`, "Copy the last answer", (e) => ctrl(e) && e.shiftKey && e.code === "Semicolon", chat.copyLast],
  [
    `${mod} K`,
    "Find a conversation",
    (e) => ctrl(e) && !e.shiftKey && e.code === "KeyK",
    () => {
      side(narrow.matches);
      $("find").focus();
    },
  ],
  [`${mod} ,`, "Settings", (e) => ctrl(e) && e.key === ",", settings],
  [
    "Alt 1 2 3",
    "Chat, slots, inside",
    (e) => e.altKey && !ctrl(e) && /^Digit[123]$/.test(e.code),
    (e) => {
      location.hash = `#/${VIEWS[e.code.at(-1) - 1]}`;
    },
  ],
  ["/", "To the message box", (e) => plain(e) && e.key === "/", toComposer],
  ["?", "This list", (e) => plain(e) && e.key === "?", help],
];

const ctrl = (e) => e.ctrlKey || e.metaKey;
const plain = (e) => !ctrl(e) && !e.altKey && !/^(INPUT|TEXTAREA|SELECT)$/.test(e.target.tagName);

function help() {
  dialog("Keyboard", () =>
    el(
      "dl.keys",
      {},
      ...KEYS.map(([keys, text]) =>
        el("div", {}, el("dt", {}, ...keys.split(" ").map((k) => el("kbd", {}, k))), el("dd", {}, text)),
      ),
    ),
  );
}

function pressed(e) {
  if (document.querySelector("dialog[open]") || e.isComposing) return;
  const found = KEYS.find(([, , test]) => test?.(e));
  if (!found) return;
  e.preventDefault();
  found[3](e);
}

// --- start

function decorate() {
  $("side-open").append(icon("menu"));
  $("side-close").append(icon("close"));
  $("new").append(icon("plus"), "New conversation");
  $("settings-open").append(icon("settings"));
  $("help-open").append(icon("keyboard"));
  theme(themeNow());
}

function start() {
  decorate();
  store.load();
  chat.start();
  store.onChange(() => list());
  store.onChange((id) => {
    // another tab has changed what is shown here
    const c = store.get(id),
      here = chat.shown();
    if (c && c.id === here?.id && c !== here && !generate.runs(here)) chat.open(c);
  });
  $("new").addEventListener("click", fresh);
  $("side-open").addEventListener("click", () => side(true));
  $("side-close").addEventListener("click", () => side(false));
  $("shade").addEventListener("click", () => side(false));
  $("find").addEventListener("input", list);
  $("theme").addEventListener("click", nextTheme);
  $("settings-open").addEventListener("click", settings);
  $("help-open").addEventListener("click", help);
  narrow.addEventListener("change", () => side(false));
  addEventListener("hashchange", route);
  addEventListener("keydown", pressed);
  addEventListener("server-gone", meet);
  side(false);
  if (!keeps) toast("This browser keeps nothing for this page: conversations end with the tab.");
  route();
  meet();
}

start();
