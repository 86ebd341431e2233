// What the page keeps and uses when a host or a network in between sends something else: node --test web/test

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { beforeEach, test } from "node:test";

const encode = (text) => new TextEncoder().encode(text);
const describe = (text) => ({ size_bytes: text.length, sha256: createHash("sha256").update(text).digest("hex") });
const text = async ({ bytes }) => new TextDecoder().decode(bytes);

const RIGHT = "weights, weights";
const EXPECTED = describe(RIGHT);
const WRONG = {
  "a portal's page": "<!doctype html><title>Log in</title>",
  "half of the file": RIGHT.slice(0, 8),
  "nothing": "",
  "the same size": RIGHT.replaceAll("w", "W"),
};

/** A browser's store and the network: answers by URL, one after the other, the last one again and again. */
class Store {
  entries = new Map();
  async match(request) {
    return this.entries.get(String(request.url ?? request))?.clone();
  }
  async put(request, response) {
    this.entries.set(String(request.url ?? request), response);
  }
  async delete(request) {
    return this.entries.delete(String(request.url ?? request));
  }
  async keys() {
    return [...this.entries.keys()].map((url) => ({ url }));
  }
}

let asked, answers, store, stores;
globalThis.fetch = async (url, { cache } = {}) => {
  asked.push(cache);
  const left = answers[url.url ?? url];
  if (!left) throw new TypeError("Failed to fetch");
  return new Response(left.length > 1 ? left.shift() : left[0], { headers: { "content-encoding": "gzip" } });
};
globalThis.caches = {
  open: async (name) => (stores[name] ??= new Store()),
  keys: async () => Object.keys(stores),
  delete: async (name) => delete stores[name],
};

const HOME = "https://host.example/page/";
const handlers = {};
globalThis.self = { addEventListener: (type, handler) => (handlers[type] = handler), registration: { scope: HOME } };
globalThis.clients = { claim: async () => undefined };
globalThis.VERSION = "t5accel-now";
globalThis.FILES = { "./": describe("<page>"), "app.js": describe("app") };
globalThis.MODELS = ["runtime.wasm", "models/a/"];

const { load } = await import("../src/files.js");
await import("../src/service-worker.js");

/** Let the service worker handle an event; the answer to a request, if it gives one. */
async function happen(type, url) {
  const event = { request: { url, method: "GET" }, waitUntil: (work) => (event.work = work) };
  event.respondWith = event.waitUntil;
  handlers[type](event);
  return (await event.work)?.text?.();
}

beforeEach(() => {
  [asked, answers, stores] = [[], {}, {}];
  store = new Store();
});

for (const [what, wrong] of Object.entries(WRONG)) {
  test(`${what}: neither used nor kept, and the next visit is well`, async () => {
    answers.file = [wrong];
    await assert.rejects(load(store, "file", EXPECTED), /file is not the file that this page was built with/);
    assert.deepEqual([asked, store.entries.size], [["default", "reload"], 0]);
    answers.file = [RIGHT];
    assert.equal(await text(await load(store, "file", EXPECTED)), RIGHT);
    assert.equal(store.entries.size, 1);
  });

  test(`${what} that the browser remembers: the host is asked`, async () => {
    answers.file = [wrong, RIGHT];
    const file = await load(store, "file", EXPECTED);
    assert.deepEqual([await text(file), file.isKept, file.headers.has("content-encoding")], [RIGHT, true, false]);
  });

  test(`${what} in the store: deleted, and loaded again`, async () => {
    await store.put("file", new Response(wrong));
    await assert.rejects(load(store, "file", EXPECTED), TypeError, "without a network");
    assert.equal(store.entries.size, 0);
    await store.put("file", new Response(wrong));
    answers.file = [RIGHT];
    assert.equal(await text(await load(store, "file", EXPECTED)), RIGHT);
    answers = {};
    assert.equal(await text(await load(store, "file", EXPECTED)), RIGHT, "from the store");
  });

  test(`${what}: the service worker is not installed with it, and does not answer with it`, async () => {
    Object.assign(answers, { "./": ["<page>"], "app.js": [wrong] });
    await assert.rejects(happen("install"), /app.js is not the file/);
    assert.equal(await (await stores[VERSION].match("app.js")), undefined);
    answers["app.js"] = ["app"];
    await happen("install");
    await stores[VERSION].put("app.js", new Response(wrong));
    assert.equal(await happen("fetch", `${HOME}app.js?query`), "app");
    answers = {};
    assert.deepEqual([await happen("fetch", `${HOME}app.js`), await happen("fetch", HOME)], ["app", "<page>"]);
  });
}

test("a store that cannot be written costs only time", async () => {
  answers.file = [RIGHT];
  store.put = async () => { throw new Error("full"); };
  for (const one of [store, undefined]) {
    const file = await load(one, "file", EXPECTED);
    assert.deepEqual([await text(file), file.isKept], [RIGHT, false]);
  }
});

test("progress counts every byte", async () => {
  answers.file = [RIGHT];
  let loaded = 0;
  await load(store, "file", EXPECTED, (more) => (loaded += more));
  assert.equal(loaded, RIGHT.length);
});

test("a login page is shown where the page is not kept, and the models are the worker's", async () => {
  answers[`${HOME}app.js`] = answers["app.js"] = ["<login>"];
  assert.equal(await happen("fetch", `${HOME}app.js`), "<login>");
  assert.equal(stores[VERSION].entries.size, 0);
  for (const other of [`${HOME}models/a/weights.data`, "https://other.example/page/app.js"])
    assert.equal(await happen("fetch", other), undefined);
});

test("a new version keeps the models that stay the same, but not over one that is there", async () => {
  const [earlier, now] = [await caches.open("t5accel-earlier"), await caches.open(VERSION)];
  for (const name of ["models/a/1", "models/a/2", "models/b/1", "runtime.wasm", "app.js"])
    await earlier.put(HOME + name, new Response("earlier"));
  await now.put(`${HOME}models/a/2`, new Response("now"));
  await happen("activate");
  const found = Object.fromEntries(await Promise.all([...now.entries].map(async ([url, one]) => [url, await one.text()])));
  assert.deepEqual(found, {
    [`${HOME}models/a/1`]: "earlier", [`${HOME}models/a/2`]: "now", [`${HOME}runtime.wasm`]: "earlier",
  });
  assert.deepEqual(Object.keys(stores), [VERSION]);
});
