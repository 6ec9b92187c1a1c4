// The settings of a conversation: what it is told at the start, how its tokens are chosen.
import { forgetKey, hasKey } from "./api.js";
import { dialog, el, toast } from "./dom.js";
import * as store from "./store.js";

// Name, label, step, range, what it does.
const NUMBERS = [
  ["temperature", "Temperature", 0.05, 0, 5, "0 always takes the likeliest token; higher is more varied."],
  ["top_k", "Top K", 1, 0, 100000, "Only the K likeliest tokens; 0: all."],
  ["top_p", "Top P", 0.01, 0, 1, "Only the likeliest tokens that together reach P."],
  ["min_p", "Min P", 0.01, 0, 1, "Only tokens at least this likely, as a share of the likeliest."],
  ["repeat_penalty", "Repeat penalty", 0.05, 0.05, 3, "Above 1: what was said lately becomes less likely."],
  ["presence_penalty", "Presence penalty", 0.1, -2, 2, ""],
  ["frequency_penalty", "Frequency penalty", 0.1, -2, 2, ""],
  ["max_tokens", "Most tokens of an answer", 1, -1, 1000000, "-1: no limit."],
  ["seed", "Seed", 1, -1, 4294967295, "The same seed gives the same answer; -1: a new one each time."],
  ["n_probs", "Token probabilities", 1, 0, 20, "How many alternatives to keep for each token; 0: none."],
];

export function settingsDialog(c, server, onDone) {
  return dialog("Settings", (close) => form(c, server, close)).then(onDone);
}

function form(c, server, close) {
  const inputs = Object.fromEntries(NUMBERS.map((n) => [n[0], input(c, server, n)]));
  const system = el("textarea", { id: "set-system", rows: 4, value: c.system, placeholder: "You are a helpful assistant." });
  const stop = el("input", { id: "set-stop", value: (c.settings.stop ?? []).map(escaped).join(", "), placeholder: "none" });
  const read = () => {
    const settings = {};
    for (const [name, node] of Object.entries(inputs)) if (node.value !== "") settings[name] = Number(node.value);
    const stops = stop.value
      .split(",")
      .map((s) => unescaped(s.trim()))
      .filter(Boolean);
    if (stops.length) settings.stop = stops;
    return { system: system.value, settings };
  };
  const take = (e) => {
    e.preventDefault();
    Object.assign(c, read());
    if (Object.keys(c.messages).length) store.save(c);
    if (e.submitter?.value === "defaults") {
      store.setDefaults(read());
      toast("New conversations start with these settings.");
    }
    close(true);
  };
  const clear = () => {
    for (const node of Object.values(inputs)) node.value = "";
    stop.value = "";
  };
  return el(
    "form.settings",
    { onsubmit: take },
    field("set-system", "System prompt", system, "What the model is told before the conversation."),
    el(
      "fieldset",
      {},
      el("legend", {}, "Sampling"),
      el("p.small", {}, "What is empty is up to the server."),
      el("div.grid", {}, ...NUMBERS.map(([name, label, , , , text]) => field(`set-${name}`, label, inputs[name], text))),
      field("set-stop", "Stop before", stop, "Texts that end an answer, separated by commas; \\n is a line break."),
    ),
    hasKey()
      ? el(
          "p",
          {},
          el(
            "button.link",
            {
              type: "button",
              onclick: (e) => {
                forgetKey();
                e.target.remove();
                toast("The API key is forgotten.");
              },
            },
            "Forget the API key",
          ),
        )
      : null,
    el(
      "footer",
      {},
      el("button", { type: "button", onclick: clear }, "Clear"),
      el("span.space"),
      el("button", { type: "submit", value: "defaults" }, "Use for new ones too"),
      el("button.primary", { type: "submit" }, "Use"),
    ),
  );
}

function input(c, server, [name, , step, min, max]) {
  const usual = server?.[name];
  const placeholder = typeof usual === "number" ? String(Math.round(usual * 1000) / 1000) : "";
  return el("input", {
    id: `set-${name}`,
    type: "number",
    step: "any",
    min,
    max,
    inputmode: step < 1 ? "decimal" : "numeric",
    value: c.settings[name] ?? "",
    placeholder,
  });
}

const field = (id, label, node, text) =>
  el("div.field", {}, el("label", { for: id }, label), node, text ? el("p.small", {}, text) : null);
const escaped = (s) => s.replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
const unescaped = (s) => s.replace(/\\(n|t|\\)/g, (m, c) => ({ n: "\n", t: "\t", "\\": "\\" })[c]);
