// The totals above the requests, their charts, and the legend.

// The totals of the requests from `begin` to `end`; the prompts' tokens do not count.
const totals = (begin, end) => {
  const found = { tokens: 0, known: 0, total: 0, drafts: 0, accepted: 0, emitted: 0, steps: 0,
    bands: new Array(EDGES.length + 1).fill(0), proposedAt: [], acceptedAt: [] };
  for (let r = begin; r < end; r++) {
    const from = data.row_start[r] + data.requests[r].promptRows;
    found.tokens += data.row_start[r + 1] - from;
    for (let row = from; row < data.row_start[r + 1]; row++) {
      const logprob = data.logprob[row];
      if (!isNumber(logprob)) continue;
      found.known++;
      found.total += logprob;
      found.bands[bucket(EDGES, -logprob)]++;
    }
  }
  for (let step = data.step_start[begin]; step < data.step_start[end]; step++) {
    const drafts = data.step_drafts[step], accepted = data.step_accepted[step];
    found.steps++;
    found.drafts += drafts;
    found.accepted += accepted;
    found.emitted += accepted + 1;
    for (let at = 0; at < drafts; at++) {
      found.proposedAt[at] = (found.proposedAt[at] ?? 0) + 1;
      found.acceptedAt[at] = (found.acceptedAt[at] ?? 0) + (at < accepted ? 1 : 0);
    }
  }
  found.mean = found.known ? found.total / found.known : null;
  return found;
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
  let begin = 0;
  for (const { name, count } of data.files) {
    const box = element("div", "summary"), all = totals(begin, begin + count);
    if (data.pairs) box.append(element("h2", "", name));
    box.append(stat(whole(count), "requests"), stat(whole(all.tokens), "tokens"));
    if (all.steps) box.append(stat((all.emitted / all.steps).toFixed(2), "tokens a step"));
    if (all.drafts) box.append(stat(percent(all.accepted / all.drafts), `of ${whole(all.drafts)} drafts accepted`));
    if (all.known) {
      box.append(stat(number(all.mean), "mean logprob"), stat(Math.exp(-all.mean).toFixed(2), "perplexity"));
      box.append(chart("Tokens by logprob", all.bands.map((many, n) => [many, "s" + n, `${whole(many)} tokens`]),
        all.bands.map((_, n) => (n < EDGES.length ? "\u2212" + EDGES[n] : "less"))));
    }
    if (all.proposedAt.length) {
      const parts = all.proposedAt.map((proposed, at) => all.acceptedAt[at] / proposed);
      box.append(chart("Drafts accepted, by position in the step",
        parts.map((part, at) => [part, "", `${whole(all.acceptedAt[at])} of ${whole(all.proposedAt[at])} accepted`]),
        parts.map((part, at) => `${at + 1}: ${percent(part)}`)));
    }
    byId("summary").append(box);
    begin += count;
  }
};

const drawLegend = () => {
  const scale = element("span", "scale"), steps = element("span", "steps");
  for (let n = 0; n <= EDGES.length; n++) steps.append(element("span", "swatch s" + n));
  const [low, high] = [element("span", "low"), element("span", "high")];
  scale.append(low, steps, high);
  byId("legend").append(scale);
  const kinds = new Uint8Array(256);
  for (const kind of data.kind) kinds[kind] = 1;
  KINDS.forEach((kind, n) => {
    if (kinds[n] && n !== 3) byId("legend").append(element("span", `mark k${n}`, kind));
  });
  byId("legend").append(element("span", "keys", "hover, or Tab and the arrow keys; n: the next surprising token; /: search"));
};
