// The page of rollouts: which step, which order, which words, and the list of groups.
const GROUPS = 40; // in the list before "more"
const CELLS = 600; // groups in the strip
const BARS = 32; // answers of a group that have a bar
const KINDS = { signal: "signal", low: "all equal", high: "all at the highest reward", failed: "not graded" };

const root = document.getElementById("rollouts");
const stepView = document.getElementById("step");
const CONTROLS = ["back", "at", "on", "where", "sort", "colour", "search"];
const control = Object.fromEntries(CONTROLS.map((id) => [id, document.getElementById(id)]));
const steps = JSON.parse(root.dataset.steps); // [step, answers, groups, groups without signal, mean reward] of each
const view = { place: -1, sort: "worst", colour: "advantage", words: "", listed: GROUPS, opened: new Set() };
let shown = null; // the step on the page

// --- a step

async function openStep(place, opened = []) {
  view.place = Math.max(0, Math.min(steps.length - 1, place));
  Object.assign(view, { listed: GROUPS, opened: new Set(opened) });
  const [step] = steps[view.place];
  const current = () => steps[view.place][0] === step; // no other one was opened meanwhile
  control.at.value = view.place;
  named(view.place);
  control.back.disabled = view.place === 0;
  control.on.disabled = view.place === steps.length - 1;
  stepView.setAttribute("aria-busy", "true");
  try {
    const read = await load(step);
    if (!current()) return;
    shown = read;
    showStep();
  } catch (error) {
    if (current()) stepView.replaceChildren(make("p", { class: "bad", role: "alert" }, error.message));
  }
  stepView.removeAttribute("aria-busy");
}

function named(place) {
  control.at.setAttribute("aria-valuetext", `step ${steps[place][0]}`);
  control.where.textContent = `step ${number(steps[place][0])} of ${number(steps.at(-1)[0])}`;
}

// The address names what is on the page, so that it can be kept, sent, and found again after a reload.
function remember() {
  const words = new URLSearchParams({ step: steps[view.place][0], sort: view.sort, colour: view.colour });
  if (view.words) words.set("search", view.words);
  for (const group of view.opened) words.append("group", group);
  history.replaceState(null, "", `#${words}`);
}

function showStep() {
  const [, answers, groups, silent, mean] = steps[view.place];
  const rows = [["mean reward", reward(mean)], ["answers", number(answers)]];
  rows.push(["groups without signal", `${number(silent)} of ${number(groups)}`]);
  if (shown.answers.length) rows.push(["stopped by", counted(shown.answers, "stop")]);
  if (shown.answers.some((answer) => (answer.outcome ?? "ok") !== "ok")) {
    rows.push(["grading", counted(shown.answers, "outcome")]);
  }
  const left = `Left out for the limit of the folder: ${plural(shown.dropped, "answer")}. The numbers are of all.`;
  stepView.replaceChildren(
    ...(shown.fault ? [make("p", { class: "bad" }, `${shown.fault}.`)] : []),
    ...(shown.dropped ? [make("p", { class: "look" }, left)] : []),
    facts(rows),
    strip(),
    make("div", { id: "hits", "aria-live": "polite" }),
    make("div", { id: "list" }),
  );
  showList();
}

// A cell for each group: full with signal, hollow without.
function strip() {
  const cell = (group) => {
    const name = kind(group, shown);
    const why = { signal: "with signal", failed: "no answer was graded" }[name] ?? `all ${reward(group.high)}`;
    const words = `group ${group.number}: mean ${reward(group.mean)}, ${why}`;
    return pressable("", () => reach(group), { class: name, title: words, "aria-label": words, tabindex: "-1" });
  };
  const kinds = new Set(shown.groups.map((group) => kind(group, shown)));
  const names = Object.keys(KINDS).filter((name) => kinds.has(name));
  const key = names.map((name) => make("span", {}, make("i", { class: name }), KINDS[name]));
  const more = shown.groups.length > CELLS ? [make("span", {}, `the first ${CELLS} groups`)] : [];
  const label = { class: "cells", role: "group", "aria-label": "groups of the step" };
  return make(
    "div",
    { class: "strips" },
    make("div", label, ...shown.groups.slice(0, CELLS).map(cell)),
    make("p", { class: "key" }, ...key, ...more),
  );
}

// --- the list of groups

// Answers of a group that hold the words, in the text, a turn, the grader's message or the prompt.
function hits(group) {
  if (!view.words) return group.answers;
  const turns = (answer) => (answer.turns ?? []).map(([, text]) => text);
  const texts = (answer) => [group.prompt, answer.text, answer.message, ...turns(answer)];
  group.lower ??= group.answers.map((answer) => texts(answer).join("\n").toLowerCase());
  return group.answers.filter((_, place) => group.lower[place].includes(view.words));
}

const countHits = (groups) => groups.reduce((sum, group) => sum + hits(group).length, 0);

function showList() {
  const found = sortedGroups(shown.groups.filter((group) => hits(group).length), view.sort);
  const list = document.getElementById("list");
  list.replaceChildren(...found.slice(0, view.listed).map(groupView));
  const rest = found.length - view.listed;
  if (rest > 0) {
    const more = () => {
      view.listed += GROUPS;
      showList();
    };
    list.append(pressable(`${number(Math.min(rest, GROUPS))} more of ${plural(rest, "group")}`, more));
  }
  if (!shown.groups.length) list.append(make("p", { class: "note" }, "No answer of this step is in its file."));
  const words = `${plural(countHits(found), "answer")} of this step with “${plain(view.words)}”.`;
  const all = steps.length > 1 ? pressable(`search all ${number(steps.length)} steps`, searchAll) : null;
  const line = view.words ? [make("p", { class: "note" }, words), all] : [];
  document.getElementById("hits").replaceChildren(...line.filter(Boolean));
  remember();
}

async function searchAll() {
  const { words } = view;
  const places = make("ul");
  const line = make("p", { class: "note" });
  document.getElementById("hits").replaceChildren(line, places);
  let sum = 0;
  for (const [place, [step]] of steps.entries()) {
    line.textContent = `Searched ${number(place)} of ${number(steps.length)} steps for “${plain(words)}”.`;
    const read = await load(step, shown.step).catch(() => null);
    if (view.words !== words || !places.isConnected) return; // something else is looked for by now
    const count = countHits(read?.groups ?? []);
    sum += count;
    const button = pressable(`step ${number(step)}: ${number(count)}`, () => openStep(place));
    if (count) places.append(make("li", {}, button));
  }
  line.textContent = `${plural(sum, "answer")} with “${plain(words)}” in ${plural(steps.length, "step")}.`;
}

function groupView(group) {
  const range = shown.high - shown.low;
  const bars = group.answers.slice(0, BARS).map((answer) => {
    const bar = make("i", graded(answer.reward) ? {} : { class: "failed" });
    if (graded(answer.reward)) bar.style.height = `${range > 0 ? (100 * (answer.reward - shown.low)) / range : 100}%`;
    return bar;
  });
  const silent = kind(group, shown) === "signal" ? "" : " silent";
  const button = pressable("", () => turn(inside.hidden), { "aria-expanded": "false" });
  button.append(
    make("span", { class: "row-number" }, group.row === null ? `group ${group.number}` : `row ${number(group.row)}`),
    make("span", { class: "what" }, plain(group.prompt.slice(0, 300)).replace(/\s+/g, " ") || "(empty prompt)"),
    make("span", { class: `bars${silent}`, "aria-hidden": "true" }, ...bars),
    make("span", { class: "mean" }, reward(group.mean)),
  );
  const inside = make("div", { class: "inside", hidden: "" });
  const turn = (open) => {
    button.setAttribute("aria-expanded", open);
    inside.hidden = !open;
    inside.replaceChildren(...(open ? contents(group).filter(Boolean) : []));
    view.opened[open ? "add" : "delete"](group.number);
    remember();
  };
  if (view.opened.has(group.number)) turn(true);
  return make("article", { class: "group", id: `group-${group.number}` }, make("h3", {}, button), inside);
}

function contents(group) {
  const answers = sortedAnswers(hits(group), view.sort);
  const others = group.answers.length - answers.length;
  const change = make("div", { class: "change" });
  const fill = (earlier) => change.replaceChildren(...changeView(group, earlier));
  if (group.before !== undefined) load(group.before, shown.step).then(fill, () => null);
  return [
    make("h4", {}, "Prompt"),
    make("div", { class: "prompt" }, ...longText(group.prompt)),
    change,
    make("h4", {}, others ? `Answers with “${plain(view.words)}”; ${number(others)} without it` : "Answers"),
    view.colour === "advantage" && !shown.scale ? null : legend(view.colour, shown.scale),
    ...answers.map((answer) => answerView(answer, group, view.colour, shown.scale)),
  ];
}

// From the strip: the group is listed, opened and in sight.
function reach(group) {
  if (!hits(group).length) view.words = control.search.value = "";
  const order = sortedGroups(shown.groups.filter((each) => hits(each).length), view.sort);
  view.listed = Math.max(view.listed, order.indexOf(group) + 1);
  view.opened.add(group.number);
  showList();
  const article = document.getElementById(`group-${group.number}`);
  article.querySelector("button").focus({ preventScroll: true });
  article.scrollIntoView({ block: "center" });
}

// --- controls and keys

function change(field, value) {
  view[field] = value;
  if (shown) showList();
}

function keys(event) {
  const typing = event.target.closest("input, select");
  if (event.key === "Escape") return leave(event.target, typing);
  if (typing || event.target.closest("svg") || event.ctrlKey || event.metaKey || event.altKey) return;
  const by = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  if (event.key === "/") control.search.focus();
  else if (event.key === "ArrowLeft" || event.key === "ArrowRight") openStep(view.place + by);
  else if (by && shown) walk(by);
  else return;
  event.preventDefault();
}

// Esc: the search ends; without one, the group with the focus is closed, or the last that was opened.
function leave(target, typing) {
  if (typing) target.blur();
  if (control.search.value || view.words) {
    control.search.value = "";
    return change("words", "");
  }
  const last = document.getElementById(`group-${[...view.opened].at(-1)}`);
  const button = (target.closest(".group") ?? last)?.querySelector("h3 button");
  if (button?.getAttribute("aria-expanded") === "true") button.click();
  button?.focus();
}

function walk(by) {
  const heads = [...document.querySelectorAll(".group h3 button")];
  const at = heads.indexOf(document.activeElement.closest(".group")?.querySelector("h3 button"));
  heads[Math.max(0, Math.min(heads.length - 1, at + by))]?.focus();
}

function start() {
  root.querySelector(".tools").hidden = false;
  control.at.max = steps.length - 1;
  control.at.addEventListener("input", () => named(Number(control.at.value)));
  control.at.addEventListener("change", () => openStep(Number(control.at.value)));
  control.back.addEventListener("click", () => openStep(view.place - 1));
  control.on.addEventListener("click", () => openStep(view.place + 1));
  for (const field of ["sort", "colour"]) {
    control[field].addEventListener("change", () => change(field, control[field].value));
  }
  let soon = 0;
  control.search.addEventListener("input", () => {
    clearTimeout(soon);
    soon = setTimeout(() => change("words", control.search.value.trim().toLowerCase()), 150);
  });
  document.addEventListener("keydown", keys);
  document.addEventListener("choose", (event) => {
    openStep(nearest(steps.map(([step]) => step), event.detail));
    root.scrollIntoView();
  });
  // while a run goes on, the page follows it until a step is opened
  const seconds = Number(root.dataset.reload);
  if (seconds) setTimeout(() => view.place < 0 && location.reload(), 1000 * seconds);

  const address = new URLSearchParams(location.hash.slice(1));
  for (const field of ["sort", "colour"]) {
    control[field].value = address.get(field) ?? view[field];
    view[field] = control[field].value ||= view[field]; // "" if the address names no option
  }
  view.words = control.search.value = (address.get("search") ?? "").toLowerCase();
  const place = steps.findIndex(([step]) => String(step) === address.get("step"));
  if (place >= 0) openStep(place, address.getAll("group").map(Number));
  else offer();
}

// Nothing is opened yet: steps to begin with.
function offer() {
  const means = steps.map(([, , , , mean], place) => [mean, place]).filter(([mean]) => mean !== null);
  const [lowest] = means.sort((a, b) => a[0] - b[0]);
  const ways = [["the last", steps.length - 1]];
  if (steps.length > 1) ways.push(["the first", 0]);
  if (steps.length > 2 && lowest) ways.push(["the one of lowest reward", lowest[1]]);
  const button = ([words, place]) => pressable(`${words}, step ${number(steps[place][0])}`, () => openStep(place));
  control.where.textContent = plural(steps.length, "step");
  const words = make("p", { class: "note" }, "Open a step:");
  stepView.replaceChildren(words, make("p", { class: "ways" }, ...ways.map(button)));
}

if (steps.length) start();
