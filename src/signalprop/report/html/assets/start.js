"use strict";

// Builds the page from its data, and draws figures as they come near the screen.

(() => {
  const root = document.documentElement;
  const everywhere = () => [...document.querySelectorAll("figure.block")];

  const waiting = [];
  let drawing = false;

  /** Draw what waits, one figure at a time, so that the page answers its reader in between. */
  function next() {
    const figure = waiting.shift();
    drawing = Boolean(figure);
    if (!figure) {
      ready();
      return;
    }
    figure.refresh();
    setTimeout(next);
  }

  function ready() {
    if (root.dataset.state === "ready") return;
    root.dataset.state = "ready";
    performance.mark("ready");
  }

  /** Figures are drawn when they come near the screen. */
  function watch() {
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        near.unobserve(entry.target);
        entry.target.wanted = true;
        waiting.push(entry.target);
      }
      if (!drawing) next();
    }, { rootMargin: "300px 0px" });
    const figures = everywhere();
    for (const figure of figures) near.observe(figure);
    if (!figures.length) ready();
  }

  function redraw() {
    for (const figure of everywhere()) if (figure.wanted) figure.refresh();
  }

  /** On paper every figure is drawn, in dark ink and as wide as the paper. */
  function printing() {
    root.dataset.paper = "";
    for (const notes of document.querySelectorAll("details.notes")) notes.open = true;
    for (const figure of everywhere()) figure.wanted = true;
    redraw();
  }

  function printed() {
    delete root.dataset.paper;
    redraw();
  }

  function followNavigation() {
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
    }, { rootMargin: "-45% 0px -50% 0px" });
    for (const section of document.querySelectorAll("main section")) if (links.has(section.id)) seen.observe(section);
  }

  function withoutCharts(error) {
    const text = `The charts cannot be drawn in this browser (${error.message}). Their numbers are in the tables.`;
    document.getElementById("sections").prepend(element("div", { class: "wide" }, element("p", { class: "problem", role: "alert" }, text)));
    for (const details of document.querySelectorAll("details.numbers")) details.open = true;
    root.dataset.state = "without charts";
  }

  const library = loadLibrary(); // is inflated while the page is built
  const data = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("sections").append(...data.sections.map(sections.build));
  followNavigation();
  root.dataset.state = "built";
  performance.mark("built");
  library.then(() => {
    performance.mark("loaded");
    watch();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    addEventListener("beforeprint", printing);
    addEventListener("afterprint", printed);
  }).catch(withoutCharts);
})();
