// The slots: who is running, how far prompts are, what of the memory is used. Asks the server while it is looked at, no longer.
import { request, json } from "./api.js";
import { $, el, fill, number } from "./dom.js";

const BUSY = 1000,
  IDLE = 3000,
  FAILED = 8000; // ms between two looks
let timer = null,
  wanted = false,
  metrics = true;
const before = new Map(); // slot id -> {task, n, at}: for the speed

export function show(visible) {
  wanted = visible;
  if (visible && !timer) look();
  if (!visible) {
    clearTimeout(timer);
    timer = null;
  }
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && wanted && timer === "hidden") look();
});

async function look() {
  timer = "asking";
  let wait = IDLE;
  try {
    const slots = await json("/slots", { quiet: true });
    const measured = metrics ? await scrape() : null;
    if (wanted) draw(slots, measured);
    if (slots.some((s) => s.is_processing)) wait = BUSY;
  } catch (e) {
    wait = FAILED;
    if (wanted) failed(e);
  }
  if (!wanted) {
    timer = null;
    return;
  }
  timer = document.hidden ? "hidden" : setTimeout(look, wait);
}

/** Name -> value of /metrics; null where the server has none. */
async function scrape() {
  try {
    const text = await (await request("/metrics", { quiet: true })).text();
    return Object.fromEntries(
      [...text.matchAll(/^llamacpp:(\w+) (\S+)$/gm)].map((m) => [m[1].replace(/_total$/, ""), Number(m[2])]),
    );
  } catch (e) {
    if (e.status === 501) metrics = false;
    return null;
  }
}

function failed(e) {
  fill($("view-slots"), heading(), el("p.notice.error", { role: "alert" }, e.message));
}

const heading = () =>
  el(
    "header.page-head",
    {},
    el("h1", {}, "Slots"),
    el("p", {}, "A slot is one sequence of the model's memory. All slots that are busy run together, in one batch a round."),
  );

function draw(slots, measured) {
  const busy = slots.filter((s) => s.is_processing).length;
  const facts = [["Busy", `${busy} of ${slots.length}`]];
  if (measured) {
    facts.push(
      ["Waiting", number(measured.requests_deferred)],
      ["Prompt tokens/s", number(measured.prompt_tokens_seconds, 0)],
      ["Written tokens/s", number(measured.predicted_tokens_seconds, 1)],
      ["Tokens written", number(measured.tokens_predicted)],
      ["Prompt tokens", number(measured.prompt_tokens)],
      ["From the cache", number(measured.prompt_tokens_cached)],
    );
  }
  const more = measured ? null : el("p.small", {}, "Start the server with --metrics to see totals and averages.");
  fill(
    $("view-slots"),
    heading(),
    el("dl.facts", {}, ...facts.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v)))),
    more,
    el("div.cards", {}, ...slots.map(card)),
  );
}

function card(s) {
  const n = s.next_token?.[0]?.n_decoded ?? 0;
  const state = !s.is_processing ? "Idle" : n ? "Writing" : "Reading";
  const node = el(
    `article.card.slot.${state.toLowerCase()}`,
    { "aria-label": `Slot ${s.id}` },
    el("header", {}, el("h2", {}, `Slot ${s.id}`), el("span.pill", {}, state)),
    bar("Memory", s.n_past ?? 0, s.n_ctx, `${number(s.n_past ?? 0)} of ${number(s.n_ctx)} tokens`),
  );
  if (s.is_processing) {
    const done = Math.min(s.n_prompt_tokens_cache + s.n_prompt_tokens_processed, s.n_prompt_tokens);
    node.append(
      bar(
        "Prompt",
        n ? s.n_prompt_tokens : done,
        s.n_prompt_tokens,
        `${number(n ? s.n_prompt_tokens : done)} of ${number(s.n_prompt_tokens)} tokens, ${number(s.n_prompt_tokens_cache)} cached`,
      ),
    );
    const left = s.next_token?.[0]?.n_remain ?? -1,
      rate = speed(s, n);
    node.append(
      el(
        "p.line",
        {},
        el("span", {}, `Request ${s.id_task}`),
        el(
          "span",
          {},
          `${number(n)} written${left >= 0 ? `, ${number(left)} to go` : ""}${rate ? ` · ${number(rate, 1)} tokens/s` : ""}`,
        ),
      ),
    );
  } else before.delete(s.id);
  if (s.cache_reuse) node.append(el("p.small", {}, `Last prompt: ${s.cache_reuse}`));
  return node;
}

function bar(label, value, max, text) {
  return el(
    "div.bar-row",
    {},
    el("span", {}, label),
    el("span.amount", {}, text),
    el(
      "div.meter",
      {
        role: "meter",
        "aria-label": label,
        "aria-valuemin": 0,
        "aria-valuemax": max,
        "aria-valuenow": value,
        "aria-valuetext": text,
      },
      el("div", { style: { width: `${max ? Math.min(100, (100 * value) / max) : 0}%` } }),
    ),
  );
}

/** Tokens per second since the last look at the same request. */
function speed(s, n) {
  const now = performance.now(),
    was = before.get(s.id);
  before.set(s.id, { task: s.id_task, n, at: now });
  return was && was.task === s.id_task && n > was.n ? (1000 * (n - was.n)) / (now - was.at) : 0;
}
