// One answer: its numbers, its tokens in colour, and what changed since its prompt was asked before.
const TOKENS = 400; // of an answer before "show all"
const WORDS = 400; // of each of two answers that are compared
const LEVELS = 5; // of a token's colour
const MOVES = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity };

// colours: "advantage" or "probability"; scale: the largest advantage of the step.
function answerView(answer, group, colours, scale) {
  const { advantage } = answer;
  const each = Array.isArray(advantage) ? "by token" : graded(advantage) ? signed(advantage) : "none";
  const rows = [
    ["answer", number(answer.answer)],
    ["reward", reward(answer.reward)],
    ["advantage", each],
    ["tokens", number(numTokens(answer))],
    ["stopped by", answer.stop || "unknown"],
  ];
  const failed = (answer.outcome ?? "ok") !== "ok";
  if (failed) rows.push(["grading", answer.outcome]);
  const parts = Object.entries(answer.parts ?? {}).map(([name, value]) => [name, reward(value), "part"]);
  const message = answer.message ? longText(answer.message) : [];
  for (const part of message) part.classList.add(failed ? "bad" : "when");
  const best = group.low < group.high && answer.reward === group.high;
  const look = !graded(answer.reward) ? " failed" : best ? " best" : "";
  const speaker = (role) => make("span", { class: "when" }, plain(role));
  const turn = ([role, text]) => make("div", { class: "turn" }, speaker(role), ...longText(text));
  return make(
    "section",
    { class: `answer${look}`, "aria-label": `answer ${answer.answer}` },
    facts([...rows, ...parts]),
    ...message,
    ...(answer.turns ?? []).map(turn),
    ...(answer.pieces?.length ? tokensView(answer, colours, scale) : longText(answer.text ?? "")),
  );
}

function tokensView(answer, colours, scale) {
  const count = answer.pieces.length;
  const words = make("output");
  const about = { tabindex: "0", role: "group", "aria-label": "sampled tokens; the arrow keys go through them" };
  const box = make("div", { class: `tokens ${colours}`, ...about });
  const put = (from, to) => {
    for (let place = from; place < Math.min(to, count); place++) box.append(token(answer, place, colours, scale));
  };
  put(0, TOKENS);
  const all = pressable(`show all ${number(count)} tokens`, () => {
    put(TOKENS, count);
    all.remove();
  });
  let at = -1;
  const tell = (place) => {
    box.children[at]?.classList.remove("at");
    at = Math.max(0, Math.min(box.children.length - 1, place));
    box.children[at].classList.add("at");
    words.textContent = tokenWords(answer, at);
  };
  box.addEventListener("pointerover", (event) => {
    if (event.target !== box) tell([...box.children].indexOf(event.target.closest("span")));
  });
  box.addEventListener("keydown", (event) => {
    if (!MOVES[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    tell(at + MOVES[event.key]);
  });
  return [box, words, count > TOKENS ? all : null];
}

const advantageOf = ({ advantage }, place) => (Array.isArray(advantage) ? advantage[place] : advantage) ?? null;

function token(answer, place, colours, scale) {
  const piece = answer.pieces[place];
  const advantage = advantageOf(answer, place);
  const log = answer.logprobs?.[place] ?? null;
  // -1 to 1: the advantage over the largest of the step, or p - 1
  const size = colours === "probability" ? (log === null ? 0 : Math.exp(log) - 1) : scale ? advantage / scale : 0;
  const level = Math.min(LEVELS, Math.ceil(Math.abs(size) * LEVELS - 1e-9));
  // the end of a line is a sign as well, so that its colour can be seen
  const lines = plain(piece).split("\n");
  const span = make("span", {}, lines[0], ...lines.slice(1).flatMap((line) => [make("i"), `\n${line}`]));
  if (level > 0) span.classList.add(`${size > 0 ? "up" : "down"}-${level}`);
  return span;
}

function tokenWords(answer, place) {
  const advantage = advantageOf(answer, place);
  const log = answer.logprobs?.[place] ?? null;
  const words = [`token ${number(place + 1)} of ${number(answer.pieces.length)}`];
  if (advantage !== null) words.push(`advantage ${signed(advantage)}`);
  if (log !== null) words.push(`log p ${signed(log)}`, `p ${rounded(Math.exp(log))}`);
  return `“${plain(answer.pieces[place].slice(0, 80)).replace(/\n/g, "↵")}”: ${words.join(", ")}`;
}

// The meaning of the colours.
function legend(colours, scale) {
  const advantage = [`−${rounded(scale)}`, `+${rounded(scale)} advantage`];
  const ends = colours === "advantage" ? advantage : ["likely", "unlikely token"];
  return make("p", { class: "scale" }, ends[0], make("i", { class: colours }), ends[1]);
}

// Word by word: the best answer to the same prompt in an earlier step and in this one. earlier: that step.
function changeView(group, earlier) {
  const before = earlier?.groups.find((other) => other.prompt === group.prompt);
  if (!before) return [];
  const [old, now] = [before, group].map((each) => sortedAnswers(each.answers, "best")[0]);
  const title = `Best answer since step ${number(earlier.step)}: reward ${reward(old.reward)} → ${reward(now.reward)}`;
  if (old.text === now.text) return [make("h4", {}, `${title}, in the same words`)];
  const [a, b] = [old, now].map((answer) => plain(answer.text ?? "").match(PIECES)?.slice(0, WORDS) ?? []);
  const cut = Math.max(a.length, b.length) === WORDS ? `, the first ${number(WORDS)} words` : "";
  const marked = difference(a, b).map(([tag, text]) => (tag ? make(tag, {}, text) : text));
  return [make("h4", {}, title + cut), make("p", { class: "text" }, ...marked)];
}
