// Elements, numbers as text, and the bands of the colors.

const KINDS = ["accepted draft", "recovered token", "bonus token", "decoded without drafts", "prompt"];
const EDGES = [0.02, 0.1, 0.25, 0.5, 1, 1.75, 2.75, 4.5, 7];
const RANKS = [1, 2, 3, 4, 5, 8, 12, 20, 50];
const DIFFERENCES = [0, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1];

const element = (name, classes, text) => {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
};
const append = (parent, ...children) => { parent.append(...children); return parent; };
const byId = (id) => document.getElementById(id);

const bucket = (edges, value) => {
  let at = 0;
  while (at < edges.length && !(value <= edges[at])) at++;
  return at;
};
const isMasked = (logprob) => logprob === NEGATIVE_INFINITY;
const isNumber = (logprob) => logprob < NOT_ASKED && !isMasked(logprob); // false for NaN
// The band of a logprob: 0 the most likely, 9 the least, "x" an invalid row, "" not known.
const surprise = (logprob) =>
  logprob === NOT_ASKED ? "" : Number.isNaN(logprob) ? "x" : isMasked(logprob) ? 9 : bucket(EDGES, -logprob);
const rarity = (rank) => (rank < 0 ? "" : rank ? bucket(RANKS, rank) : "x");
const difference = (one, other) =>
  isNumber(one) && isNumber(other) ? bucket(DIFFERENCES, Math.abs(one - other)) : Object.is(one, other) ? 0 : "x";

const digits = (value) => {
  const size = Math.abs(value);
  return (value < 0 ? "\u2212" : "") + size.toFixed(size < 0.1 ? 4 : 3);
};
const number = (logprob) => (Number.isNaN(logprob) ? "invalid" : isMasked(logprob) ? "\u2212\u221e" : digits(logprob));
const share = (logprob) => (isNumber(logprob) ? Math.exp(logprob) : 0);
const percent = (part) => (100 * part).toFixed(part === 0 || part === 1 ? 0 : 1) + "%";
const percentOf = (logprob) => {
  const value = 100 * share(logprob);
  if (value >= 99.95) return value > 99.9995 ? "100%" : value.toFixed(3) + "%";
  return value === 0 ? "0%" : value < 0.01 ? "<0.01%" : value.toFixed(2) + "%";
};
const whole = (count) => count.toLocaleString("en");

// A token's string with its invisible characters made visible.
const visible = (text) =>
  text === "" ? "(empty)"
    : text.replace(/[\u0000-\u0020\u007f\u00a0\u2028\u2029]/g, (character) =>
        character === " " ? "\u00b7" : character === "\n" ? "\u21b5" : character === "\t" ? "\u21e5"
          : "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0"));
const stringAt = (row) => data.strings[data.token[row]];
// Whether a string stands for a part of a character, by its bytes.
const isRaw = (text) => /^bytes:|^(\\x[0-9a-f]{2})+$/.test(text);
