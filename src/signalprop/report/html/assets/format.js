"use strict";

// Numbers and elements, as every other script writes them.

const format = {
  /** A number to some significant digits, short at any magnitude. */
  number(value, digits = 4) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(digits)));
    return value.toExponential(digits - 1).replace("e+", "e");
  },

  /** 10 to a power that a number cannot hold. */
  power(exponent, digits = 4) {
    const whole = Math.floor(exponent);
    return `${(10 ** (exponent - whole)).toFixed(digits - 1)}e${whole}`;
  },

  /** The i-th value of a series with its standard error or range, as text. */
  value(series, i, digits = 5) {
    const beyond = series.log10 && series.y[i] === null && series.log10[i] !== null;
    const plain = beyond ? format.power(series.log10[i], digits) : format.number(series.y[i], digits);
    if (series.low && series.low[i] !== null && series.low[i] !== series.high[i]) {
      return `${plain} (${format.number(series.low[i], 3)} to ${format.number(series.high[i], 3)})`;
    }
    const error = series.error ? series.error[i] : null;
    return error ? `${plain} ± ${format.number(error, 2)}` : plain;
  },

  /** Text that the plotting library shows as it is: it reads a few tags and entities of HTML. */
  plain(text) {
    return text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  },
};

/** An element with attributes and children; texts become text nodes, never HTML. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** The bytes that a base64 text stands for. */
function bytesOf(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  return bytes;
}
