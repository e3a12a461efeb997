// The panel of one token, for the mouse, the keyboard and touch.

const panel = byId("panel");
const SHOWN = 20; // of the top K
let shown = null, marked = [];

const topTable = (row) => {
  const begin = details.top_start[row], end = Math.min(details.top_start[row + 1], begin + SHOWN), rows = [];
  for (let at = begin; at < end; at++) {
    const logprob = details.top_logprob[at], bar = element("div");
    bar.style.width = 100 * share(logprob) + "%";
    rows.push(append(element("tr", details.top_token[at] === data.token[row] ? "chosen" : ""),
      element("td", "token", visible(data.strings[details.top_token[at]])), element("td", "number", number(logprob)),
      element("td", "number", percentOf(logprob)), append(element("td", "share"), bar)));
  }
  const half = rows.length > 10 ? Math.ceil(rows.length / 2) : rows.length;
  const halves = [rows.slice(0, half), rows.slice(half)].filter((part) => part.length);
  return append(element("div", "top" + (halves.length > 1 ? " two" : "")),
    ...halves.map((part) => append(element("table"), append(element("tbody"), ...part))));
};

const drawDrafts = (step) => {
  const box = element("div", "drafts"), begin = details.draft_start[step], sent = details.draft_start[step + 1] - begin;
  const accepted = data.step_accepted[step];
  for (let n = 0; n < data.step_drafts[step]; n++) {
    const known = n < sent ? visible(data.strings[details.draft_token[begin + n]])
      : n < Math.min(accepted, data.step_tokens[step]) ? visible(stringAt(data.stepRow[step] + n)) : "?";
    const chip = append(element("span", n < accepted ? "yes" : n === accepted ? "no" : "cut"), element("em", "", known));
    const logprob = n < sent ? details.draft_logprob[begin + n] : NaN;
    if (!Number.isNaN(logprob)) chip.append(` ${number(logprob)}`);
    box.append(chip);
  }
  return box;
};

const topTitle = (count) => "Most likely tokens" + (count > SHOWN ? `: ${SHOWN} of ${count}` : "");

const fill = (row) => {
  const facts = element("div", "facts"), r = requestOf(row), request = data.requests[r];
  const fact = (name, value) => facts.append(append(element("span", "", name + " "), element("b", "", value)));
  const logprob = data.logprob[row], kind = data.kind[row], rank = data.rank[row], index = row - data.row_start[r];
  panel.replaceChildren(element("div", "name", visible(stringAt(row))));
  if (kind !== UNKNOWN_KIND) facts.append(element("span", "kind c" + kind, KINDS[kind]));
  if (kind === PROMPT && index === 0 && Number.isNaN(logprob)) fact("logprob", "none: nothing comes before it");
  else if (logprob !== NOT_ASKED) {
    fact("logprob", number(logprob));
    fact("probability", percentOf(logprob));
  }
  if (data.twin && data.twin[row] >= 0) fact("in the other file", number(data.logprob[data.twin[row]]));
  if (rank >= 0) fact("token rank", rank ? String(rank) : "none: invalid row");
  if (details?.id[row] >= 0) fact("id", String(details.id[row]));
  fact("token", whole(1 + (kind === PROMPT ? index : index - request.promptRows)));
  panel.append(facts);
  const count = details ? details.top_start[row + 1] - details.top_start[row] : 0;
  if (count) panel.append(element("h3", "", topTitle(count)), topTable(row));
  const step = data.stepOf[row];
  if (step >= 0) {
    const proposed = data.step_drafts[step], name = `Step ${data.step[step]}: `;
    panel.append(element("h3", "", name + (proposed ? `${proposed} drafts proposed, ${data.step_accepted[step]} accepted` : "no drafts")));
    if (proposed && details) panel.append(drawDrafts(step));
  }
  if (!details) panel.append(element("h3", "", "The rest is still being read \u2026"));
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
  const row = Number(token.dataset.row), step = data.stepOf[row];
  shown = token;
  token.classList.add("on");
  token.setAttribute("aria-describedby", "panel");
  if (step >= 0) {
    const rows = [...Array(data.step_tokens[step]).keys()].map((n) => data.stepRow[step] + n);
    marked = rows.map((one) => tokenOf(one)).filter(Boolean);
    marked.forEach((other) => other.classList.add("same"));
  }
  fill(row);
  panel.hidden = false;
  place(token);
};

const tokenUnder = (event) => event.target.closest?.(".t") ?? null;

const move = (event) => {
  const token = tokenUnder(event);
  if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
  const row = Number(token.dataset.row), r = requestOf(row), [begin, end] = rowsOf(r), step = data.stepOf[row];
  const beside = (by) => {
    const next = step + by, inside = step >= 0 && next >= data.step_start[r] && next < data.step_start[r + 1];
    return inside ? data.stepRow[next] : row;
  };
  const to = { ArrowRight: row + 1, ArrowLeft: row - 1, Home: begin, End: end - 1,
    ArrowDown: beside(1), ArrowUp: beside(-1) }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  goTo(Math.max(begin, Math.min(end - 1, to)), "nearest");
};

const listen = (text) => {
  text.addEventListener("mouseover", (event) => { const token = tokenUnder(event); if (token) show(token); else hide(); });
  text.addEventListener("mouseleave", hide);
  text.addEventListener("focusin", (event) => { const token = tokenUnder(event); if (token) show(token); });
  text.addEventListener("focusout", hide);
  text.addEventListener("keydown", move);
  addEventListener("scroll", () => { if (shown && (shown === document.activeElement || shown === held)) place(shown); else hide(); }, { passive: true });
};
