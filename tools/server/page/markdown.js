// Markdown -> DOM nodes. Every character of the text ends up in a text node; only tags named here are ever made.
import { copyButton, el } from "./dom.js";

const DEPTH = 12; // of lists, quotes and emphasis; deeper is plain text
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const ALIGN = /^ *\|? *:?-+:? *(?:\| *:?-+:? *)*\|? *$/;

/** Show `text` in `box`. While a text grows, blocks that are as they were stay as they are. */
export function render(box, text) {
  const parts = split(text);
  const old = box._parts ?? [];
  let same = 0;
  while (same < parts.length && same < old.length && parts[same] === old[same].source && same < parts.length - 1) same++;
  for (const part of old.slice(same)) for (const node of part.nodes) node.remove();
  const fresh = parts.slice(same).map((source) => ({ source, nodes: blocks(source.split("\n"), 0) }));
  for (const part of fresh) for (const node of part.nodes) box.append(node);
  box._parts = [...old.slice(0, same), ...fresh];
}

/** The text, cut where no block crosses: at blank lines outside of code, before lines that are not indented. */
function split(text) {
  const parts = [];
  let lines = [],
    fence = null,
    blank = false,
    list = false;
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const mark = FENCE.exec(line);
    const open = fence === null && blank && line.trim() !== "" && !/^\s/.test(line) && !(list && ITEM.test(line));
    if (open && lines.length) {
      parts.push(lines.join("\n"));
      lines = [];
      list = false;
    }
    if (fence === null && ITEM.test(line)) list = true;
    if (mark && fence === null) fence = mark[1];
    else if (fence !== null && closes(line, fence)) fence = null;
    lines.push(line);
    blank = line.trim() === "";
  }
  parts.push(lines.join("\n"));
  return parts;
}

function closes(line, fence) {
  const t = line.trim();
  return t.length >= fence.length && t[0] === fence[0] && t === fence[0].repeat(t.length);
}

function blocks(lines, depth) {
  const out = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    let m;
    if (line.trim() === "") i++;
    else if ((m = FENCE.exec(line))) i = fenced(lines, i, m, out);
    else if ((m = HEADING.exec(line))) {
      out.push(el(`h${m[1].length}`, {}, inline(trimHashes(m[2] ?? ""), depth)));
      i++;
    } else if (RULE.test(line)) {
      out.push(el("hr"));
      i++;
    } else if (QUOTE.test(line) && depth < DEPTH) i = quote(lines, i, depth, out);
    else if (ITEM.test(line) && depth < DEPTH) i = list(lines, i, depth, out);
    else if (
      line.includes("|") &&
      ALIGN.test(lines[i + 1] ?? "") &&
      lines[i + 1].includes("-") &&
      cells(line).length === cells(lines[i + 1]).length
    )
      i = table(lines, i, depth, out);
    else i = paragraph(lines, i, depth, out);
  }
  return out;
}

function trimHashes(text) {
  let end = text.trimEnd();
  const bare = end.replace(/#+$/, "");
  if (bare === "" || bare.endsWith(" ")) end = bare.trimEnd();
  return end;
}

function fenced(lines, i, m, out) {
  const indent = line0(lines[i]),
    code = [];
  let k = i + 1;
  for (; k < lines.length && !closes(lines[k], m[1]); k++) code.push(lines[k].slice(Math.min(indent, line0(lines[k]))));
  out.push(codeBlock(code.join("\n"), m[2].trim().split(/\s+/)[0]));
  return k + 1;
}

const line0 = (line) => line.length - line.trimStart().length;

export function codeBlock(text, language = "") {
  const code = el("code", {}, highlighted(text, language));
  return el(
    "div.code",
    {},
    el(
      "div.code-head",
      {},
      el("span", {}, language),
      copyButton(() => text, "Copy code"),
    ),
    el("pre", { tabindex: "0" }, code),
  );
}

function quote(lines, i, depth, out) {
  const inner = [];
  for (; i < lines.length && lines[i].trim() !== "" && (QUOTE.test(lines[i]) || plain(lines[i])); i++)
    inner.push(lines[i].replace(QUOTE, ""));
  out.push(el("blockquote", {}, blocks(inner, depth + 1)));
  return i;
}

const plain = (line) => !(FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line));

function list(lines, i, depth, out) {
  const first = ITEM.exec(lines[i]),
    base = first[1].length,
    ordered = /\d/.test(first[2]);
  const items = [];
  let loose = false;
  while (i < lines.length) {
    const m = ITEM.exec(lines[i]);
    if (!m || m[1].length < base || m[1].length > base + 3 || /\d/.test(m[2]) !== ordered || RULE.test(lines[i])) break;
    const indent = m[1].length + m[2].length + Math.min(m[3].length || 1, 4),
      inner = [lines[i].slice(indent)];
    for (i++; i < lines.length; i++) {
      const blank = lines[i].trim() === "",
        deep = line0(lines[i]) >= Math.min(indent, base + 2);
      if (blank) {
        const at = following(lines, i),
          next = lines[at],
          more = ITEM.exec(next ?? "");
        const same = more && more[1].length >= base && /\d/.test(more[2]) === ordered;
        if (next === undefined || (line0(next) < Math.min(indent, base + 2) && !same)) break;
        loose ||= line0(next) <= indent;
        while (i < at - 1) {
          inner.push("");
          i++;
        }
      } else if (!deep && (ITEM.test(lines[i]) || inner.at(-1).trim() === "" || !plain(lines[i]))) break;
      inner.push(blank ? "" : lines[i].slice(Math.min(indent, line0(lines[i]))));
    }
    items.push(inner);
    if (i < lines.length && lines[i].trim() === "") break;
  }
  const start = parseInt(first[2], 10);
  out.push(el(ordered ? "ol" : "ul", ordered && start !== 1 ? { start } : {}, ...items.map((inner) => item(inner, loose, depth))));
  return i;
}

/** Where the next line is that is not blank. */
function following(lines, i) {
  while (i < lines.length && lines[i].trim() === "") i++;
  return i;
}

function item(lines, loose, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) lines = [lines[0].slice(4), ...lines.slice(1)];
  const nodes = blocks(lines, depth + 1);
  const flat = loose ? nodes : nodes.flatMap((n) => (n.tagName === "P" ? [...n.childNodes] : [n]));
  const box = task ? el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "done" }) : null;
  return el(task ? "li.task" : "li", {}, box, flat);
}

/** A row's cells; "\|" and bars inside of code do not end one. */
function cells(line) {
  const t = line.trim().replace(/^\|/, ""),
    out = [""];
  let code = false;
  for (let i = 0; i < t.length; i++) {
    if (t[i] === "\\" && t[i + 1] === "|") {
      out[out.length - 1] += "|";
      i++;
      continue;
    }
    if (t[i] === "`") code = !code;
    if (t[i] === "|" && !code) {
      if (i < t.length - 1) out.push("");
      continue;
    }
    out[out.length - 1] += t[i];
  }
  return out.map((c) => c.trim());
}

function table(lines, i, depth, out) {
  const sides = cells(lines[i + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : "left"));
  const row = (line, tag) => {
    const found = cells(line);
    return el(
      "tr",
      {},
      sides.map((side, k) => el(`${tag}.${side}`, {}, inline(found[k] ?? "", depth))),
    );
  };
  const head = row(lines[i], "th"),
    body = [];
  for (i += 2; i < lines.length && lines[i].trim() !== "" && lines[i].includes("|"); i++) body.push(row(lines[i], "td"));
  out.push(el("div.table", { tabindex: "0" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body))));
  return i;
}

function paragraph(lines, i, depth, out) {
  const start = i++;
  while (i < lines.length && lines[i].trim() !== "" && (plain(lines[i]) || depth >= DEPTH)) i++;
  out.push(
    el(
      "p",
      {},
      inline(
        lines
          .slice(start, i)
          .map((l) => l.trimStart())
          .join("\n")
          .trimEnd(),
        depth,
      ),
    ),
  );
  return i;
}

// --- inside a block

const PUNCTUATION = /[!-/:-@[-`{-~]/;
const URL_START = /https?:\/\/[^\s<>"'`|\\^{}[\]]+/y;

function inline(text, depth) {
  const out = [],
    failed = new Set();
  let plainText = "";
  const flush = () => {
    if (plainText) {
      out.push(plainText);
      plainText = "";
    }
  };
  for (let i = 0; i < text.length;) {
    const c = text[i];
    let found = null;
    if (c === "\\" && i + 1 < text.length && PUNCTUATION.test(text[i + 1])) {
      plainText += text[i + 1];
      i += 2;
      continue;
    }
    if (c === "\n") {
      plainText = plainText.replace(/[ \\]+$/, "");
      flush();
      out.push(el("br"));
      i++;
      continue;
    }
    if (c === "`") found = codeSpan(text, i, failed);
    else if (c === "[" || (c === "!" && text[i + 1] === "[")) found = depth < DEPTH ? link(text, i, depth) : null;
    else if (c === "<") found = angle(text, i);
    else if (c === "h" && !/\w/.test(text[i - 1] ?? " ")) found = bare(text, i);
    else if ((c === "*" || c === "_" || c === "~") && depth < DEPTH) found = run(text, i);
    if (found === null) {
      plainText += c;
      i++;
      continue;
    }
    if (found.text !== undefined) {
      plainText += found.text;
      i = found.end;
      continue;
    }
    flush();
    out.push(found.node);
    i = found.end;
  }
  flush();
  return emphasized(out);
}

function codeSpan(text, i, failed) {
  let n = 1;
  while (text[i + n] === "`") n++;
  const mark = "`".repeat(n);
  for (let end = failed.has(n) ? -1 : text.indexOf(mark, i + n); end >= 0; end = text.indexOf(mark, end)) {
    let m = n;
    while (text[end + m] === "`") m++;
    if (m === n) return { node: el("code", {}, trimmed(text.slice(i + n, end).replaceAll("\n", " "))), end: end + n };
    end += m;
  }
  failed.add(n);
  return { text: mark, end: i + n };
}

const trimmed = (t) => (t.length > 2 && t.startsWith(" ") && t.endsWith(" ") && t.trim() !== "" ? t.slice(1, -1) : t);

function link(text, i, depth) {
  const start = i + (text[i] === "!" ? 2 : 1);
  let open = 1,
    end = start;
  for (; end < text.length && end < start + 2000; end++) {
    if (text[end] === "\\") end++;
    else if (text[end] === "[") open++;
    else if (text[end] === "]" && --open === 0) break;
  }
  if (text[end] !== "]" || text[end + 1] !== "(") return null;
  const m = /^\( *<?([^\s<>]*?)>?(?: +"[^"]*"| +'[^']*')? *\)$/.exec(balanced(text.slice(end + 1, end + 2002)));
  if (!m) return null;
  const label = text.slice(start, end),
    href = safe(m[1]);
  const shown = text[i] === "!" ? [label || m[1]] : inline(label, depth + 1);
  return { node: href ? anchor(href, shown) : el("span", { title: m[1] }, shown), end: end + 1 + m[0].length };
}

/** "(…)" with the brackets inside of it, so that an address may hold some. */
function balanced(text) {
  let open = 0;
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "(") open++;
    else if (text[i] === ")" && --open === 0) return text.slice(0, i + 1);
  }
  return text;
}

/** An address that a link may have, else null: nothing that runs, nothing relative to this page. */
export function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const anchor = (href, shown) => el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, shown);

function angle(text, i) {
  const m = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/.exec(text.slice(i, i + 2002));
  if (m && safe(m[1])) return { node: anchor(safe(m[1]), [m[1]]), end: i + m[0].length };
  const br = /^<br ?\/?>/i.exec(text.slice(i, i + 6));
  return br ? { node: el("br"), end: i + br[0].length } : null;
}

function bare(text, i) {
  URL_START.lastIndex = i;
  const m = URL_START.exec(text);
  if (!m) return null;
  let address = m[0].replace(/[.,;:!?*_~]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  const href = safe(address);
  return href ? { node: anchor(href, [address]), end: i + address.length } : null;
}

/** A run of *, _ or ~ that may open or close emphasis. */
function run(text, i) {
  const mark = text[i];
  let n = 1;
  while (text[i + n] === mark) n++;
  const before = text[i - 1] ?? " ",
    after = text[i + n] ?? " ";
  const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
  const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
  const word = mark === "_";
  const open = left && (!word || !right || PUNCTUATION.test(before)),
    close = right && (!word || !left || PUNCTUATION.test(after));
  if ((!open && !close) || (mark === "~" && n !== 2)) return { text: mark.repeat(n), end: i + n };
  return { node: { mark, n, open, close }, end: i + n };
}

/** Runs of marks -> em, strong and del around what lies between; those without a partner are text. */
function emphasized(items) {
  const openers = { "*": [], _: [], "~": [] };
  for (let k = 0; k < items.length; k++) {
    const closer = items[k];
    if (closer.mark === undefined) continue;
    while (closer.close && closer.n > 0 && openers[closer.mark].length) {
      const at = openers[closer.mark].at(-1),
        opener = items[at];
      const n = Math.min(opener.n, closer.n) >= 2 ? 2 : 1;
      const inner = items.slice(at + 1, k).map(asNode);
      const tag = closer.mark === "~" ? "del" : n === 2 ? "strong" : "em";
      items.splice(at + 1, k - at - 1, el(tag, {}, inner));
      k = at + 2;
      opener.n -= n;
      closer.n -= n;
      for (const stack of Object.values(openers)) while (stack.length && stack.at(-1) > at) stack.pop();
      if (opener.n === 0) openers[closer.mark].pop();
    }
    if (closer.open && closer.n > 0) openers[closer.mark].push(k);
  }
  return items.map(asNode);
}

const asNode = (item) => (item.mark === undefined ? item : item.mark.repeat(item.n));

// --- colours in code: comments, strings, numbers and the words that most languages share

const WORDS = new Set(
  (
    "and as async await bool break case catch class const continue def default del do double elif else enum export extends " +
    "False false final finally float fn for from func function if impl import in int interface is lambda let loop match mod mut " +
    "namespace new nil None not null or pass private protected pub public raise return self static string struct super switch " +
    "template this throw True true try type typedef typename union unsafe use using var virtual void where while with yield " +
    "SELECT FROM WHERE JOIN GROUP BY ORDER INSERT INTO VALUES UPDATE SET CREATE TABLE"
  ).split(" "),
);
const HASH = new Set([
  "py",
  "python",
  "sh",
  "bash",
  "shell",
  "zsh",
  "yaml",
  "yml",
  "toml",
  "ruby",
  "rb",
  "r",
  "perl",
  "make",
  "dockerfile",
]);
const PIECE =
  /"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|`[^`]*`|\b\d[\w.]*\b|[A-Za-z_]\w*|\/\/[^\n]*|\/\*[^]*?\*\/|#[^\n]*|--[^\n]*|[^]/g;

function highlighted(text, language) {
  const name = language.toLowerCase();
  if (!name || ["text", "txt", "plain", "markdown", "md"].includes(name) || text.length > 20_000) return [text];
  const out = [];
  let rest = "";
  for (const [piece] of text.matchAll(PIECE)) {
    const kind = kindOf(piece, name);
    if (!kind) {
      rest += piece;
      continue;
    }
    if (rest) out.push(rest);
    rest = "";
    out.push(el(`span.${kind}`, {}, piece));
  }
  return rest ? [...out, rest] : out;
}

function kindOf(piece, name) {
  const c = piece[0];
  if (c === "#") return HASH.has(name) && piece.length > 1 ? "c" : null;
  if (piece.length > 1 && (piece.startsWith("//") || piece.startsWith("/*"))) return HASH.has(name) ? null : "c";
  if (piece.length > 2 && piece.startsWith("--")) return name === "sql" || name === "lua" || name === "haskell" ? "c" : null;
  if (piece.length > 1 && (c === '"' || c === "'" || c === "`")) return "s";
  if (/\d/.test(c)) return "n";
  return WORDS.has(piece) ? "k" : null;
}
