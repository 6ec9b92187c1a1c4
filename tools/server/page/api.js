// Talking to the server: the API key, errors as one sentence, answers that stream.
import { dialog, el } from "./dom.js";
import { storage } from "./storage.js";

const KEY = "ggraph.key";

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => Boolean(storage.getItem(KEY));
export const forgetKey = () => storage.removeItem(KEY);

function headers(body) {
  const key = storage.getItem(KEY);
  return { ...(body ? { "Content-Type": "application/json" } : {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The response of a request that went well, else an ApiError. Asks for the key where the server wants one. */
export async function request(path, { body = null, signal = null, quiet = false } = {}) {
  let response;
  try {
    response = await fetch(path.slice(1), {     // beside the page, wherever the server's --api-prefix puts it
      method: body ? "POST" : "GET",
      headers: headers(body),
      body: body ? JSON.stringify(body) : null,
      signal,
      credentials: "omit",
      cache: "no-store",
    });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    dispatchEvent(new Event("server-gone"));
    throw new ApiError("The server cannot be reached.");
  }
  if (response.status === 401 && !quiet && (await askKey())) return request(path, { body, signal });
  if (!response.ok) throw await told(response);
  return response;
}

export const json = async (path, options) => (await request(path, options)).json();

async function told(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    /* no JSON: the status has to do */
  }
  return new ApiError(message, response.status);
}

let asking = null; // one dialog for all requests that wait for it

function askKey() {
  asking ??= dialog("API key", (close) => {
    const input = el("input", { id: "key", type: "password", required: true, autocomplete: "off", autofocus: true });
    return el(
      "form",
      {
        onsubmit: (e) => {
          e.preventDefault();
          close(input.value.trim());
        },
      },
      el("p", {}, hasKey() ? "The server does not accept the key that this browser has." : "This server wants an API key."),
      el("label", { for: "key" }, "Key"),
      input,
      el("p.small", {}, "It is kept in this browser, and sent to this server alone."),
      el("footer", {}, el("button.primary", { type: "submit" }, "Use it")),
    );
  })
    .then((key) => {
      if (key) storage.setItem(KEY, key);
      return Boolean(key);
    })
    .finally(() => {
      asking = null;
    });
  return asking;
}

/** POST `body`, and call `take` with the JSON of each event until the stream ends. */
export async function stream(path, body, signal, take) {
  const response = await request(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "",
    ended = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6).trim();
        if (data === "[DONE]") {
          ended = true;
          continue;
        }
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, event.error.code);
        take(event);
      }
    }
  } catch (e) {
    if (e.name === "AbortError" || e instanceof ApiError) throw e;
    throw new ApiError("The connection broke off before the answer was complete.");
  }
  if (!ended) throw new ApiError("The connection broke off before the answer was complete.");
}
