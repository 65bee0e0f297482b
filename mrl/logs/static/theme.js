// Runs before the page is drawn, so that it is never drawn in the wrong colours first.
"use strict";
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("mrl-theme"); } catch { /* no storage: the system's choice */ }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  document.documentElement.classList.add("js");
})();
