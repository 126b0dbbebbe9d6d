"use strict";

// Curves: what is visible in a view, and how the plotting library draws it. A view says which groups and sources are on
// ([true, false, ...]), which step the slider is at, and the scale: charts.draw(box, chart, section, view).

const charts = (() => {
  const GROUPS = 7;
  const DASHES = { line: "solid", dashed: "dash", dotted: "dot", mixed: "dashdot", points: "dot" };
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "star", "hexagon"];
  const MARKERS = 40; // of a curve of points; more would merge
  const UNIFIED = 9; // curves whose numbers fit beside a pointer
  const BAND = 2; // standard errors
  const LINEAR = 0.01; // up to here a signed axis is linear

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const known = new Map(); // colours by name; asking the browser makes it lay out the page

  function colour(name) {
    const key = `${name} ${dark.matches && !("paper" in document.documentElement.dataset)}`;
    if (!known.has(key)) known.set(key, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
    return known.get(key);
  }

  const made = new WeakMap();

  /** What `make` gives, kept with its owner: texts and heights of long curves take longer to make than to draw. */
  function kept(owner, key, make) {
    if (!made.has(owner)) made.set(owner, new Map());
    const own = made.get(owner);
    if (!own.has(key)) own.set(key, make());
    return own.get(key);
  }

  let letters = "";

  /** The page's typeface. */
  function family() {
    letters ||= getComputedStyle(document.body).fontFamily;
    return letters;
  }

  function groupColour(k) {
    return colour(`group-${k % GROUPS}`);
  }

  /** Where there are more groups than colours, the next round has dashed lines, the one after it dotted ones. */
  function roundStyle(k) {
    return ["line", "dashed", "dotted"][Math.floor(k / GROUPS) % 3];
  }

  /** The series that a view shows: their group and source are on, and of those with steps the last one up to the view's. */
  function visible(chart, section, view) {
    const shown = [];
    const latest = new Map();
    for (const series of chart.series) {
      if (!view.groups[series.group] || !view.sources[series.source]) continue;
      if (series.step === undefined) shown.push(series);
      else if (series.step <= view.step) latest.set(`${series.group}/${series.source}`, series);
    }
    return [...latest.values(), ...shown];
  }

  function nameOf(series, section) {
    const source = section.sources.length > 1 ? section.sources[series.source].name : "";
    return [section.groups[series.group], source].filter(Boolean).join(", ");
  }

  /** How values become heights: the identity, exponents of ten where numbers end, or logarithms of both signs. */
  function heights(scale, chosen) {
    if (scale === "signed") {
      const bend = (y) => Math.sign(y) * Math.log10(1 + Math.abs(y) / LINEAR);
      return { of: (series, i) => (series.y[i] === null ? null : bend(series.y[i])), bend, kind: "signed" };
    }
    if (scale === "log" && chosen.some((series) => series.log10)) {
      const exponent = (series, i) => {
        if (series.log10 && series.log10[i] !== null) return series.log10[i];
        return series.y[i] > 0 ? Math.log10(series.y[i]) : null;
      };
      return { of: exponent, bend: Math.log10, kind: "exponent" };
    }
    const positive = scale === "log";
    return { of: (series, i) => (positive && !(series.y[i] > 0) ? null : series.y[i]), bend: (y) => y, kind: scale };
  }

  /** Lower and upper edge of a series' band at i, as heights; null without one. */
  function edges(series, i, height) {
    const y = series.y[i];
    if (height.kind === "exponent" && series.log10_error) {
      const middle = height.of(series, i), size = BAND * (series.log10_error[i] || 0);
      return middle === null ? null : [middle - size, middle + size];
    }
    if (y === null) return null;
    let low = series.low ? series.low[i] : y - BAND * (series.error[i] || 0);
    const high = series.high ? series.high[i] : y + BAND * (series.error[i] || 0);
    if (low === null || high === null) return null;
    if (height.kind === "log" || height.kind === "exponent") {
      if (!(high > 0 && y > 0)) return null;
      low = Math.max(low, (y * y) / high); // a band that reaches 0 has no lower edge there: as far down as up
    }
    return [height.bend(low), height.bend(high)];
  }

  /** A band's outline: to the right along its upper edge, back along the lower one; null without a band. */
  function outline(series, place, height) {
    const x = [], low = [], high = [];
    place.x.forEach((at, i) => {
      const found = at === null ? null : edges(series, i, height);
      if (!found) return;
      x.push(at);
      low.push(found[0]);
      high.push(found[1]);
    });
    return x.length ? { x: [...x, ...x.slice().reverse()], y: [...high, ...low.reverse()] } : null;
  }

  function band(series, place, height) {
    if (!series.error && !series.low) return null;
    const found = kept(series, `band ${height.kind}`, () => outline(series, place, height));
    return found && {
      ...found, type: "scatter", mode: "lines", fill: "toself",
      fillcolor: `${groupColour(series.group)}2e`, line: { width: 0 }, hoverinfo: "skip", showlegend: false,
    };
  }

  function curve(series, section, height, bars) {
    const place = section.places[series.place];
    const own = section.sources[series.source].style;
    const style = own === "line" ? roundStyle(series.group) : own;
    const few = place.x.filter((x) => x !== null).length < 4;
    const name = format.plain(nameOf(series, section));
    const ink = groupColour(series.group);
    return {
      x: place.x, y: kept(series, height.kind, () => place.x.map((_, i) => height.of(series, i))), type: "scatter", name,
      mode: style === "points" || few ? "lines+markers" : "lines",
      line: { color: style === "points" ? `${ink}80` : ink, width: style === "points" || style === "dotted" ? 1.2 : 2, dash: DASHES[style] },
      marker: { color: ink, size: 6, symbol: SYMBOLS[(series.group + Math.floor(series.group / GROUPS)) % SYMBOLS.length], maxdisplayed: MARKERS },
      text: kept(series, "text", () => place.x.map((_, i) => `${name}: ${format.value(series, i)}`)),
      customdata: kept(place, "names", () => place.names.map(format.plain)),
      ...(bars && series.error ? { error_y: { array: series.error.map((error) => BAND * (error || 0)), color: ink, thickness: 1.4, width: 4 } } : {}),
      hovertemplate: "%{customdata}<br>%{text}<extra></extra>",
    };
  }

  /** Above the numbers beside a pointer stands the name of the place: an invisible copy of the first line carries it. */
  function heading(line) {
    return { ...line, mode: "lines", line: { color: "rgba(0,0,0,0)" }, hovertemplate: "<b>%{customdata}</b><extra></extra>" };
  }

  // Margins and the overflow of labels are fixed: to measure them takes as long as to draw the chart.
  function axis(extra) {
    return {
      gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: false, ticklabeloverflow: "allow", ticks: "",
      tickfont: { color: colour("soft"), size: 12 }, fixedrange: matchMedia("(pointer: coarse)").matches, ...extra,
    };
  }

  /** The size of a drawing: its box's, or one for paper. Given with the rest: a second change would leave false labels. */
  function size() {
    return "paper" in document.documentElement.dataset ? { width: 660, height: 270 } : { autosize: true };
  }

  function bar() {
    return { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("accent") };
  }

  /** Labels of a horizontal axis that has names; of unknown length, so that room for them has to be measured. */
  function named(chart) {
    if (!chart.ticks.length) return {};
    return { tickvals: chart.ticks.map(([x]) => x), ticktext: chart.ticks.map(([, name]) => format.plain(name)), automargin: true, ticklabeloverflow: "hide past div" };
  }

  /** Few whole numbers are labelled one by one: there is no layer 1.5. */
  function whole(lines) {
    const values = lines.flatMap((line) => line.x.filter((x, i) => x !== null && line.y[i] !== null));
    const few = values.length && values.every(Number.isInteger) && Math.max(...values) - Math.min(...values) < 6;
    return few ? { tick0: 0, dtick: 1 } : {};
  }

  function vertical(chart, chosen, height) {
    if (height.kind === "exponent") return axis({ tickprefix: "10<sup>", ticksuffix: "</sup>" });
    if (height.kind === "log") {
      // Powers of ten are labelled as such; where there are labels between them, the library would write those as small
      // single digits, so that all are plain numbers. It writes powers a quarter larger than it is told.
      const [low, high] = extent(chosen, height), span = Math.log10(high / low);
      const narrow = span < 0.5 && high > low; // few digits lie within: even steps instead
      return axis({ type: "log", exponentformat: "power", ...(span < 5 ? { tickformat: "~g" } : { tickfont: { color: colour("soft"), size: 9.6 } }), ...(narrow ? { tick0: 0, dtick: `L${step(low, high)}` } : span < 3 ? { dtick: "D2" } : {}) });
    }
    if (height.kind === "signed") {
      const [low, high] = extent(chosen, { kind: "", bend: (y) => y });
      let values = [-10, -1, -0.1, -LINEAR, 0, LINEAR, 0.1, 1, 10, 100];
      if (high > low && values.filter((y) => low <= y && y <= high).length < 2) {
        const size = step(low, high), first = Math.ceil(low / size);
        values = Array.from({ length: Math.floor(high / size) - first + 1 }, (_, k) => Number(((first + k) * size).toPrecision(6)));
      }
      return axis({ tickvals: values.map(height.bend), ticktext: values.map(String), zeroline: true, zerolinecolor: colour("soft") });
    }
    return axis({ exponentformat: "power", ...(chart.limits ? { range: chart.limits } : { rangemode: chart.zero ? "tozero" : "normal" }) });
  }

  /** The lowest and the highest height of curves, bands included. */
  function extent(chosen, height) {
    let low = Infinity, high = -Infinity;
    for (const series of chosen) {
      series.y.forEach((y, i) => {
        if (y === null || (height.kind === "log" && !(y > 0))) return;
        const found = (series.error || series.low) && edges(series, i, height) || [height.bend(y), height.bend(y)];
        low = Math.min(low, found[0]);
        high = Math.max(high, found[1]);
      });
    }
    return [low, high];
  }

  /** A round number of which there are three to eight between two others. */
  function step(low, high) {
    const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
    return Number(([1, 2, 5].findLast((digit) => digit * power <= rough) * power).toPrecision(1));
  }

  function layout(chart, chosen, height, unified, lines) {
    const middle = Math.max(...lines.flatMap((line) => line.x.filter((x) => x !== null))) / 2;
    return {
      ...size(), margin: { l: 66, r: 14, t: chart.marks.length ? 20 : 10, b: 42 }, showlegend: false, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", modebar: bar(),
      font: { family: family(), size: 13, color: colour("ink") },
      hovermode: unified ? "x unified" : "closest",
      hoverlabel: { bgcolor: colour("paper"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 }, namelength: -1, align: "left" },
      xaxis: axis({ ...whole(lines), ...named(chart), title: { text: format.plain(chart.x), font: { size: 12, color: colour("soft") } }, unifiedhovertitle: { text: " " } }),
      yaxis: vertical(chart, chosen, height),
      shapes: chart.marks.map((mark) => ({
        type: "line", x0: mark.x, x1: mark.x, yref: "paper", y0: 0, y1: 1, line: { color: colour("soft"), width: 1, dash: "dash" },
      })),
      annotations: chart.marks.map((mark) => ({
        x: mark.x, y: 1, yref: "paper", text: format.plain(mark.label), showarrow: false, yanchor: "bottom",
        xanchor: mark.x > middle ? "right" : "left", // within the chart
        font: { size: 11, color: colour("soft") },
      })),
    };
  }

  // A list of its own: what the library adds to its bar, such as sending the data away, stays out.
  const CONFIG = {
    responsive: true, displaylogo: false, doubleClick: "reset", showSendToCloud: false, plotlyServerURL: "",
    displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  /** Draw the chart; the library must be there. */
  function draw(box, chart, section, view) {
    const chosen = visible(chart, section, view);
    const height = heights(view.scale, chosen);
    const lines = chosen.map((series) => curve(series, section, height, chart.bars));
    const unified = lines.length > 0 && lines.length <= UNIFIED;
    const title = unified ? [heading(lines[0])] : [];
    if (unified) for (const line of lines) line.hovertemplate = "%{text}<extra></extra>";
    const bands = chart.bars ? [] : chosen.map((series) => band(series, section.places[series.place], height)).filter(Boolean);
    return Plotly.react(box, [...bands, ...title, ...lines], layout(chart, chosen, height, unified, lines), CONFIG);
  }

  /** What cannot be drawn at the present scale, in words; empty if nothing. */
  function missing(chart, section, view) {
    let zero = 0, beyond = 0;
    for (const series of visible(chart, section, view)) {
      series.y.forEach((y, i) => {
        if (y !== null && y <= 0 && view.scale === "log") zero += 1;
        if (y === null && series.log10 && series.log10[i] !== null && view.scale !== "log") beyond += 1;
      });
    }
    const parts = [];
    if (zero) parts.push(`${zero} values that are not above 0 have no place on a logarithmic axis.`);
    if (beyond) parts.push(`${beyond} values beyond 1e±290 are only on the logarithmic axis.`);
    return parts.join(" ");
  }

  /** The chart in words, for those who do not see it. */
  function described(chart, section, view) {
    const parts = visible(chart, section, view).slice(0, 8).map((series) => {
      const known = series.y.map((y, i) => i).filter((i) => series.y[i] !== null || (series.log10 && series.log10[i] !== null));
      if (!known.length) return "";
      return `${nameOf(series, section)} from ${format.value(series, known[0], 4)} to ${format.value(series, known[known.length - 1], 4)}`;
    });
    return `${chart.title}, ${chart.y} over ${chart.x}. ${parts.filter(Boolean).join("; ")}. Left and right arrow keys read the numbers.`;
  }

  /** Header and rows of the same numbers as a table. */
  function rows(chart, section, view) {
    const chosen = visible(chart, section, view);
    const names = new Map();
    chosen.forEach((series, k) => {
      const place = section.places[series.place];
      place.x.forEach((x, i) => {
        if (x === null) return;
        const row = names.get(`${x}|${place.names[i]}`) || { x, name: place.names[i], cells: chosen.map(() => "") };
        row.cells[k] = format.value(series, i, 6);
        names.set(`${x}|${place.names[i]}`, row);
      });
    });
    const ordered = [...names.values()].sort((a, b) => a.x - b.x);
    return { header: [chart.x, ...chosen.map((series) => nameOf(series, section))], rows: ordered.map((row) => [row.name, ...row.cells]) };
  }

  /** Numbers at the i-th place of the first visible series, and of all others at the same position. */
  function reading(chart, section, view, i) {
    const chosen = visible(chart, section, view);
    if (!chosen.length) return null;
    const places = section.places[chosen[0].place];
    const at = places.x.map((_, k) => k).filter((k) => places.x[k] !== null);
    const index = Math.max(0, Math.min(i, at.length - 1));
    const x = places.x[at[index]];
    const parts = chosen.map((series) => {
      const k = section.places[series.place].x.indexOf(x);
      return k < 0 ? "" : `${nameOf(series, section)} ${format.value(series, k)}`;
    });
    return { index, x, text: `${places.names[at[index]]}: ${parts.filter(Boolean).join("; ")}` };
  }

  /** The sample beside a button: the line of a group or of a source. */
  function swatch(ink, style) {
    const line = `M1 7 H23`;
    const dash = { line: "", dashed: "6 4", dotted: "2 3", mixed: "7 3 2 3", points: "2 3" }[style];
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (const [name, value] of Object.entries({ width: 24, height: 14, "aria-hidden": "true" })) svg.setAttribute(name, value);
    const path = document.createElementNS(svg.namespaceURI, "path");
    for (const [name, value] of Object.entries({ d: line, fill: "none", "stroke-width": 3, "stroke-dasharray": dash })) path.setAttribute(name, value);
    path.style.stroke = ink;
    svg.append(path);
    if (style === "points") {
      const dot = document.createElementNS(svg.namespaceURI, "circle");
      for (const [name, value] of Object.entries({ cx: 12, cy: 7, r: 4 })) dot.setAttribute(name, value);
      dot.style.fill = ink;
      svg.append(dot);
    }
    return svg;
  }

  return { draw, visible, missing, described, rows, reading, swatch, roundStyle, colour, family, axis, bar, size, CONFIG, GROUPS };
})();
