"use strict";

// Integrals of softmax over Gaussian scores, and averages over rows of attention, tabulated by the rules of
// theory/softmax.py and theory/attention_rows.py; and the arithmetic that all of the closed form shares.

const softmax = (() => {
  const { PI, abs, ceil, exp, floor, log, log1p, max, min, round, sqrt } = Math;
  const NO_SIGNAL = -1e12, TINY = 1e-300;
  const clip = (x, low, high) => min(max(x, low), high);
  const ln = (x) => (x > 0 ? log(x) : NO_SIGNAL);
  const logAdd = (x, y) => max(x, y) + log1p(exp(max(min(x, y) - max(x, y), -700)));
  const ratio = (x, y) => (y === 0 ? 0 : x / y);
  const correlation = (shared, total) => (total > 0 ? clip(shared / total, -1, 1) : 0);
  const range = (n) => Array.from({ length: n }, (_, k) => k);
  const sum = (values) => values.reduce((total, x) => total + x, 0);
  const dot = (x, y) => { let total = 0; for (let k = 0; k < x.length; k++) total += x[k] * y[k]; return total; };

  /** Python's round: halves go to the even number. */
  function even(x) {
    return abs(x - floor(x) - 0.5) < 1e-12 ? 2 * round(x / 2) : round(x);
  }

  /** A function that keeps its answers, the last 500. */
  function kept(f) {
    const known = new Map();
    return (...given) => {
      const key = given.join();
      if (!known.has(key)) {
        if (known.size >= 500) known.delete(known.keys().next().value);
        known.set(key, f(...given));
      }
      return known.get(key);
    };
  }

  // --- softmax (theory/softmax.py) -----------------------------------------------------------------------------

  /** By the trapezoidal sum of its integral, less what the pole at ix adds to the sum (Matta and Reichel 1971). */
  function erfc(x) {
    if (x < 0) return 2 - erfc(-x);
    if (x < 0.5) {
      let term = 2 * x / sqrt(PI), total = term;
      for (let n = 1; n < 16; n++) total += (term *= -x * x / n) / (2 * n + 1);
      return 1 - total;
    }
    let total = 0.5 / (x * x);
    for (let n = 1; n < 14; n++) total += exp(-n * n / 4) / (n * n / 4 + x * x);
    return x * exp(-x * x) / PI * total - (x < 6 ? 2 / (exp(4 * PI * x) - 1) : 0);
  }

  const STEP = 0.4, KNEE = 3, INTERVALS = 80;
  const NODES = range(INTERVALS - 1).map((k) => k / INTERVALS);
  const STDS = NODES.map((x) => KNEE * x / (1 - x));
  const Y = range(81).map((k) => (k - 70) * STEP);
  const vanishing = (s) => KNEE / (sqrt(s) + KNEE);
  const FAR = STDS.map((std) => vanishing(std * std));

  const fourth = (z) => z ** 4 - 6 * z * z + 3;

  function laplaceNarrow(std, u) {
    const z = range(25).map((k) => (k - 12) * 0.7), raw = z.map((x) => exp(-0.5 * x * x)), all = sum(raw);
    return u.map((at) => {
      const found = range(10).map(() => 0);
      z.forEach((x, k) => {
        const w = raw[k] / all, ey = exp(at + std * x), e1 = exp(-ey) * ey, e2 = e1 * ey, miss = -Math.expm1(-ey), f = fourth(x);
        const values = [miss, e2, e2 * ey, e2 * ey * ey, e1 * x, e2 * x * x, -miss * f, e2 * f, e2 * ey * f, e2 * ey * ey * f];
        values.forEach((value, i) => { found[i] += w * value; });
      });
      found[0] = log1p(-min(found[0], 1 - 1e-16));
      return found;
    });
  }

  function laplaceWide(std, u) {
    const last = u.length - 1;
    const z = range(u.length + Y.length - 1).map((k) => (k * STEP + (Y[0] - u[last])) / std);
    const density = z.map((x) => exp(-0.5 * x * x) / (std * sqrt(2 * PI))), tail = z.map((x) => 0.5 * erfc(x * Math.SQRT1_2));
    const flat = density.map((x, k) => x * fourth(z[k])), flatTail = density.map((x, k) => x * std * (z[k] ** 3 - 3 * z[k]));
    const ey = Y.map(exp), gumbel = Y.map((y, k) => STEP * exp(y - ey[k]));
    const psi = range(4).map((n) => gumbel.map((g, k) => g * ey[k] ** n));
    const weights = [...psi, Y.map((y, k) => y * psi[0][k]), Y.map((y, k) => y * psi[1][k]), Y.map((y, k) => y * y * psi[1][k])];
    return u.map((at, i) => {
      const over = (values, by) => { let t = 0; for (let n = 0; n < Y.length; n++) t += values[last - i + n] * by[n]; return t; };
      const [psi1, psi2, psi3, psi4, y1, y2, yy2] = weights.map((by) => over(density, by));
      const miss = log1p(-min(over(tail, gumbel), 1 - 1e-16));
      return [miss, psi2, psi3, psi4, (y1 - at * psi1) / std, (yy2 - 2 * at * y2 + at * at * psi2) / (std * std),
        -over(flatTail, gumbel), ...psi.slice(1).map((by) => over(flat, by))];
    });
  }

  const lowest = (std) => floor((-8.5 * std - log(1e6) - 14) / STEP);

  const laplace = kept(() => STDS.map((std) => {
    const low = lowest(std), high = ceil((8.5 * std + 5) / STEP);
    const u = range(high - low + 1).map((k) => (low + k) * STEP);
    return std <= 1 ? laplaceNarrow(std, u) : laplaceWide(std, u);
  }));

  /** At every node: [second, jacobian, response, second * squared tilt, derivatives of second and jacobian by flatness, how far a
   *  key's own spread moves its weight, and second times that of the squared weight] of a softmax of so many logits. */
  const nodeMoments = kept((length) => {
    if (length === 1) return STDS.map(() => [1, 0, 0, 0, 0, 0, 0, 0]);
    const raw = laplace().map((rows) => {
      let second = 0, third = 0, fourth = 0, pairs = 0, score = 0, flat2 = 0, flat3 = 0, flat4 = 0, flatPairs = 0;
      for (const [phi, psi2, psi3, psi4, z1, zz2, f0, f2, f3, f4] of rows) {
        const [one, two, three] = [1, 2, 3].map((k) => exp((length - k) * phi));
        const pair = length * (length - 1) * two, single = length * one, flat = (psi, f) => f * one + (length - 1) * psi * f0 * two;
        second += single * psi2;
        third += single * psi3;
        fourth += single * psi4;
        pairs += pair * psi2 * psi2;
        score += single * zz2 + pair * z1 * z1;
        flat2 += flat(psi2, f2);
        flat3 += flat(psi3, f3);
        flat4 += flat(psi4, f4);
        flatPairs += psi2 * (2 * f2 * two + (length - 2) * psi2 * f0 * three);
      }
      second *= STEP;
      third *= STEP / 2;
      fourth *= STEP / 6;
      const square = fourth + STEP * pairs / 6, jacobian = second - 2 * third + square;
      const flattened = flat4 / 6 + (length - 1) / 6 * flatPairs;
      return { second, third, fourth, square, jacobian, score: STEP * score, flats: [flat2, flat2 - flat3 + flattened].map((x) => -length / 4 * STEP * x) };
    });
    const response = raw.map((m, k) => (m.score - m.second) / (k ? STDS[k] ** 2 : 1));
    response[0] = (4 * response[1] - response[2]) / 3;
    return raw.map((m, k) => {
      const tilt = 1 - (5 * m.third - 3 * m.fourth) / (2 * m.second), others = length - 1;
      const own = [1 - 3 * m.second + 2 * m.third, 4 * m.second * tilt];
      const other = [-own[0], 6 * (m.square - m.fourth) - 2 * (m.second - m.third)];
      const moved = own.map((x, i) => (length < 3 ? 0 : STDS[k] ** 2 * (1 - 1 / length) / 2
        * (x + (2 * x - other[i]) / others + 2 * (x - other[i]) / (others * (others - 1)))));
      return [m.second, m.jacobian, response[k], m.second * tilt, ...m.flats, ...moved];
    });
  });

  /** Cubic not-a-knot splines in xi = sqrt(s) / (sqrt(s) + 3), of all columns: (row of values per node) -> s -> values.
   *  At all nodes, or at every second, third, ... */
  function spline(values) {
    const n = values.length, columns = values[0].length, intervals = (n - 1) / NODES[NODES.length - 1];
    const slopes = range(columns).map((c) => {
      const v = values.map((row) => row[c]), m = new Float64Array(n), diagonal = new Float64Array(n).fill(4);
      const above = new Float64Array(n).fill(1), below = new Float64Array(n).fill(1);
      for (let k = 1; k < n - 1; k++) m[k] = 3 * (v[k + 1] - v[k - 1]);
      m[0] = -2.5 * v[0] + 2 * v[1] + 0.5 * v[2];
      m[n - 1] = -0.5 * v[n - 3] - 2 * v[n - 2] + 2.5 * v[n - 1];
      [diagonal[0], above[0], below[n - 1], diagonal[n - 1]] = [1, 2, 2, 1];
      for (let k = 1; k < n; k++) {
        const w = below[k] / diagonal[k - 1];
        diagonal[k] -= w * above[k - 1];
        m[k] -= w * m[k - 1];
      }
      m[n - 1] /= diagonal[n - 1];
      for (let k = n - 2; k >= 0; k--) m[k] = (m[k] - above[k] * m[k + 1]) / diagonal[k];
      return m;
    });
    return (s) => {
      const std = sqrt(s), position = intervals * std / (std + KNEE), i = min(floor(position), n - 2), x = position - i;
      return range(columns).map((c) => {
        const v0 = values[i][c], v1 = values[i + 1][c], m0 = slopes[c][i], m1 = slopes[c][i + 1];
        return (((2 * (v0 - v1) + m0 + m1) * x + (3 * (v1 - v0) - 2 * m0 - m1)) * x + m0) * x + v0;
      });
    };
  }

  const secondTable = kept((length) => spline(nodeMoments(length).map(([second], k) => {
    const excess = (length * second - 1) / (length - 1);
    return [log(k ? excess / NODES[k] ** 2 : KNEE ** 2 / length)];
  })));

  /** E of the sum of squares of a softmax over so many logits of variance s. */
  function softmaxSecond(s, length) {
    return (1 + (length - 1) * min(exp(secondTable(length)(s)[0]) * (1 - vanishing(s)) ** 2, 1)) / length;
  }

  const sumTable = kept((length) => spline(laplace().map((rows, k) => {
    const s = STDS[k] ** 2, low = lowest(STDS[k]) * STEP;
    let mean = low - STEP / 2, square = low * low - STEP * low + STEP * STEP / 6;
    rows.forEach(([phi], i) => {
      const beyond = STEP * exp(length * phi);
      mean += beyond;
      square += 2 * (low + i * STEP) * beyond;
    });
    return k ? [(-0.5772156649015329 - mean - log(length)) / STDS[k], max(square - mean * mean - PI * PI / 6, 0) / s] : [0, 1 / length];
  })));

  /** Mean and variance of ln of the sum of e^logit over so many logits of variance s. */
  function logSum(s, length) {
    const [rise, scatter] = sumTable(length)(s);
    return [log(length) + rise * sqrt(s), max(scatter, 0) * s];
  }

  // --- rows of attention (theory/attention_rows.py) ------------------------------------------------------------

  const OUTER = sqrt(5 + sqrt(10)), INNER = sqrt(5 - sqrt(10)), HERMITE_X = [-OUTER, -INNER, 0, INNER, OUTER];
  const HERMITE_W = HERMITE_X.map((x) => 4.8 / (x ** 4 - 6 * x * x + 3) ** 2);
  const pairLength = (length, causal) => (causal ? max(1, even(length / 4)) : length);

  /** Distinct whole numbers from 1 to length, in about equal ratios. */
  function geometric(length, count) {
    const found = range(count).map((k) => (k === count - 1 ? length : even(10 ** (k * Math.log10(length) / (count - 1)))));
    return [...new Set(found)];
  }

  function overPositions(length) {
    if (length === 1) return [[1, 1]];
    const n = geometric(length, 24), weights = n.map(() => 0);
    for (let i = 1, upper = 1; i <= length; i++) {
      while (n[upper] < i) upper++;
      const share = log(i / n[upper - 1]) / log(n[upper] / n[upper - 1]);
      weights[upper] += share * n[upper] / i;
      weights[upper - 1] += (1 - share) * n[upper - 1] / i;
    }
    return n.map((at, k) => [at, weights[k] / length]);
  }

  const rowTable = kept((length, spread, causal, oneLength) => {
    const rows = (causal ? overPositions(length) : [[length, 1]]).map(([n, w]) => [w, nodeMoments(n)]);
    const mean = NODES.map((_, k) => range(8).map((c) => sum(rows.map(([w, m]) => w * m[k][c]))));
    const remaining = NODES.map((_, k) => 1 - sum(rows.map(([w, m]) => w * m[k][0] * (2 - m[k][0]))));
    const positive = (x) => log(max(x, TINY));
    const smooth = spline(mean.map(([p, j, response, tilt, flatP, flatJ, moved, squares], k) => [
      positive(p), positive(j / FAR[k]), (response - (oneLength ? 4 * tilt : 0)) / FAR[k] ** 2, remaining[k] / FAR[k] ** 2, tilt / p / FAR[k] ** 2,
      flatP / p, flatJ / max(j, TINY), moved, squares,
    ]));
    const logSpread = log1p(spread), factor = HERMITE_X.map((x) => exp(sqrt(logSpread) * x - 0.5 * logSpread));
    return spline(STDS.map((std, k) => {
      const found = factor.map((f) => smooth(std * std * f)), slower = factor.map((f) => vanishing(std * std * f) / FAR[k]);
      const over = (value) => dot(found.map((row, m) => value(row, slower[m], factor[m])), HERMITE_W);
      return [
        log(over((row) => exp(row[0]))), log(over((row, w) => exp(row[1]) * w)), log(over((row, w, f) => exp(row[1]) * w * f)),
        over((row, w, f) => row[2] * w * w * f), over((row, w) => row[3] * w * w), over((row, w, f) => row[4] * w * w * f),
        ...[5, 6, 7].map((c) => over((row) => row[c])), over((row) => row[7] - row[8]),
      ];
    }));
  });

  function rowMoments(s, length, spread, causal, oneLength) {
    const [p, j, weighted, response, rest, tilt, flatP, flatJ, moved, movedPairs] = rowTable(length, spread, causal, oneLength)(s), far = vanishing(s);
    return {
      second: min(exp(p), 1), jacobian: exp(j) * far, weightedJacobian: exp(weighted) * far, response: response * far ** 2,
      remaining: rest * far ** 2, squaredTilt: tilt * far ** 2, flatP, flatJ, moved, movedPairs,
    };
  }

  return {
    HERMITE_W, HERMITE_X, STDS, clip, correlation, dot, even, geometric, kept, ln, logAdd, logSum, nodeMoments, pairLength, range, ratio, rowMoments,
    softmaxSecond, spline, sum, vanishing,
  };
})();
