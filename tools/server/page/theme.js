// Light or dark, before anything is painted. Without a choice the system's wish counts.
"use strict";
(() => {
  let choice = null;
  try {
    choice = localStorage.getItem("ggraph.theme");
  } catch {
    /* storage is off: the system's wish */
  }
  if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
})();
