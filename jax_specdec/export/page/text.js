// The requests' texts. Only what is near the window has elements: a card for each request, and in
// it chunks of its text, are empty boxes of an estimated height until they come near.

const MARGIN = 1200; // pixels around the window that are drawn
const LINE = 27.3, CHARACTER = 8.43; // pixels, of the text's font
const CHUNK = 3000; // characters after which a chunk ends with a line, and at twice as many anyway
const GROUP = 100; // cards
const MOST_STEPS = 1000; // of a request's table
const PRINTED = 200000; // tokens at most, if a page is printed whole

const cards = []; // by request
const tabRow = new Map(); // the row that Tab reaches, of requests where it isn't the first
let lastRow = -1; // that the user went to
let found = null; // Uint8Array, 1 for rows that a search found

const rowsOf = (r) => [data.row_start[r], data.row_start[r + 1]];

// The first rows of a request's chunks, and its end.
const chunksOf = (r) => {
  const [begin, end] = rowsOf(r), cuts = [begin];
  let size = 0, rows = 0;
  for (let row = begin; row < end; row++) {
    const at = data.token[row];
    size += data.length[at];
    rows++;
    if ((size >= CHUNK || rows >= CHUNK) && (data.endsLine[at] || size >= 2 * CHUNK || rows >= 2 * CHUNK)) {
      cuts.push(row + 1);
      size = rows = 0;
    }
  }
  if (cuts.at(-1) !== end || cuts.length === 1) cuts.push(end);
  return cuts;
};

// The height of some rows' text in pixels, roughly.
const heightOf = (begin, end, width, text = "") => {
  let size = text.length, lines = text.split("\n").length;
  for (let row = begin; row < end; row++) {
    size += data.length[data.token[row]];
    lines += data.newlines[data.token[row]];
  }
  return LINE * (lines + Math.floor((0.8 * size * CHARACTER) / Math.max(width, 100)));
};

const classes = (row) => {
  const made = [`t p${surprise(data.logprob[row])} r${rarity(data.rank[row])}`];
  if (data.kind[row] !== UNKNOWN_KIND) made.push("k" + data.kind[row]);
  if (data.twin && data.twin[row] >= 0)
    made.push("d" + difference(data.logprob[row], data.logprob[data.twin[row]]));
  if (data.forks?.has(row)) made.push("fork");
  if (found?.[row]) made.push("found");
  return made.join(" ");
};

const drawToken = (row) => {
  const text = stringAt(row), token = element("span", classes(row));
  if (isRaw(text)) append(token, text.replace(/^bytes:/, "")).classList.add("bytes");
  else text.split("\n").forEach((part, line) => {
    if (line) token.append(element("span", "nl", "\u21b5"), "\n");
    token.append(part);
  });
  token.dataset.row = row;
  return token;
};

const drawChunk = (chunk) => {
  const [begin, end] = chunk.rows, r = chunk.request;
  const reached = tabRow.get(r) ?? data.row_start[r];
  chunk.tokens = [];
  for (let row = begin; row < end; row++) {
    const token = drawToken(row);
    token.tabIndex = row === reached ? 0 : -1;
    chunk.tokens.push(token);
  }
  const prompt = begin === data.row_start[r] && data.requests[r].prompt;
  chunk.replaceChildren(...(prompt ? [element("span", "prompt", prompt)] : []), ...chunk.tokens);
  chunk.style.height = "";
};

const drawText = (r, width) => {
  const box = element("div", "text"), cuts = chunksOf(r);
  box.chunks = cuts.slice(0, -1).map((begin, n) => {
    const chunk = element("div", "chunk");
    chunk.request = r;
    chunk.rows = [begin, cuts[n + 1]];
    chunk.tokens = null;
    return chunk;
  });
  box.append(...box.chunks);
  if (box.chunks.length === 1) drawChunk(box.chunks[0]);
  else for (const chunk of box.chunks) {
    chunk.style.height = heightOf(...chunk.rows, width) + "px";
    near.observe(chunk);
  }
  return box;
};

const median = (r) => {
  const [begin, end] = rowsOf(r), values = data.logprob.slice(begin + data.requests[r].promptRows, end);
  const sorted = values.filter(isNumber).sort();
  return sorted.length ? sorted[sorted.length >> 1] : null;
};

// How far a request is from the one beside it: in words, and where that begins.
const compared = (r) => {
  let most = 0, fork = -1, same = 0;
  for (let [row, end] = rowsOf(r); row < end; row++) {
    if (data.forks.has(row)) fork = row;
    const twin = data.twin[row];
    if (twin < 0) continue;
    same++;
    if (isNumber(data.logprob[row]) && isNumber(data.logprob[twin]))
      most = Math.max(most, Math.abs(data.logprob[row] - data.logprob[twin]));
  }
  return { most, fork, same };
};

const drawHead = (r) => {
  const request = data.requests[r], sums = totals(r, r + 1);
  const head = append(element("div", "head"), element("h2", "", request.id));
  const fact = (value, name) => head.append(append(element("span"), element("b", "", value), " " + name));
  fact(whole(sums.tokens), "tokens");
  if (request.promptRows) fact(whole(request.promptRows), "of the prompt");
  if (sums.steps) fact((sums.emitted / sums.steps).toFixed(2), "a step");
  if (sums.drafts) fact(`${sums.accepted} / ${sums.drafts}`, "drafts accepted");
  if (sums.known) {
    fact(number(sums.mean), "mean logprob");
    fact(number(median(r)), "median");
  }
  if (request.temperature !== null) fact(String(request.temperature), "temperature");
  if (request.mode && request.mode !== "raw") fact(request.mode, "logprobs");
  fact(request.finish ?? "not ended", "");
  if (data.twin) {
    const { most, fork, same } = compared(r);
    if (same) fact(most ? most.toPrecision(2) : "0", "largest difference");
    fact(fork < 0 ? "same tokens" : `differs from token ${fork - data.row_start[r] - request.promptRows + 1}`, "");
  }
  return head;
};

const drawSteps = (r) => {
  const begin = data.step_start[r], count = data.step_start[r + 1] - begin;
  const box = element("details");
  box.append(element("summary", "", `${whole(count)} steps`));
  const draw = () => {
    const strip = element("div", "strip"), table = element("table"), body = element("tbody");
    const titles = ["step", "drafts", "accepted", "tokens", "mean logprob", "text"];
    table.append(append(element("thead"), append(element("tr"), ...titles.map((title) => element("th", "", title)))));
    for (let step = begin; step < begin + Math.min(count, MOST_STEPS); step++) {
      const drafts = data.step_drafts[step], accepted = data.step_accepted[step], mark = element("i");
      mark.style.height = 6 + 6 * drafts + "px";
      mark.style.setProperty("--accepted-share", drafts ? (100 * accepted) / drafts + "%" : "0%");
      mark.title = `step ${data.step[step]}: ${accepted} of ${drafts} drafts accepted`;
      strip.append(mark);
      const row = data.stepRow[step], rows = [...Array(data.step_tokens[step]).keys()].map((n) => row + n);
      const known = rows.map((one) => data.logprob[one]).filter(isNumber);
      const mean = known.length ? number(known.reduce((sum, one) => sum + one, 0) / known.length) : "";
      const cells = [data.step[step], drafts, accepted, rows.length, mean, rows.map((one) => visible(stringAt(one))).join(" ")];
      body.append(append(element("tr"), ...cells.map((cell) => element("td", "", String(cell)))));
    }
    box.append(strip, append(element("div", "scroll"), append(table, body)));
    if (count > MOST_STEPS) box.append(element("p", "cut", `The first ${whole(MOST_STEPS)} of ${whole(count)} steps.`));
  };
  box.addEventListener("toggle", draw, { once: true });
  return box;
};

const drawCard = (card) => {
  const r = card.request;
  card.text = drawText(r, card.clientWidth - 35);
  card.replaceChildren(drawHead(r), card.text);
  if (data.step_start[r] < data.step_start[r + 1]) card.append(drawSteps(r));
  card.style.height = "";
};

const isDrawn = (box) => Boolean(box.rows ? box.tokens : box.text);
const draw = (box) => { if (!isDrawn(box)) (box.rows ? drawChunk : drawCard)(box); };
// Empties a box that is far away, unless the user is in it.
const clear = (box, height) => {
  if (!isDrawn(box) || box.contains(document.activeElement) || box.querySelector("details[open]")) return;
  box.style.height = height + "px";
  box.tokens = box.text = null;
  box.replaceChildren();
};

// Only the cards of a group that is near are watched one by one: there may be 100,000 of them.
const watch = (group) => group.cards.forEach((card) => near.observe(card));
const leave = (group) => group.cards.forEach((card) => {
  near.unobserve(card);
  if (isDrawn(card)) clear(card, card.offsetHeight);
});

const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting, boundingClientRect } of entries) {
    if (!target.isConnected) near.unobserve(target);
    else if (target.cards) (isIntersecting ? watch : leave)(target);
    else if (isIntersecting) draw(target);
    else clear(target, boundingClientRect.height);
  }
  keepHeld();
}, { rootMargin: `${MARGIN}px 0px` });

const makeCard = (r, width) => {
  if (r < 0) return element("div", "none");
  const card = element("article"), [begin, end] = rowsOf(r);
  card.request = r;
  card.dataset.request = r;
  card.style.height = 120 + heightOf(begin, end, width - 35, data.requests[r].prompt) + "px";
  cards[r] = card;
  return card;
};

const drawRequests = () => {
  const box = byId("requests"), columns = data.pairs && innerWidth > 800 ? 2 : 1;
  const width = box.clientWidth / columns, places = data.pairs ?? data.order;
  for (let begin = 0; begin < places.length; begin += GROUP) {
    const group = element("div", "group"), part = places.slice(begin, begin + GROUP);
    group.append(...(data.pairs
      ? part.map((pair) => append(element("div", "pair"), ...pair.map((r) => makeCard(r, width))))
      : part.map((r) => makeCard(r, width))));
    group.cards = part.flat().filter((r) => r >= 0).map((r) => cards[r]);
    box.append(group);
    near.observe(group);
  }
  cards.slice(0, 5).forEach(draw);
};

// The element of a row, if it is drawn; it is drawn where `now` is set.
const tokenOf = (row, now = false) => {
  const r = requestOf(row), card = cards[r];
  if (now) draw(card);
  const chunk = card.text?.chunks.find(({ rows }) => row < rows[1]);
  if (chunk && now) draw(chunk);
  return chunk?.tokens?.[row - chunk.rows[0]] ?? null;
};

// Moves the keyboard to a row, wherever it is.
const goTo = (row, block = "center") => {
  const r = requestOf(row), before = tokenOf(tabRow.get(r) ?? data.row_start[r]), token = tokenOf(row, true);
  if (before) before.tabIndex = -1;
  tabRow.set(r, row);
  lastRow = row;
  token.tabIndex = 0;
  token.scrollIntoView({ block });
  token.focus({ preventScroll: true });
  hold(token);
};

// A token that was gone to stays in the window while what is around it is drawn, which may be higher
// than it was estimated, until the user scrolls.
const HELD = 2000; // milliseconds, at most
let held = null, holding = 0;
const hold = (token) => {
  held = token;
  clearTimeout(holding);
  holding = setTimeout(() => { held = null; }, HELD);
};
const keepHeld = () => {
  if (!held?.isConnected) return;
  const { top, bottom } = held.getBoundingClientRect();
  if (top < byId("header").offsetHeight || bottom > innerHeight) held.scrollIntoView({ block: "center" });
};
for (const name of ["wheel", "touchstart", "mousedown", "keydown"])
  addEventListener(name, () => { held = null; }, { capture: true, passive: true });

addEventListener("beforeprint", () => {
  if (data?.token.length > PRINTED) return;
  cards.forEach(draw);
  cards.forEach((card) => card.text.chunks.forEach(draw));
});
