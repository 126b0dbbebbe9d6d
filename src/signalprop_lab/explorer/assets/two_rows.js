"use strict";

// What two rows of attention weights have in common (theory/two_rows.py), with the table that it reads.

const twoRows = (() => {
  const { HERMITE_W, HERMITE_X, STDS, kept, nodeMoments, range, spline, sum, vanishing } = softmax;
  const { PI, atanh, cos, exp, expm1, log, log1p, max, min, sqrt, tanh } = Math;
  const NODES = STDS.filter((_, k) => k % 3 === 0).map((std) => std * std);
  const LEAST = -0.3, DEGREE = 7, AT = range(DEGREE + 1).map((k) => LEAST + (1 - LEAST) * (1 - cos(PI * k / DEGREE)) / 2);
  const THREE = [[-sqrt(3), 1 / 6], [0, 2 / 3], [sqrt(3), 1 / 6]];
  const POINTS = HERMITE_X.flatMap((angle, k) => THREE.map(([size, w]) => [angle, size, w * HERMITE_W[k]]));
  const table = kept(() => JSON.parse(document.getElementById("closed-form").textContent).two_rows);

  const horner = (c, x) => c.reduceRight((total, value) => total * x + value);

  /** s or the largest that is tabulated, and how many times larger s is. */
  function withinTable(s) {
    const within = min(s, NODES.at(-1));
    return [within, s / within];
  }

  function position(s, c) {
    const root = sqrt(s + 4);
    return c / (root + sqrt(s + 4 - c)) * ((root + 2) / s);
  }

  function share(s, x) {
    const root = sqrt(s + 4);
    return x * (2 * root - x * (root - 2)) / (root + 2);
  }

  /** Of the four knots around x: [which, weight of the cubic through them]. */
  function lagrange(x, knots) {
    const start = min(max(knots.filter((k) => k < x).length - 2, 0), knots.length - 4), near = knots.slice(start, start + 4);
    return near.map((a, i) => [start + i, near.reduce((w, b, j) => (i === j ? w : w * (x - b) / (a - b)), 1)]);
  }

  /** Coefficients of the polynomial through values at AT, by divided differences. */
  function through(values) {
    const d = [...values], n = d.length;
    for (let k = 1; k < n; k++) for (let i = n - 1; i >= k; i--) d[i] = (d[i] - d[i - 1]) / (AT[i] - AT[i - k]);
    return range(n).reduceRight((c, k) => c.map((x, i) => (i ? c[i - 1] : 0) - AT[k] * x + (i ? 0 : d[k])), range(n).map(() => 0));
  }

  const steady = kept((length) => {
    if (length === 1) return spline(NODES.map(() => [0, 0, 0, 0, 0]));
    const { lengths, even, odd } = table(), weights = lagrange(log(length), lengths.map((n) => log(n)));
    const moments = nodeMoments(length).filter((_, k) => k % 3 === 0);
    return spline(NODES.map((s, k) => {
      const [p, j] = moments[k], root = sqrt(s + 4), per = 1 / max(s, 1e-12);
      const first = (1 - p) ** 2 * length / (length - 1) * 2 * root / (root + 2), last = j / p * 4 / (root + 2);
      const whole = s > 0 ? log(length * p) / s : 1 - 1 / length;
      const [b0, b1] = [even, odd].map((rest) => per * sum(weights.map(([i, w]) => w * rest[k][i])));
      return [first, 3 * whole - 2 * first - last + b0, first + last - 2 * whole - 2 * b0 + b1, b0 - 2 * b1, b1];
    }));
  });

  /** ln of the overlap of rows whose scores do not fluctuate. */
  function logOverlap(given, c, length) {
    const [s, beyond] = withinTable(given + 1e-12), x = position(s, c / beyond);
    return s * x * horner(steady(length)(s), x);
  }

  const fluctuating = kept((length, spread, turns) => {
    const none = range(DEGREE + 1).map(() => 0);
    if (length === 1) return spline(NODES.map(() => [...none, -700, ...none.slice(1), ...none]));
    const logSpread = log1p(spread), half = sqrt(logSpread / 2), turned = sqrt(logSpread / 2 + turns), polynomials = steady(length);
    return spline(NODES.map((node) => {
      const s = max(node, 1e-6);
      const columns = AT.map((at) => {
        const r = share(s, at), angle = atanh(min(r, 1 - 1e-12)) + r * turned ** 2 / 2;
        const drawn = POINTS.map(([a, b, w]) => [s * exp(half * (b + r * half / turned * a) - logSpread / 2), tanh(angle + turned * a), w]);
        const off = s * r - sum(drawn.map(([size, cosine, w]) => w * size * cosine));
        let value = 0, jacobian = 0, weighted = 0;
        for (const [size, cosine, w] of drawn) {
          const c = min(size * cosine + off, size), x = position(size, c), h = polynomials(size), root = sqrt(size + 4);
          const log = size * x * horner(h, x), slope = horner(h.map((y, k) => (k + 1) * y), x);
          const one = w * exp(log) * slope * (root + 2) / (2 * sqrt(size + 4 - c));
          value += w * expm1(log);
          jacobian += one;
          weighted += c * one;
        }
        return [log1p(value) / s, log(jacobian / vanishing(s)), weighted / (s * jacobian)];
      });
      return range(3).flatMap((k) => through(columns.map((column) => column[k])));
    }));
  });

  /** Averages over pairs of rows of one length. */
  function pairOverlaps(given, c, length, spread, turns) {
    const [s, beyond] = withinTable(given + 1e-12), x = position(s, c / beyond), found = fluctuating(length, spread, turns)(s), n = DEGREE + 1;
    const [value, jacobian, weighted] = range(3).map((k) => horner(found.slice(k * n, (k + 1) * n), x));
    const met = exp(jacobian) * vanishing(s) / beyond;
    return { value: exp(s * value), jacobian: met, weighted: (given + 1e-12) * weighted * met };
  }

  return { LEAST, logOverlap, pairOverlaps };
})();
