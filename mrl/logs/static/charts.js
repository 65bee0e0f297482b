// Charts: every figure.chart says in data-chart what it draws; points come from points.js, or, in a report, from the
// element #data. Zoom and smoothing hold for all charts of a page and are part of its address.
"use strict";
(() => {
  const { state, runs, css, colour, faint, needed, load, merge, curvesOf, againstOf, dotsOf } = window.mrlPoints;
  const HEIGHT = 190;
  const STEPS = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((power) => [1, 2, 5].map((one) => one * 10 ** power));
  const TALL = 340;
  const POLL = 2000;
  const EVENT_COLOURS = { warning: "--warn", error: "--bad", restart: "--bad", checkpoint: "--muted" };
  const tools = document.getElementById("chart-tools");
  const embedded = document.getElementById("data");
  let drawn = [];

  const shown = (value) => {
    if (value === null || value === undefined) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
    return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
  };

  // --- the address -----------------------------------------------------------------------------------------------
  const readHash = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    const smooth = Number(given.get("smooth"));
    state.smooth = smooth > 0 && smooth < 1 ? smooth : 0;
    const range = (given.get("x") || "").split("-").map(Number);
    state.zoom = range.length === 2 && range.every(Number.isFinite) && range[0] < range[1] ? range : null;
  };
  const writeHash = () => {
    const given = new URLSearchParams();
    if (state.smooth) given.set("smooth", state.smooth);
    if (state.zoom) given.set("x", state.zoom.map((one) => Math.round(one)).join("-"));
    history.replaceState(null, "", given.size ? `#${given}` : location.pathname + location.search);
  };

  // --- drawing ---------------------------------------------------------------------------------------------------
  const marksOf = (spec) => {
    if (spec.x || spec.dots) return [];
    const names = [...new Set(spec.series.map((one) => one.run))];
    return names.length === 1 ? (runs[names[0]]?.events || []) : [];
  };

  const drawMarks = (plot, marks) => {
    const { ctx, bbox } = plot, ratio = devicePixelRatio || 1;
    ctx.save();
    for (const mark of marks) {
      const x = plot.valToPos(mark.step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const minor = mark.kind === "checkpoint";
      ctx.strokeStyle = ctx.fillStyle = css(EVENT_COLOURS[mark.kind] || "--muted");
      ctx.lineWidth = ratio;
      if (!minor) {
        ctx.setLineDash([3 * ratio, 3 * ratio]);
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      }
      const y = minor ? bbox.top + bbox.height : bbox.top, size = (minor ? 3 : 4) * ratio, way = minor ? -1 : 1;
      ctx.beginPath(); ctx.moveTo(x - size, y); ctx.lineTo(x + size, y); ctx.lineTo(x, y + way * 1.5 * size); ctx.fill();
    }
    ctx.restore();
  };

  const setZoom = (range) => {
    state.zoom = range;
    for (const one of drawn) {
      if (!one.plot || one.spec.x || one.spec.dots) continue;
      const xs = one.plot.data[0];
      one.quiet = true;
      one.plot.setScale("x", range ? { min: range[0], max: range[1] } : { min: xs[0], max: xs[xs.length - 1] });
      one.quiet = false;
    }
    const button = document.getElementById("unzoom");
    if (button) button.disabled = !range;
    writeHash();
  };

  const draw = (one) => {
    const { spec, box, legend } = one;
    const made = spec.dots ? dotsOf(spec) : spec.x ? againstOf(spec) : curvesOf(spec);
    one.plot?.destroy();
    one.plot = null;
    one.made = made;
    if (!made) { box.textContent = "nothing recorded"; box.classList.add("none"); legend.textContent = ""; return; }
    box.textContent = "";
    box.classList.remove("none");
    const muted = css("--muted"), grid = css("--grid");
    const axis = { stroke: muted, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const positive = spec.log && made.data.slice(1).every((ys) => ys.every((y) => y === null || y === undefined || y > 0));
    const series = [{}];
    const bands = [];
    made.about.forEach((line, at) => {
      const off = one.off.has(line.group);
      const item = {
        label: line.label, stroke: line.colour, width: line.hidden === "raw" ? 1 : 1.6, dash: line.dash, spanGaps: true,
        show: !off, points: { show: false }, scale: "y",
      };
      if (line.dots) Object.assign(item, { paths: () => null, points: { show: true, size: 5, fill: line.colour, stroke: line.colour } });
      else if (line.points && !line.hidden && !spec.stacked) item.points = { show: true, size: 4, fill: line.colour, stroke: line.colour, width: 0 };
      if (line.hidden === "high" || line.hidden === "low") item.stroke = "transparent";
      if (line.hidden === "high") bands.push({ series: [at + 1, at + 2], fill: faint(line.colour, 0.16) });
      if (spec.stacked) {
        if (at === 0) item.fill = faint(line.colour, 0.35);
        else bands.push({ series: [at + 1, at], fill: faint(line.colour, 0.35) });
      }
      series.push(item);
    });
    const marks = marksOf(spec);
    const xs = made.data[0];
    const options = {
      padding: [8, 12, 0, 0], width: Math.max(box.clientWidth, 160), height: one.tall ? TALL : HEIGHT, series, bands,
      legend: { show: false },
      cursor: {
        sync: spec.x || spec.dots ? undefined : { key: "mrl", setSeries: false, scales: ["x", null] },
        drag: { x: true, y: false, setScale: false }, points: { size: 6 },
      },
      scales: {
        x: { time: false, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
        y: positive ? { distr: 3 } : { range: (_, min, max) => {
          if (min === null) return [0, 1];
          const low = spec.stacked ? 0 : min, span = (max - low) || Math.abs(max) || 1;
          return [spec.stacked ? 0 : low - 0.06 * span, max + 0.06 * span];
        } },
      },
      axes: [{ ...axis, size: 24, incrs: spec.x ? undefined : STEPS, values: (_, ticks) => ticks.map(shown) },
        { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick))) }],
      hooks: {
        draw: [(plot) => drawMarks(plot, marks)],
        setCursor: [(plot) => showValues(one, plot.cursor.idx, marks)],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          if (spec.x || spec.dots) plot.setScale("x", { min: range[0], max: range[1] }); else setZoom(range);
        }],
        ready: [(plot) => {
          plot.over.addEventListener("dblclick", () => (spec.x || spec.dots
            ? plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] }) : setZoom(null)));
          let from = 0;
          plot.over.addEventListener("mousedown", (event) => { from = event.clientX; });
          plot.over.addEventListener("click", (event) => {
            const at = plot.cursor.idx;
            if (Math.abs(event.clientX - from) < 4 && at !== null && at !== undefined) pin(one, at);
          });
        }],
      },
    };
    one.plot = new uPlot(options, made.data, box);
    if (state.zoom && !spec.x && !spec.dots) one.plot.setScale("x", { min: state.zoom[0], max: state.zoom[1] });
    showLegend(one);
  };

  // --- legends ---------------------------------------------------------------------------------------------------
  const showLegend = (one) => {
    one.legend.textContent = "";
    one.values = [];
    one.made.about.forEach((line, at) => {
      if (line.hidden) return;
      const item = document.createElement("button");
      item.type = "button";
      item.className = one.off.has(line.group) ? "item off" : "item";
      item.title = "Hide or show";
      const mark = document.createElement("i");
      mark.style.background = line.colour;
      const name = document.createElement("span");
      name.textContent = line.label;
      const value = document.createElement("b");
      item.append(mark, name, value);
      item.addEventListener("click", () => {
        if (one.off.has(line.group)) one.off.delete(line.group); else one.off.add(line.group);
        draw(one);
      });
      one.legend.append(item);
      one.values.push([at, value]);
    });
    one.note = document.createElement("span");
    one.note.className = "at muted";
    one.legend.append(one.note);
    for (const text of one.made.notes) {
      const warning = document.createElement("span");
      warning.className = "warn-text";
      warning.textContent = text;
      one.legend.append(warning);
    }
    showValues(one, null, []);
  };

  const showValues = (one, at, marks) => {
    if (!one.made || !one.values) return;
    const xs = one.made.data[0];
    const resting = at === null || at === undefined;
    for (const [line, element] of one.values) {
      const ys = one.made.about[line].own || one.made.data[line + 1];
      let value = resting ? ys.findLast((y) => y !== null && y !== undefined) : ys[at];
      if (one.made.about[line].dots && resting) value = undefined;
      element.textContent = value === undefined && one.made.about[line].dots ? "" : shown(value);
    }
    if (one.pinned) return;
    const near = resting ? [] : marks.filter((mark) => mark.kind !== "checkpoint" && Math.abs(mark.step - xs[at]) < 0.5);
    one.note.textContent = resting ? "" : one.spec.x
      ? `${one.spec.x} ${shown(xs[at])} at step ${one.made.steps[at]}` : `step ${shown(xs[at])}`;
    if (near.length) one.note.textContent += ` · ${near[0].kind}: ${near[0].message.slice(0, 160)}`;
  };

  const pin = (one, at) => {
    if (embedded) return;
    if (one.made.keys) { location.assign(`${one.spec.open}${one.made.keys[at]}`); return; }
    const step = one.made.steps ? one.made.steps[at] : one.made.data[0][at];
    const link = document.createElement("a");
    link.href = `/run/${encodeURIComponent(one.spec.series[0].run)}/rollouts?step=${step}`;
    link.textContent = `rollouts of step ${step}`;
    one.note.textContent = "";
    one.note.append(link);
    one.pinned = true;
    setTimeout(() => { one.pinned = false; }, 8000);
  };

  // --- PNG -------------------------------------------------------------------------------------------------------
  const save = (one) => {
    if (!one.plot) return;
    const from = one.plot.ctx.canvas, ratio = devicePixelRatio || 1, room = 44 * ratio;
    const canvas = document.createElement("canvas");
    canvas.width = from.width;
    canvas.height = from.height + room;
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = css("--surface");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(from, 0, room);
    ctx.fillStyle = css("--text");
    ctx.font = `${13 * ratio}px system-ui, sans-serif`;
    ctx.fillText(one.spec.title, 8 * ratio, 17 * ratio);
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    let x = 8 * ratio;
    for (const line of one.made.about) {
      if (line.hidden) continue;
      ctx.fillStyle = line.colour;
      ctx.fillRect(x, 28 * ratio, 9 * ratio, 9 * ratio);
      ctx.fillStyle = css("--muted");
      ctx.fillText(line.label, x + 13 * ratio, 36 * ratio);
      x += 26 * ratio + ctx.measureText(line.label).width;
    }
    canvas.toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = `${one.spec.title.replace(/[^\w.-]+/g, "-")}.png`;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  };

  // --- begin -----------------------------------------------------------------------------------------------------
  const redraw = () => drawn.forEach(draw);
  const start = async () => {
    readHash();
    drawn = [...document.querySelectorAll("figure.chart")].map((figure) => ({
      figure, spec: JSON.parse(figure.dataset.chart), box: figure.querySelector(".plot"),
      legend: figure.querySelector(".legend"), off: new Set(), tall: figure.classList.contains("tall"),
    }));
    if (!drawn.length) return;
    for (const one of drawn) one.figure.querySelector(".png")?.addEventListener("click", () => save(one));
    const wanted = needed(drawn.map((one) => one.spec));
    if (embedded) Object.assign(runs, JSON.parse(embedded.textContent));
    else {
      await Promise.all(Object.entries(wanted).map(async ([run, metrics]) => {
        try { merge(run, await load(run, metrics, -1)); } catch (error) {
          for (const one of drawn) if (one.spec.series.some((s) => s.run === run)) one.legend.textContent = `points could not be read (${error.message})`;
        }
      }));
    }
    redraw();
    document.documentElement.dataset.drawn = "1";
    follow(wanted);
  };

  const follow = (wanted) => {
    const run = tools?.dataset.run;
    if (!tools?.dataset.live || !run || !wanted[run]) return;
    const timer = setInterval(async () => {
      if (document.hidden) return;
      const known = runs[run];
      try {
        // An evaluation is recorded after its step, so the last steps are asked for again.
        const found = await load(run, wanted[run], known ? Math.max(known.steps - 3, -1) : -1);
        if (found.curves > Number(tools.dataset.curves)) { location.reload(); return; } // its first evaluation, say
        if (known && found.resumes !== known.resumes) merge(run, await load(run, wanted[run], -1));
        else merge(run, found);
        redraw();
        if (!found.live) clearInterval(timer);
      } catch { /* the next time */ }
    }, POLL);
  };

  let width = innerWidth, timer = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(timer);
    timer = setTimeout(redraw, 120);
  });
  document.addEventListener("mrl:theme", redraw);
  const range = document.getElementById("smooth"), output = document.getElementById("smooth-shown");
  const showSmooth = () => { if (output) output.textContent = state.smooth ? state.smooth.toFixed(2) : "off"; };
  range?.addEventListener("input", () => { state.smooth = Number(range.value); showSmooth(); writeHash(); redraw(); });
  document.getElementById("unzoom")?.addEventListener("click", () => setZoom(null));
  document.getElementById("chart-filter")?.addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const one of drawn) {
      const names = [one.spec.title, ...one.spec.series.map((s) => s.metric)].join(" ").toLowerCase();
      one.figure.hidden = Boolean(wanted) && !names.includes(wanted);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "0" && !event.target.closest("input, select")) setZoom(null);
  });
  start().then(() => {
    if (range) range.value = state.smooth;
    showSmooth();
    const button = document.getElementById("unzoom");
    if (button) button.disabled = !state.zoom;
  });
})();
