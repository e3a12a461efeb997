// Search in all texts, and the way to the next surprising token.

const LIMITS = [4.5, 2.75, 1.75, 1]; // of surprise: the first that some token exceeds
const WAIT = 150; // milliseconds after a key, before a search begins
const texts = new Map(); // by request: its text in lower case, and where each row begins in it
let hits = [], hit = -1; // [first row, row after the last], in the order of the page
let limit = LIMITS[0];

// The row that a step begins at: the current token's, or the one that was last gone to.
const currentRow = () => Number(document.activeElement?.dataset.row ?? shown?.dataset.row ?? lastRow);

// A request's text in which characters are whole, also those that several tokens share.
const textOf = (r) => {
  if (texts.has(r)) return texts.get(r);
  const [begin, end] = rowsOf(r), starts = new Uint32Array(end - begin + 1), parts = [];
  let size = 0, bytes = [];
  const flush = () => {
    if (!bytes.length) return;
    const text = new TextDecoder().decode(new Uint8Array(bytes));
    parts.push(text);
    size += text.length;
    bytes = [];
  };
  for (let row = begin; row < end; row++) {
    const text = stringAt(row), raw = text.includes("\\x") && isRaw(text);
    if (!raw) flush();
    starts[row - begin] = size;
    if (raw) for (const [, code] of text.matchAll(/\\x([0-9a-f]{2})/g)) bytes.push(parseInt(code, 16));
    else { parts.push(text); size += text.length; }
  }
  flush();
  starts[end - begin] = size;
  const whole = parts.join(""), lower = whole.toLowerCase();
  const made = { text: lower.length === whole.length ? lower : whole, starts };
  texts.set(r, made);
  return made;
};

// The first index whose start is above `at`.
const above = (starts, at) => {
  let low = 0, high = starts.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= at) low = middle + 1; else high = middle;
  }
  return low;
};

const search = (words) => {
  const wanted = words.toLowerCase();
  hits = [];
  hit = -1;
  found = new Uint8Array(data.token.length);
  if (wanted) for (const r of data.order) {
    const { text, starts } = textOf(r), begin = data.row_start[r];
    for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + wanted.length)) {
      const first = begin + above(starts, at) - 1, last = begin + above(starts, at + wanted.length - 1) - 1;
      // Rows without characters of their own, before the first, belong to what they begin.
      let from = first;
      while (from > begin && starts[from - 1 - begin] === starts[first - begin] && isRaw(stringAt(from - 1))) from--;
      hits.push([from, last + 1]);
      found.fill(1, from, last + 1);
    }
  }
  for (const token of document.querySelectorAll(".t")) token.classList.toggle("found", Boolean(found[token.dataset.row]));
  report();
};

const report = () => {
  const words = byId("words").value;
  byId("hits").textContent = !words ? "" : hit < 0 ? `${whole(hits.length)} found` : `${whole(hit + 1)} of ${whole(hits.length)}`;
};

const goToHit = (by) => {
  if (!hits.length) return;
  hit = hit < 0 && by < 0 ? hits.length - 1 : (hit + by + hits.length) % hits.length;
  const rows = hits[hit], focused = document.activeElement === byId("words");
  goTo(rows[0]);
  if (focused) {
    byId("words").focus({ preventScroll: true });
    show(tokenOf(rows[0]));
  }
  report();
};

const isSurprising = (row) => {
  const logprob = data.logprob[row];
  return logprob < NOT_ASKED && -logprob > limit;
};

// The nearest surprising token before or after a row, round the end of the page; -1 for none.
const nextSurprising = (row, by) => {
  const count = data.order.length;
  let place = row < 0 ? (by > 0 ? 0 : count - 1) : data.placeOf[requestOf(row)];
  for (let tried = 0; tried <= count; tried++, place = (place + by + count) % count) {
    const [begin, end] = rowsOf(data.order[place]);
    let at = tried === 0 && row >= 0 ? row + by : by > 0 ? begin : end - 1;
    for (; at >= begin && at < end; at += by) if (isSurprising(at)) return at;
  }
  return -1;
};

const goToSurprising = (by) => {
  const row = nextSurprising(currentRow(), by);
  if (row >= 0) goTo(row);
};

const setLimit = () => {
  const counts = LIMITS.map(() => 0);
  for (const logprob of data.logprob)
    if (logprob < NOT_ASKED) LIMITS.forEach((one, n) => { if (-logprob > one) counts[n]++; });
  const first = counts.findIndex(Boolean);
  limit = LIMITS[Math.max(first, 0)];
  byId("surprising").textContent = first < 0 ? "no surprising token"
    : `${whole(counts[first])} below \u2212${limit}`;
  for (const id of ["previous", "next"]) byId(id).disabled = first < 0;
};

const listenToSearch = () => {
  const words = byId("words");
  let waiting = 0;
  words.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => { waiting = 0; search(words.value); }, WAIT); });
  words.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (waiting) { clearTimeout(waiting); waiting = 0; search(words.value); }
    goToHit(event.shiftKey ? -1 : 1);
  });
  byId("previous").addEventListener("click", () => goToSurprising(-1));
  byId("next").addEventListener("click", () => goToSurprising(1));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return hide();
    if (event.target.closest("input")?.type === "search") return;
    const action = { n: () => goToSurprising(1), N: () => goToSurprising(-1), p: () => goToSurprising(-1),
      "/": () => words.select() }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
};
