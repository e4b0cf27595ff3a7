"use strict";
// The built-in page: a chat with the served model, and how the engine is. It asks the same routes as any client.
// Everything a model or a server says goes into the page as text, never as markup.

const $ = (id) => document.getElementById(id);
const make = (name, className, text) => {
  const one = document.createElement(name);
  if (className) one.className = className;
  if (text !== undefined) one.textContent = text;
  return one;
};
const base = location.pathname.replace(/\/$/, "");

// --- asking the server ---------------------------------------------------------------------------------------------

const KEY = "tiercel-key";
const SETTINGS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "reasoning_effort", "tools"];

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function ask(path, options = {}) {
  const response = await fetch(base + path, { ...options, headers: { ...headers(), ...options.headers } });
  if (response.status === 401) {
    askForKey(sessionStorage.getItem(KEY) ? "That key is not one of this server's." : "This server asks for a key.");
    throw new Error("a key is needed");
  }
  if (!response.ok) throw new Error(await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function askForKey(why) {
  $("key-why").textContent = why;
  $("key-form").hidden = false;
  document.querySelector("main").hidden = true;
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  begin();
});

async function begin() {
  try {
    const { data } = await (await ask("/v1/models")).json();
    $("model").replaceChildren(...data.map((one) => new Option(one.id, one.id)));
  } catch (error) {
    if ($("key-form").hidden) problem(error.message);
    return;
  }
  $("key-form").hidden = true;
  document.querySelector("main").hidden = false;
  problem("");
  $("text").focus();
}

// --- settings ------------------------------------------------------------------------------------------------------

for (const id of SETTINGS) {
  $(id).value = localStorage.getItem(`tiercel-${id}`) ?? "";
  $(id).addEventListener("change", () => localStorage.setItem(`tiercel-${id}`, $(id).value));
}
$("probabilities").checked = localStorage.getItem("tiercel-probabilities") === "1";
$("probabilities").addEventListener("change", (event) => {
  localStorage.setItem("tiercel-probabilities", event.target.checked ? "1" : "0");
});

function settings() {
  const body = {};
  for (const id of ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"]) {
    if ($(id).value === "") continue;
    if (!$(id).checkValidity()) throw new Error(`${id}: ${$(id).validationMessage}`);
    body[id] = Number($(id).value);
  }
  if ($("reasoning_effort").value) body.reasoning_effort = $("reasoning_effort").value;
  if ($("probabilities").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const tools = $("tools").value.trim();
  if (tools) {
    try {
      body.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools: ${error.message}`);
    }
  }
  return body;
}

// --- the chat ------------------------------------------------------------------------------------------------------

let messages = [];  // as they are sent, but the system message
let running = null;  // the AbortController of the answer under way

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function atBottom() {
  const log = $("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function article(role, title) {
  const one = make("article", role);
  one.append(make("h2", "", title));
  $("log").append(one);
  return one;
}

function showMessage(role, text) {
  const one = article(role, role === "user" ? "You" : "Tool's result");
  one.append(make("div", "text", text));
  $("log").scrollTop = $("log").scrollHeight;
  return one;
}

class Answer {
  // One answer as it grows: reasoning and calls folded, content in spans of tokens where probabilities are known.
  constructor(model) {
    this.root = article("assistant", model);
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.pending = "";  // content whose tokens are not known yet
    this.tokens = [];
    this.text = make("div", "text");
    this.root.append(this.text);
  }

  fold(title, before) {
    const details = make("details");
    details.append(make("summary", "", title));
    const body = make("pre");
    details.append(body);
    this.root.insertBefore(details, before);
    return body;
  }

  take(choice) {
    const { delta, logprobs } = choice;
    this.tokens.push(...(logprobs?.content ?? []));
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) {
      this.thoughts ??= this.fold("Reasoning", this.text);
      this.reasoning += thought;
      this.thoughts.textContent = this.reasoning;
    }
    if (delta.content) {
      this.content += delta.content;
      this.pending += delta.content;
    }
    for (const part of delta.tool_calls ?? []) this.takeCall(part);
    this.show();
  }

  takeCall(part) {
    const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    call.body ??= this.fold("Call", null);
    call.body.parentElement.firstChild.textContent = `Call of ${call.function.name}`;
    call.body.textContent = call.function.arguments;
  }

  show() {
    if (!$("probabilities").checked) {
      this.text.append(this.pending);
      this.pending = "";
      return;
    }
    // A token that is not what the content goes on with is of the reasoning, of a call, or special.
    while (this.pending && this.tokens.length) {
      const token = this.tokens.shift();
      if (token.token && this.pending.startsWith(token.token)) {
        this.text.append(tokenSpan(token));
        this.pending = this.pending.slice(token.token.length);
      }
    }
  }

  end(note, isBad) {
    this.text.append(this.pending);
    this.pending = "";
    this.root.append(make("p", isBad ? "note bad" : "note", note));
    for (const call of this.calls) this.root.append(resultForm(call));
  }

  message() {
    const one = { role: "assistant", content: this.content };
    if (this.reasoning) one.reasoning = this.reasoning;
    if (this.calls.length) one.tool_calls = this.calls.map(({ id, type, function: f }) => ({ id, type, function: f }));
    return one;
  }
}

function resultForm(call) {
  const form = make("form", "buttons");
  const input = make("input");
  input.setAttribute("aria-label", `Result of ${call.function.name}`);
  input.placeholder = `Result of ${call.function.name}`;
  form.append(input, make("button", "", "Give it"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    messages.push({ role: "tool", tool_call_id: call.id, content: input.value });
    showMessage("tool", input.value);
    form.remove();
    const isWhole = messages.filter((one) => one.role === "tool").length >= countCalls();
    if (isWhole) answer();
  });
  return form;
}

const countCalls = () => messages.reduce((n, one) => n + (one.tool_calls?.length ?? 0), 0);

function tokenSpan(token) {
  const span = make("span", "token", token.token);
  span.tabIndex = 0;
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(2).padStart(6)} %`;
  const lines = [`${percent(token.logprob)}  ${JSON.stringify(token.token)}`, ""];
  for (const one of token.top_logprobs) lines.push(`${percent(one.logprob)}  ${JSON.stringify(one.token)}`);
  const show = () => showHover(span, lines.join("\n"));
  span.addEventListener("mouseenter", show);
  span.addEventListener("focus", show);
  span.addEventListener("mouseleave", hideHover);
  span.addEventListener("blur", hideHover);
  return span;
}

function showHover(span, text) {
  hideHover();
  const box = make("div", "", text);
  box.id = "hover";
  box.setAttribute("role", "tooltip");
  document.body.append(box);
  const at = span.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - box.offsetWidth - 4))}px`;
  const below = at.bottom + 4;
  box.style.top = `${below + box.offsetHeight < innerHeight ? below : Math.max(4, at.top - box.offsetHeight - 4)}px`;
}

function hideHover() {
  document.getElementById("hover")?.remove();
}

function buttons() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  $("again").disabled = Boolean(running) || !messages.some((one) => one.role === "user");
  $("clear").disabled = Boolean(running) || !messages.length;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const one of frames) {
      const data = one.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer() {
  problem("");
  let body;
  try {
    body = { ...settings(), model: $("model").value, stream: true, stream_options: { include_usage: true } };
  } catch (error) {
    $("settings").open = true;
    problem(error.message);
    return;
  }
  const system = $("system").value.trim();
  body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  const one = new Answer(body.model);
  running = new AbortController();
  buttons();
  const began = performance.now();
  let first = null;
  let usage = null;
  let finish = null;
  let failure = null;
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const follows = atBottom();
      if (choice.delta.content || choice.delta.reasoning || choice.delta.tool_calls) first ??= performance.now();
      one.take(choice);
      finish = choice.finish_reason ?? finish;
      if (follows) $("log").scrollTop = $("log").scrollHeight;
    }
  } catch (error) {
    failure = error;
  }
  const isStopped = failure?.name === "AbortError";
  const isKept = one.content || one.reasoning || one.calls.length;
  one.end(isStopped ? "stopped" : failure ? failure.message : note(finish, usage, began, first), failure && !isStopped);
  if (isKept) messages.push(one.message());
  else {
    one.root.remove();
    if (failure && !isStopped) problem(failure.message);
  }
  running = null;
  buttons();
  if (atBottom()) $("log").scrollTop = $("log").scrollHeight;
}

function note(finish, usage, began, first) {
  const parts = [];
  if (finish === "length") parts.push("cut: no room for more tokens");
  if (usage) {
    const seconds = (performance.now() - (first ?? began)) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} a second`);
    if (first) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`prompt of ${usage.prompt_tokens}${cached ? `, ${cached} cached` : ""}`);
  }
  return parts.join(" · ");
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  showMessage("user", text);
  $("text").value = "";
  answer();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideHover();
  running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("again").addEventListener("click", () => {
  while (messages.length && messages.at(-1).role !== "user") {
    messages.pop();
    $("log").lastElementChild.remove();
  }
  answer();
});
$("clear").addEventListener("click", () => {
  messages = [];
  $("log").replaceChildren();
  problem("");
  buttons();
  $("text").focus();
});

// --- the engine ----------------------------------------------------------------------------------------------------

const PERIOD_MS = 1000;
const WINDOW_S = 60;
const CURVE_S = 120;
const TIMES = [
  ["First token", "vllm:time_to_first_token_seconds"],
  ["Between tokens", "vllm:inter_token_latency_seconds"],
  ["Whole request", "vllm:e2e_request_latency_seconds"],
  ["Waiting", "vllm:request_queue_time_seconds"],
];
let past = [];  // {time, values}, oldest first

function readMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = found[2] ?? "";
    const le = /(?:^|,)le="([^"]*)"/.exec(labels)?.[1];
    const state = /(?:^|,)state="([^"]*)"/.exec(labels)?.[1];
    const name = found[1] + (le ? `|${le}` : state ? `|${state}` : "");
    values.set(name, (values.get(name) ?? 0) + Number(found[3]));
  }
  return values;
}

function percentile(part, now, before, name) {
  // The bound of the bucket the part-th value is in, straight between its bounds.
  const buckets = [];
  for (const [key, value] of now) {
    if (!key.startsWith(`${name}_bucket|`)) continue;
    const bound = key.split("|")[1];
    buckets.push([bound === "+Inf" ? Infinity : Number(bound), value - (before?.get(key) ?? 0)]);
  }
  buckets.sort((a, b) => a[0] - b[0]);
  const all = buckets.at(-1)?.[1] ?? 0;
  if (!all) return null;
  let low = 0;
  let below = 0;
  for (const [bound, count] of buckets) {
    if (count >= part * all) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (part * all - below)) / Math.max(count - below, 1e-9);
    }
    low = bound;
    below = count;
  }
  return low;
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
}

async function look() {
  if ($("engine").hidden) return;
  try {
    const values = readMetrics(await (await ask("/metrics")).text());
    past.push({ time: performance.now() / 1000, values });
    const oldest = past.at(-1).time - CURVE_S;
    past = past.filter((one) => one.time >= oldest);
    $("engine-state").textContent = "Live, once a second.";
    draw();
  } catch (error) {
    $("engine-state").textContent = `No numbers: ${error.message}`;
  }
  setTimeout(look, PERIOD_MS);
}

function draw() {
  const last = past.at(-1);
  const before = past.at(-2) ?? last;
  const rate = (name, a = before, b = last) => {
    const elapsed = b.time - a.time;
    return elapsed > 0 ? Math.max(0, (b.values.get(name) - a.values.get(name)) / elapsed) : 0;
  };
  const get = (name) => last.values.get(name) ?? 0;
  const queries = get("vllm:prefix_cache_queries_total");
  const drafted = get("vllm:spec_decode_num_draft_tokens_total");
  const numbers = [
    ["Tokens a second", rate("vllm:generation_tokens_total").toFixed(1)],
    ["Prompt tokens a second", rate("vllm:prompt_tokens_total").toFixed(1)],
    ["Running", get("vllm:num_requests_running")],
    ["Waiting", get("vllm:num_requests_waiting")],
    ["Pages used", `${(100 * get("vllm:kv_cache_usage_perc")).toFixed(1)} %`],
    ["Pages cached", `${get("tiercel:kv_pages|cached")} of ${get("tiercel:kv_pages|all")}`],
    ["Prompt tokens from cache", queries ? `${((100 * get("vllm:prefix_cache_hits_total")) / queries).toFixed(1)} %` : "–"],
    ["Preemptions", get("vllm:num_preemptions_total")],
  ];
  if (drafted) {
    const accepted = get("vllm:spec_decode_num_accepted_tokens_total");
    numbers.push(["Drafted tokens accepted", `${((100 * accepted) / drafted).toFixed(1)} %`]);
  }
  $("numbers").replaceChildren(...numbers.map(([name, value]) => {
    const one = make("div");
    one.append(make("dt", "", name), make("dd", "", String(value)));
    return one;
  }));
  const minute = past.find((one) => one.time >= last.time - WINDOW_S);
  $("times").replaceChildren(...TIMES.map(([title, name]) => {
    const count = (from) => get(`${name}_count`) - (from?.values.get(`${name}_count`) ?? 0);
    const from = count(minute) > 0 ? minute : undefined;
    const row = make("tr");
    row.append(make("td", "", title));
    for (const part of [0.5, 0.9, 0.99]) row.append(make("td", "", seconds(percentile(part, last.values, from?.values, name))));
    row.append(make("td", "", String(count(from))));
    return row;
  }));
  const points = past.slice(1).map((one, i) => [one.time, rate("vllm:generation_tokens_total", past[i], one)]);
  const top = Math.max(1, ...points.map(([, value]) => value));
  const path = points.map(([time, value], i) => {
    const x = 600 * (1 - (last.time - time) / CURVE_S);
    return `${i ? "L" : "M"}${x.toFixed(1)} ${(116 - (112 * value) / top).toFixed(1)}`;
  });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path.join(" "));
  $("curve").replaceChildren(line);
  $("curve-top").textContent = `; the top is ${top.toFixed(0)}`;
}

function view(name) {
  for (const one of ["chat", "engine"]) {
    $(one).hidden = one !== name;
    $(`show-${one}`).setAttribute("aria-pressed", String(one === name));
  }
  if (name === "engine") look();
  else $("text").focus();
}
$("show-chat").addEventListener("click", () => view("chat"));
$("show-engine").addEventListener("click", () => $("engine").hidden && view("engine"));

buttons();
begin();
