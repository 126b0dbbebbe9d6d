"use strict";

// Tables of texts, long ones in parts, with a search where that helps.

const tables = (() => {
  const SHOWN = 100;

  function text(cell) {
    return typeof cell === "string" ? cell : cell.text;
  }

  function content(cell) {
    return typeof cell === "string" ? cell : element("a", { href: cell.href }, cell.text);
  }

  function cells(tag, contents, left, scope) {
    return contents.map((cell, k) => element(k < left ? (k === 0 && scope ? "th" : tag) : tag, {
      class: k < left ? "word" : null, scope: scope && k === 0 ? scope : tag === "th" ? "col" : null,
    }, content(cell)));
  }

  /** A table element of the first rows; returns it with what fills it. */
  function grid(header, left, label) {
    const body = element("tbody");
    const made = element("table", { "aria-label": label }, element("thead", {}, element("tr", {}, ...cells("th", header, left))), body);
    const fill = (rows) => body.replaceChildren(...rows.map((row) => element("tr", {}, ...cells("td", row, left, "row"))));
    return { made, fill };
  }

  function scroller(child, label) {
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, child);
  }

  /** A box with the table, its search and a button for the rows that are not shown. */
  function box(table) {
    const { made, fill } = grid(table.header, table.left, table.title);
    const count = element("span", { role: "status" });
    const more = element("button", { type: "button", class: "more" });
    const texts = table.rows.map((row) => row.map(text).join(" ").toLowerCase());
    let words = [], all = false;
    const show = () => {
      const found = table.rows.filter((_, k) => words.every((word) => texts[k].includes(word)));
      const shown = all ? found : found.slice(0, SHOWN);
      fill(shown);
      count.textContent = words.length ? `${found.length} of ${table.rows.length} rows` : `${table.rows.length} rows`;
      more.hidden = shown.length === found.length;
      more.textContent = `Show all ${found.length} rows`;
    };
    more.addEventListener("click", () => { all = true; show(); });
    const parts = [];
    if (table.search) {
      const input = element("input", { type: "search", placeholder: "Search", "aria-label": `Search in ${table.title}` });
      input.addEventListener("input", () => { words = input.value.toLowerCase().split(/\s+/).filter(Boolean); show(); });
      parts.push(element("div", { class: "search" }, input, count));
    }
    show();
    return element("div", {}, ...parts, scroller(made, table.title), more);
  }

  return { box };
})();
