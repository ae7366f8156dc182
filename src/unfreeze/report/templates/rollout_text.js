// Elements and words for the page of rollouts. What a model or a grader wrote becomes text nodes, never anything else.
const LETTERS = 4000; // of a text before "show all"

// An element. about: its attributes, and what it does on an event: {onclick: f}. children: elements, texts or null.
function make(tag, about = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const pressable = (words, press, about = {}) => make("button", { type: "button", onclick: press, ...about }, words);

// Control characters as pictures (␀ ␛), and marks that turn the direction of writing by their number.
function plain(text) {
  const picture = (mark) => (mark === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + mark.charCodeAt(0)));
  return text
    .replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, picture)
    .replace(/[\u202a-\u202e\u2066-\u2069]/g, (mark) => `⟨U+${mark.charCodeAt(0).toString(16)}⟩`);
}

// A text, cut after LETTERS with a button that shows the rest.
function longText(text) {
  if (text.length <= LETTERS) return [make("p", { class: "text" }, plain(text))];
  const words = make("p", { class: "text" }, `${plain(text.slice(0, LETTERS))} …`);
  const all = pressable(`show all ${number(text.length)} characters`, () => {
    words.replaceChildren(plain(text));
    all.remove();
  });
  return [words, all];
}

// rows: [name, value], and a class if there is a third.
function facts(rows) {
  const fact = ([name, value, look = ""]) =>
    make("div", { class: look }, make("dt", {}, plain(name)), make("dd", {}, plain(String(value))));
  return make("dl", { class: "facts small" }, ...rows.map(fact));
}

const graded = (value) => value !== null && value !== undefined;
const rounded = (value) => number(Number(value.toPrecision(4)));
const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + rounded(Math.abs(value));
const reward = (value) => (graded(value) ? rounded(value) : "none");
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

// "end 120, length 8": the values of a field, most frequent first.
function counted(items, field) {
  const counts = new Map();
  for (const item of items) counts.set(item[field] || "unknown", (counts.get(item[field] || "unknown") ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([name, many]) => `${name} ${number(many)}`).join(", ");
}

// Words and marks with the space after them; Chinese and Japanese signs one by one.
const PIECES = /(?:[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}]|[\p{L}\p{N}_'’-]+|.)\s*/gsu;

// [tag, text] pieces of lists a and b by their longest common subsequence: "" in both, "del" in a, "ins" in b only.
function difference(a, b) {
  const length = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      length[i][j] = a[i] === b[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const pieces = [];
  const put = (tag, text) => {
    if (pieces.at(-1)?.[0] === tag) pieces.at(-1)[1] += text;
    else pieces.push([tag, text]);
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) put("", a[(j++, i++)]);
    else if (j === b.length || (i < a.length && length[i + 1][j] >= length[i][j + 1])) put("del", a[i++]);
    else put("ins", b[j++]);
  }
  return pieces;
}
