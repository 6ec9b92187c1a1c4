// What the browser keeps for this page; where it keeps nothing, the same for as long as the tab lives.

class Short {
  #items = new Map();
  get length() {
    return this.#items.size;
  }
  key(i) {
    return [...this.#items.keys()][i] ?? null;
  }
  getItem(key) {
    return this.#items.get(key) ?? null;
  }
  setItem(key, value) {
    this.#items.set(key, String(value));
  }
  removeItem(key) {
    this.#items.delete(key);
  }
}

function find() {
  try {
    localStorage.getItem("ggraph");
    return localStorage;
  } catch {
    return null;
  }
}

const found = find();
export const keeps = found !== null;
export const storage = found ?? new Short();
