"use strict";
// Everything from the file goes through textContent, which is never parsed as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const strings = data.strings;
const KINDS = ["accepted draft", "recovered token", "bonus token", "decoded without drafts"];
const EDGES = [0.02, 0.1, 0.25, 0.5, 1, 1.75, 2.75, 4.5, 7];
const RANKS = [1, 2, 3, 4, 5, 8, 12, 20, 50];
const NEGATIVE_INFINITY = -9999;

const element = (name, classes, text) => {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
};
const append = (parent, ...children) => { parent.append(...children); return parent; };
const sum = (values) => values.reduce((total, value) => total + value, 0);
const bucket = (edges, value) => {
  const found = edges.findIndex((edge) => value <= edge);
  return found < 0 ? edges.length : found;
};
const surprise = (logprob) =>
  logprob === null ? "sx" : "s" + (isMasked(logprob) ? 9 : bucket(EDGES, -logprob));
const rarity = (rank) => (rank ? "s" + bucket(RANKS, rank) : "sx");
const isMasked = (logprob) => logprob === NEGATIVE_INFINITY;
const number = (logprob) =>
  logprob === null ? "invalid" : isMasked(logprob) ? "\u2212\u221e"
    : (logprob < 0 ? "\u2212" : "") + Math.abs(logprob).toFixed(Math.abs(logprob) < 0.1 ? 4 : 3);
const share = (logprob) => (logprob === null || isMasked(logprob) ? 0 : Math.exp(logprob));
const percent = (part) => (100 * part).toFixed(part === 0 || part === 1 ? 0 : 1) + "%";
const percentOf = (logprob) => {
  const value = 100 * share(logprob);
  if (value >= 99.95) return value > 99.9995 ? "100%" : value.toFixed(3) + "%";
  return value === 0 ? "0%" : value < 0.01 ? "<0.01%" : value.toFixed(2) + "%";
};
// A token's string with its invisible characters made visible.
const visible = (text) =>
  text === "" ? "(empty)"
    : text.replace(/[\u0000-\u0020\u007f\u00a0\u2028\u2029]/g, (character) =>
        character === " " ? "\u00b7" : character === "\n" ? "\u21b5" : character === "\t" ? "\u21e5"
          : "\\u" + character.charCodeAt(0).toString(16).padStart(4, "0"));
const median = (values) => {
  const sorted = [...values].sort((left, right) => left - right);
  return sorted.length ? sorted[sorted.length >> 1] : null;
};

// The step of each token, and the first token of each step.
for (const request of data.requests) {
  request.stepOf = [];
  request.begins = [];
  request.steps.forEach(([, tokens], index) => {
    request.begins.push(request.stepOf.length);
    for (let n = 0; n < tokens; n++) request.stepOf.push(index);
  });
}

// The totals of some requests.
const totals = (requests) => {
  const logprobs = requests.flatMap((request) => request.logprobs ?? []);
  const known = logprobs.filter((logprob) => logprob !== null && !isMasked(logprob));
  const steps = requests.flatMap((request) => request.steps);
  const mean = known.length ? sum(known) / known.length : null;
  return {
    tokens: sum(requests.map((request) => request.tokens.length)),
    known, mean, steps,
    drafts: sum(steps.map((step) => step[2])),
    accepted: sum(steps.map((step) => step[3])),
    emitted: sum(steps.map((step) => step[3] + 1)),
    perplexity: mean === null ? null : Math.exp(-mean),
  };
};

const stat = (value, name) => append(element("div", "stat"), element("b", "", value), element("span", "", name));

const chart = (title, bars, labels) => {
  const box = append(element("div", "chart"), element("h2", "", title));
  const drawn = element("div", "bars");
  const most = Math.max(...bars.map(([height]) => height), 1e-9);
  for (const [height, classes, hint] of bars) {
    const bar = element("div", classes);
    bar.style.height = (100 * height) / most + "%";
    bar.title = hint;
    drawn.append(bar);
  }
  const axis = element("div", "axis");
  labels.forEach((label) => axis.append(element("span", "", label)));
  return append(box, drawn, axis);
};

const drawSummary = () => {
  const all = totals(data.requests), box = document.getElementById("summary");
  box.append(stat(String(data.requests.length), "requests"), stat(all.tokens.toLocaleString("en"), "tokens"));
  if (all.steps.length) box.append(stat((all.emitted / all.steps.length).toFixed(2), "tokens a step"));
  if (all.drafts) box.append(stat(percent(all.accepted / all.drafts), `of ${all.drafts.toLocaleString("en")} drafts accepted`));
  if (all.mean !== null) {
    box.append(stat(number(all.mean), "mean logprob"), stat(all.perplexity.toFixed(2), "perplexity"));
    const counts = new Array(EDGES.length + 1).fill(0);
    all.known.forEach((logprob) => counts[bucket(EDGES, -logprob)]++);
    box.append(chart("Tokens by logprob", counts.map((count, n) => [count, "s" + n, `${count} tokens`]),
      counts.map((_, n) => (n < EDGES.length ? "\u2212" + EDGES[n] : "less"))));
  }
  const deepest = Math.max(0, ...all.steps.map((step) => step[2]));
  if (deepest) {
    const shares = Array.from({ length: deepest }, (_, at) => {
      const proposed = all.steps.filter((step) => step[2] > at).length;
      const accepted = all.steps.filter((step) => step[3] > at).length;
      return [proposed ? accepted / proposed : 0, "", `${accepted} of ${proposed} accepted`];
    });
    box.append(chart("Drafts accepted, by position in the step", shares,
      shares.map(([part], at) => `${at + 1}: ${percent(part)}`)));
  }
};

const drawText = (request, index) => {
  const box = element("div", "text");
  if (request.prompt) box.append(element("span", "prompt", request.prompt));
  const newline = () => element("span", "nl", "\u21b5");
  request.tokens.forEach((at, n) => {
    const text = strings[at], token = element("span", "t");
    const raw = /^bytes:|^(\\x[0-9a-f]{2})+$/.test(text);
    if (raw) append(token, text.replace(/^bytes:/, "")).classList.add("bytes");
    else text.split("\n").forEach((part, line) => {
      if (line) token.append(newline(), "\n");
      token.append(part);
    });
    if (request.logprobs) token.dataset.logprob = surprise(request.logprobs[n]);
    if (request.ranks) token.dataset.rank = rarity(request.ranks[n]);
    if (request.kinds) token.classList.add("k" + request.kinds[n]);
    token.dataset.at = n;
    token.tabIndex = n ? -1 : 0;
    box.append(token);
  });
  box.dataset.request = index;
  return box;
};

const drawSteps = (request) => {
  const box = element("details"), found = totals([request]);
  box.append(element("summary", "", `${request.steps.length} steps`));
  const draw = () => {
    const strip = element("div", "strip");
    const table = element("table"), body = element("tbody");
    const titles = ["step", "drafts", "accepted", "tokens", "mean logprob", "text"];
    table.append(append(element("thead"), append(element("tr"), ...titles.map((title) => element("th", "", title)))));
    request.steps.forEach(([step, tokens, drafts, accepted], index) => {
      const mark = element("i"), begin = request.begins[index];
      mark.style.height = 6 + 6 * drafts + "px";
      mark.style.setProperty("--accepted-share", drafts ? (100 * accepted) / drafts + "%" : "0%");
      mark.title = `step ${step}: ${accepted} of ${drafts} drafts accepted`;
      strip.append(mark);
      const logprobs = (request.logprobs ?? []).slice(begin, begin + tokens).filter((p) => p !== null);
      const mean = logprobs.length ? number(sum(logprobs) / logprobs.length) : "";
      const text = request.tokens.slice(begin, begin + tokens).map((at) => visible(strings[at])).join(" ");
      const cells = [step, drafts, accepted, tokens, mean, text];
      body.append(append(element("tr"), ...cells.map((cell) => element("td", "", String(cell)))));
    });
    box.append(strip, append(element("div", "scroll"), append(table, body)));
  };
  box.addEventListener("toggle", draw, { once: true });
  return box;
};

const drawRequests = () => {
  const box = document.getElementById("requests");
  data.requests.forEach((request, index) => {
    const head = append(element("div", "head"), element("h2", "", request.id)), found = totals([request]);
    const fact = (value, name) => head.append(append(element("span"), element("b", "", value), " " + name));
    fact(String(request.tokens.length), "tokens");
    if (found.steps.length) fact((found.emitted / found.steps.length).toFixed(2), "a step");
    if (found.drafts) fact(`${found.accepted} / ${found.drafts}`, "drafts accepted");
    if (found.mean !== null) {
      fact(number(found.mean), "mean logprob");
      fact(number(median(found.known)), "median");
    }
    if (request.temperature !== null) fact(String(request.temperature), "temperature");
    if (request.mode && request.mode !== "raw") fact(request.mode, "logprobs");
    fact(request.finish ?? "not ended", "");
    const card = append(element("article"), head, drawText(request, index));
    if (request.steps.length) card.append(drawSteps(request));
    box.append(card);
  });
};

const drawLegend = () => {
  const box = document.getElementById("legend"), scale = element("span", "scale"), steps = element("span", "steps");
  for (let n = 0; n <= EDGES.length; n++) {
    const swatch = element("span", "swatch s" + n);
    swatch.style.background = "var(--tint)";
    swatch.style.outline = "1px solid var(--line)";
    steps.append(swatch);
  }
  scale.append("expected", steps, "surprising");
  box.append(scale);
  if (data.requests.some((request) => request.kinds))
    KINDS.forEach((kind, n) => n < 3 && box.append(element("span", `mark k${n}`, kind)));
  box.append("hover, or Tab and the arrow keys");
};

// The panel of one token.
const panel = document.getElementById("panel");
let shown = null, marked = [];

const SHOWN = 20; // of the top K
const table = (request, at) => {
  const flat = request.top[at], emitted = request.tokens[at], rows = [];
  for (let n = 0; n < Math.min(flat.length, 2 * SHOWN); n += 2) {
    const bar = element("div");
    bar.style.width = 100 * share(flat[n + 1]) + "%";
    rows.push(append(element("tr", flat[n] === emitted ? "chosen" : ""),
      element("td", "token", visible(strings[flat[n]])), element("td", "number", number(flat[n + 1])),
      element("td", "number", percentOf(flat[n + 1])), append(element("td", "share"), bar)));
  }
  const half = rows.length > 10 ? Math.ceil(rows.length / 2) : rows.length;
  const halves = [rows.slice(0, half), rows.slice(half)].filter((part) => part.length);
  return append(element("div", "top" + (halves.length > 1 ? " two" : "")),
    ...halves.map((part) => append(element("table"), append(element("tbody"), ...part))));
};

const drafts = (request, at) => {
  const index = request.stepOf[at], [, tokens, proposed, accepted, sent] = request.steps[index];
  const box = element("div", "drafts"), begin = request.begins[index];
  for (let n = 0; n < proposed; n++) {
    const known = sent.length ? visible(strings[sent[2 * n]])
      : n < Math.min(accepted, tokens) ? visible(strings[request.tokens[begin + n]]) : "?";
    const chip = append(element("span", n < accepted ? "yes" : n === accepted ? "no" : "cut"),
      element("em", "", known));
    if (sent.length && sent[2 * n + 1] !== null) chip.append(` ${number(sent[2 * n + 1])}`);
    box.append(chip);
  }
  return box;
};

const topTitle = (count) => "Most likely tokens" + (count > SHOWN ? `: ${SHOWN} of ${count}` : "");

const fill = (request, at) => {
  const facts = element("div", "facts");
  const fact = (name, value) => facts.append(append(element("span", "", name + " "), element("b", "", value)));
  panel.replaceChildren(element("div", "name", visible(strings[request.tokens[at]])));
  if (request.kinds) facts.append(element("span", "kind c" + request.kinds[at], KINDS[request.kinds[at]]));
  if (request.logprobs) {
    fact("logprob", number(request.logprobs[at]));
    fact("probability", percentOf(request.logprobs[at]));
  }
  if (request.ranks) fact("token rank", request.ranks[at] ? String(request.ranks[at]) : "none: invalid row");
  if (request.ids) fact("id", String(request.ids[at]));
  fact("token", String(at + 1));
  panel.append(facts);
  if (request.top && request.top[at].length)
    panel.append(element("h3", "", topTitle(request.top[at].length / 2)), table(request, at));
  if (request.steps.length) {
    const [step, , proposed, accepted] = request.steps[request.stepOf[at]];
    panel.append(element("h3", "", proposed ? `Step ${step}: ${proposed} drafts proposed, ${accepted} accepted`
      : `Step ${step}: no drafts`));
    if (proposed) panel.append(drafts(request, at));
  }
};

const place = (token) => {
  const line = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const { width, height } = panel.getBoundingClientRect(), edge = 8;
  const left = Math.max(edge, Math.min(line.left, innerWidth - width - edge));
  const below = line.bottom + 8, above = line.top - height - 8;
  const top = below + height < innerHeight - edge || above < edge ? below : above;
  panel.style.left = left + "px";
  panel.style.top = Math.max(edge, Math.min(top, innerHeight - height - edge)) + "px";
};

const hide = () => {
  panel.hidden = true;
  shown?.classList.remove("on");
  shown?.removeAttribute("aria-describedby");
  marked.forEach((token) => token.classList.remove("same"));
  [shown, marked] = [null, []];
};

const show = (token) => {
  if (token === shown) return;
  hide();
  const request = data.requests[token.parentNode.dataset.request], at = Number(token.dataset.at);
  shown = token;
  token.classList.add("on");
  token.setAttribute("aria-describedby", "panel");
  if (request.steps.length) {
    const all = token.parentNode.querySelectorAll(".t"), step = request.stepOf[at];
    for (let n = request.begins[step]; request.stepOf[n] === step; n++) marked.push(all[n]);
    marked.forEach((other) => other.classList.add("same"));
  }
  fill(request, at);
  panel.hidden = false;
  place(token);
};

const tokenOf = (event) => event.target.closest?.(".t") ?? null;

const move = (event) => {
  const token = tokenOf(event);
  if (event.key === "Escape") return hide();
  if (!token) return;
  const all = [...token.parentNode.querySelectorAll(".t")], at = all.indexOf(token);
  const request = data.requests[token.parentNode.dataset.request];
  const step = (by) => request.begins[request.stepOf[at] + by] ?? at;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1,
    ArrowDown: step(1), ArrowUp: step(-1) }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const next = all[Math.max(0, Math.min(all.length - 1, to))];
  token.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
};

const paint = (by) => {
  document.body.dataset.color = by;
  for (const token of document.querySelectorAll(".t")) {
    const name = by === "kind" ? undefined : token.dataset[by];
    if (token.tint) token.classList.remove(token.tint);
    if (name) token.classList.add(name);
    token.tint = name;
  }
};

const theme = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };

drawLegend();
drawSummary();
drawRequests();
paint("logprob");
label();
document.getElementById("color").addEventListener("change", (event) => paint(event.target.value));
theme.addEventListener("click", () => {
  document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
  label();
});
dark.addEventListener("change", label);
const text = document.getElementById("requests");
text.addEventListener("mouseover", (event) => { const token = tokenOf(event); if (token) show(token); else hide(); });
text.addEventListener("mouseleave", hide);
text.addEventListener("focusin", (event) => { const token = tokenOf(event); if (token) show(token); });
text.addEventListener("focusout", hide);
text.addEventListener("keydown", move);
addEventListener("scroll", () => { if (shown && shown === document.activeElement) place(shown); else hide(); }, { passive: true });
