// The data: columns of all responses, read from the page's compressed blocks.
// Everything from the file goes through textContent, which is never parsed as markup.

const NEGATIVE_INFINITY = -9999, NOT_ASKED = Infinity, PROMPT = 4, UNKNOWN_KIND = 255;
const TYPES = { u1: Uint8Array, i4: Int32Array, u4: Uint32Array, f4: Float32Array };

const bytesOf = (text) => {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let n = 0; n < raw.length; n++) bytes[n] = raw.charCodeAt(n);
  return bytes;
};

const inflated = async (bytes) => {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
};

// A block's head, with its columns by name.
const readBlock = async (holder) => {
  const buffer = await inflated(bytesOf(holder.textContent.trim()));
  holder.remove();
  const size = new DataView(buffer).getUint32(0, true);
  const block = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  for (const [name, type, length] of block.columns) {
    block[name] = new TYPES[type](buffer, at, length);
    at += Math.ceil(block[name].byteLength / 4) * 4;
  }
  return block;
};

// What is drawn, with what follows from it.
const readDrawn = async () => {
  const read = await readBlock(document.getElementById("drawn"));
  measureStrings(read);
  numberSteps(read);
  arrange(read);
  return read;
};

// What the panel shows of a token; it stands behind this script, and comes when the page is drawn.
const readDetails = async () => {
  if (document.readyState === "loading")
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  return readBlock(document.getElementById("details"));
};

// Of each string: its length, how many lines it ends, and whether it ends with one.
const measureStrings = (data) => {
  const count = data.strings.length;
  data.length = new Uint32Array(count);
  data.newlines = new Uint32Array(count);
  data.endsLine = new Uint8Array(count);
  data.strings.forEach((text, n) => {
    data.length[n] = text.length;
    for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) data.newlines[n]++;
    data.endsLine[n] = text.endsWith("\n") ? 1 : 0;
  });
};

// The step of each row (-1 for a prompt's, and without steps), and the first row of each step.
const numberSteps = (data) => {
  data.stepOf = new Int32Array(data.token.length).fill(-1);
  data.stepRow = new Uint32Array(data.step.length);
  data.requests.forEach((request, r) => {
    let row = data.row_start[r] + request.promptRows;
    for (let step = data.step_start[r]; step < data.step_start[r + 1]; step++) {
      data.stepRow[step] = row;
      data.stepOf.fill(step, row, row + data.step_tokens[step]);
      row += data.step_tokens[step];
    }
  });
};

// The requests in the order of the page: data.order[place] is a request, and data.placeOf[request]
// its place. With two files, data.pairs has [left, right], where either may be -1; data.twin[row]
// is the same token's row in the other file, as long as the two texts are equal, otherwise -1; and
// data.forks has the first rows that differ.
const arrange = (data) => {
  const [first, second] = data.files;
  const left = [...Array(first.count).keys()];
  data.pairs = null;
  data.order = left;
  if (second) {
    data.pairs = paired(data, left, [...Array(second.count).keys()].map((n) => first.count + n));
    data.order = data.pairs.flat().filter((r) => r >= 0);
    data.twin = new Int32Array(data.token.length).fill(-1);
    data.forks = new Set();
    for (const [a, b] of data.pairs) if (a >= 0 && b >= 0) compare(data, a, b);
  }
  data.placeOf = new Int32Array(data.requests.length);
  data.order.forEach((r, place) => { data.placeOf[r] = place; });
};

const paired = (data, left, right) => {
  const byId = new Map(right.map((r) => [data.requests[r].id, r]));
  const ids = new Set(left.map((r) => data.requests[r].id));
  const told = byId.size === right.length && ids.size === left.length;
  if (!told || !right.some((r) => ids.has(data.requests[r].id)))
    return [...Array(Math.max(left.length, right.length)).keys()].map((n) => [left[n] ?? -1, right[n] ?? -1]);
  const pairs = left.map((r) => [r, byId.get(data.requests[r].id) ?? -1]);
  return [...pairs, ...right.filter((r) => !ids.has(data.requests[r].id)).map((r) => [-1, r])];
};

const compare = (data, a, b) => {
  // Prompts count where both have their tokens.
  const [rowsA, rowsB] = [a, b].map((r) => data.requests[r].promptRows);
  const skip = rowsA > 0 && rowsB > 0 ? 0 : 1;
  let left = data.row_start[a] + skip * rowsA, right = data.row_start[b] + skip * rowsB;
  const [endA, endB] = [data.row_start[a + 1], data.row_start[b + 1]];
  while (left < endA && right < endB && data.token[left] === data.token[right]) {
    data.twin[left] = right;
    data.twin[right] = left;
    left++; right++;
  }
  if (left < endA) data.forks.add(left);
  if (right < endB) data.forks.add(right);
};

// The request of a row, by bisection.
const requestOf = (row) => {
  let low = 0, high = data.requests.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (data.row_start[middle] <= row) low = middle; else high = middle - 1;
  }
  return low;
};

let data = null, details = null; // set once they have been read
