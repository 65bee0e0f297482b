// Points of runs, from /run/NAME/series.json, and what a chart draws of them: rows of uPlot's data, and of each row its
// label, colour and the like. Nothing here touches the page.
"use strict";
window.mrlPoints = (() => {
  const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
  const state = { smooth: 0, zoom: null };
  const runs = {}; // by name: {series: {metric: {x, y}}, events, resumes, live}

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (at) => css(`--s${at % 8}`);
  const faint = (hex, alpha) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    return `rgba(${r},${g},${b},${alpha})`;
  };

  // --- points ----------------------------------------------------------------------------------------------------
  const needed = (specs) => {
    const wanted = {};
    for (const spec of specs) {
      for (const one of spec.series) {
        const list = (wanted[one.run] ||= new Set());
        list.add(one.metric);
        if (spec.spread && one.metric.endsWith("/mean")) list.add(one.metric.replace(/mean$/, "std"));
        if (spec.x) list.add(spec.x);
      }
    }
    return wanted;
  };
  const load = async (run, metrics, since) => {
    const query = new URLSearchParams([...metrics].map((name) => ["metric", name]));
    query.set("since", since);
    const answer = await fetch(`/run/${encodeURIComponent(run)}/series.json?${query}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer.json();
  };
  const merge = (run, found) => {
    const known = runs[run];
    if (!known || known.resumes !== found.resumes) { runs[run] = found; return; }
    for (const [name, fresh] of Object.entries(found.series)) {
      const old = known.series[name] || { x: [], y: [] };
      const from = fresh.x.length ? fresh.x[0] : Infinity;
      const kept = old.x.filter((x) => x < from).length;
      known.series[name] = { x: [...old.x.slice(0, kept), ...fresh.x], y: [...old.y.slice(0, kept), ...fresh.y] };
    }
    Object.assign(known, { events: found.events, live: found.live, steps: found.steps });
  };

  const numbers = (ys) => ys.map((y) => (typeof y === "number" ? y : null));
  const odd = (points) => points.y.flatMap((y, at) => (typeof y === "string" ? [`${points.x[at]}: ${y}`] : []));
  const smoothed = (ys) => {
    let last = 0, weight = 0;
    return ys.map((y) => {
      if (y === null) return null;
      last = last * state.smooth + (1 - state.smooth) * y;
      weight = weight * state.smooth + (1 - state.smooth);
      return last / weight;
    });
  };

  // Rows of uPlot's data with what is to be known of each: {label, ys, colour, width, dash, band, own}
  const curvesOf = (spec) => {
    const tables = [], about = [], notes = [];
    spec.series.forEach((one, at) => {
      const found = runs[one.run]?.series[one.metric];
      if (!found || !found.x.length) return;
      const raw = numbers(found.y);
      const ill = odd(found);
      if (ill.length) notes.push(`${one.label} is not finite at ${ill.slice(0, 3).join(", ")}${ill.length > 3 ? ` and ${ill.length - 3} more steps` : ""}`);
      const paint = colour(at);
      const few = found.x.length < 60 || one.metric.startsWith("eval:");
      const line = { label: one.label, colour: paint, dash: DASHES[Math.floor(at / 8) % 4], points: few };
      const std = spec.spread ? runs[one.run].series[one.metric.replace(/mean$/, "std")] : null;
      if (std && one.metric.endsWith("/mean") && !spec.stacked) {
        const by = new Map(std.x.map((x, i) => [x, std.y[i]]));
        const off = (sign) => smoothed(raw.map((y, i) => {
          const s = by.get(found.x[i]);
          return y === null || typeof s !== "number" ? null : y + sign * s;
        }));
        tables.push([found.x, off(1)], [found.x, off(-1)]);
        about.push({ ...line, hidden: "high", group: at }, { ...line, hidden: "low", group: at });
      }
      if (state.smooth && !spec.stacked) {
        tables.push([found.x, raw]);
        about.push({ ...line, colour: faint(paint, 0.25), hidden: "raw", group: at });
      }
      tables.push([found.x, state.smooth && !spec.stacked ? smoothed(raw) : raw]);
      about.push({ ...line, group: at, raw });
    });
    if (!tables.length) return null;
    const data = tables.length > 1 ? uPlot.join(tables) : [tables[0][0], tables[0][1]];
    if (spec.stacked) {
      const sums = data[0].map(() => 0);
      about.forEach((one, at) => {
        one.own = data[at + 1];
        data[at + 1] = data[at + 1].map((y, i) => (sums[i] += y ?? 0));
      });
    }
    return { data, about, notes };
  };

  // One metric against another: points in thirds of the run, from early to late.
  const againstOf = (spec) => {
    const one = spec.series[0], found = runs[one.run]?.series;
    const ys = found?.[one.metric], xs = found?.[spec.x];
    if (!ys || !xs) return null;
    const by = new Map(xs.x.map((step, at) => [step, xs.y[at]]));
    const pairs = ys.x.map((step, at) => [by.get(step), ys.y[at], step])
      .filter(([x, y]) => typeof x === "number" && typeof y === "number");
    if (!pairs.length) return null;
    const third = Math.ceil(pairs.length / 3);
    pairs.forEach((pair, at) => pair.push(Math.floor(at / third)));
    pairs.sort((a, b) => a[0] - b[0]);
    const names = ["first third", "second third", "last third"];
    return {
      data: [pairs.map((p) => p[0]), ...names.map((_, k) => pairs.map((p) => (p[3] === k ? p[1] : null)))],
      about: names.map((label, k) => ({ label, colour: colour([5, 0, 1][k]), dash: [], dots: true, group: k })),
      notes: [], steps: pairs.map((p) => p[2]),
    };
  };

  const dotsOf = (spec) => {
    const dots = [...spec.dots].sort((a, b) => a.x - b.x);
    if (!dots.length) return null;
    return {
      data: [dots.map((d) => d.x), dots.map((d) => (d.eval ? null : d.y)), dots.map((d) => (d.eval ? d.y : null))],
      about: [{ label: "training", colour: colour(0), dash: [], dots: true, group: 0 },
        { label: "evaluation", colour: colour(1), dash: [], dots: true, group: 1 }],
      notes: [], keys: dots.map((d) => d.key),
    };
  };

  return { state, runs, css, colour, faint, needed, load, merge, curvesOf, againstOf, dotsOf };
})();
