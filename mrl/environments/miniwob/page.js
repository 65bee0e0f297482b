// What an environment does in a page of MiniWoB++: `mrlBegin` starts an episode, `mrlLook` lets time pass and writes
// down what there is. It runs before the page's own scripts.
(() => {
  // --- time passes only when it is told to, so that nothing depends on how fast the machine is
  const sleep = window.setTimeout.bind(window);
  const RealDate = Date;
  const BEGINNING = RealDate.UTC(2020, 0, 1, 12);
  const FRAME = 16;
  const MOST_CALLS = 20000;
  const timers = new Map();
  let now = 0;
  let made = 0;

  function later(call, milliseconds, every, given) {
    if (typeof call !== "function") call = new Function(call);
    if (!(milliseconds >= 1)) milliseconds = 1;
    timers.set(++made, { at: now + Number(milliseconds), call, every, given });
    return made;
  }

  function advance(milliseconds) {
    const end = now + milliseconds;
    for (let calls = 0; calls < MOST_CALLS; calls++) {
      let next = null;
      for (const [id, timer] of timers) if (timer.at <= end && (!next || timer.at < next[1].at)) next = [id, timer];
      if (!next) break;
      const [id, timer] = next;
      now = timer.at;
      if (timer.every) timer.at += timer.every;
      else timers.delete(id);
      try {
        timer.call.apply(window, timer.given);
      } catch (error) {
        console.error(error);
      }
    }
    now = end;
  }

  const forget = (id) => void timers.delete(id);
  window.setTimeout = (call, milliseconds, ...given) => later(call, milliseconds, 0, given);
  window.setInterval = (call, every, ...given) => later(call, every, Math.max(1, every || 0), given);
  window.requestAnimationFrame = (call) => later(() => call(now), FRAME, 0, []);
  window.clearTimeout = window.clearInterval = window.cancelAnimationFrame = forget;
  performance.now = () => now;
  window.Date = new Proxy(RealDate, {
    construct: (real, given) => new real(...(given.length ? given : [BEGINNING + now])),
    apply: () => new RealDate(BEGINNING + now).toString(),
    get: (real, name) => (name === "now" ? () => BEGINNING + now : Reflect.get(real, name)),
  });

  // --- scripts draw while the page loads, before the episode's seed is set: from here, the same each time
  let state = 1;
  Math.random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 4294967296;
  };

  const NOT_THE_TASK = new Set(["query", "reward-display", "sync-task-cover", "click-canvas"]);
  const SHAPES = new Set(
    ["rect", "circle", "ellipse", "polygon", "polyline", "line", "path", "text", "canvas", "image"],
  );
  const ROLES = {
    a: "link", textarea: "textbox", select: "combobox", img: "image", p: "text", span: "text", div: "text", li: "item",
  };
  const INPUTS = { checkbox: "checkbox", radio: "radio", button: "button", submit: "button", range: "slider" };
  const NAMED = new Set(["a", "button", "input", "textarea", "select", "option", "label"]);
  const MOST = 2000;

  let episode = false;
  let next = 1;

  // Resolves when the task is there. milliseconds: after which the page itself ends the episode, with -1.
  window.mrlBegin = async (seed, milliseconds) => {
    while (!core.cover_div) await new Promise((done) => sleep(done, 10));
    Math.seedrandom(seed);
    if (core.setDataMode) core.setDataMode("train");
    core.EPISODE_MAX_TIME = milliseconds;
    core.startEpisodeReal();
    while (!WOB_TASK_READY) {
      advance(FRAME);
      await new Promise((done) => sleep(done, 10));
    }
    episode = true;
  };

  // goal, text, done, reward after so many milliseconds; `left` when this is not the page in which the episode began.
  window.mrlLook = async (milliseconds) => {
    if (!episode) return { left: true };
    advance(milliseconds);
    for (let waits = 0; waits < 300 && loading(); waits++) await new Promise((done) => sleep(done, 10));
    const asked = core.getUtterance();
    const lines = [];
    if (!WOB_DONE_GLOBAL) for (const child of document.body.children) write(child, lines);
    return {
      left: false,
      goal: typeof asked === "string" ? asked : asked.utterance,
      text: lines.join("\n"),
      done: WOB_DONE_GLOBAL,
      reward: WOB_RAW_REWARD_GLOBAL,
    };
  };

  // Images take the machine's time, and have no size until they are there; so do icons of style sheets.
  function loading() {
    if ([...document.images].some((image) => !image.complete)) return true;
    return [...document.body.getElementsByTagName("*")].some(
      (one) =>
        one.offsetParent && !(one.offsetHeight && one.offsetWidth) && getComputedStyle(one).content.startsWith("url"),
    );
  }

  function write(element, lines) {
    const tag = element.tagName.toLowerCase();
    if (NOT_THE_TASK.has(element.id) || ["script", "style", "br", "defs"].includes(tag) || !visible(element)) return;
    const said = ownText(element);
    const children = tag === "select" ? [] : [...element.children];
    const leaf = children.length === 0;
    if (said || NAMED.has(tag) || SHAPES.has(tag) || leaf) lines.push(line(element, tag, said));
    for (const child of children) write(child, lines);
  }

  function visible(element) {
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    const shape = element instanceof SVGElement; // a line has no area
    if (shape ? box.width + box.height === 0 : box.width === 0 || box.height === 0) {
      return element.children.length > 0 && style.display !== "none";
    }
    return style.visibility !== "hidden";
  }

  function ownText(element) {
    const texts = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data);
    return texts.join(" ").replace(/\s+/g, " ").trim().slice(0, MOST);
  }

  function line(element, tag, said) {
    if (!element.dataset.mrl) element.dataset.mrl = String(next++);
    const role = tag === "input" ? INPUTS[element.type] || "textbox" : ROLES[tag] || tag;
    const parts = [`[${element.dataset.mrl}] ${role}`];
    if (said) parts.push(JSON.stringify(said));
    else if (role === "button" && element.value) parts.push(JSON.stringify(element.value));
    if (role === "textbox" || role === "slider") parts.push(`value=${JSON.stringify(element.value.slice(0, MOST))}`);
    if (element.type === "password") parts.push("password");
    if (tag === "select") {
      const options = [...element.options].map((option) => option.text.trim());
      parts.push(`value=${JSON.stringify(element.selectedOptions[0]?.text.trim() ?? "")}`);
      parts.push(`options=${JSON.stringify(options)}`);
    }
    if (element.checked) parts.push("checked");
    if (element.disabled) parts.push("disabled");
    if (document.activeElement === element) parts.push("focused");
    const classes = element.classList.value;
    if (!said && !NAMED.has(tag) && classes) parts.push(`class=${JSON.stringify(classes)}`);
    if (SHAPES.has(tag)) {
      const box = element.getBoundingClientRect();
      const fill = element.getAttribute("fill") || element.style.fill;
      if (fill && fill !== "none") parts.push(`fill=${fill}`);
      parts.push(`at ${Math.round(box.x + box.width / 2)},${Math.round(box.y + box.height / 2)}`);
      parts.push(`size ${Math.round(box.width)}x${Math.round(box.height)}`);
    }
    return parts.join(" ");
  }
})();
