"use strict";

// Fidelity `moments` of signalprop.theory in the browser: the same formulas in the same order, under the same names.
// What is tabulated there (integrals of softmax, Hermite series) is tabulated in the browser by the same rules, so that numbers
// agree to rounding (tests/lab/explorer/test_static.py holds them to 1e-9). Stacks of attention and feed-forward that
// read tokens; streams have mean 0 there. A table is what `schemes.js` makes.

const closedForm = (() => {
  const { PI, exp, log, max, min, sin, sqrt } = Math;
  const { clip, correlation, dot, even, geometric, kept, ln, logAdd, logSum, pairLength, range, ratio, rowMoments, softmaxSecond, sum } = softmax;
  const { centralDual } = activations;
  const LARGEST = 600, HELD = 27.6, LARGEST_SCORE = 1e60, TINY = 1e-300;
  const NORMAL = range(81).map((k) => [0.15 * (k - 40), exp(-((0.15 * (k - 40)) ** 2) / 2)]);
  const ALL_NORMAL = sum(NORMAL.map(([, weight]) => weight));
  const safeExp = (x) => exp(clip(x, -LARGEST, LARGEST));

  // --- attention (theory/attention.py) -------------------------------------------------------------------------

  /** 1 + 1/2 + ... + 1/n, and the same of squares. */
  function harmonic(n) {
    const m = n + 8, less = (power) => sum(range(8).map((i) => 1 / (n + i + 1) ** power));
    const first = log(m) + 0.5772156649015329 + 1 / (2 * m) - 1 / (12 * m ** 2) + 1 / (120 * m ** 4) - 1 / (252 * m ** 6);
    const tail = 1 / m - 1 / (2 * m ** 2) + 1 / (6 * m ** 3) - 1 / (30 * m ** 5) + 1 / (42 * m ** 7);
    return [first - less(1), PI ** 2 / 6 - tail - less(2)];
  }

  const pairs = kept((n, causal) => {
    if (!causal) return [n * (n - 1) / n ** 2, n * (n - 1) / n ** 2];
    const [h, squares] = harmonic(n), value = 2 - 2 * h / n;
    return [value, max(value - (h * h - squares) / n, 0)];
  });

  const rotaryCoherence = kept((length, dHead, base, fraction, causal) => {
    const rotated = 2 * even(fraction * dHead / 2);
    let n = [length], weight = [1];
    if (causal) {
      n = geometric(length, 256);
      const edges = [0.5, ...n.slice(1).map((x, k) => 0.5 * (x + n[k])), length + 0.5];
      weight = n.map((x, k) => (edges[k + 1] - edges[k]) * (causal === "pairs" ? 1 : (x - 1) / x ** 2));
    }
    if (!rotated || !weight.some(Boolean)) return 1;
    const half = range(rotated / 2).map((k) => 0.5 * base ** (-2 * k / rotated));
    const coherence = n.map((x) => sum(half.map((h) => (sin(x * h) / (x * sin(h))) ** 2)) / half.length);
    return 1 - rotated / dHead * (1 - dot(coherence, weight) / sum(weight));
  });

  /** How often two rows meet in a key of their averages. */
  function meetings(x) {
    return x.causal ? pairs(x.n, x.causal)[0] / max(x.n - 1, 1) : 1 / x.n;
  }

  // theory/one_length.py
  const ofTwoRows = (near) => (1 + (4 + 2 * near) * near) / 7;
  const shorterBy = (x, s, tilt) => (x.oneLength ? 1 / (1 + 4 * s * tilt / x.d) : 1);
  const NO_NORMS = { queries: Infinity, keys: Infinity };
  const byChance = (x) => 1 - 1 / (x.norms.keys * (1 / x.dHead + 2 / x.d));
  const ofOwnLength = (x, r, kept) => (x.oneLength ? 4 * r : 2) * kept - 1;

  /** What the score matrix contributes; x: r, s0, n, d, dHead, p, omega, omegaRows, queryBias, causal, oneLength, norms. */
  function scores(x) {
    const r = clip(x.r, -1 / max(x.n - 1, 1), 1), rQuery = r + x.queryBias * (1 - r);
    const s = max((1 - r * x.omegaRows) * x.s0, 0), own = x.omega * (1 - r) * x.s0, c = min(max(rQuery * own, twoRows.LEAST * s), s);
    const v = 2 / x.dHead - 2 / x.norms.queries + (x.oneLength ? 2 : 4) / x.d, rows = rowMoments(s, x.n, v, x.causal, x.oneLength);
    const met = twoRows.pairOverlaps(s, c, pairLength(x.n, x.causal), v, x.oneLength ? 1 / x.d + 1 / x.norms.queries : 0);
    met.weighted = byChance(x) * met.weighted + (1 - byChance(x)) * c * met.jacobian;
    const found = { r, rQuery, s, c, rows, q0: (1 - r) * own / x.d, valueOverlap: met.value, jacobianOverlap: met.jacobian, weighted: met.weighted };
    if (!x.oneLength) return { ...found, crowds: [0, 0] };
    const least = max(s, 1e-300), part = own / least, flat = ((1 - r) * part) ** 2 * (1 / x.d + 1 / x.norms.keys), both = ofTwoRows(c / least);
    const whole = x.omegaRows * part * (1 - r) / x.d, apart = whole * r * (1 - 0.5 * r), near = whole * (1 + r - 0.5 * r * r);
    const less = exp(flat * rows.flatJ), alike = exp(flat * rows.flatJ * both);
    return {
      ...found, crowds: [4 * rows.movedPairs * apart, 4 * rows.moved * (apart + near * meetings(x))],
      valueOverlap: met.value * exp(flat * rows.flatP * both), jacobianOverlap: met.jacobian * alike, weighted: met.weighted * alike,
      rows: {
        ...rows, second: min(rows.second * exp(flat * rows.flatP), 1), jacobian: rows.jacobian * less,
        weightedJacobian: rows.weightedJacobian * less,
      },
    };
  }

  function attend(x) {
    const { r, rQuery, rows, q0, valueOverlap, crowds } = scores(x), own = rows.second / (1 - x.p);
    const longer = x.oneLength ? 0 : 4 * x.p * own * rows.squaredTilt;
    const variance = max(r * (1 + x.p * own) + (1 - r) * own + q0 * (rows.response + longer) - crowds[0], 0);
    const scorePairs = pairs(x.n, x.causal)[1], others = max(x.n - 1, 1);
    const overlap = x.causal ? meetings(x) + (valueOverlap - 1) * scorePairs / others : valueOverlap / x.n;
    const covariance = r + (1 - r) * overlap + rQuery * q0 * (1 - rows.second) ** 2 - crowds[1];
    return [variance, clip(covariance, -variance, variance)];
  }

  /** (variance, covariance) of what heads send back where the gradient's token correlation at their output is 0, and 1. */
  function attendBack(x) {
    const { r, s, c, rows, q0, valueOverlap, jacobianOverlap, weighted } = scores(x);
    const keep = 1 / (1 - x.p), others = max(x.n - 1, 1), [valuePairs, scorePairs] = pairs(x.n, x.causal), h = x.p * keep;
    const shorter = shorterBy(x, s, rows.squaredTilt), only = 1 - x.queryBias;
    const along = 1 / x.dHead - 1 / x.norms.queries + 2 / x.d, far = rows.squaredTilt * rows.jacobian / rows.second;
    const normed = 1 / max(1 + (4 * s / max(x.s0, 1e-300) * s * far - 1) / x.norms.keys, 0.5);
    const noise = (keep - r + (4 * h + 1) * rows.squaredTilt * q0) * shorter;
    const longer = noise * (1 + along * s * rows.squaredTilt) * shorter + ofOwnLength(x, r, keep) * (1 - r) / x.d;
    const query = max((q0 * rows.remaining + rows.jacobian * s * longer) * only, 0);
    const common = ofOwnLength(x, r, 1) / x.d + shorterBy(x, s + 0.5 * c, rows.squaredTilt);
    const sameKeys = scorePairs * jacobianOverlap / others * s * (1 - r) * common;
    return [0, 1].map((rG) => {
      const throughValue = keep * rows.second + rG * (valuePairs + (valueOverlap - 1) * scorePairs);
      const throughKey = rG * scorePairs * weighted + rows.weightedJacobian * x.s0 * noise * normed;
      const queryCovariance = rG * (q0 * (1 - rows.second) ** 2 + sameKeys) * only;
      const total = 1 + x.p * keep * rows.second + rG * (x.n - 1), key = max(throughValue + throughKey, 0);
      const keyCovariance = (total - throughValue - x.omega * throughKey) / others;
      return [query + key, clip(queryCovariance, -query, query) + clip(keyCovariance, -key, key)];
    });
  }

  // --- maps (theory/elements.py) -------------------------------------------------------------------------------

  const linear = ([v, c], gain, bias = 0) => [gain * v + bias, gain * c + bias];
  const dropped = ([v, c], p) => [v / (1 - p), c];
  const dualOf = (x, name) => centralDual(name, x[0], correlation(x[1], x[0]));
  const activated = (x, name) => { const [mean, v, c] = dualOf(x, name); return [v + mean ** 2, c + mean ** 2]; };
  const activatedBack = (g, x, name) => { const q = dualOf(x, name); return [g[0] * q[3], g[1] * q[4]]; };

  // --- branches (sublayers/*/moments.py) -----------------------------------------------------------------------

  /** What attention's formulas take, of what a row reads. */
  function setting(t, i, second, r) {
    const a = t.a, query = a.d * t.w.query[i] ** 2, key = a.d * t.w.key[i] ** 2, scale = a.scoreScale ** 2;
    const bias = query > 0 ? t.b.query[i] ** 2 / query : 0, total = second + bias;
    const kept = ratio(query * total, query * total + a.eps) * ratio(key * second, key * second + a.eps);
    const s0 = a.qkNorm ? a.dHead * scale * kept : query * key * a.dHead * scale * total * second;
    const causal = a.kind === "decoder", turned = [a.n, a.dHead, a.rotaryBase, a.rotaryFraction];
    const rotary = a.positions === "rotary", whole = a.qkNorm === "whole";
    const norms = a.qkNorm ? { queries: a.dHead * (whole ? a.heads : 1), keys: a.dHead * (whole ? a.kvHeads : 1) } : NO_NORMS;
    return {
      norms,
      r, s0: min(s0, LARGEST_SCORE), n: a.n, d: a.d, dHead: a.dHead, p: a.attentionDropout, causal,
      oneLength: a.qkNorm || t.placement.every((place) => place === "pre" || place === "post" || place === "sandwich"),
      queryBias: a.qkNorm ? 0 : correlation(bias, total), omega: rotary ? rotaryCoherence(...turned, causal && "pairs") : 1,
      omegaRows: rotary ? rotaryCoherence(...turned, causal && "rows") : 1,
    };
  }

  /** Variances of the scores of attention that reads a normed stream. */
  function scoreVariances(t) {
    const { a, w } = t, rows = range(a.layers).map((layer) => 2 * layer).filter((i) => before(t.placement[i]) || t.placement[i] === "post");
    return rows.map((i) => (a.qkNorm ? 1 : (a.d * w.query[i] * w.key[i]) ** 2) * a.dHead * a.scoreScale ** 2 * t.normScale[i] ** 4);
  }

  const attention = {
    forward(t, i, second, r) {
      const { a, w, b } = t, values = linear(attend(setting(t, i, second, r)), a.d * w.value[i] ** 2 * second, b.value[i] ** 2);
      return dropped(linear(values, a.inner * w.output[i] ** 2, b.output[i] ** 2), a.dropout);
    },
    /** [vv, vc, cv, cc] of the map from the gradient at the branch's output. */
    backward(t, i, second, r) {
      const { a, w } = t, [low, high] = attendBack(setting(t, i, second, r));
      const back = a.d * w.output[i] ** 2 * (a.inner * w.value[i] ** 2), by = 1 / (1 - a.dropout);
      return [low[0] * by * back, (high[0] - low[0]) * back, low[1] * by * back, (high[1] - low[1]) * back];
    },
  };

  const feedForward = {
    forward(t, i, second, r) {
      const { a, w, b } = t, x = [second, second * r], up = linear(x, a.d * w.up[i] ** 2, b.up[i] ** 2);
      let hidden;
      if (a.gated) {
        const gain = a.d * w.gate[i] ** 2, gate = linear(x, gain, b.gate[i] ** 2), act = activated(gate, a.activation);
        const slope = max(activatedBack([1, 1], [gate[0], 0], a.activation)[1], 0), apart = (1 - min(r, 1) ** 2) ** 2;
        hidden = [act[0] * up[0], act[1] * up[1] + second ** 2 * gain * w.up[i] ** 2 * slope * apart]; // overlaps by chance
      } else hidden = activated(up, a.activation);
      return dropped(linear(hidden, a.dFf * w.down[i] ** 2, b.down[i] ** 2), a.dropout);
    },
    backward(t, i, second, r) {
      const { a, w, b } = t, x = [second, second * r], up = linear(x, a.d * w.up[i] ** 2, b.up[i] ** 2);
      const g = linear(dropped([1, 1], a.dropout), a.d * w.down[i] ** 2);
      if (!a.gated) {
        const [v, c] = linear(activatedBack(g, up, a.activation), a.dFf * w.up[i] ** 2);
        return [v, 0, 0, c];
      }
      const gate = linear(x, a.d * w.gate[i] ** 2, b.gate[i] ** 2), act = activated(gate, a.activation);
      const throughUp = linear([g[0] * act[0], g[1] * act[1]], a.dFf * w.up[i] ** 2);
      const throughGate = linear(activatedBack([g[0] * up[0], g[1] * up[1]], gate, a.activation), a.dFf * w.gate[i] ** 2);
      return [throughUp[0] + throughGate[0], 0, 0, throughUp[1] + throughGate[1]];
    },
  };
  const branchOf = (i) => (i % 2 ? feedForward : attention);

  // --- the two ends (theory/embedding.py, theory/head.py) ------------------------------------------------------

  /** [variance, token correlation] of the stream that enters the first sublayer. */
  function embed(a, e) {
    const segment = a.nSegments > 1 ? a.inputs.segment_correlation : 1;
    let variance = (e.token ** 2 + e.position ** 2 + e.segment ** 2) * e.scale ** 2;
    let shared = (e.token ** 2 * a.inputs.token_correlation + segment * e.segment ** 2) * e.scale ** 2;
    if (a.embeddingNorm) [variance, shared] = [variance, shared].map((x) => x * ratio(e.normGain ** 2, variance + a.eps));
    variance /= 1 - a.embeddingDropout;
    return [variance, ratio(shared, variance)];
  }

  /** Variance of logits that are so large that a few words decide the softmax, else 0. */
  function decidesFew({ a, head }, logVariance) {
    if (a.headTransform) return 0;
    const s = a.d * (head.weight * head.scale) ** 2 * (a.finalNorm ? 1 : exp(min(logVariance, 600)));
    return s > 2 * log(max(a.vocab, 2)) ? s : 0;
  }

  /** Of the gradient at the last stream: token correlation; what a norm after it keeps, and that part's correlation. */
  function gradientAtTop(t, logVariance, given, logShare) {
    const { a, embedding, head } = t, classes = a.vocab, normed = a.finalNorm || a.headTransform, held = clip(logVariance, -600, 600);
    let second = normed ? 1 : exp(held), through = 1, r = given;
    if (a.headTransform) {
      const [, variance, covariance, slope2, slope] = centralDual(a.activation, a.d * head.transform ** 2 * second, r);
      through = ratio(slope, slope2);
      second = 1;
      r = variance > 0 ? covariance / variance : 0;
    }
    const s = min(a.d * head.weight ** 2 * head.scale ** 2 * second, 1e4);
    let own = 0, ownSquare = 0, aligned = 0;
    if (a.tied && !a.headTransform) {
      const share = clip(logShare - (normed ? held : 0), -600, 600), [others, scatter] = logSum(s, max(classes - 1, 1));
      const at = head.scale * a.d * embedding.token ** 2 * exp(share / 2) - others;
      aligned = min(ratio(embedding.token ** 2 * exp(share), second), 1);
      const std = sqrt(scatter + s * (1 - aligned / 2));
      for (const [z, weight] of NORMAL) {
        const found = 1 / (1 + exp(-clip(at + std * z, -600, 600)));
        own += weight / ALL_NORMAL * found;
        ownSquare += weight / ALL_NORMAL * found * found;
      }
    }
    const positive = clip(r, 0, 1), alone = softmaxSecond(s, classes);
    const overlap = exp(twoRows.logOverlap(s, positive * s, classes)) / classes;
    const { token_correlation: tokens, target_correlation: c, loss_fraction: fraction } = a.inputs;
    const [targets, same, crossed, copied] = a.kind === "encoder" ? [c, 0.64 + 0.36 * c, (1 - 0.8) * c, 0.1] : [c, tokens, c, c];
    const others = 1 - 2 * own + ownSquare, rest = max(positive - aligned, 0) / max(1 - aligned, 1e-12);
    const equal = own ** 2 + max(ownSquare - own ** 2, 0) * rest;
    const moments = (norm) => {
      const along = norm ? aligned * (ownSquare + copied * (1 - 2 * own)) : 0;
      const variance = max(1 + ownSquare + others * alone - 2 * (own * copied + (1 - own) / classes) - along, 0);
      let shared = targets + equal * same - 2 * own * crossed + (1 - own) ** 2 * (overlap - 2 / classes);
      if (norm) shared -= aligned * (2 * (own - copied) * (own * same - crossed) - (own - copied) ** 2 * positive);
      return [variance, clip(fraction * ratio(shared * through, variance), 0, 1)];
    };
    const [variance, shared] = moments(a.finalNorm);
    if (a.finalNorm) return [shared, 1, shared];
    const [keptVariance, keptShared] = moments(true), along = others * min(s, 2 * log(max(classes, 2)));
    const leaves = (of, more) => max(1 - ((a.headTransform ? 0 : 2 - of ** 2 + more) + (a.norm === "layernorm")) / a.d, 0), one = leaves(1, along);
    return [shared, one * ratio(keptVariance, variance), ratio(keptShared * leaves(given, 0), one)];
  }

  /** Log of the factor alpha^2 on the token's row in the last stream (the skip path alone). */
  function tokenShare(t, norms) {
    const { a, embedding: e } = t, total = (e.token ** 2 + e.position ** 2 + e.segment ** 2) * e.scale ** 2;
    const start = ln(e.scale ** 2) + (a.embeddingNorm ? ln(ratio(e.normGain ** 2, total + a.eps)) : 0);
    return start + sum(norms.map((norm, i) => {
      const skip = a.parallel && i % 2 ? 0 : ln(t.skip[i] ** 2);
      return skip + (t.placement[i] === "post" ? ln(t.normScale[i] ** 2) - norm : 0);
    }));
  }

  // --- the recursion (network/residual.py, theory/network.py) --------------------------------------------------

  const before = (where) => where === "pre" || where === "sandwich", onBranch = (where) => where === "sandwich" || where === "res-post";

  /** Arrays by sublayer: log variances and correlations of stream_in, branch and stream_out, and what norms met. */
  function forward(t) {
    const { a } = t, epsilon = ln(a.eps), seen = { in: [], rIn: [], branch: [], rBranch: [], out: [], rOut: [], second: [], norm: [], raw: [] };
    const start = embed(a, t.embedding);
    let stream = [ln(start[0]), start[1]], layerIn = stream;
    t.skip.forEach((skip, i) => {
      const where = t.placement[i], beside = a.parallel && i % 2, gain2 = t.normScale[i] ** 2;
      if (!beside) layerIn = stream;
      const [logV, r] = layerIn;
      let second, norm = 0, beyond = 0;
      if (before(where)) {
        norm = logAdd(logV, epsilon);
        second = safeExp(logV - norm) * gain2;
      } else {
        const held = clip(logV, -HELD, HELD);
        second = safeExp(held);
        beyond = logV - held;
      }
      const made = branchOf(i).forward(t, i, second, r), raw = ln(made[0]) + beyond, rBranch = correlation(made[1], made[0]);
      // the norm on a branch has gain 1 in a sandwich (its gain is the one before the branch)
      const branch = onBranch(where) ? raw - logAdd(raw, epsilon) + (where === "sandwich" ? 0 : ln(gain2)) : raw;
      const base = beside ? stream : [ln(skip ** 2) + logV, r];
      const logBranch = ln(t.branch[i] ** 2) + branch;
      let total = logAdd(base[0], logBranch);
      const share = exp(max(logBranch - total, -745)), rOut = share * rBranch + (1 - share) * base[1];
      if (where === "post") {
        norm = logAdd(total, epsilon);
        total = total - norm + ln(gain2);
      }
      stream = [total, rOut];
      const row = { in: logV, rIn: r, branch, rBranch, out: total, rOut, second, norm, raw };
      for (const name of Object.keys(row)) seen[name].push(row[name]);
    });
    return { input: start, ...seen };
  }

  /** Of a table: `forward`, and log variance and token correlation of gradients, relative to the last stream. */
  function predict(t) {
    const { a } = t, f = forward(t), n = t.skip.length, epsilon = ln(a.eps), gradient = { in: [], rIn: [], out: [], rOut: [] };
    const [topR, keptShare, keptR] = gradientAtTop(t, f.out[n - 1], f.rOut[n - 1], tokenShare(t, f.norm));
    let g = [0, topR], readers = [], gathered = null;
    for (let i = n - 1; i >= 0; i--) {
      const where = t.placement[i], logGain2 = ln(t.normScale[i] ** 2), beside = a.parallel && i % 2;
      [gradient.out[i], gradient.rOut[i]] = g;
      let [logSum, r] = g;
      if (where === "post") {
        logSum += logGain2 - f.norm[i];
        if (i === n - 1) [logSum, r] = [logSum + ln(keptShare), keptR];
      }
      let inner = ln(t.branch[i] ** 2) + (before(where) ? logGain2 - f.norm[i] : 0);
      if (onBranch(where)) inner += (where === "sandwich" ? 0 : logGain2) - logAdd(f.raw[i], epsilon);
      const [vv, vc, cv, cc] = branchOf(i).backward(t, i, f.second[i], f.rIn[i]).map((x) => safeExp(inner) * x);
      const skip2 = beside ? 0 : t.skip[i] ** 2, share = [logSum, skip2 + vv + vc * r, skip2 * r + cv + cc * r];
      gathered = gathered ? [share[0], share[1] + gathered[1], share[2] + gathered[2]] : share;
      readers.push(i);
      if (beside) continue;
      g = [gathered[0] + ln(gathered[1]), correlation(gathered[2], gathered[1])];
      for (const reader of readers) [gradient.in[reader], gradient.rIn[reader]] = g;
      [readers, gathered] = [[], null];
    }
    const last = gradient.out[n - 1];
    gradient.in = gradient.in.map((x) => x - last);
    gradient.out = gradient.out.map((x) => x - last);
    return { forward: f, gradient, sensitivity: sensitivity(t, f) };
  }

  /** By layer: what its sublayers add over the stream that enters it. */
  function sensitivity(t, f) {
    return range(t.skip.length / 2).map((layer) => sum([2 * layer, 2 * layer + 1].map((i) => {
      const skip = t.skip[t.a.parallel ? 2 * layer : i], gain = skip === 0 ? 1 : min((t.branch[i] / skip) ** 2, Number.MAX_VALUE);
      const ratios = f.branch[i] <= -1e11 ? 0 : gain * exp(min(f.branch[i] - f.in[i], 300));
      return ratios * exp(min(f.in[i] - f.in[2 * layer], 300));
    })));
  }

  return { activations: activations.names, centralDual, decidesFew, embed, even, forward, predict, range, scores: scoreVariances };
})();
