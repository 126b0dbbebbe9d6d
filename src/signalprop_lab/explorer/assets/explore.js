"use strict";

// The explorer: reads the controls, asks the server for the curves, and draws them with the report's own charts. One
// question is under way at a time; of changes that come meanwhile the last one is asked next. Where a prediction takes
// long, the server sends a draft first, and the page asks again when the controls rest.

(() => {
  const root = document.documentElement;
  const part = (id) => document.getElementById(id);
  const REST = 250; // milliseconds without a change
  const { start, options, presets, most } = JSON.parse(part("data").textContent);
  const form = part("controls");
  const pinned = [];
  const inks = []; // the colour of every pinned curve: the one that it had when it was pinned
  let ink = 0; // and of the current one
  let walking = 0; // the timer after which the state goes into the address
  const section = { groups: [], sources: [], places: [] };
  const view = { groups: [], sources: [] };
  const figures = new Map();
  const sliders = []; // functions that put a slider where its field is
  let shown = null; // the answer that is on screen, and the settings that it answers
  let asking = null; // the question under way
  let changedAt = null; // when the reader changed what nobody has asked about yet
  let speaking = 0;

  // --- controls ------------------------------------------------------------------------------------------------

  /** The state of all controls; an empty field is null, which the server explains where it needs a number. */
  function settings() {
    return Object.fromEntries(Object.keys(start).map((name) => {
      const field = form.elements[name];
      if (field.type !== "number") return [name, field.value];
      return [name, field.disabled || field.value === "" ? null : Number(field.value)];
    }));
  }

  function nearest(steps, value) {
    return steps.reduce((best, step, k) => (Math.abs(step - value) < Math.abs(steps[best] - value) ? k : best), 0);
  }

  /** A slider over usual values before a number field, which takes all values. */
  function withSlider(field) {
    const name = field.parentElement.firstChild.textContent.trim();
    const steps = field.dataset.steps.split(" ").map(Number);
    const slider = element("input", { type: "range", min: 0, max: steps.length - 1, step: 1, "aria-label": `${name}, usual values` });
    const follow = () => {
      slider.value = nearest(steps, Number(field.value));
      slider.setAttribute("aria-valuetext", field.value);
    };
    slider.addEventListener("input", () => {
      field.value = steps[slider.value];
      slider.setAttribute("aria-valuetext", field.value);
    });
    field.addEventListener("input", follow);
    const pair = element("span", { class: "pair" });
    field.replaceWith(pair);
    pair.append(slider, field);
    sliders.push(follow);
    follow();
  }

  /** k and alpha belong to some schemes only; a scheme's own value is shown where the field is empty. */
  function offerOptions() {
    const own = options[form.elements.scheme.value];
    for (const name of ["k", "alpha"]) {
      const field = form.elements[name];
      field.disabled = !(name in own);
      field.placeholder = field.disabled ? "–" : String(own[name] ?? "auto");
    }
  }

  function changed(event) {
    if (event.target.name === "scheme") {
      for (const name of ["k", "alpha"]) form.elements[name].value = "";
      offerOptions();
    }
    if (event.target.name === "preset") put({ ...settings(), k: null, alpha: null, ...presets[event.target.value] });
    asked(event.timeStamp);
  }

  /** Move the controls there. */
  function put(values) {
    for (const [name, value] of Object.entries(values)) form.elements[name].value = value ?? "";
    for (const follow of sliders) follow();
    offerOptions();
  }

  // --- the address ---------------------------------------------------------------------------------------------

  function inWords(values) {
    return new URLSearchParams(Object.entries(values).filter(([, value]) => value !== null)).toString();
  }

  /** The address of the page's state: controls, and what is pinned. */
  function address() {
    return `#${[inWords(settings()), ...pinned.map((item) => new URLSearchParams({ pin: inWords(item) }))].join("&")}`;
  }

  /** Settings from such words; what is not said is as at the start. */
  function fromWords(words) {
    const said = new URLSearchParams(words);
    return Object.fromEntries(Object.entries(start).map(([name, value]) => {
      if (!said.has(name)) return [name, value];
      return [name, form.elements[name].type === "number" ? Number(said.get(name)) : said.get(name)];
    }));
  }

  /** Go where the address says; colours are those that the curves had there, if that is known. */
  function restore(known) {
    const said = location.hash.slice(1);
    const pins = [...new Set(new URLSearchParams(said).getAll("pin"))].slice(0, most - 1);
    pinned.splice(0, pinned.length, ...pins.map(fromWords));
    inks.splice(0, inks.length, ...(known?.inks.length === pins.length ? known.inks : pins.map((_, k) => k + 1)));
    ink = inks.includes(known?.ink ?? 0) ? free() : known?.ink ?? 0;
    put(fromWords(said));
  }

  /** Once the controls rest, the address says where they are: one step of the browser's back button. */
  function remember() {
    clearTimeout(walking); // a slider that moves is one step
    walking = setTimeout(() => {
      if (address() !== location.hash) history.pushState({ ink, inks: [...inks] }, "", address());
    }, 2 * REST);
  }

  /** A colour that no pinned curve has. */
  function free() {
    return Array.from({ length: most }, (_, k) => k).find((k) => !inks.includes(k));
  }

  /** There is something to ask, since then. */
  function asked(since) {
    changedAt ??= since;
    remember();
    root.dataset.state = "busy";
    if (!asking) ask();
    else if (asking.slow) asking.abort.abort(); // nobody waits for what has changed since
  }

  // --- questions -----------------------------------------------------------------------------------------------

  /** Post JSON; a refusal and an answer that is not a success become an error with the server's line. */
  async function post(path, body, signal) {
    let answer;
    try {
      answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error("the explorer does not answer; was it ended in its terminal? (signalprop explore starts it again)");
    }
    if (!answer.headers.get("content-type")?.startsWith("application/json")) return answer.blob();
    const found = await answer.json();
    const line = found.refused ?? found.error;
    if (line !== undefined) throw new Error(line);
    return found;
  }

  /** Wait until the controls have been left alone for a moment. */
  function rest(signal) {
    return new Promise((done, stop) => {
      const timer = setTimeout(done, REST);
      signal.addEventListener("abort", () => { clearTimeout(timer); stop(signal.reason); });
    });
  }

  async function ask() {
    const begun = changedAt, current = settings(), order = [ink, ...inks];
    const draft = !shown || !same(shown.settings, current); // pins alone change nothing that takes long
    changedAt = null;
    asking = { abort: new AbortController(), slow: false };
    const { signal } = asking.abort;
    try {
      let answer = await post("/curves", { current, pinned, draft }, signal);
      if (answer.section) await show({ ...answer, settings: current, order }, begun);
      if (answer.pending && changedAt === null) {
        asking.slow = true;
        if (!answer.section) wait();
        await rest(signal);
        answer = await post("/curves", { current, pinned, draft: false }, signal);
        await show({ ...answer, settings: current, order }, begun);
      }
    } catch (error) {
      if (error.name !== "AbortError") refuse(error.message);
    }
    asking = null;
    if (changedAt !== null) ask();
    else root.dataset.state = "ready";
  }

  function same(one, other) {
    return JSON.stringify(one) === JSON.stringify(other);
  }

  // --- what is shown -------------------------------------------------------------------------------------------

  async function show(answer, begun) {
    shown = answer;
    problem("");
    Object.assign(section, coloured(shown.section, shown.order));
    view.groups = section.groups.map(() => true);
    view.sources = section.sources.map(() => true);
    const drawn = shown.section.blocks.map(update); // all stand in their places before the first is drawn, and measured
    await Promise.all(drawn.map((figure) => figure.refresh()));
    // After the next frame the curves are on screen.
    await new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
    if (begun !== null) timed(begun);
    part("python").textContent = shown.python;
    part("command").textContent = shown.command;
    part("numbers").replaceChildren(tables.box(shown.table), element("p", { class: "caption" }, shown.table.caption));
    const lines = [...shown.warnings.map((text) => ["warning", text]), ...shown.notes.map((text) => ["note", text])];
    if (!shown.warnings.length) lines.unshift(["good", "nothing stands out: variance, gradient and token correlation stay within bounds"]);
    part("says").replaceChildren(...lines.map(([kind, text]) => element("li", { class: kind }, text)));
    listPins();
    speak(`${shown.label}, ${shown.settings.n_layers} layers: ${lines.map(([, text]) => text).join("; ")}`);
  }

  /** A section whose k-th curve has the colour order[k]; a colour that nobody has is a group without a name. */
  function coloured(given, order) {
    const groups = Array.from({ length: most }, () => "");
    given.groups.forEach((name, k) => { groups[order[k]] = name; });
    for (const block of given.blocks) for (const series of block.series) series.group = order[series.group];
    return { ...given, groups };
  }

  /** Say how long it took from the change to the screen; kept as a measure of the browser's, too. */
  function timed(begun) {
    if (performance.getEntriesByName("redraw").length > 99) performance.clearMeasures("redraw");
    const all = performance.measure("redraw", { start: begun, detail: { server: shown.milliseconds } }).duration;
    const after = all < 950 ? `${Math.round(all)} ms` : `${(all / 1000).toFixed(1)} s`;
    part("latency").textContent = shown.pending
      ? `moments on screen after ${after}; token kernels follow …`
      : `on screen after ${after}, ${Math.round(shown.milliseconds)} ms of them prediction`;
  }

  /** There is nothing to show before the token kernels are done. */
  function wait() {
    problem("");
    part("latency").textContent = "computing token kernels …";
    part("charts").classList.add("stale");
    part("pin").disabled = true;
  }

  /** The figure of a chart, which now holds this one. */
  function update(block) {
    let kept = figures.get(block.id);
    if (!kept) {
      const own = { ...block };
      const figure = sections.figure(own, section, view, charts);
      figure.wanted = true;
      part("charts").append(figure);
      kept = { own, figure };
      figures.set(block.id, kept);
    }
    Object.assign(kept.own, block);
    return kept.figure;
  }

  function problem(text) {
    const box = part("problem");
    if (box.textContent !== text) box.textContent = text;
    box.hidden = !text;
    part("charts").classList.toggle("stale", Boolean(text));
    for (const button of document.querySelectorAll("#download, [data-copy]")) button.disabled = Boolean(text);
    part("pin").disabled = Boolean(text) || pinned.length + 2 > most || isPinned() || shown?.pending;
  }

  function refuse(text) {
    part("latency").textContent = "";
    problem(text);
  }

  /** For those who listen: when the changes have come to rest. */
  function speak(text) {
    clearTimeout(speaking);
    speaking = setTimeout(() => { part("heard").textContent = text; }, 700);
  }

  // --- pins ----------------------------------------------------------------------------------------------------

  function isPinned() {
    return Boolean(shown) && pinned.some((item) => same(item, shown.settings));
  }

  function listPins() {
    const names = shown.order.slice(1).map((k) => section.groups[k]);
    const now = element("li", {}, charts.swatch(`var(--group-${shown.order[0]})`, "line"), section.groups[shown.order[0]]);
    now.style.paddingRight = ".75rem";
    part("pins").replaceChildren(...(names.length ? [now] : []), ...names.map((name, k) => {
      const remove = element("button", { type: "button", "aria-label": `Unpin ${name}` }, "✕");
      remove.addEventListener("click", () => {
        pinned.splice(k, 1);
        inks.splice(k, 1);
        part("pin").focus();
        asked(performance.now());
      });
      return element("li", {}, charts.swatch(`var(--group-${shown.order[k + 1]})`, "line"), name, remove);
    }));
    part("pin").disabled = pinned.length + 2 > most || isPinned() || shown.pending;
  }

  // --- taking it away ------------------------------------------------------------------------------------------

  async function copy(button) {
    const text = part(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      speak("copied");
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(part(button.dataset.copy));
      button.textContent = "Selected: press Ctrl-C";
      speak(button.textContent);
    }
    setTimeout(() => { button.textContent = `Copy as ${button.dataset.copy === "python" ? "Python" : "command"}`; }, 1500);
  }

  async function download() {
    const button = part("download");
    button.disabled = true;
    button.textContent = "Making the report …";
    try {
      const made = await post("/report", { current: shown.settings, pinned, draft: false });
      const link = element("a", { href: URL.createObjectURL(made), download: "signalprop-report.html" });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
      speak("the report is downloaded as signalprop-report.html");
    } catch (error) {
      refuse(error.message);
    }
    button.disabled = false;
    button.textContent = "Download report";
  }

  // --- start ---------------------------------------------------------------------------------------------------

  for (const field of form.querySelectorAll("[data-steps]")) withSlider(field);
  restore(history.state);
  history.replaceState({ ink, inks: [...inks] }, "", address());
  addEventListener("popstate", (event) => {
    if (location.hash && !location.hash.includes("=")) return; // a place on the page
    restore(event.state);
    asked(performance.now());
  });
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  part("pin").addEventListener("click", () => {
    pinned.push(shown.settings);
    inks.push(ink);
    ink = free();
    asked(performance.now());
  });
  part("download")?.addEventListener("click", download);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  const redraw = () => { for (const { figure } of figures.values()) figure.refresh(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => { root.dataset.paper = ""; redraw(); });
  addEventListener("afterprint", () => { delete root.dataset.paper; redraw(); });
  ask();
})();
