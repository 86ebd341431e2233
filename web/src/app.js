// The page: what is chosen and typed goes to the worker, and what it writes comes back. What can be chosen (tasks,
// examples, models) is in page.json, which `make web` writes.

const element = (id) => document.getElementById(id);
const [form, fields, answer, figures, status, progress, announcement] = [
  "form", "fields", "answer", "figures", "status", "progress", "announcement",
].map(element);

const page = await readPage();
let worker, task, model;
let ready = false;
let running = null; // what was asked and is not answered yet
let asked = 0;

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;

/** What can be chosen; a host's error page, which the browser may remember, is asked for again. */
async function readPage() {
  for (const cache of ["default", "reload"]) {
    const found = await fetch("page.json", { cache }).then((response) => response.json()).catch(() => undefined);
    if (found?.models) return found;
  }
  const message = "The host does not send what belongs to this page (page.json): reload it later.";
  document.querySelector("main").append(make("p", { role: "alert", textContent: message }));
  throw new Error(message);
}

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** Radio buttons, one of them chosen; `describe` gives what is said below each label. */
function choices(place, name, options, onChoice, { first = options[0], describe } = {}) {
  for (const option of options) {
    const input = make("input", { type: "radio", name, value: option.id, checked: option === first });
    input.addEventListener("change", () => onChoice(option));
    const label = make("label", {}, input, make("span", { textContent: option.label }));
    if (describe) label.append(make("small", { textContent: describe(option) }));
    place.append(label);
  }
  onChoice(first);
}

function chooseTask(chosen) {
  task = chosen;
  fields.replaceChildren(
    ...Object.entries(task.fields).map(([name, label]) =>
      make("label", {}, make("span", { textContent: label }), make("textarea", { name, dir: "auto" })),
    ),
  );
  const menu = element("examples");
  menu.replaceChildren(
    make("option", { value: "", textContent: "Choose one" }),
    ...task.titles.map((textContent, value) => make("option", { value, textContent })),
  );
  fill(task.examples[0]);
  clear();
}

function fill(example) {
  for (const [name, text] of Object.entries(example)) form.elements[name].value = text;
}

function clear() {
  answer.textContent = figures.textContent = "";
  delete answer.dataset.tokens;
}

function chooseModel(chosen) {
  model = chosen;
  worker?.terminate(); // and with it all memory that the last model had
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => received[data.type](data);
  worker.onerror = (event) => received.failed({ message: event.message || "The browser cannot start it." });
  ready = false;
  delete document.body.dataset.ready;
  settle();
  progress.value = 0;
  progress.hidden = false;
  status.textContent = `Loading ${model.label}: ${megabytes(model.bytes)}, once.`;
  const { folder, files, bytes } = model;
  const { wasm, version, warm_up: warmUp, max_source_tokens: limit } = page;
  worker.postMessage({ type: "open", folder, files, wasm, version, bytes: bytes + wasm.size_bytes, warmUp, limit });
}

/** Send what was asked, as soon as the model is there. */
function ask() {
  if (running && ready) worker.postMessage({ type: "generate", ...running });
}

function settle() {
  running = null;
  form.classList.remove("busy");
  element("stop").disabled = true;
}

const isRunning = ({ id }) => running?.id === id;

const received = {
  progress({ loaded }) {
    progress.value = loaded;
  },
  warming() {
    progress.removeAttribute("value");
    status.textContent = "Warming up.";
  },
  ready({ seconds, isKept, isHashed }) {
    ready = true;
    progress.hidden = true;
    const kept = isKept ? " It stays on this device and works without a network." : "";
    const checked = isHashed ? "" : " Without https its files are checked by their sizes alone.";
    status.textContent = `Ready after ${seconds.toFixed(1)} s.${kept}${checked}`;
    document.body.dataset.ready = model.id;
    ask();
  },
  token(message) {
    if (!isRunning(message)) return;
    answer.textContent = message.text;
    if (!running.firstS) {
      running.firstS = (performance.now() - running.clicked) / 1000;
      figures.textContent = `First word after ${running.firstS.toFixed(2)} s`;
    }
  },
  done(message) {
    if (!isRunning(message)) return;
    const { tokens, text, stopped, perToken } = message;
    const speed = perToken ? `, ${perToken.toFixed(1)} ms per token (${(1000 / perToken).toFixed(0)} tokens/s)` : "";
    figures.textContent =
      `${tokens.length} tokens, the first after ${running.firstS.toFixed(2)} s${speed}; ` +
      `${model.label}, ${megabytes(model.bytes)}`;
    answer.dataset.tokens = tokens.join(" ");
    answer.dataset.times = JSON.stringify({ firstS: running.firstS, perToken });
    status.textContent = stopped ? "Stopped." : "Done.";
    // Words that come one by one are no pleasure to hear: the whole is read once.
    announcement.textContent = text;
    settle();
  },
  refused({ message }) {
    complain(message, Object.keys(task.fields).at(-1));
    settle();
  },
  failed({ message }) {
    const offline = navigator.onLine ? "" : " There is no network, and this model was not loaded before.";
    status.textContent = `Something went wrong: ${message}${offline}`;
    progress.hidden = true;
    worker?.terminate(); // half a model, or one without memory, answers nothing more
    worker = null;
    settle();
  },
};

function complain(sentence, name) {
  const field = form.elements[name];
  status.textContent = sentence;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) return;
  const names = Object.keys(task.fields);
  const texts = Object.fromEntries(names.map((name) => [name, form.elements[name].value.trim()]));
  const empty = names.find((name) => !texts[name]);
  if (empty) return complain(`Nothing is written under “${task.fields[empty]}”.`, empty);
  if (!worker) chooseModel(model); // it failed: try again
  clear();
  announcement.textContent = "";
  answer.lang = announcement.lang = task.language; // and stays that of this answer if another task is chosen meanwhile
  const text = task.template.replace(/\{(\w+)\}/g, (_, name) => texts[name]);
  running = { id: ++asked, text, maxNewTokens: page.max_new_tokens, clicked: performance.now() };
  form.classList.add("busy");
  element("stop").disabled = false;
  status.textContent = ready ? "Writing." : `${status.textContent} Your text comes first then.`;
  ask();
});

function stop() {
  if (!running) return;
  if (ready) return worker.postMessage({ type: "stop" });
  settle();
  status.textContent = "Stopped; the model is still loading.";
}

element("stop").addEventListener("click", stop);
element("examples").addEventListener("change", ({ target }) => {
  if (target.value) fill(task.examples[target.value]);
  clear();
});
form.addEventListener("input", ({ target }) => target.removeAttribute("aria-invalid"));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

choices(element("tasks"), "task", page.tasks, chooseTask);
choices(element("models"), "model", page.models, chooseModel, {
  first: page.models.find(({ id }) => location.hash === `#${id}`), // a link may name one
  describe: (one) => [megabytes(one.bytes), one.quality].filter(Boolean).join(" · "),
});
element("scores").hidden = !page.models.some(({ quality }) => quality);
form.hidden = false;

navigator.serviceWorker?.register("service-worker.js").catch(() => undefined); // without it the page needs a network
