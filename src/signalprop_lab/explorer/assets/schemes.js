"use strict";

// From the controls to the table of numbers that `closedForm` predicts: architectures as changed presets
// (network/architecture.py), and schemes (schemes/*.py) as one function each. A table has arrays by sublayer.

const schemes = (() => {
  const { sqrt, min, max, floor } = Math;
  const { centralDual, embed, even, forward, range } = closedForm;
  const ROLES = ["query", "key", "value", "output", "gate", "up", "down"];
  const second = (name, s) => { const [mean, variance] = centralDual(name, s, 0); return variance + mean ** 2; };

  function refuse(text) {
    throw new Error(text);
  }

  /** The preset's fields with those of the controls; what followed from a changed field follows again. */
  function architecture(s, presets) {
    const of = presets[s.preset] ?? refuse(`this page has no preset ${s.preset}; take signalprop predict`);
    for (const [name, low, high] of [["n_layers", 1, 2000], ["d_model", 1, 65536], ["n_heads", 1, 65536], ["seq_len", 1, 65536]]) {
      if (!Number.isInteger(s[name]) || s[name] < low || s[name] > high) refuse(`${name} is ${s[name]}; expected a whole number from ${low} to ${high}`);
    }
    if (!(s.dropout >= 0 && s.dropout < 1)) refuse(`dropout is ${s.dropout}; expected a number from 0 to below 1`);
    if (s.kind === "encoder-decoder") refuse("this page has no encoder-decoders; take signalprop predict");
    if (s.d_model % s.n_heads) refuse(`d_model ${s.d_model} is not divisible by n_heads ${s.n_heads}; choose a divisor`);
    const shared = of.n_kv_heads === of.n_heads ? s.n_heads : of.n_kv_heads;
    if (s.n_heads % shared) refuse(`n_heads ${s.n_heads} is not a multiple of n_kv_heads ${shared}; choose a divisor`);
    const dHead = s.d_model / s.n_heads, follows = (value) => (value === of.dropout ? s.dropout : value);
    const a = {
      ...of.fixed, kind: s.kind, layers: s.n_layers, d: s.d_model, n: s.seq_len, activation: s.activation, dropout: s.dropout,
      attentionDropout: follows(of.attention_dropout), embeddingDropout: follows(of.embedding_dropout), dHead, inner: s.d_model,
      heads: s.n_heads, kvHeads: shared, scoreScale: 1 / sqrt(dHead), inputs: of.inputs[s.kind],
      dFf: s.d_model === of.d_model ? of.d_ff : max(1, even(of.d_ff * s.d_model / of.d_model)),
      places: range(s.n_layers).map(() => of.norm_placement), finalNorm: of.final_norm,
    };
    return placed(a, s.norm_placement);
  }

  /** With norms there; where that is a change, a final norm follows unless the last layer is post-norm. */
  function placed(a, where) {
    const places = Array.isArray(where) ? where : range(a.layers).map(() => where);
    if (a.parallel && places.some((place) => place !== "pre" && place !== "none")) refuse("parallel attention and feed-forward needs norm_placement 'pre' or 'none'");
    const moved = places.some((place, k) => place !== a.places[k]), last = places[a.layers - 1] !== "post";
    return { ...a, places, finalNorm: moved || a.finalNorm === null ? last : a.finalNorm };
  }

  const bare = (a) => ({ ...placed(a, "none"), finalNorm: false });

  function fan(a, role) {
    const heads = a.heads * a.dHead, kv = a.kvHeads * a.dHead;
    return { query: [a.d, heads], key: [a.d, kv], value: [a.d, kv], output: [heads, a.d], gate: [a.d, a.dFf], up: [a.d, a.dFf], down: [a.dFf, a.d] }[role];
  }

  const each = (value) => Object.fromEntries(ROLES.map((role) => [role, value(role)]));
  const writes = (role) => role === "output" || role === "down";
  const scored = (a) => a.scoreScale * sqrt(a.dHead);
  const xavier = (a) => each((role) => sqrt(2 / (fan(a, role)[0] + fan(a, role)[1])) / (role === "query" ? scored(a) : 1));
  const times = (std, factor) => each((role) => std[role] * factor(role));

  function fanIn(a) {
    const std = each((role) => fan(a, role)[0] ** -0.5);
    return { ...std, query: std.query / scored(a), down: (a.dFf * second(a.activation, 1)) ** -0.5 };
  }

  // --- the two ends (schemes/vanilla.py) -----------------------------------------------------------------------

  const sameEmbedding = (a, std) => ({
    token: std, position: a.positions === "learned" ? std : 0, segment: a.nSegments ? std : 0, scale: a.embeddingScale, normGain: 1,
  });
  const unitEmbedding = (a) => sameEmbedding(a, sqrt((1 - a.embeddingDropout) / (1 + (a.positions === "learned") + (a.nSegments > 0))) / a.embeddingScale);
  const headOf = (a, std, embedding) => ({ weight: a.tied ? embedding.token : std, scale: 1, transform: a.headTransform ? std : 0 });
  const smallHead = (a, embedding) => ({ weight: embedding.token, scale: 1 / sqrt(a.d), transform: a.headTransform ? 1 / sqrt(a.d) : 0 });

  /** Tables that start the stream at variance 1, and a head with small logits. */
  function ends(a) {
    const embedding = unitEmbedding(a);
    return { a, embedding, head: smallHead(a, embedding) };
  }

  function oneStd(a, std, residual = 1) {
    const embedding = sameEmbedding(a, std);
    return { a, std: each((role) => (writes(role) ? std * residual : std)), embedding, head: headOf(a, std, embedding) };
  }

  // --- schemes -------------------------------------------------------------------------------------------------

  const layerOf = (i) => floor(i / 2);
  const positive = (name, value) => (value > 0 ? value : refuse(`${name} is ${value}; expected a positive number`));

  /** Of DeepScaleLM: correlation of what the attention of every layer reads, by the scheme's own recursion. */
  function inputCorrelations(a, beta2, up) {
    const out = [], keep = 1 - a.dropout;
    let r = embed(a, unitEmbedding(a))[1];
    for (let i = 0; i < 2 * a.layers; i++) {
      out.push(i % 2 ? 1 : r);
      let branch = 1;
      if (i % 2) {
        const [mean, variance, covariance] = centralDual(a.activation, a.d * up ** 2, r);
        branch = (covariance + mean ** 2) / (variance + mean ** 2) * (a.gated ? r : 1);
      }
      r = (1 - beta2) * r + beta2 * keep * branch;
    }
    return out;
  }

  function deepScale(a, s, simple) {
    const alpha = s.alpha ?? 1, beta2 = min(1, positive("k", s.k ?? 2) * a.layers ** -alpha), keep = 1 - a.dropout;
    if (!(alpha >= 0 && alpha <= 10)) refuse(`alpha is ${alpha}; expected a number from 0 to 10`);
    const inside = a.gated ? 1 / a.d : sqrt(2 * keep / (a.d * a.dFf)), up = sqrt(inside), key = 1 / sqrt(a.d);
    const read = simple ? range(2 * a.layers).map(() => 2) : inputCorrelations(a, beta2, up);
    const value = read.map((r) => sqrt(sqrt(keep / r / (a.d * a.inner))));
    const down = sqrt(keep / (a.dFf * second(a.activation, a.d * inside))), made = ends(a);
    if (a.embeddingNorm) made.embedding.normGain = sqrt(1 - a.embeddingDropout);
    return { ...made, std: { query: key / scored(a), key, value, output: value, gate: up, up, down }, branch: sqrt(beta2), skip: sqrt(1 - beta2) };
  }

  function tFixup(given) {
    const a = bare(given), of = a.kind === "decoder" ? (9 * a.layers) ** -0.25 : 0.67 * a.layers ** -0.25, gated = of ** (2 / 3);
    const std = times(xavier(a), (role) => (["query", "key"].includes(role) ? 1 : a.gated && ["gate", "up", "down"].includes(role) ? gated : of));
    const size = (9 * a.layers) ** -0.25, embedding = sameEmbedding(a, size / a.embeddingScale);
    if (a.embeddingNorm) embedding.normGain = a.embeddingScale * Math.hypot(embedding.token, embedding.position, embedding.segment);
    const head = { weight: a.tied ? embedding.token : 1 / sqrt(a.d), scale: a.tied ? a.embeddingScale / sqrt(a.d) : 1, transform: a.headTransform ? 1 / sqrt(a.d) : 0 };
    return { a, std, embedding, head };
  }

  function pytorch(a) {
    const std = each((role) => 1 / sqrt(3 * fan(a, role)[0])), packed = sqrt(2 / (a.d + (a.heads + 2 * a.kvHeads) * a.dHead));
    const embedding = sameEmbedding(a, 1);
    const bias = a.bias ? { gate: std.gate, up: std.up, down: std.down } : {};
    return { a, std: { ...std, query: packed, key: packed, value: packed }, bias, embedding, head: headOf(a, 1 / sqrt(3 * a.d), embedding) };
  }

  function admin(given) {
    const a = placed(given, "post"), profiling = { ...ends(a), std: xavier(a) }, branch = forward(complete(profiling, 1)).branch;
    let before = 0;
    const skip = branch.map((log) => { const own = sqrt(1 + before); before += Math.exp(log); return own; });
    return { ...profiling, skip };
  }

  function mixed(given) {
    const post = floor(0.25 * given.layers + 1e-9), places = range(given.layers).map((layer) => (layer < post ? "post" : "pre"));
    return oneStd(placed(given, places), 0.02);
  }

  function normalisedSkip(a, s) {
    const alpha2 = s.k === null ? 0.99 ** 2 : max(0, 1 - positive("k", s.k) / a.layers);
    return { ...ends(a), std: fanIn(a), skip: sqrt(alpha2), branch: sqrt(1 - alpha2) };
  }

  const residualGpt2 = (a) => 1 / sqrt(2 * a.layers);
  const SCHEMES = {
    admin,
    bamboo: (a) => { const pre = placed(a, "pre"); return { ...ends(pre), std: xavier(pre) }; },
    deepnorm: (given) => {
      const a = placed(given, "post"), beta = (8 * a.layers) ** -0.25;
      return { ...ends(a), std: times(xavier(a), (role) => (["query", "key"].includes(role) ? 1 : beta)), skip: (2 * a.layers) ** 0.25 };
    },
    deepscalelm: (a, s) => deepScale(a, s, false),
    "deepscalelm-simple": (a, s) => deepScale(a, s, true),
    "ds-init": (a, s) => {
      const std = xavier(a), scale = range(2 * a.layers).map((i) => positive("alpha", s.alpha ?? 1) / sqrt(1 + layerOf(i)));
      return { ...ends(a), std: each((role) => scale.map((x) => x * std[role])) };
    },
    fixed: (a) => oneStd(a, 0.02),
    fixup: (given) => {
      const a = bare(given), n = 2 * a.layers, ends_ = ends(a), of = (role) => (["query", "key", "value"].includes(role) ? n ** (-1 / 6) : n ** (a.gated ? -1 / 4 : -1 / 2));
      if (!a.tied) ends_.head.weight = 0;
      return { ...ends_, std: times(xavier(a), (role) => (writes(role) ? 0 : of(role))) };
    },
    gpt2: (a) => oneStd(a, 0.02, residualGpt2(a)),
    huggingface: (a) => (a.drawn === null
      ? refuse("the default initialisation of this family is not known; choose another scheme")
      : oneStd(a, 0.02, a.drawn === "gpt2" ? residualGpt2(a) : 1)),
    layerscale: (a) => ({ ...oneStd(a, 0.02), branch: a.layers <= 18 ? 0.1 : a.layers <= 24 ? 1e-5 : 1e-6 }),
    lns: (a) => ({ ...oneStd(placed(a, "pre"), 0.02), normScale: range(2 * a.layers).map((i) => 1 / sqrt(1 + layerOf(i))) }),
    "mix-ln": mixed,
    noci: (a) => ({ ...ends(a), std: each((role) => (["query", "key", "value"].includes(role) ? a.dHead : fan(a, role)[1]) ** -0.5), branch: a.layers ** -0.5 }),
    "normalised-skip": normalisedSkip,
    pytorch,
    rezero: (given) => { const a = bare(given); return { ...ends(a), std: xavier(a), branch: 0 }; },
    sandwich: (given) => { const a = placed(given, "sandwich"); return oneStd(a, 0.02, residualGpt2(a)); },
    skipinit: (given) => { const a = bare(given); return { ...ends(a), std: fanIn(a), branch: 0 }; },
    "stable-resnet": (a) => ({ ...ends(a), std: fanIn(a), branch: (2 * a.layers) ** -0.5 }),
    "t-fixup": tFixup,
    takase: (a) => { const made = oneStd(a, sqrt(2 / (5 * a.d)), residualGpt2(a)); made.embedding.scale = sqrt(a.d); return made; },
    xavier: (a) => ({ ...ends(a), std: xavier(a) }),
  };
  SCHEMES["xavier-uniform"] = SCHEMES.xavier;

  /** Arrays by sublayer of what a scheme says; `qk` multiplies queries and keys. */
  function complete(made, qk) {
    const n = 2 * made.a.layers, column = (value) => (Array.isArray(value) ? value : range(n).map(() => value));
    const factor = (role) => (role === "query" || role === "key" ? qk : 1);
    return {
      a: made.a, embedding: made.embedding, head: made.head, skip: column(made.skip ?? 1), branch: column(made.branch ?? 1),
      normScale: column(made.normScale ?? 1), placement: range(n).map((i) => made.a.places[layerOf(i)]),
      w: each((role) => column(made.std[role]).map((x) => x * factor(role))), b: each((role) => column(made.bias?.[role] ?? 0)),
    };
  }

  /** The table of settings (those of explorer/settings.py). */
  function table(s, presets) {
    const make = SCHEMES[s.scheme] ?? refuse(`this page has no scheme ${s.scheme}; take signalprop predict`);
    if (!(s.qk_scale >= 1e-3 && s.qk_scale <= 1e3)) refuse(`qk_scale is ${s.qk_scale}; expected a number from 0.001 to 1000`);
    return complete(make(architecture(s, presets), s), s.qk_scale);
  }

  return { names: Object.keys(SCHEMES), table };
})();
