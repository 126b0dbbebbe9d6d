"use strict";

// Matrices with 16-bit entries, one per step of the section's slider.

const heatmaps = (() => {
  const LEVELS = 32767;
  const unpacked = new WeakMap();

  /** Rows of numbers of a frame; null for what is not finite. */
  function matrix(map, label) {
    const known = unpacked.get(map) || unpacked.set(map, new Map()).get(map);
    if (!known.has(label)) known.set(label, unpack(map, map.frames[label]));
    return known.get(label);
  }

  function unpack(map, packed) {
    const view = new DataView(bytesOf(packed).buffer);
    const [low, high] = map.limits;
    const out = [];
    for (let row = 0; row < map.rows; row += 1) {
      const line = [];
      for (let column = 0; column < map.columns; column += 1) {
        const level = view.getInt16(2 * (row * map.columns + column), true);
        line.push(level < -LEVELS ? null : low + ((level + LEVELS) / (2 * LEVELS)) * (high - low));
      }
      out.push(line);
    }
    return out;
  }

  /** The frame at the slider: that of its label, else the last one before it. */
  function frameOf(map, view) {
    const labels = Object.keys(map.frames);
    if (labels.length === 1 || view.step === undefined) return labels[0];
    const before = labels.filter((label) => Number(label) <= view.step);
    return before.length ? before[before.length - 1] : labels[0];
  }

  function at(map, axis, k) {
    return map.origin[axis] + k * map.step[axis];
  }

  function draw(box, map, section, view) {
    const z = matrix(map, frameOf(map, view));
    const value = format.plain(map.value);
    const trace = {
      type: "heatmap", z, x: z[0].map((_, k) => at(map, 0, k)), y: z.map((_, k) => at(map, 1, k)), zmin: map.limits[0], zmax: map.limits[1],
      colorscale: "Cividis", colorbar: { thickness: 10, outlinewidth: 0, tickfont: { size: 11, color: charts.colour("soft") }, len: 1 },
      hovertemplate: `${format.plain(map.x)} %{x}, ${format.plain(map.y)} %{y}<br>${value} %{z:.4f}<extra></extra>`, hoverongaps: false,
    };
    const title = (text) => ({ text: format.plain(text), font: { size: 12, color: charts.colour("soft") } });
    const square = map.down && map.rows === map.columns;
    const layout = {
      ...charts.size(), margin: { l: 44, r: 8, t: 8, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, modebar: charts.bar(),
      font: { family: charts.family(), size: 12, color: charts.colour("ink") },
      xaxis: charts.axis({ title: title(map.x), showgrid: false, constrain: "domain" }),
      yaxis: charts.axis({
        ...(map.step[1] === 1 && map.rows < 7 ? { tick0: 0, dtick: 1 } : {}), title: title(map.y), showgrid: false, constrain: "domain", autorange: map.down ? "reversed" : true, ...(square ? { scaleanchor: "x" } : {}),
      }),
    };
    return Plotly.react(box, [trace], layout, charts.CONFIG);
  }

  function summary(z) {
    const known = z.flat().filter((value) => value !== null);
    if (!known.length) return ["–", "–", "–"];
    let low = known[0], high = known[0], sum = 0;
    for (const value of known) {
      low = Math.min(low, value);
      high = Math.max(high, value);
      sum += value;
    }
    return [low, sum / known.length, high].map((value) => format.number(value));
  }

  /** Every frame in numbers: smallest, mean and largest entry. */
  function rows(map, section) {
    const name = section.slider ? section.slider.label : "matrix";
    return {
      header: [name, "smallest", "mean", "largest"],
      rows: Object.keys(map.frames).map((label) => [label, ...summary(matrix(map, label))]),
    };
  }

  function described(map, section, view) {
    const [low, mean, high] = summary(matrix(map, frameOf(map, view)));
    const where = section.slider ? ` at ${section.slider.label} ${frameOf(map, view)}` : "";
    return `Heat map: ${map.title}${where}, ${map.y} by ${map.x}. ${map.value} from ${low} to ${high}, mean ${mean}. Arrow keys read the entries.`;
  }

  /** The entry at a row and column, held inside the matrix. */
  function reading(map, section, view, row, column) {
    const z = matrix(map, frameOf(map, view));
    const i = Math.max(0, Math.min(row, map.rows - 1)), j = Math.max(0, Math.min(column, map.columns - 1));
    return { row: i, column: j, text: `${map.x} ${at(map, 0, j)}, ${map.y} ${at(map, 1, i)}: ${map.value} ${format.number(z[i][j])}` };
  }

  return { draw, rows, described, reading, matrix, frameOf };
})();
