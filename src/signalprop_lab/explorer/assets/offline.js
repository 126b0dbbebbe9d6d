"use strict";

// Answers the explorer's questions within the page, as the server's `curves.shown` does: the same section, table, words
// and warnings, from `closedForm`. What the page cannot predict is refused in one line.

const offline = (() => {
  const { presets, template, bounds, growths, words } = JSON.parse(document.getElementById("closed-form").textContent);
  const library = loadLibrary();
  const { exp, floor, log, max, min, sqrt } = Math;
  const NETWORK = ["kind", "n_layers", "d_model", "n_heads", "norm_placement", "activation", "seq_len", "dropout"];
  const FLAGS = {
    n_layers: "--layers", d_model: "--d-model", n_heads: "--heads", norm_placement: "--norm", activation: "--activation",
    seq_len: "--seq-len", dropout: "--dropout",
  };
  const last = (values) => values[values.length - 1];

  // --- words ---------------------------------------------------------------------------------------------------

  const exponent = (text) => text.replace(/e([+-])(\d)$/, "e$10$2");
  const float = (x) => (Number.isInteger(x) ? x.toFixed(1) : exponent(String(x)));
  const percent = (x) => `${(100 * x).toFixed(2)} %`;

  /** So many significant digits, as Python's format g. */
  function rough(x, digits) {
    const text = Number(x.toPrecision(digits));
    return Math.abs(text) < 10 ** digits ? String(text) : exponent(text.toExponential(digits - 1).replace(/\.?0+e/, "e"));
  }

  /** Four significant digits, as results/text.py writes them. */
  function number(x) {
    if (x === 0) return "0.000";
    return exponent(Math.abs(x) >= 1e-3 && Math.abs(x) < 1e5 ? x.toPrecision(4) : x.toExponential(3));
  }

  /** A variance from its logarithm. */
  function variance(logs) {
    const plain = exp(logs);
    if (plain > 1e-300 && plain < 1e300) return number(plain);
    const power = logs / Math.LN10, whole = floor(power);
    return `${(10 ** (power - whole)).toFixed(3)}e${whole < 0 ? "" : "+"}${whole}`;
  }

  function python(s) {
    const said = (value) => (typeof value === "string" ? `'${value}'` : String(value));
    const fields = NETWORK.map((name) => `${name}=${name === "dropout" ? float(s[name]) : said(s[name])}`).join(", ");
    const options = ["k", "alpha"].filter((name) => s[name] !== null).map((name) => `, ${name}=${float(s[name])}`).join("");
    const scaled = [
      'roles = ("query", "key")', `scaled = {f"weight__{role}": ${float(s.qk_scale)} * table.weights[role] for role in roles}`,
      "table = table.with_columns(**scaled)",
    ];
    return [
      "import signalprop as sp", "", `architecture = sp.Architecture.preset('${s.preset}', ${fields})`,
      `table = sp.scheme('${s.scheme}'${options})(architecture)`, ...(s.qk_scale === 1 ? [] : scaled),
      "profile = sp.predict(table, fidelity='moments')", ...words.prints, "",
    ].join("\n");
  }

  function command(s) {
    const flags = NETWORK.filter((name) => FLAGS[name]).flatMap((name) => [FLAGS[name], name === "dropout" ? float(s[name]) : s[name]]);
    const options = ["k", "alpha"].filter((name) => s[name] !== null).flatMap((name) => ["--option", `${name}=${float(s[name])}`]);
    const scaled = s.qk_scale === 1 ? [] : ["--qk-scale", float(s.qk_scale)];
    return ["signalprop predict", s.preset, "--set", `kind=${s.kind}`, ...flags, "--scheme", s.scheme, ...options, ...scaled, "--fidelity moments"].join(" ");
  }

  function details(s) {
    const short = (x) => String(Number(x.toPrecision(6)));
    return {
      preset: s.preset, k: s.k === null ? "" : `k ${short(s.k)}`, alpha: s.alpha === null ? "" : `alpha ${short(s.alpha)}`,
      qk_scale: `Q/K × ${short(s.qk_scale)}`, kind: s.kind, n_layers: `${s.n_layers} layers`, d_model: `width ${s.d_model}`,
      n_heads: `${s.n_heads} heads`, norm_placement: s.norm_placement === "none" ? "no norm" : `${s.norm_placement}-norm`,
      activation: s.activation, seq_len: `${s.seq_len} tokens`, dropout: `dropout ${short(s.dropout)}`,
    };
  }

  /** A name for each: its scheme, and all in which they differ; of different presets, what is not as in its own. */
  function labels(several, own) {
    const all = several.map(details), telling = Object.keys(all[0]).filter((name) => new Set(all.map((item) => item[name])).size > 1);
    const names = several.map((s, k) => {
      const given = telling.includes("preset") ? details({ ...s, ...own[s.preset] }) : {};
      const told = telling.filter((name) => all[k][name] && (!NETWORK.includes(name) || all[k][name] !== given[name]));
      return [s.scheme, ...told.map((name) => all[k][name])].join(", ");
    });
    return several.length === 1 ? names : [`${names[0]} (now)`, ...names.slice(1)];
  }

  // --- what stands out (report/findings.py) --------------------------------------------------------------------

  function sure(beyond) {
    return beyond < log(bounds.NARROW) ? "narrow, within a factor of 3 of the bound" : "clear";
  }

  const CURE = "what-would-cure-it";

  function ofGradient(p, half) {
    const ratio = p.gradient.in[0], bound = log(bounds.GRADIENT_RATIO), shown = variance(ratio);
    if (ratio < -bound) {
      const text = `its variance at the first sublayer is ${shown} of that at the last (below 1/${bounds.GRADIENT_RATIO})`;
      return [["the gradient vanishes", text, sure(-ratio - bound), "try pre-norm, deepscalelm or deepnorm", CURE]];
    }
    const excess = log(bounds.GRADIENT_EXCESS), beyond = max(half.excess - excess, half.upper - log(bounds.UPPER_RATIO));
    if (beyond <= 0) return [];
    const more = half.excess > excess
      ? `above ${bounds.GRADIENT_EXCESS}, the stream's growth apart`
      : `${number(exp(min(half.upper, 700)))} over the upper half of the layers, in known models 6 at most`;
    const text = `its variance at the first sublayer is ${shown} times that at the last (${more})`;
    return [["the gradient explodes", text, sure(beyond), "try smaller queries and keys, a norm before every branch, or deepscalelm", CURE]];
  }

  function ofGrowth(p, half) {
    const growth = last(p.forward.out) - p.forward.in[0], share = last(p.sensitivity);
    const late = share < bounds.LATE_SHARE;
    if (!(growth > log(bounds.STREAM_GROWTH)) || !(late || half.upperGrowth > log(bounds.UPPER_RATIO))) return [];
    const more = late ? `the last layer adds ${percent(share)} to it` : `by ${number(exp(min(half.upperGrowth, 700)))} in the upper half`;
    const beyond = late ? log(bounds.LATE_SHARE / max(share, 1e-300)) : half.upperGrowth - log(bounds.UPPER_RATIO);
    const text = `its variance at the top is ${number(exp(min(growth, 700)))} times that at the bottom; ${more}`;
    return [["the stream grows", text, sure(beyond), "try deepscalelm, gpt2 or lns", CURE]];
  }

  function ofCollapse(p) {
    const r = p.forward.rOut, bound = bounds.RANK_COLLAPSE, above = closedForm.range(r.length).filter((i) => r[i] > bound);
    if (!above.length) return [];
    const most = max(...above.map((i) => r[i])), left = (1 - most) / (1 - bound);
    const where = last(above) === r.length - 1
      ? `from sublayer ${above[0]} on tokens correlate above ${bound} (${most.toFixed(4)} at most)`
      : `${above.length} of ${r.length} sublayers are above ${bound}`;
    const advice = "try multipliers on the branches that fall with depth (deepscalelm), or e-spa without skips";
    return [["rank collapse", where, sure(left <= 0 ? Infinity : -log(left)), advice, CURE]];
  }

  function ofOverflow(p) {
    const limit = 2 * log(bounds.FP16_MAX / bounds.LARGEST_IN_STDS);
    return [["stream", p.forward.out], ["branch", p.forward.branch]].flatMap(([name, logs]) => {
      const first = logs.findIndex((x) => x > limit);
      if (first < 0) return [];
      const text = `at sublayer ${first} ${bounds.LARGEST_IN_STDS} standard deviations of the ${name} pass ${bounds.FP16_MAX}`;
      return [["fp16 overflow", text, sure(max(...logs) - limit), "use bf16 or fp32", "the-four-numbers"]];
    });
  }

  function warned(p) {
    const logs = p.gradient.in, stream = p.forward.in, middle = stream.length / 2;
    const half = { upper: logs[middle], upperGrowth: last(p.forward.out) - stream[middle] };
    half.excess = logs[0] - logs[middle] - max(stream[middle] - stream[0], 0);
    return [...ofGradient(p, half), ...ofGrowth(p, half), ...ofCollapse(p), ...ofOverflow(p)];
  }

  const inWords = ([kind, text, how, advice, page]) => `${kind}: ${text}; ${how}; ${advice} (docs/will-it-train.md#${page})`;

  // --- notes (prediction.py) -----------------------------------------------------------------------------------

  function notes(s, table, p) {
    const { a } = table, places = [...new Set(a.places)].sort(), found = [];
    if (places.join() !== s.norm_placement) found.push(`${s.scheme} decides where the norms stand: ${places.join(" and ")} (not ${s.norm_placement})`);
    if (a.kind === "decoder") found.push(words.decoder);
    const largest = max(0, ...closedForm.scores(table));
    if (largest > bounds.LARGE_SCORES) found.push(words.scores.replace("@", rough(largest, 3)));
    const start = p.forward.input[1];
    if (start > 0 && p.forward.rOut.slice(0, -1).some((r) => r < start / 2)) found.push(words.equal);
    if (a.gated && a.places.includes("none")) {
      const rows = closedForm.range(a.layers).map((layer) => 2 * layer + 1);
      const shares = rows.map((i) => min(table.branch[i] ** 2 * exp(min(p.forward.branch[i] - p.forward.out[i], 0)), 1));
      const grown = shares.reduce((sum, share) => sum + Math.log1p(share * max(growths[a.activation], 0)), 0);
      const spread = sqrt(2 / a.d) * exp(min(grown, 700));
      if (spread > bounds.SPREAD) found.push(words.spread.replace("@", rough(spread, 2)));
    }
    const logits = closedForm.decidesFew(table, p.forward.out.at(-1));
    if (logits) found.push(words.logits.replace("@", rough(logits, 3)));
    const even = (i) => exp(p.forward.branch[i]) > 0.9 * table.normScale[i] ** 2;
    const unequal = a.qkNorm && s.norm_placement === "res-post" && !closedForm.range(2 * a.layers).every(even);
    if (unequal) found.push(words.sizes);
    return found;
  }

  // --- charts and table (report/html/signal.py) ----------------------------------------------------------------

  function logSeries(ids, logs) {
    const y = logs.map(exp), far = (value) => !(value > 1e-290 && value < 1e290);
    if (!y.some(far)) return { ...ids, y };
    return { ...ids, y: y.map((value) => (far(value) ? null : value)), log10: logs.map((x) => x / Math.LN10) };
  }

  const spans = (all) => (max(...all.flat()) - min(...all.flat()) > log(10) ? "log" : "linear");

  function placesOf(layers) {
    const all = closedForm.range(layers), halves = all.flatMap((k) => [[k + 0.5, `layer ${k}, attention`], [k + 1, `layer ${k}, feed-forward`]]);
    return [
      { x: halves.map(([x]) => x), names: halves.map(([, name]) => name) },
      { x: all.map((k) => k + 1), names: all.map((k) => `layer ${k}`) },
    ];
  }

  function section(curves, names) {
    const depths = [...new Set(curves.map((curve) => curve.table.a.layers))], made = structuredClone(template);
    const ids = (k, byLayer) => ({ group: k, source: 0, place: 2 * depths.indexOf(curves[k].table.a.layers) + byLayer });
    const [stream, gradient, correlation, sensitivity] = made.blocks;
    const streams = curves.map(({ p }) => p.forward.out), gradients = curves.map(({ p }) => p.gradient.in);
    stream.series = streams.map((logs, k) => logSeries(ids(k, 0), logs));
    gradient.series = gradients.map((logs, k) => logSeries(ids(k, 0), logs));
    correlation.series = curves.map(({ p }, k) => ({ ...ids(k, 0), y: p.forward.rOut }));
    sensitivity.series = curves.map(({ p }, k) => logSeries(ids(k, 1), p.sensitivity.map(log)));
    [stream.scale, gradient.scale] = [spans(streams), spans(gradients)];
    correlation.limits = [min(0, 1.05 * min(...curves.flatMap(({ p }) => p.forward.rOut))), 1.03];
    return { ...made, groups: names, places: depths.flatMap(placesOf) };
  }

  function row({ p }, name, n) {
    const f = p.forward, all = p.sensitivity.reduce((sum, x) => sum + x, 0), kinds = warned(p).map(([kind]) => kind.replace(/^the /, ""));
    return [
      name, template.sources[0].name, String(n), `${number(f.input[0])} → ${variance(last(f.out))}`, `${number(f.input[1])} → ${number(last(f.rOut))}`,
      variance(p.gradient.in[0]), number(all), [...new Set(kinds)].join(", ") || "nothing",
    ];
  }

  // --- the answer ----------------------------------------------------------------------------------------------

  const known = new Map();

  function predicted(s) {
    const key = JSON.stringify(s);
    if (!known.has(key)) {
      const table = schemes.table(s, presets);
      known.set(key, { table, p: closedForm.predict(table) });
    }
    return known.get(key);
  }

  /** What the server answers to /curves; `own`: where the controls stand for every preset. */
  async function answer({ current, pinned }, own) {
    await library;
    const begun = performance.now();
    const several = [...new Map([current, ...pinned].map((s) => [JSON.stringify(s), s])).values()];
    const curves = several.map(predicted), names = labels(several, own);
    return {
      pending: false, section: section(curves, names), label: names[0], python: python(current), command: command(current),
      table: { ...words.table, rows: curves.map((curve, k) => row(curve, names[k], several[k].n_layers)) },
      warnings: warned(curves[0].p).map(inWords), notes: notes(current, curves[0].table, curves[0].p),
      milliseconds: performance.now() - begun,
    };
  }

  return { answer };
})();
