// The page of the gateway: a chat, and what the server saw of it.
// All text that comes from elsewhere goes into the page as text (textContent), never as markup.

const KEY = "sordino-key"; // in sessionStorage: of this tab, gone with it
const BETWEEN_MS = 100; // pictures are drawn ten times a second at most
const AFTER_ERROR_MS = 2000;
const GONE = "The gateway does not answer. Is `sordino gateway` still running on this machine?";

const NOTES = {
  masked: "Every row leaves this machine under a mask that is used once.",
  auto: "Every row leaves this machine under a mask that is used once. Where none is left, it is made just in time.",
  rlwe: "Every row leaves this machine encrypted. Choose this only for a server that follows the protocol.",
  clear: "Nothing is hidden: the server sees every row as it is. This protocol is for tests.",
};
const WELCOME = {
  masked: "What you write stays on this machine. The server computes on rows that it cannot read.",
  auto: "What you write stays on this machine. The server computes on rows that it cannot read.",
  rlwe: "What you write stays on this machine. The server computes on ciphertexts.",
  clear: "Nothing is hidden with this protocol: the server can read what you write from the rows it gets.",
};

const $ = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en");

function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

function bytes(number) {
  if (number < 1e3) return `${number} B`;
  if (number < 1e6) return `${(number / 1e3).toFixed(1)} kB`;
  return number < 1e9 ? `${(number / 1e6).toFixed(1)} MB` : `${(number / 1e9).toFixed(2)} GB`;
}

let wake = () => {}; // ends a pause
const pause = (ms) =>
  new Promise((resolve) => {
    wake = resolve;
    setTimeout(resolve, ms);
  });

// -- the key ----------------------------------------------------------------------------------------------------------

const key = () => sessionStorage.getItem(KEY);

/** Takes the key out of the address, where `sordino gateway` puts it: a fragment is never sent to anybody. */
function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!given) return false;
  history.replaceState(null, "", location.pathname);
  return keep(given);
}

function keep(given) {
  if (!/^[\x21-\x7e]+$/.test(given)) {
    askForKey("That is no key: it has characters that no key has.");
    return false;
  }
  sessionStorage.setItem(KEY, given);
  $("key-form").hidden = true;
  put("key-error", "");
  wake();
  return true;
}

function askForKey(why = "") {
  sessionStorage.removeItem(KEY);
  put("key-error", why);
  $("key-form").hidden = false;
}

// -- requests ---------------------------------------------------------------------------------------------------------

/** A request with the key; throws an Error whose text is for the user where it is not answered as it should be. */
async function ask(path, options = {}) {
  if (!key()) {
    askForKey();
    throw new Error("The key is missing.");
  }
  const headers = { ...options.headers, Authorization: `Bearer ${key()}` };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(GONE);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) {
    const wrong = "The gateway does not take this key.";
    askForKey(wrong);
    throw new Error(wrong);
  }
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error?.message ?? `The gateway refused the request (${answer.status}).`);
}

/** The events of an answer of type text/event-stream, parsed. */
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(GONE);
    }
    if (part.done) throw new Error("The answer broke off: the gateway ended it too early.");
    const blocks = (rest + part.value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// -- chat -------------------------------------------------------------------------------------------------------------

let talk = []; // what was said so far, as the gateway takes it
let going = null; // ends the answer under way
let model = null;
let before = null; // bytes carried before this answer
let carried = null;

function say(kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.dir = "auto";
  line.textContent = text;
  $("talk").append(line);
  return line;
}

/** Does something to the conversation, and stays at its end if it was there. */
function scrolling(change) {
  const box = $("talk");
  const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  const made = change();
  if (atEnd) box.scrollTop = box.scrollHeight;
  return made;
}

function busy(on) {
  const focused = document.activeElement;
  $("send").hidden = on;
  $("stop").hidden = !on;
  if (focused === $("send") || focused === $("stop")) $("prompt").focus();
}

async function send() {
  const text = $("prompt").value;
  if (!text.trim() || going) return;
  const here = talk;
  const ending = new AbortController();
  going = ending;
  $("prompt").value = "";
  $("welcome").hidden = true;
  busy(true);
  scrolling(() => say("said you", text));
  const line = scrolling(() => say("said model", ""));
  line.setAttribute("aria-busy", "true"); // read out once, at its end
  const clock = { start: performance.now(), pieces: 0 };
  put("ttft", "…");
  put("speed", "…");
  before = carried;
  let said = "";
  let failure = null;
  try {
    model ??= (await (await ask("/v1/models", { signal: ending.signal })).json()).data[0].id;
    const answer = await ask("/v1/chat/completions", {
      method: "POST",
      signal: ending.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        model,
        messages: [...here, { role: "user", content: text }],
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices?.[0]?.delta?.content;
      if (piece) {
        said += piece;
        scrolling(() => line.append(piece));
        clock.last = performance.now();
        clock.first ??= clock.last;
        clock.pieces += 1;
      }
      if (event.usage) clock.tokens = event.usage.completion_tokens;
      if (going === ending) showSpeed(clock);
    }
  } catch (error) {
    failure = error;
  }
  line.removeAttribute("aria-busy");
  if (going === ending) {
    going = null;
    busy(false);
  }
  if (here !== talk) return; // a new chat has begun
  const stopped = failure?.name === "AbortError";
  if (!said) line.remove();
  if (stopped) scrolling(() => say("aside", "Stopped."));
  else if (failure) scrolling(() => say("error", failure.message)).setAttribute("role", "alert");
  if (said && (!failure || stopped)) {
    here.push({ role: "user", content: text }, { role: "assistant", content: said });
  } else if (failure && !$("prompt").value) {
    $("prompt").value = text; // what failed can be sent again
  }
  if (!clock.first) put("ttft", "–");
  if (!clock.first) put("speed", "–");
}

function showSpeed({ start, first, last, pieces, tokens }) {
  if (!first) return;
  put("ttft", `${((first - start) / 1e3).toFixed(2)} s`);
  const rate = ((tokens ?? pieces) - 1) / ((last - first) / 1e3);
  if (rate > 0 && Number.isFinite(rate)) put("speed", `${rate.toFixed(1)} tokens/s`);
}

function stop() {
  going?.abort();
}

function startAnew() {
  stop();
  talk = [];
  going = null;
  busy(false);
  $("talk").replaceChildren($("welcome"));
  $("welcome").hidden = !$("welcome").textContent;
  $("prompt").focus();
}

// -- what the server sees ---------------------------------------------------------------------------------------------

let shown = { number: 0 };
let looking = null; // ends the request under way

/** What the gateway says of itself, once; fills the list of layers. */
async function introduce() {
  const about = await (await ask("/sordino/about")).json();
  showFigures(about);
  document.body.className = about.protocol;
  put("model", about.model);
  put("protocol", about.protocol);
  put("note", NOTES[about.protocol] ?? "");
  put("attention", about.attention === "local" ? "on this machine" : "on the server, encrypted");
  put("welcome", WELCOME[about.protocol] ?? "");
  $("welcome").hidden = $("talk").children.length > 1;
  const layers = new Map();
  for (const { name, layer, label, inputs } of about.groups) {
    if (!layers.has(layer)) {
      const part = document.createElement("optgroup");
      part.label = `Layer ${layer}`;
      layers.set(layer, part);
    }
    layers.get(layer).append(new Option(`${layer} · ${label} (${count.format(inputs)})`, name));
  }
  const chosen = $("group").value;
  $("group").replaceChildren(...layers.values());
  if (about.groups.some(({ name }) => name === chosen)) $("group").value = chosen;
  else shown = { number: 0 };
}

async function look() {
  let known = false;
  for (;;) {
    if (document.hidden || !key()) {
      await pause(BETWEEN_MS);
      continue;
    }
    looking = new AbortController();
    const group = $("group").value;
    try {
      if (!known) {
        await introduce();
        known = true;
        continue;
      }
      const query = new URLSearchParams({ group, after: shown.number });
      const seen = await (await ask(`/sordino/seen?${query}`, { signal: looking.signal })).json();
      $("live-error").hidden = true;
      if (group === $("group").value) show(seen);
      await pause(BETWEEN_MS);
    } catch (error) {
      if (error.name === "AbortError") continue;
      put("live-error", error.message);
      $("live-error").hidden = false;
      known = false; // another gateway may come
      await pause(AFTER_ERROR_MS);
    }
  }
}

function showFigures({ up, down, masks_left: masks }) {
  carried = { up, down };
  if (before) {
    put("up", bytes(up - before.up));
    put("down", bytes(down - before.down));
  }
  put("up-all", `${bytes(up)} in all`);
  put("down-all", `${bytes(down)} in all`);
  put("masks", masks === null ? "none needed" : count.format(masks));
}

function show(seen) {
  showFigures(seen);
  if (!seen.row || seen.row.number === shown.number) return;
  shown = seen.row;
  draw();
  const { correlation, elements, ciphertext_bytes: size } = shown;
  put("true-size", `${count.format(elements)} values`);
  if (size === null) {
    put("sent-size", `${count.format(elements)} values`);
    put("correlation", correlation === null ? "–" : correlation.toFixed(3));
    put("chance", `1: the same row; chance alone: within ±${(2 / Math.sqrt(elements)).toFixed(2)}, 19 times of 20`);
  } else {
    put("sent-size", `${count.format(levels(shown.sent).length)} of ${count.format(size)} bytes`);
    put("correlation", "–");
    put("chance", "The picture shows bytes of a ciphertext. None of them belongs to one value, so there are no pairs to compare.");
  }
}

/** Signed bytes from base64. */
const levels = (text) => Int8Array.from(atob(text), (letter) => letter.charCodeAt(0));

function draw() {
  if (!shown.true) return;
  const style = getComputedStyle(document.documentElement);
  const [cold, zero, warm] = ["--cold", "--zero", "--warm"].map((name) => rgb(style.getPropertyValue(name)));
  for (const id of ["true", "sent"]) {
    const values = levels(shown[id]);
    const width = columns(values.length);
    const canvas = $(id);
    canvas.width = width;
    canvas.height = Math.ceil(values.length / width);
    const pen = canvas.getContext("2d");
    const image = pen.createImageData(canvas.width, canvas.height);
    values.forEach((value, place) => {
      const end = value < 0 ? cold : warm;
      const share = Math.min(1, Math.abs(value) / 127);
      for (let c = 0; c < 3; c += 1) image.data[4 * place + c] = zero[c] + (end[c] - zero[c]) * share;
      image.data[4 * place + 3] = 255;
    });
    pen.putImageData(image, 0, 0);
    canvas.setAttribute("aria-label", `${values.length} blocks of colour, row ${shown.number}`);
  }
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.trim().slice(at, at + 2), 16));

/** Of a picture that is nearly square, and full if it can be. */
function columns(size) {
  const root = Math.ceil(Math.sqrt(size));
  for (let width = root; width <= 2 * root; width += 1) if (size % width === 0) return width;
  return root;
}

// -- events -----------------------------------------------------------------------------------------------------------

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", stop);
$("fresh").addEventListener("click", startAnew);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (keep($("key").value.trim())) $("prompt").focus();
  $("key").value = "";
});
$("group").addEventListener("change", () => {
  shown = { number: 0 };
  looking?.abort();
});
addEventListener("hashchange", takeKey);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

takeKey();
if (!key()) askForKey();
(key() ? $("prompt") : $("key")).focus();
look();
