"use strict";

// What an activation makes of two Gaussians (network/activations.py, network/duals.py): closed forms, Hermite series.

const activations = (() => {
  const { PI, exp, max, min, sqrt } = Math;
  const { clip, dot, kept, logAdd, range, sum } = softmax;

  const sigmoid = (x) => 0.5 * (1 + Math.tanh(x / 2));
  const softplus = (x) => logAdd(0, x);
  const swishSlope = (x) => sigmoid(x) * (1 + x * (1 - sigmoid(x)));
  const geluInner = (x) => Math.tanh(sqrt(2 / PI) * (x + 0.044715 * x ** 3));
  const half = (r) => PI / 2 + Math.asin(r), chord = (r) => sqrt((1 - r) * (1 + r));

  function leaky(a) {
    const b = 1 - a, linear = a * a + a * b;
    return (s, r) => {
      const relu = s / (2 * PI) * (chord(r) - 1 + r * half(r));
      return [b * sqrt(s / (2 * PI)), s * linear + b * b * s / 2 * (1 - 1 / PI), s * linear * r + b * b * relu, linear + b * b / 2, linear + b * b * half(r) / (2 * PI)];
    };
  }

  /** (s, r) -> [mean, variance, covariance, E f'^2, E f' f'] in closed form. */
  const CLOSED = {
    relu: leaky(0), leaky_relu: leaky(0.01), identity: (s, r) => [0, s, r * s, 1, 1],
    relu2: (s, r) => [s / 2, 1.25 * s * s, s * s / (2 * PI) * (3 * chord(r) * r + half(r) * (1 + 2 * r * r) - PI / 2), 2 * s, 2 * s / PI * (chord(r) + r * half(r))],
    erf: (s, r) => {
      const share = 2 * s / (1 + 2 * s);
      return [0, 2 / PI * Math.asin(share), 2 / PI * Math.asin(r * share), 4 / PI / sqrt(1 + 4 * s), 4 / PI / sqrt((1 + 2 * s * (1 - r)) * (1 + 2 * s * (1 + r)))];
    },
    gelu: (s, r) => {
      const one = 1 + s, two = 1 + 2 * s, square = (1 + s * (1 - r)) * (1 + s * (1 + r)), delta = sqrt(square), share = s / one;
      return [
        s / sqrt(2 * PI * one), s / (2 * PI) * (PI / 2 - share + Math.asin(share) + 2 * share / sqrt(two)),
        s / (4 * PI) * (PI * r + 2 * r * Math.asin(r * share) + 2 * share * ((s * (1 - r * r) + 1 + r * r) / delta - 1)),
        0.25 + (Math.asin(share) + share * (5 * s + 3) / (two * sqrt(two))) / (2 * PI),
        0.25 + (Math.asin(r * share) + r * share * (2 * square + one) / (square * delta)) / (2 * PI),
      ];
    },
  };
  /** Functions and their slopes, of which Hermite series are made. */
  const SERIES = {
    gelu_tanh: [(x) => 0.5 * x * (1 + geluInner(x)), (x) => 0.5 * (1 + geluInner(x)) + 0.5 * x * (1 - geluInner(x) ** 2) * sqrt(2 / PI) * (1 + 3 * 0.044715 * x * x)],
    quick_gelu: [(x) => x * sigmoid(1.702 * x), (x) => swishSlope(1.702 * x)], silu: [(x) => x * sigmoid(x), swishSlope],
    tanh: [Math.tanh, (x) => 1 - Math.tanh(x) ** 2], sigmoid: [sigmoid, (x) => 0.25 * (1 - Math.tanh(x / 2) ** 2)],
    mish: [(x) => x * Math.tanh(softplus(x)), (x) => Math.tanh(softplus(x)) + x * (1 - Math.tanh(softplus(x)) ** 2) * sigmoid(x)],
    softplus: [softplus, sigmoid], elu: [(x) => (x > 0 ? x : Math.expm1(x)), (x) => exp(min(x, 0))],
  };
  const RULES = [
    [128, range(7).map((k) => 2 * k)], [512, range(13)],
    [2048, [0, ...range(9).map((k) => 2 ** (k - 10)), ...range(24).map((k) => (k + 1) / 2)]],
  ];

  /** Nodes and weights of Gauss and Legendre's rule, by Newton's method. */
  const legendre = kept((n) => range(n).map((k) => {
    let x = Math.cos(PI * (n - k - 0.25) / (n + 0.5)), slope = 1;
    for (let turn = 0; turn < 8; turn++) {
      let before = 1, value = x;
      for (let m = 2; m <= n; m++) [before, value] = [value, ((2 * m - 1) * x * value - (m - 1) * before) / m];
      slope = n * (x * value - before) / (x * x - 1);
      x -= value / slope;
    }
    return [x, 2 / ((1 - x * x) * slope * slope)];
  }));

  const hermiteTable = kept((rule) => {
    const [terms, edges] = RULES[rule], z = [], weight = [];
    for (let k = 0; k + 1 < edges.length; k++) {
      for (const [x, w] of legendre(24)) {
        z.push(edges[k] + (edges[k + 1] - edges[k]) * (x + 1) / 2);
        weight.push((edges[k + 1] - edges[k]) * w / 2);
      }
    }
    const rows = [z.map((x) => exp(-x * x / 4) / (2 * PI) ** 0.25)];
    rows.push(z.map((x, k) => x * rows[0][k]));
    for (let n = 1; n < terms - 1; n++) rows.push(z.map((x, k) => (x * rows[n][k] - sqrt(n) * rows[n - 1][k]) / sqrt(n + 1)));
    return { z, rows, weight: weight.map((w, k) => w * rows[0][k]) };
  });

  const expansion = kept((name, s) => {
    const [f, slopeOf] = SERIES[name];
    let z, rows, weight, squared, slope2, density;
    for (let rule = 0; rule < RULES.length; rule++) {
      ({ z, rows, weight } = hermiteTable(rule));
      density = weight.map((w, k) => w * rows[0][k]);
      const plus = z.map((x) => slopeOf(x * sqrt(s))), minus = z.map((x) => slopeOf(-x * sqrt(s)));
      const sides = [plus.map((p, k) => weight[k] * (p + minus[k])), plus.map((p, k) => weight[k] * (p - minus[k]))];
      squared = rows.map((row, n) => dot(row, sides[n % 2]) ** 2);
      slope2 = dot(density, plus.map((p, k) => p * p + minus[k] ** 2));
      if (slope2 - sum(squared) <= 1e-12 * slope2) break;
    }
    const plus = z.map((x) => f(x * sqrt(s))), minus = z.map((x) => f(-x * sqrt(s)));
    const mean = dot(density, plus.map((p, k) => p + minus[k]));
    const variance = dot(density, plus.map((p, k) => (p - mean) ** 2 + (minus[k] - mean) ** 2));
    const missing = max(slope2 - sum(squared), 0), slope = [...squared, missing, 0];
    const central = slope.map((_, n) => (n && n <= squared.length ? s * squared[n - 1] / n : 0));
    central[central.length - 1] = clip(variance - sum(central), 0, s * missing / (slope.length - 1));
    return { mean, variance: sum(central), slope2, central, slope };
  });

  /** [mean, variance, covariance, E f'^2, E f' f'] of an activation of two Gaussians of variance s, correlation r. */
  function centralDual(name, s, given) {
    const r = clip(given, -1, 1);
    let found;
    if (CLOSED[name]) found = CLOSED[name](s, r);
    else {
      const e = expansion(name, s);
      let covariance = 0, slope = 0;
      for (let n = e.slope.length - 1; n >= 0; n--) {
        covariance = covariance * r + e.central[n];
        slope = slope * r + e.slope[n];
      }
      found = [e.mean, e.variance, covariance, e.slope2, slope];
    }
    const [mean, variance, covariance, slope2, slope] = found;
    if (r === 1) return [mean, variance, variance, slope2, slope2];
    return [mean, variance, clip(covariance, -variance, variance), slope2, clip(slope, -slope2, slope2)];
  }

  return { centralDual, names: Object.keys({ ...CLOSED, ...SERIES }) };
})();
