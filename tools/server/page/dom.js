// Elements made without markup: text never becomes HTML.

/** el("a.big", {href, onclick}, child, ...): strings become text, null and false are left out. */
export function el(kind, props = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(props)) set(node, name, value);
  for (const child of kept(children)) node.append(child); // there may be more than a call takes
  return node;
}

const kept = (children) => children.flat(Infinity).filter(Boolean); // what a condition left out is no child

/** These children in place of those that a node has. */
export const fill = (node, ...children) => node.replaceChildren(...kept(children));

function set(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
  else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
  else if (name === "data") Object.assign(node.dataset, value);
  else if (name === "value") node.value = value;
  else node.setAttribute(name, value === true ? "" : value);
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter(Boolean));
  return node;
}

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4 12H2M22 12h-2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5",
  moon: "M20 14.5A8 8 0 1 1 9.5 4 6.5 6.5 0 0 0 20 14.5z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5",
  keyboard: "M3 7h18v11H3zM7 11h0M11 11h0M15 11h0M17 11h0M8 15h8",
  look: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zM16 16l5 5",
  forward: "M5 5l7 7-7 7M12 5l7 7-7 7",
  chart: "M5 20v-6M10 20V8M15 20v-9M20 20V4",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  key: "M15 9a4 4 0 1 0-3.5 4L12 14h2v2h2v2h3v-3l-4.3-4.3A4 4 0 0 0 15 9z",
};

export function icon(name) {
  return svg("svg", { viewBox: "0 0 24 24", class: "i", "aria-hidden": "true" }, svg("path", { d: PATHS[name] }));
}

/** A button that shows an icon; `label` is what it is called, and its tooltip. */
export function iconButton(name, label, onclick, props = {}) {
  return el("button.icon", { type: "button", "aria-label": label, title: label, onclick, ...props }, icon(name));
}

export const $ = (id) => document.getElementById(id);

export function toast(text, action = null) {
  const box = el("div.toast", {}, text);
  if (action)
    box.append(
      el(
        "button.link",
        {
          type: "button",
          onclick: () => {
            action.run();
            box.remove();
          },
        },
        action.label,
      ),
    );
  $("toasts").append(box);
  setTimeout(() => box.remove(), action ? 8000 : 3000);
}

/** A dialog that is gone when it is closed; resolves to what `close(value)` was given, null where it was dismissed. */
export function dialog(title, build) {
  return new Promise((resolve) => {
    let result = null;
    const box = el("dialog", { "aria-label": title });
    const close = (value) => {
      result = value;
      box.close();
    };
    box.append(
      el(
        "header",
        {},
        el("h2", {}, title),
        iconButton("close", "Close", () => close(null)),
      ),
      build(close),
    );
    box.addEventListener("close", () => {
      box.remove();
      refocus();
      resolve(result);
    });
    box.addEventListener("click", (e) => {
      if (e.target === box) close(null);
    });
    document.body.append(box);
    box.showModal();
  });
}

/** What a closed dialog gives the focus back to takes no text in Chromium before it gets the focus once more. */
function refocus() {
  const node = document.activeElement;
  node?.blur();
  node?.focus();
}

/** Copy, also where the page is not at localhost and has no clipboard of its own. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { value: text, "aria-hidden": "true", style: { position: "fixed", opacity: "0" } });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copy(text());
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1200);
  });
  return button;
}

export const number = (x, digits = 0) => x.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
