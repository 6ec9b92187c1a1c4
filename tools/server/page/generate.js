// An answer in the making: from the branch of a conversation to a message that grows. It knows nothing of the screen.
import { stream } from "./api.js";
import * as store from "./store.js";

const running = new Map(); // conversation id -> {controller, message}
const listeners = new Set();
let timer = null;

export function onProgress(listener) {
  listeners.add(listener);
}
export const runs = (c) => running.get(c.id) ?? null;
export const stop = (c) => running.get(c.id)?.controller.abort();

const tell = (c, m) => {
  for (const listener of listeners) listener(c, m);
};

/** Fields of a conversation's settings that go into the request as they are. */
const FIELDS = [
  "temperature",
  "top_k",
  "top_p",
  "min_p",
  "repeat_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
  "max_tokens",
];

export function messagesOf(c, leaf) {
  const said = store.path(c, leaf).filter((m) => m.content !== "" || m.role === "user");
  const system = c.system.trim() ? [{ role: "system", content: c.system }] : [];
  return [...system, ...said.map(({ role, content }) => ({ role, content }))];
}

/** What the conversation's settings say of how tokens are chosen. */
export const settingsOf = (c) =>
  Object.fromEntries(FIELDS.filter((name) => c.settings[name] !== undefined).map((name) => [name, c.settings[name]]));

function bodyOf(c, leaf) {
  const body = { messages: messagesOf(c, leaf), stream: true, return_progress: true, ...settingsOf(c) };
  if (c.settings.stop?.length) body.stop = c.settings.stop;
  if (c.settings.n_probs) Object.assign(body, { logprobs: true, top_logprobs: c.settings.n_probs });
  return body;
}

/** A new version of the answer to message `parent`. */
export function answer(c, parent) {
  const m = store.add(c, { parent: parent.id, role: "assistant", content: "", reasoning: "", pending: true });
  return follow(c, m, bodyOf(c, parent.id));
}

/** Go on with an answer that was cut short: the server gets it as the start of its own. */
export function resume(c, m) {
  const body = bodyOf(c, m.id),
    before = { content: m.content, n: m.stats?.n ?? 0 };
  Object.assign(m, { pending: true, stopped: false, error: null });
  return follow(c, m, body, before);
}

async function follow(c, m, body, before = null) {
  const controller = new AbortController();
  running.set(c.id, { controller, message: m });
  Object.assign(m, { _start: performance.now(), _first: 0, _n: 0, _progress: null, _probs: before ? [...(m._probs ?? [])] : [] });
  let fresh = "";
  keep(c);
  tell(c, m);
  try {
    await stream("/v1/chat/completions", body, controller.signal, (event) => {
      const content = take(m, event);
      if (content === null) return;
      fresh += content;
      m.content = before && before.content.startsWith(fresh) ? before.content : fresh;
      later();
      tell(c, m);
    });
  } catch (e) {
    if (e.name === "AbortError" || leaving) m.stopped = true;
    else m.error = e.message;
  }
  m.pending = false;
  c.updated = Date.now();
  running.delete(c.id);
  keep(c);
  tell(c, m);
}

/** What an event adds to the content; null where it is about something else. */
function take(m, event) {
  if (event.prompt_progress) {
    m._progress = event.prompt_progress;
    return "";
  }
  if (event.timings) m.stats = stats(event.timings);
  const choice = event.choices?.[0];
  if (!choice) return null;
  if (choice.finish_reason) m.finish = choice.finish_reason;
  if (choice.logprobs?.content) m._probs.push(...choice.logprobs.content);
  const { content, reasoning_content: reasoning } = choice.delta;
  if (!content && !reasoning) return choice.finish_reason ? "" : null;
  m._first ||= performance.now();
  m._n += choice.logprobs?.content?.length ?? 1;
  if (reasoning) m.reasoning += reasoning;
  return content ?? "";
}

const stats = (t) => ({
  n: t.predicted_n,
  perSecond: t.predicted_per_second,
  prompt: t.prompt_n,
  cached: t.cache_n,
  promptMs: t.prompt_ms,
  ms: t.predicted_ms,
});

function later() {
  timer ??= setTimeout(() => {
    timer = null;
    keepAll();
  }, 1000);
}

function keepAll() {
  for (const id of running.keys()) {
    const c = store.get(id);
    if (c) keep(c);
  }
}

function keep(c) {
  if (c._gone) return; // it was deleted meanwhile
  try {
    store.save(c);
    c._unsaved = false;
  } catch {
    c._unsaved = true;
  }
}

// A page that is left breaks its streams off, which is no error; a link to another program only seems to leave it.
let leaving = false;
addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => (leaving = false), 1000);
});
addEventListener("pagehide", () => {
  leaving = true;
  keepAll();
});
addEventListener("pageshow", () => (leaving = false));
