// Keeps the page itself, so that it opens without a network. The models are kept by the worker that loads them, in the
// same store; esbuild puts in the version, a hash of all files, the page's own files with size and hash, and the names
// with which the models' files begin.

/* global VERSION, FILES, MODELS */

import { load } from "./files.js";

/** A file of the page: from the store or the network if it is as it was built. */
async function answer(name) {
  const { bytes, headers } = await load(await caches.open(VERSION), name, FILES[name]);
  return new Response(bytes, { headers });
}

// What is not as it was built fails the installation, which the browser tries again at the next visit.
self.addEventListener("install", (event) => {
  event.waitUntil(Promise.all(Object.keys(FILES).map(answer)));
});

/** Keep an earlier version's files of models that are still the same, and drop the rest of its store. */
async function takeOver(name) {
  const [store, earlier] = [await caches.open(VERSION), await caches.open(name)];
  for (const request of await earlier.keys()) {
    if (!MODELS.some((start) => request.url.includes(`/${start}`)) || (await store.match(request))) continue;
    await store.put(request, await earlier.match(request)).catch(() => undefined); // a full disk costs only time
  }
  await caches.delete(name);
}

self.addEventListener("activate", (event) => {
  const others = (names) => names.filter((name) => name.startsWith("t5accel-") && name !== VERSION);
  event.waitUntil(
    caches.keys().then((names) => Promise.all(others(names).map(takeOver))).then(() => clients.claim()),
  );
});

self.addEventListener("fetch", (event) => {
  const { scope } = self.registration;
  const url = event.request.url.split(/[?#]/)[0];
  const name = url.startsWith(scope) ? url.slice(scope.length) || "./" : "";
  if (event.request.method !== "GET" || !Object.hasOwn(FILES, name)) return;
  // What the host has instead is shown, a network's login page for example, and not kept.
  event.respondWith(answer(name).catch(() => fetch(event.request)));
});
