// Keys, the theme, and small things of every page. Curves are in charts.js.
"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const go = (href) => { if (href) location.assign(href); };

  // --- theme -----------------------------------------------------------------------------------------------------
  const isDark = () => (document.documentElement.dataset.theme
    || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const switchTheme = () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("mrl-theme", next); } catch { /* it holds for this page */ }
    document.dispatchEvent(new Event("mrl:theme"));
  };
  $("#theme").addEventListener("click", switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("mrl:theme")));

  const help = $("#help");
  const showHelp = () => (help.open ? help.close() : help.showModal());
  $("#keys").addEventListener("click", showHelp);

  // --- htmx ------------------------------------------------------------------------------------------------------
  document.addEventListener("htmx:configRequest", (event) => {
    // Links without what says nothing: ?status=&step=3 is ?step=3. A new filter begins at the first page.
    const given = event.detail.parameters;
    for (const name of Object.keys(given)) if (given[name] === "") delete given[name];
    // The table of runs refreshes itself: what its own form holds is for comparing.
    if (event.detail.elt.id === "runs") for (const name of Object.keys(given)) delete given[name];
  });
  // Fields that search while one types say "change" when they are left: a list that is there already is not made again,
  // least of all under the click that left the field.
  document.addEventListener("change", (event) => { if (event.target.matches("[data-search]")) event.stopPropagation(); }, true);
  document.addEventListener("htmx:beforeRequest", (event) => {
    const busy = event.detail.elt.id === "runs" && (picked().length || document.hidden || selected());
    if (busy || (event.detail.elt.id === "head" && document.hidden)) event.preventDefault();
  });

  // --- clicks ----------------------------------------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const row = event.target.closest("tr[data-href]");
    if (!row || event.target.closest("a, button, input, label, summary") || String(getSelection())) return;
    if (event.ctrlKey || event.metaKey) open(row.dataset.href); else go(row.dataset.href);
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submit]")) event.target.form.requestSubmit();
    if (event.target.matches("#runs input")) showPicked();
  });
  const picked = () => all("#runs input:checked");
  const showPicked = () => {
    const button = $("#compare");
    if (button) button.textContent = picked().length ? `Compare ${picked().length} picked` : "Compare those picked";
  };
  showPicked();

  // What a token is, below the stream: titles need a mouse, and patience.
  const fact = $("#tokenfact");
  if (fact) {
    for (const kind of ["mouseover", "click"]) {
      document.addEventListener(kind, (event) => {
        const token = event.target.closest(".tokens .t");
        if (token) fact.textContent = `${JSON.stringify(token.textContent)} · ${token.title}`;
      });
    }
  }

  // A run without curves yet: the page is made again when there are some.
  const waiting = $("[data-wait]");
  if (waiting) {
    setInterval(async () => {
      if (document.hidden) return;
      try {
        if ((await (await fetch(waiting.dataset.wait)).json()).curves) location.reload();
      } catch { /* the next time */ }
    }, 2000);
  }

  // --- keys ------------------------------------------------------------------------------------------------------
  const selected = () => $("tr.selected, article.selected");
  const move = (by) => {
    const rows = all("tr[data-href], article[data-href]");
    if (!rows.length) return;
    const at = rows.indexOf(selected());
    const next = rows[Math.min(Math.max(at + by, 0), rows.length - 1)];
    selected()?.classList.remove("selected");
    next.classList.add("selected");
    next.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const neighbour = async (which) => {
    const here = $("#rollout");
    const found = await (await fetch(here.dataset.neighbours)).json();
    if (found[which] !== null) go(`${here.dataset.base}${found[which]}${here.dataset.query}`);
  };
  const nextView = () => {
    const views = all("[data-view]");
    if (views.length) go(views[(views.findIndex((one) => one.classList.contains("on")) + 1) % views.length].href);
  };
  const keys = {
    j: () => move(1), k: () => move(-1),
    Enter: () => go(selected()?.dataset.href),
    n: () => ($("#rollout") ? neighbour("after") : go($("a[rel=next]")?.href)),
    p: () => ($("#rollout") ? neighbour("before") : go($("a[rel=prev]")?.href)),
    "[": () => go($("a[rel=prev-attempt]")?.href),
    "]": () => go($("a[rel=next-attempt]")?.href),
    v: nextView,
    x: () => { const box = $("input[type=checkbox]", selected() || undefined); if (selected() && box) box.click(); },
    c: () => { const form = $("#runs"); if (form && picked().length) form.requestSubmit($("#compare")); },
    "/": () => { const field = $("[data-search]"); if (field) { field.focus(); field.select(); } },
    g: () => go($("#up")?.href || $("[data-tab='1']:not(.on)")?.href || "/"),
    t: switchTheme,
    "?": showHelp,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
    if (help.open && event.key !== "?") return;
    if (/^[1-6]$/.test(event.key)) { go($(`[data-tab='${event.key}']`)?.href); return; }
    const act = keys[event.key];
    if (act) { event.preventDefault(); act(); }
  });
})();
