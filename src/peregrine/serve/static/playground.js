// The playground: generate, see which tokens were drafted, race plain decoding against speculation.
//
// A lane shows one generation. A run has one lane, a race has two. Besides the text, chunks of the stream say which tokens
// were drafted, and what each round's drafts were (docs/server.md, "Seeing speculation").

const find = (id) => document.getElementById(id);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const RETRY_MS = 1000;
const EXAMPLE_ROUND_MS = 90; // at which the recorded run is played

// ---- Talking to the server ------------------------------------------------------------------------------------------

let key = sessionStorage.getItem("key") ?? "";

/** An error response of the server, or a failure to reach it; `field` is the one of the body that it is about. */
class Refusal extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

/** The response if it is good; else throws a Refusal with the server's message. */
async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const { message, param } = body?.error ?? {};
  throw new Refusal(response.status, message ?? `The server answered ${response.status}.`, param);
}

/** The JSON values of a stream of server-sent events, up to its [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let pending = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Refusal(0, "The connection was cut before the text was complete.");
    const parts = (pending + value).split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(0, event.error.message);
      yield event;
    }
  }
}

// ---- One generation -------------------------------------------------------------------------------------------------

const notes = new WeakMap(); // a token's element -> what the card says about it

/** Depth of each draft and which drafts hang from a node; drafts are the nodes 1, 2, ... of their round. */
function linked(drafts) {
  const depths = [0]; // by node; parents come before children
  for (const draft of drafts) depths.push(depths[draft.parent] + 1);
  const nodes = drafts.map((draft, index) => ({ ...draft, node: index + 1, depth: depths[index + 1] }));
  return { nodes, depth: Math.max(...depths), under: (parent) => nodes.filter((draft) => draft.parent === parent) };
}

/** Drafts below rejected ones: whether they were right is not known. */
function fallen(nodes, rejected) {
  const lost = new Set(rejected.map((draft) => draft.node));
  return nodes.filter((draft) => lost.has(draft.parent) && lost.add(draft.node));
}

/** Bytes of a token; one whose bytes are no text by themselves is written as bytes:\xe2\x82. */
function tokenBytes(text) {
  const halves = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(text);
  if (!halves) return new TextEncoder().encode(text);
  return Uint8Array.from(halves[1].slice(2).split("\\x"), (byte) => parseInt(byte, 16));
}

/** Shows one generation as it comes: its text, a strip of its rounds, its figures. */
class Lane {
  constructor(title, budget) {
    this.element = find("lane").content.firstElementChild.cloneNode(true);
    this.element.querySelector("h2").textContent = title;
    this.text = this.element.querySelector(".text");
    this.text.setAttribute("aria-label", `${title || "Text"}: tokens; the arrow keys go from one to the next`);
    this.strip = this.element.querySelector(".strip");
    this.budget = budget;
    this.content = "";
    this.ids = [];
    this.pieces = []; // each token's own text
    this.rounds = this.drafted = this.correct = 0;
    this.ended = null; // the choice that ended it
    this.decoder = new TextDecoder(); // half a character waits for the token that completes it
    this.times = null; // of the first and the latest chunk, and how many tokens the first one had
  }

  /** Take in a choice of one chunk, which arrived `seconds` after the request was sent. */
  take(choice, seconds) {
    const { tokens, rounds } = choice.speculation;
    this.content += choice.text ?? choice.delta.content;
    if (choice.finish_reason !== null) this.ended = choice;
    const stop = choice.finish_reason === "stop" ? choice.stop_reason : null;
    let begin = 0;
    for (const round of rounds) {
      this.addRound(round, tokens.slice(begin, (begin += round.num_tokens)), stop);
    }
    if (tokens.length) this.times ??= { first: seconds, early: this.ids.length };
    if (this.times) this.times.latest = seconds;
    this.showFigures();
  }

  addRound(round, tokens, stop) {
    const { nodes, depth, under } = linked(round.drafts);
    this.rounds += 1;
    this.drafted += round.drafts.length;
    const mark = this.addMark(nodes, depth);
    let node = 0;
    for (const token of tokens) {
      const rejected = under(node).filter((draft) => !draft.correct);
      const others = token.drafted ? [] : fallen(nodes, rejected);
      this.addToken(token, rejected, token.id === stop, { round: this.rounds, offered: nodes.length, others, mark });
      if (token.drafted) node = under(node).find((draft) => draft.correct).node;
    }
  }

  addToken(token, rejected, ends, note) {
    this.ids.push(token.id);
    this.pieces.push(token.text);
    this.correct += token.drafted;
    if (ends) return; // it is no text; the status line says that it came
    const decoded = this.decoder.decode(tokenBytes(token.text), { stream: true });
    // The space before a word is not underlined: at the end of a line the underline would stick out.
    const [, space, shown] = /^( ?)(.*)$/s.exec(decoded);
    const element = document.createElement("span");
    element.className = "token";
    element.classList.toggle("drafted", token.drafted);
    element.classList.toggle("rejected", !token.drafted && rejected.length > 0);
    element.classList.toggle("break", shown.includes("\n"));
    element.textContent = shown;
    element.tabIndex = -1;
    notes.set(element, { ...note, token, rejected, place: this.ids.length });
    this.text.append(this.text.hasChildNodes() ? space : "", element);
  }

  /** A round in the strip: a cell per level of drafts, filled where one was right. */
  addMark(nodes, depth) {
    const mark = document.createElement("span");
    mark.className = "round";
    for (let level = 1; level <= depth; level++) {
      const cell = document.createElement("i");
      const right = nodes.some((draft) => draft.depth === level && draft.correct);
      cell.className = right ? "cell correct" : "cell";
      mark.append(cell);
    }
    if (!depth) mark.classList.add("plain");
    const right = nodes.filter((draft) => draft.correct).length;
    mark.title = `round ${this.rounds}: ${nodes.length} drafted, ${right} accepted`;
    this.strip.append(mark);
    return mark;
  }

  get acceptance() {
    return this.ids.length / this.rounds;
  }

  /** Why the text ended, in words. */
  get reason() {
    const { finish_reason: why, stop_reason: stop } = this.ended ?? {};
    if (why === "stop") return typeof stop === "string" ? `the stop string “${stop}” came` : "the model ended the text";
    if (why === "length") return this.ids.length < this.budget ? "the context is full" : "max tokens reached";
    return why ?? "the stream ended";
  }

  /** Show the complete text as a JSON value beside it, if it is one. */
  showValue() {
    const shown = this.element.querySelector(".value");
    try {
      shown.textContent = JSON.stringify(JSON.parse(this.content), null, 2);
      shown.hidden = false;
    } catch {
      shown.hidden = true; // it was cut off
    }
  }

  showFigures() {
    const count = this.ids.length;
    const { first, latest, early } = this.times ?? {};
    const speed = (count - early) / (latest - first);
    const figures = {
      acceptance: this.rounds ? this.acceptance.toFixed(2) : "–",
      speed: Number.isFinite(speed) && speed > 0 ? speed.toFixed(0) : "–",
      first: first === undefined ? "–" : `${(1000 * first).toFixed(0)} ms`,
      count,
    };
    for (const [name, value] of Object.entries(figures)) {
      this.element.querySelector(`[data-figure=${name}]`).textContent = value;
    }
    this.element.style.setProperty("--done", Math.min(1, count / this.budget));
    const said = `${plural(this.rounds, "round")}: ${this.drafted} drafted, ${this.correct} accepted`;
    this.strip.setAttribute("aria-label", said);
  }
}

/** A promise for a later time, or for the signal if that comes first. */
function until(time, signal) {
  const wait = time - performance.now();
  if (wait <= 0 || signal.aborted) return Promise.resolve();
  return new Promise((resolve) => {
    setTimeout(resolve, wait);
    signal.addEventListener("abort", resolve, { once: true });
  });
}

/** Generate into a lane. Slow motion delays what is shown, not what is read, so the figures are those of real time. */
async function generate(request, lane, { begun, signal, slowdown, onNews }) {
  const path = request.messages ? "/v1/chat/completions" : "/v1/completions";
  const body = JSON.stringify({ ...request, stream: true, return_speculation: true });
  const response = await ask(path, { method: "POST", body, signal });
  let shown = Promise.resolve();
  for await (const { choices } of events(response)) {
    const passed = performance.now() - begun;
    const show = async () => {
      await until(begun + passed * slowdown, signal);
      if (signal.aborted) return;
      choices.forEach((choice) => lane.take(choice, passed / 1000));
      onNews();
    };
    shown = shown.then(show);
  }
  await shown;
  signal.throwIfAborted();
}

// ---- The race -------------------------------------------------------------------------------------------------------

/** Compares two lanes token by token as they come, and says which one is ahead. */
class Race {
  constructor(plain, fast) {
    this.lanes = [plain, fast];
    this.checked = 0;
    this.won = ""; // how it stood when the first lane was done
  }

  update() {
    const [plain, fast] = this.lanes;
    const both = Math.min(plain.ids.length, fast.ids.length);
    while (this.checked < both && plain.ids[this.checked] === fast.ids[this.checked]) this.checked++;
    if (this.checked < both) {
      const [mine, theirs] = this.lanes.map((lane) => lane.pieces[this.checked]);
      const where = `token ${this.checked + 1} is “${mine}” plain and “${theirs}” with speculation`;
      return this.say("differs", `Not identical: ${where}. This is a defect; please report it.`);
    }
    const lead = fast.ids.length - plain.ids.length;
    if (fast.ended && !plain.ended) this.won ||= `Speculation was done when plain decoding had ${plain.ids.length}.`;
    if (plain.ended && fast.ended) {
      if (lead) return this.say("differs", "Not identical: one text is longer. This is a defect; please report it.");
      const end = fast.drafted ? this.won : "Nothing was drafted: beside another request it did not pay.";
      return this.say("identical", `Identical: all ${plural(both, "token")}. ${end}`);
    }
    if (!both) return this.say("running", "The prompt is being read.");
    const ahead = lead === 0 ? "Level." : `${lead > 0 ? "Speculation" : "Plain decoding"} is ${Math.abs(lead)} ahead.`;
    this.say("running", `Identical so far: ${plural(this.checked, "token")}. ${ahead}`);
  }

  say(state, text) {
    find("verdict").dataset.state = state;
    find("verdict").textContent = text;
  }
}

// ---- Asking ---------------------------------------------------------------------------------------------------------

let running = null; // the AbortController of what runs
const conversation = []; // messages of the chat so far

const isChat = () => find("ask").elements.mode.value === "chat";

/** What the form asks for. The seed is drawn here: the server's have more bits than a number in JavaScript. */
function readRequest() {
  const number = (id) => find(id).valueAsNumber;
  const seed = find("seed").value === "" ? Math.floor(Math.random() * 2 ** 32) : number("seed");
  const text = find("prompt").value;
  const messages = [...conversation, { role: "user", content: text }];
  return {
    ...(isChat() ? { messages } : { prompt: text }),
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    max_tokens: number("max_tokens"),
    seed,
    ...(find("constraint").value && { [find("constraint").value]: find("schema").value }),
  };
}

/** Run what the form asks for: once, or as a race. */
async function run(racing) {
  if (find("schema").required && !find("schema").value) find("structure").open = true; // it could not be pointed at
  if (running || find(racing ? "race" : "run").disabled || !find("ask").reportValidity()) return;
  example.abort();
  hideCard();
  const request = readRequest();
  const chosen = find("drafts").valueAsNumber;
  const most = Number(find("drafts").max);
  const caps = racing ? [0, chosen || most] : [chosen]; // a race needs someone to race against
  const tree = find("trees").hidden ? {} : { tree: find("ask").elements.tree.value };
  const requests = caps.map((num_drafts) => ({ ...request, speculation: { num_drafts, ...(num_drafts && tree) } }));
  const titles = racing ? ["Plain", "With speculation"] : [""];
  const lanes = titles.map((title) => new Lane(title, request.max_tokens));
  const race = racing ? new Race(...lanes) : null;
  const turn = isChat() ? beginTurn(find("prompt").value) : null;
  find("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  find("race-said").hidden = find("verdict").hidden = !racing;
  showResult();
  race?.update();

  running = new AbortController();
  const { signal } = running;
  const slowdown = Number(find("slowdown").value);
  const pace = { begun: performance.now(), signal, slowdown, onNews: () => race?.update() };
  showRunning("Running.");
  const lane = lanes.at(-1);
  let failed = false;
  try {
    await Promise.all(requests.map((each, index) => generate(each, lanes[index], pace)));
  } catch (error) {
    failed = !signal.aborted;
    if (failed) {
      running.abort();
      complain(error);
    }
  }
  running = null;
  if (request.json_schema && !failed) lanes.forEach((each) => each.showValue());
  if (!lane.element.isConnected) return showRunning(""); // it was cleared away meanwhile
  if (turn) endTurn(turn, lane);
  if (failed) return showFailure(lanes);
  const ending = signal.aborted ? "Stopped." : `Done: ${lane.reason}.`;
  showRunning(`${ending} ${plural(lane.ids.length, "token")} in ${plural(lane.rounds, "round")}, seed ${request.seed}.`);
}

/** What failed has no figures, and without a token nothing to look at. */
function showFailure(lanes) {
  for (const lane of lanes) lane.element.classList.add("failed");
  if (!lanes.some((lane) => lane.ids.length)) find("lanes").replaceChildren();
  find("verdict").hidden = find("race-said").hidden = true;
  showRunning("Failed; the reason is above.");
}

/** Scroll to the result if it begins far down, as on a phone. */
function showResult() {
  const { top } = find("result").getBoundingClientRect();
  if (top > window.innerHeight / 2) find("result").scrollIntoView();
}

function stop() {
  if (!running) return;
  if (document.activeElement === find("stop")) find("run").focus();
  running.abort();
}

function showRunning(status) {
  find("status").textContent = status;
  find("lanes").setAttribute("aria-busy", String(running !== null));
  find("stop").hidden = running === null;
  for (const id of ["run", "race"]) find(id).setAttribute("aria-disabled", String(running !== null));
  if (running) find("problem").hidden = find("schema-problem").hidden = true;
}

/** Show an error, one about the schema beside it; if an API key is missing, ask for it. */
function complain(error) {
  if (!(error instanceof Refusal)) console.error(error);
  const place = find(error.field && error.field === find("constraint").value ? "schema-problem" : "problem");
  if (place.id === "schema-problem") find("structure").open = true;
  place.textContent = error.message;
  place.hidden = false;
  place.scrollIntoView({ block: "nearest" });
  if (error.status === 401) find("key-form").hidden = false;
}

// ---- Structured output ----------------------------------------------------------------------------------------------

const examples = {
  json_schema: {
    schema: JSON.stringify(
      {
        type: "object",
        properties: {
          name: { type: "string", pattern: "^[A-Z][a-z]{2,9}$" },
          animal: { enum: ["fox", "falcon", "cat"] },
          age: { type: "integer", minimum: 1, maximum: 20 },
          friends: { type: "array", items: { type: "string", pattern: "^[A-Z][a-z]{2,9}$" }, maxItems: 3 },
        },
        required: ["name", "animal", "age", "friends"],
        additionalProperties: false,
      },
      null,
      2,
    ),
    text: "Here is the fox of the story as JSON:\n",
    chat: "Describe the fox of the story as JSON.",
  },
  regex: { schema: "[A-Z][a-z]+, \\d{1,2} years old", text: "The fox was called ", chat: "Who is the fox, and how old?" },
};
const asked = { json_schema: "", regex: "" }; // each kind keeps its own text
let constrained = ""; // the kind that is shown

/** Show the box of the chosen kind; off has none. */
function changeConstraint() {
  if (constrained) asked[constrained] = find("schema").value;
  constrained = find("constraint").value;
  find("schema").hidden = !constrained;
  find("schema").required = Boolean(constrained);
  find("schema").value = asked[constrained] ?? "";
  find("schema-problem").hidden = true;
}

/** Fill in an example of the chosen kind, and a prompt that suits it. */
function showSchemaExample() {
  if (!constrained) {
    find("constraint").value = "json_schema";
    changeConstraint();
  }
  find("schema").value = examples[constrained].schema;
  find("prompt").value = examples[constrained][isChat() ? "chat" : "text"];
  find("schema-problem").hidden = true;
}

// ---- Chat -----------------------------------------------------------------------------------------------------------

/** Move the last answer up into the transcript, and put the question under it. */
function beginTurn(question) {
  const answer = find("lanes").lastElementChild?.querySelector(".text");
  if (answer && conversation.length) find("transcript").append(answer);
  const element = document.createElement("p");
  element.className = "question";
  element.textContent = question;
  find("transcript").append(element);
  find("prompt").value = "";
  return { question, element };
}

/** Add the turn to the conversation, unless it generated nothing. */
function endTurn({ question, element }, lane) {
  if (lane.content) {
    conversation.push({ role: "user", content: question }, { role: "assistant", content: lane.content });
    find("forget").hidden = false;
  } else {
    element.remove();
    find("prompt").value = question;
  }
}

/** Start over in the chosen mode. */
function clearResult() {
  stop();
  example.abort();
  hideCard();
  conversation.length = 0;
  for (const id of ["transcript", "lanes", "status"]) find(id).replaceChildren();
  find("verdict").hidden = find("race-said").hidden = true;
  find("forget").hidden = true;
  showKeys();
}

function showKeys() {
  find("keys").textContent = isChat()
    ? "Enter sends, Shift-Enter breaks the line, Esc stops."
    : "Ctrl-Enter runs, Ctrl-Shift-Enter races, Esc stops.";
}

const written = { text: find("prompt").value, chat: "Tell me a story about a fox." }; // each mode keeps its own prompt

function changeMode() {
  const [mode, other] = isChat() ? ["chat", "text"] : ["text", "chat"];
  written[other] = find("prompt").value;
  find("prompt").value = written[mode];
  clearResult();
}

// ---- Before the first run ------------------------------------------------------------------------------------------

const example = new AbortController(); // ends the recorded run

/** Play a recorded run, round by round, until something is asked for. */
async function playExample() {
  const { prompt, max_tokens, choice } = await (await ask("/static/example.json")).json();
  if (example.signal.aborted) return;
  const lane = new Lane("A recorded run", max_tokens);
  lane.element.classList.add("example");
  lane.text.dataset.prompt = prompt;
  find("lanes").replaceChildren(lane.element);
  find("status").textContent = "Recorded with merlin and its EAGLE-3 head, and slowed down. Run asks this server.";
  const atOnce = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
  const { tokens, rounds } = choice.speculation;
  let [begin, due] = [0, performance.now()];
  for (const [index, round] of rounds.entries()) {
    if (!atOnce) await until((due += EXAMPLE_ROUND_MS), example.signal);
    if (example.signal.aborted) return;
    const speculation = { tokens: tokens.slice(begin, (begin += round.num_tokens)), rounds: [round] };
    lane.take({ ...choice, finish_reason: index + 1 < rounds.length ? null : choice.finish_reason, speculation }, 0);
  }
}

// ---- The card of a token --------------------------------------------------------------------------------------------

let carded = null; // the token it belongs to

/** A piece of text with its spaces and breaks visible. */
function piece(text, tag = "b") {
  const element = document.createElement(tag);
  element.className = "piece";
  element.textContent = text.replaceAll("\n", "↵").replaceAll(" ", "␣");
  return element;
}

function pieces(drafts, tag) {
  return drafts.flatMap((draft, index) => (index ? [", ", piece(draft.text, tag)] : [piece(draft.text, tag)]));
}

/** Lines of the card: what was drafted here, and what the target chose. */
function story({ token, rejected, others, offered }) {
  const chosen = [piece(token.text), "."];
  if (token.drafted) {
    const lines = [["Drafted ", piece(token.text), ", and the target chose the same."]];
    if (rejected.length) lines.push(["Also drafted here: ", ...pieces(rejected, "s"), "."]);
    return lines;
  }
  if (rejected.length) {
    const lines = [["Drafted ", ...pieces(rejected, "s"), ": rejected."], ["The target chose ", ...chosen]];
    if (others.length) lines.push(["What was guessed after it fell, too: ", ...pieces(others, "s"), "."]);
    return lines;
  }
  const why = offered ? "The drafts before it were right; this one comes on top." : "Nothing was drafted in this round.";
  return [["The target’s own: ", ...chosen], [why]];
}

function showCard(token) {
  hideCard();
  const note = notes.get(token);
  const card = find("card");
  const heading = document.createElement("small");
  heading.textContent = `token ${note.place}, round ${note.round}`;
  const lines = story(note).map((parts) => {
    const line = document.createElement("p");
    line.append(...parts);
    return line;
  });
  card.replaceChildren(heading, ...lines);
  card.hidden = false;
  token.setAttribute("aria-describedby", "card");
  note.mark.classList.add("here");
  carded = token;
  placeCard();
}

/** Place the card under its token, or above it where there is no room, and inside the window. */
function placeCard() {
  if (!carded) return;
  const card = find("card");
  const box = carded.getClientRects()[0] ?? carded.getBoundingClientRect();
  const rightmost = document.documentElement.clientWidth - card.offsetWidth - 8;
  const fits = box.bottom + card.offsetHeight + 12 < window.innerHeight;
  card.style.left = `${Math.max(8, Math.min(box.left, rightmost))}px`;
  card.style.top = `${fits ? box.bottom + 6 : box.top - card.offsetHeight - 6}px`;
}

function hideCard() {
  if (!carded) return;
  carded.removeAttribute("aria-describedby");
  notes.get(carded).mark.classList.remove("here");
  find("card").hidden = true;
  carded = null;
}

const tokenAt = (target) => (notes.has(target) ? target : null);

/** The arrow keys go through the tokens of a text, which is one stop of the Tab key. */
function walk(event) {
  const text = event.target.closest?.(".text");
  if (!text?.firstElementChild) return;
  const here = tokenAt(event.target);
  const moves = {
    ArrowRight: here ? here.nextElementSibling : text.firstElementChild,
    ArrowLeft: here ? here.previousElementSibling : text.lastElementChild,
    Home: text.firstElementChild,
    End: text.lastElementChild,
  };
  if (!(event.key in moves)) return;
  event.preventDefault();
  moves[event.key]?.focus();
}

// ---- The server's side of the form ----------------------------------------------------------------------------------

/** Whether the engine chooses this by itself in every round. */
const isAuto = (decisions, name) => decisions.some(({ field, value }) => field === name && value === "auto");

/** What the slider can do on this server. */
function describeShape({ depth, width, nodes }, decisions) {
  if (depth === 0) return "This server has no drafter; start it with --drafter to speculate.";
  if (isAuto(decisions, "windows")) {
    const pays = `Each round drafts what pays, up to ${plural(depth, "token")}; the slider lowers that.`;
    return isAuto(decisions, "tree") ? `${pays} In trees the drafter's next choices hang beside its first.` : pays;
  }
  const fixed = "The shape is fixed when the server starts";
  if (width === 1) return `A chain of up to ${plural(depth, "draft")}. ${fixed}: --num-drafts K, or --tree D,W,N.`;
  const tree = `${plural(depth, "level")}, ${width} children per node, ${nodes} nodes with the root`;
  return `${tree}. ${fixed}; the slider cuts its depth.`;
}

function showDrafts() {
  const count = find("drafts").valueAsNumber;
  const said = count ? `up to ${count} ${find("drafts").dataset.unit}` : "off";
  find("drafts-said").textContent = said;
  find("drafts").setAttribute("aria-valuetext", said);
}

function showServer(info) {
  const { depth, width } = info.draft_shape;
  find("model").textContent = info.model;
  find("shape").textContent = describeShape(info.draft_shape, info.decisions);
  find("drafts").dataset.unit = width > 1 ? "deep" : "per round";
  find("drafts").max = depth; // before the value, which may not exceed it
  find("drafts").value = depth;
  for (const id of ["drafts", "drafts-said", "race"]) find(id).hidden = depth === 0;
  find("drafts").disabled = find("race").disabled = depth === 0;
  find("trees").hidden = depth === 0 || !isAuto(info.decisions, "tree");
  find("run").disabled = false;
  showDrafts();
  const entries = info.decisions.flatMap(({ field, value, because }) => {
    const [term, description, reason] = ["dt", "dd", "small"].map((tag) => document.createElement(tag));
    term.textContent = field;
    reason.textContent = because;
    description.append(`${value} `, reason);
    return [term, description];
  });
  find("decisions").replaceChildren(...entries);
}

/** Read /server_info, again and again until the model is loaded. */
async function meetServer() {
  try {
    showServer(await (await ask("/server_info")).json());
    find("problem").hidden = find("key-form").hidden = true;
  } catch (error) {
    complain(error);
    if (error.status === 503) setTimeout(meetServer, RETRY_MS);
  }
}

// ---- Events ---------------------------------------------------------------------------------------------------------

find("ask").addEventListener("submit", (event) => (event.preventDefault(), run(false)));
find("race").addEventListener("click", () => run(true));
find("stop").addEventListener("click", stop);
find("forget").addEventListener("click", () => (clearResult(), find("prompt").focus()));
find("drafts").addEventListener("input", showDrafts);
find("constraint").addEventListener("change", changeConstraint);
find("schema").addEventListener("input", () => (find("schema-problem").hidden = true));
find("schema-example").addEventListener("click", showSchemaExample);
for (const choice of find("ask").elements.mode) choice.addEventListener("change", changeMode);

find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = find("key").value.trim();
  sessionStorage.setItem("key", key);
  meetServer();
});

// Shift-Enter does, and Enter inside an input method only ends a word.
const breaksLine = (event) => event.shiftKey || event.isComposing;

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    hideCard();
    stop();
  } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run(event.shiftKey);
  } else if (event.key === "Enter" && event.target === find("prompt") && isChat() && !breaksLine(event)) {
    event.preventDefault();
    run(false);
  } else {
    walk(event);
  }
});

for (const kind of ["pointerover", "focusin"]) {
  document.addEventListener(kind, (event) => (tokenAt(event.target) ? showCard(event.target) : hideCard()));
}
document.addEventListener("scroll", placeCard, { passive: true });

find("intro").open = localStorage.getItem("intro") !== "closed";
find("intro").addEventListener("toggle", () => localStorage.setItem("intro", find("intro").open ? "open" : "closed"));
// On a phone the result should not lie below a screen of parameters.
if (window.matchMedia("(max-width: 50rem)").matches) find("parameters").open = false;

showKeys();
meetServer();
playExample().catch(complain);
