"use strict";

// Sections: controls on top, blocks below; one view per section that its controls change and its blocks follow.

const sections = (() => {
  /** A pressed or not pressed button that calls back with its new state. */
  function toggle(label, sample, onChange) {
    const button = element("button", { type: "button", class: "toggle", "aria-pressed": "true" }, sample, label);
    button.addEventListener("click", () => {
      const pressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(pressed));
      onChange(pressed);
    });
    return button;
  }

  /** Buttons, each with its sample; a name that is empty is nobody's. */
  function choices(label, names, sample, states, changed) {
    const buttons = names.flatMap((name, k) => (name ? [toggle(name, sample(k), (pressed) => { states[k] = pressed; changed(); })] : []));
    return element("div", { class: "choices", role: "group", "aria-label": label }, ...buttons);
  }

  function slider(section, view, changed) {
    const { label, values, start } = section.slider;
    const shown = element("output", {}, `${label} ${values[start]}`);
    const input = element("input", { type: "range", min: 0, max: values.length - 1, step: 1, value: start, "aria-label": label, "aria-valuetext": values[start] });
    input.addEventListener("input", () => {
      view.step = Number(values[input.value]);
      shown.textContent = `${label} ${values[input.value]}`;
      input.setAttribute("aria-valuetext", values[input.value]);
      changed();
    });
    return element("label", { class: "slider" }, input, shown);
  }

  function controls(section, view, changed) {
    const parts = [];
    if (section.groups.length) {
      parts.push(choices("Show", section.groups, (k) => charts.swatch(`var(--group-${k % charts.GROUPS})`, charts.roundStyle(k)), view.groups, changed));
    }
    if (section.sources.length > 1) {
      const sample = (k) => charts.swatch("currentColor", section.sources[k].style);
      parts.push(choices("Lines", section.sources.map((source) => source.name), sample, view.sources, changed));
    }
    if (section.slider && section.slider.values.length > 1) parts.push(slider(section, view, changed));
    return parts.length ? element("div", { class: "controls" }, ...parts) : null;
  }

  function scales(chart, view, changed) {
    if (chart.scales.length < 2) return "";
    const names = { linear: "linear", log: "log", signed: "log ±" };
    const buttons = chart.scales.map((scale) => {
      const button = element("button", { type: "button", "aria-pressed": String(scale === view.scale) }, names[scale]);
      button.addEventListener("click", () => {
        view.scale = scale;
        changed();
      });
      return button;
    });
    const made = element("div", { class: "scales", role: "group", "aria-label": `Scale of ${chart.title}` }, ...buttons);
    made.refresh = () => buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(chart.scales[k] === view.scale)));
    return made;
  }

  /** A folded table of the drawing's numbers, filled when it is opened and when the view changes. */
  function numbers(block, section, view, kind) {
    const details = element("details", { class: "numbers" }, element("summary", {}, "Numbers"));
    details.fill = () => {
      if (!details.open) return;
      const found = kind.rows(block, section, view);
      details.replaceChildren(details.firstChild, tables.box({ ...found, title: block.title, left: 1, search: false }));
    };
    details.addEventListener("toggle", details.fill);
    return details;
  }

  /** A drawing with its title, switch, caption, spoken numbers and table; `refresh` draws what block and section hold now. */
  function figure(block, section, shared, kind) {
    let picked = null; // by the reader; until then the scale is the one that suits the data
    const view = Object.create(shared, { scale: { get: () => picked ?? block.scale, set: (scale) => { picked = scale; } } });
    const plot = element("div", { class: block.down ? "plot square" : "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" });
    const spoken = element("p", { class: "reading", role: "status" });
    const caption = element("p", { class: "caption" });
    const details = numbers(block, section, view, kind);
    const changed = () => { made.refresh(); };
    const head = element("div", {}, element("h3", {}, block.title), element("p", { class: "unit" }, block.type === "chart" ? block.y : block.value));
    const choice = block.type === "chart" ? scales(block, view, changed) : "";
    const top = element("div", { class: "top" }, head, choice);
    const made = element("figure", { class: "block", id: block.id }, top, plot, caption, spoken, details);
    made.wanted = false; // near the screen, so that it is worth drawing
    made.refresh = () => {
      made.classList.toggle("hidden", block.group !== undefined && !(view.groups[block.group] && view.sources[block.source]));
      plot.setAttribute("aria-label", kind.described(block, section, view));
      caption.textContent = [block.caption, kind.missing ? kind.missing(block, section, view) : ""].filter(Boolean).join(" ");
      details.fill();
      if (choice) choice.refresh();
      return made.wanted && window.Plotly ? kind.draw(plot, block, section, view) : null;
    };
    listen(plot, spoken, block, section, view, kind);
    return made;
  }

  /** Arrow keys move through the numbers, which are shown and spoken. */
  function listen(plot, spoken, block, section, view, kind) {
    let row = 0, column = -1;
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] }[event.key];
      if (!move || (block.type === "chart" && move[0])) return;
      event.preventDefault();
      if (block.type === "chart") {
        const found = kind.reading(block, section, view, Math.max(0, column + move[1]));
        if (!found) return;
        column = found.index;
        spoken.textContent = found.text;
        if (plot.data) Plotly.Fx.hover(plot, [{ xval: found.x }]);
      } else {
        const found = kind.reading(block, section, view, Math.max(0, row + move[0]), Math.max(0, column + move[1]));
        [row, column] = [found.row, found.column];
        spoken.textContent = found.text;
      }
    });
    plot.addEventListener("blur", () => { if (plot.data) Plotly.Fx.unhover(plot); });
  }

  function block(item, section, view) {
    if (item.type === "chart") return figure(item, section, view, charts);
    if (item.type === "heatmap") return figure(item, section, view, heatmaps);
    if (item.type === "text") {
      return element("div", { class: "block full" }, element("details", {}, element("summary", {}, item.title), element("pre", { tabindex: "0" }, item.body)));
    }
    const caption = item.caption ? [element("p", { class: "caption" }, item.caption)] : [];
    return element("div", { class: "block full" }, element("h3", {}, item.title), tables.box(item), ...caption);
  }

  /** A section element; its figures are drawn once they are wanted. */
  function build(section) {
    const view = {
      groups: section.groups.map(() => true), sources: section.sources.map(() => true),
      step: section.slider ? Number(section.slider.values[section.slider.start]) : undefined,
    };
    const made = section.blocks.map((item) => block(item, section, view));
    const figures = made.filter((item) => item.refresh);
    const changed = () => { for (const item of figures) item.refresh(); };
    const title = element("h2", { id: `${section.id}-title` }, section.title);
    const lead = section.lead ? element("p", { class: "lead" }, section.lead) : "";
    const bar = controls(section, view, changed) || "";
    const inside = element("div", { class: "wide" }, title, lead, bar, element("div", { class: "blocks" }, ...made));
    changed();
    return element("section", { id: section.id, "aria-labelledby": `${section.id}-title` }, inside);
  }

  return { build, figure };
})();
