// The page: it reads its data, draws what is seen, and listens.

const theme = byId("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };

const EXTREMES = { logprob: ["expected", "surprising"], rank: ["first", "late"], kind: ["", ""], difference: ["equal", "far apart"] };
// Tokens have all their colors as classes; the style picks one of them by this attribute.
const paint = (by) => {
  document.body.dataset.color = by;
  const [low, high] = EXTREMES[by];
  document.querySelector("#legend .low").textContent = low;
  document.querySelector("#legend .high").textContent = high;
};

const start = async () => {
  label();
  theme.addEventListener("click", () => {
    document.documentElement.style.colorScheme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  data = await readDrawn();
  byId("difference").hidden = !data.pairs;
  drawLegend();
  paint("logprob");
  drawSummary();
  setLimit();
  drawRequests();
  listen(byId("requests"));
  listenToSearch();
  byId("color").addEventListener("change", (event) => paint(event.target.value));
  byId("reading").remove();
  document.body.dataset.ready = "drawn";
  details = await readDetails();
  if (shown) fill(Number(shown.dataset.row));
  document.body.dataset.ready = "all";
};

start().catch((error) => {
  document.querySelector("main").prepend(element("p", "failed", `The page's data cannot be read: ${error}`));
  throw error;
});
