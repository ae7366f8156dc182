// The answers of a step: a script beside the page, gzip in base64, calls unfreezeRollouts (rollouts/copies.py).
const KEPT = 6; // steps in memory
const waiting = new Map(); // step -> what takes its data
const loaded = new Map(); // step -> promise, the latest last
window.unfreezeRollouts = (step, packed, about) => waiting.get(step)?.({ packed, about });

// A step as {step, groups, answers, low, high, scale, before, dropped, fault}. kept: a step that stays in memory.
function load(step, kept) {
  if (!loaded.has(step)) {
    const reading = unpack(step);
    loaded.set(step, reading);
    reading.catch(() => loaded.delete(step));
    const others = [...loaded.keys()].filter((other) => other !== step && other !== kept);
    for (const old of others.slice(0, Math.max(0, loaded.size - KEPT))) loaded.delete(old);
  }
  return loaded.get(step);
}

async function unpack(step) {
  if (!window.DecompressionStream) throw new Error("This browser cannot unpack gzip; a newer one can.");
  const { packed, about } = await data(step);
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  const lines = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  return grouped(step, lines.filter((line) => !("dropped" in line)), about);
}

function data(step) {
  const file = `rollouts/step-${String(step).padStart(6, "0")}.js`;
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    const ended = () => {
      script.remove();
      // does nothing if the script has called
      reject(new Error(`${file} cannot be loaded: keep the folder beside this page, or run unfreeze report again.`));
    };
    waiting.set(step, resolve);
    script.addEventListener("load", ended);
    script.addEventListener("error", ended);
    script.src = file;
    document.head.append(script);
  });
}

function grouped(step, answers, about) {
  const groups = new Map();
  for (const answer of answers) {
    const { group, row = null, prompt = "" } = answer;
    if (!groups.has(group)) groups.set(group, { number: group, row, prompt, answers: [], before: about.before[group] });
    groups.get(group).answers.push(answer);
  }
  for (const group of groups.values()) {
    const rewards = group.answers.map((answer) => answer.reward).filter(graded);
    group.mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    group.low = Math.min(...rewards);
    group.high = Math.max(...rewards);
    group.longest = Math.max(...group.answers.map(numTokens));
  }
  const all = [...groups.values()];
  let [low, high, scale] = [Infinity, -Infinity, 0];
  for (const group of all) [low, high] = [Math.min(low, group.low), Math.max(high, group.high)];
  for (const { advantage } of answers) {
    for (const each of [advantage].flat()) scale = Math.max(scale, Math.abs(each ?? 0));
  }
  return { step, groups: all, answers, low, high, scale, dropped: about.dropped, fault: about.fault };
}

function numTokens(answer) {
  return answer.logprobs?.length || answer.pieces?.length || (answer.text ?? "").split(/\s+/).length;
}

// "signal", or why there is none: "failed": nothing graded, "high": all at the step's highest reward, "low": other.
function kind(group, step) {
  if (group.mean === null) return "failed";
  if (group.low < group.high) return "signal";
  return group.high === step.high && step.high > step.low ? "high" : "low";
}

const least = (value) => value ?? -Infinity;
const ORDERS = {
  // order -> [of groups, of the answers of a group]
  worst: [(a, b) => least(a.mean) - least(b.mean), (a, b) => least(a.reward) - least(b.reward)],
  best: [(a, b) => least(b.mean) - least(a.mean), (a, b) => least(b.reward) - least(a.reward)],
  longest: [(a, b) => b.longest - a.longest, (a, b) => numTokens(b) - numTokens(a)],
  row: [(a, b) => (a.row ?? a.number) - (b.row ?? b.number), (a, b) => a.answer - b.answer],
};

// Sorted copies; NaN comes of -Infinity - -Infinity and means equal, where the number decides.
const sortedGroups = (groups, order) => [...groups].sort((a, b) => ORDERS[order][0](a, b) || a.number - b.number);
const sortedAnswers = (answers, order) => [...answers].sort((a, b) => ORDERS[order][1](a, b) || a.answer - b.answer);
